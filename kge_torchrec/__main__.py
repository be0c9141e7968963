"""Run the command line by ``python -m kge_torchrec``."""

import os
import sys

from kge_torchrec.cli import main

if sys.path[0] == os.getcwd():  # from -m: the files of a run in this folder are no modules
    del sys.path[0]
sys.exit(main())

"""Run the command line by ``python -m kge_torchrec``."""

import os
import sys

from kge_torchrec.cli import main

# Python -m puts the working directory first. It may be a run, whose files are no modules.
if sys.path[0] == os.getcwd() and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]
sys.exit(main())

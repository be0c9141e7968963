"""Run the command line by ``python -m kge_torchrec``."""

import sys

from kge_torchrec.cli import main

sys.exit(main())

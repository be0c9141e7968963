"""Planning without an installed command: the same as `kge-torchrec plan`.

python scripts/plan.py CONFIG --devices 8xH100-80GB [--hosts N] [--key.sub value ...]
"""

import sys

from kge_torchrec.cli import main

if __name__ == "__main__":
    sys.exit(main(["plan", *sys.argv[1:]]))

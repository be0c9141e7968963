"""Compare engines: the same as `kge-torchrec compare`, which starts its own processes.

python scripts/compare.py CONFIG --engines torchrec handrolled [--world-sizes 1 2 4]
"""

import sys

from kge_torchrec.cli import main

if __name__ == "__main__":
    sys.exit(main(["compare", *sys.argv[1:]]))

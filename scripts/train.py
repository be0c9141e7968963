"""Train under torchrun, which needs a file: the same as `kge-torchrec train`.

torchrun --standalone --nproc_per_node=N scripts/train.py CONFIG [--key.sub value ...]
"""

import sys

from kge_torchrec.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))

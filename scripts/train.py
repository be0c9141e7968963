"""Train on any number of ranks: the training script of this project, to copy and to change.

    python scripts/train.py demo
    torchrun --standalone --nproc_per_node=4 scripts/train.py CONFIG --data.path DIRECTORY
    torchrun --nnodes=2 --nproc_per_node=8 ... scripts/train.py CONFIG --run.dir SHARED/run \
        --run.resume auto

CONFIG is a YAML file or the name of a published config; every key of the config is an option.
Entities are sharded by rows over the ranks, and results do not depend on the number of ranks.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import kge_torchrec
from kge_torchrec.environment import prepare_process

IS_FIRST = os.environ.get("RANK", "0") == "0"  # torchrun sets RANK


def show(kind: str, values: dict[str, Any]) -> None:
    """Take a line of metrics.jsonl: "step", "epoch" or "valid". All ranks get all lines."""
    if kind == "valid" and IS_FIRST:
        print(f"  hits@10 of valid: {values['both']['realistic']['hits@10']:.4f}", flush=True)


def train(config: str, options: list[str]) -> None:
    """Train, rank the test triples with the best model, and print the MRR of each relation."""
    settings = kge_torchrec.load_config(config, options)
    with kge_torchrec.train(settings, callbacks=[show]) as run:
        results = run.evaluate("test", by=["relation"])  # all ranks take part
    if IS_FIRST:
        print("\nqueries     MRR  relation")
        for row in [*results["by"]["relation"]["groups"], {"group": "all", **results}]:
            metrics = row["both"]["realistic"]
            print(f"{row['both'].get('queries', ''):>7}  {metrics['mrr']:.4f}  {row['group']}")
        print(f"run folder: {run.path}")


def main() -> int:
    """Train, and return the exit code: 75 after SIGTERM, when a checkpoint is written."""
    if len(sys.argv) < 2:
        print(__doc__)
        return 2
    prepare_process()  # allocator, threads and log levels, before torch is imported
    try:
        train(sys.argv[1], sys.argv[2:])
    except (kge_torchrec.KGEError, OSError) as error:
        if IS_FIRST or not getattr(error, "on_every_rank", False):
            print(f"train.py: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())

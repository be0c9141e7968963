"""Compare exact filtered ranking with the same work in plain torch, alternating.

FB15k-237's test triples, both sides, ComplEx with dim 256 and random parameters.
Prints one line per figure: name, value, unit.

    python scripts/bench_ranking.py --floor ../shared/tools/peers/floor.py
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from kge_torchrec.data.store.filter_index import FilterIndex, build_side
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.environment import peak_resident_bytes
from kge_torchrec.models.scorers import SCORERS, SIDES
from kge_torchrec.ranking.exact import rank_triples

ROOT = Path(__file__).resolve().parents[1]
SPLITS = ("train", "valid", "test")
DIM = 256


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    splits, entities, relations = read_ids(args.data)
    rank = ranking(args.scorer, splits, entities, relations)
    rank()  # compiles the kernels and warms the allocator
    ours, cpu, floors, floor_cpu = [], [], [], []
    for _ in range(args.repeats):
        if args.floor.exists():
            walls, used = floor_seconds(args)
            floors += walls
            floor_cpu.append(used)
        for _ in range(3):
            start, used = time.perf_counter(), time.process_time()
            rank()
            ours.append(time.perf_counter() - start)
            cpu.append(time.process_time() - used)
    report("ranking", ours)
    print(f"ranking_cpu_fewest {min(cpu):.3f} s")
    scores = len(splits["test"]) * len(SIDES) * entities
    print(f"ranking_scores_per_second {scores / min(ours):.4g} 1/s")
    print(f"ranking_peak {peak_resident_bytes() / 2**20:.0f} MiB")
    if floors:
        report("floor", floors)
        print(f"floor_cpu_fewest {min(floor_cpu):.3f} s")
        print(f"ratio_of_medians {statistics.median(ours) / statistics.median(floors):.3f} x")
        print(f"ratio_of_minima {min(ours) / min(floors):.3f} x")
        print(f"ratio_of_cpu {min(cpu) / min(floor_cpu):.3f} x")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=ROOT / "../shared/data/fb15k-237")
    parser.add_argument("--floor", type=Path, default=ROOT / "../shared/tools/peers/floor.py")
    parser.add_argument("--scorer", choices=SCORERS, default="complex")
    parser.add_argument("--threads", type=int, default=2, help="threads; floor.py needs 2")
    parser.add_argument("--repeats", type=int, default=3, help="repeats of three runs each")
    return parser.parse_args()


def read_ids(folder: Path) -> tuple[dict[str, np.ndarray], int, int]:
    """Return triples (T, 3) by split, numbered in order of appearance."""
    entities, relations, splits = {}, {}, {}
    for name in SPLITS:
        lines = (folder / f"{name}.txt").read_text(encoding="utf-8").splitlines()
        splits[name] = np.array(
            [
                (
                    entities.setdefault(head, len(entities)),
                    relations.setdefault(relation, len(relations)),
                    entities.setdefault(tail, len(entities)),
                )
                for head, relation, tail in (line.split("\t") for line in lines)
            ]
        )
    return splits, len(entities), len(relations)


def ranking(name: str, splits: dict[str, np.ndarray], entities: int, relations: int):
    """Return the function to time: it ranks all test triples with random parameters."""
    torch.manual_seed(0)
    scorer = SCORERS[name](relations, DIM)
    for parameter in scorer.parameters():
        torch.nn.init.normal_(parameter)
    shard = EntityShard(torch.randn(entities, DIM), 0, entities)
    indices = [
        {side: build_side(side, triples, entities, relations) for side in SIDES}
        for triples in splits.values()
    ]
    known = FilterIndex(indices, entities, relations)
    return lambda: rank_triples(scorer, shard, splits["test"], known)


def floor_seconds(args: argparse.Namespace) -> tuple[list[float], float]:
    """Return ([fastest, median] wall, fewest CPU) seconds, as floor.py reports them."""
    environment = os.environ | {"MAXWAIT": "5", "KGE_DATA": str(args.data.resolve().parent)}
    printed = subprocess.run(
        [sys.executable, args.floor.name, "b"],
        cwd=args.floor.parent, env=environment, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    pattern = r"b_eval\S* (\S+) s best=(\S+).* cpu_s_min=(\S+)"
    median, best, cpu = map(float, re.search(pattern, printed).groups())
    return [best, median], cpu


def report(name: str, seconds: list[float]) -> None:
    print(f"{name}_median {statistics.median(seconds):.3f} s")
    print(f"{name}_fastest {min(seconds):.3f} s")


if __name__ == "__main__":
    main()

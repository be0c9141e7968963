"""Compare exact filtered ranking with the same work in plain torch (peers/floor.py), alternating.

    python scripts/bench_ranking.py FB15K237

Test triples, both sides, ComplEx with dim 256 and random parameters. FB15K237 is a folder with
train.txt, valid.txt and test.txt. Prints one line per figure: name, value, unit.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))
from floor import rank, read_graph

from kge_torchrec.data.store.filter_index import FilterIndex, build_side
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.environment import peak_resident_bytes
from kge_torchrec.models.scorers import SIDES
from kge_torchrec.models.scorers.bilinear import ComplEx
from kge_torchrec.ranking.ranks import rank_triples

DIM = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    splits, entities, relations = read_graph(args.data)
    rows = torch.randn(entities, DIM), torch.randn(relations, DIM)
    sides = {
        "ranking": ranking(splits, entities, relations),
        "floor": lambda: rank(*rows, splits),
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for repeat in range(args.repeats + 1):  # the first one compiles, and warms the allocator
        for name in list(sides)[:: 1 if repeat % 2 else -1]:
            start, used = time.perf_counter(), time.process_time()
            sides[name]()
            taken = time.perf_counter() - start, time.process_time() - used
            if repeat:
                seconds[name].append(taken)
    medians = {name: [statistics.median(v) for v in zip(*all_of, strict=True)]
               for name, all_of in seconds.items()}  # fmt: skip
    for name, (wall, cpu) in medians.items():
        print(f"{name}_median {wall:.3f} s")
        print(f"{name}_cpu_median {cpu:.3f} s")
    ours, floor = medians["ranking"], medians["floor"]
    scores = len(splits["test"]) * len(SIDES) * entities
    print(f"ranking_scores_per_second {scores / ours[0]:.4g} 1/s")
    print(f"ranking_over_floor {ours[0] / floor[0]:.3f} x")
    print(f"ranking_over_floor_cpu {ours[1] / floor[1]:.3f} x")
    print(f"peak_of_both {peak_resident_bytes() / 2**20:.0f} MiB")


def ranking(splits: dict[str, np.ndarray], entities: int, relations: int):
    """Return the function to time: it ranks all test triples with random parameters."""
    torch.manual_seed(0)
    scorer = ComplEx(relations, DIM)
    for parameter in scorer.parameters():
        torch.nn.init.normal_(parameter)
    shard = EntityShard(torch.randn(entities, DIM), 0, entities)
    indices = [
        {side: build_side(side, triples, entities, relations) for side in SIDES}
        for triples in splits.values()
    ]
    known = FilterIndex(indices, entities, relations)
    return lambda: rank_triples(scorer, shard, splits["test"], known)


if __name__ == "__main__":
    main()

"""Measure step time and peak memory of every rank when all entities are candidates.

python scripts/bench_full_candidates.py [--entities N] [--dim D] ...
torchrun --standalone --nproc_per_node=2 scripts/bench_full_candidates.py ...

Random triples, a reciprocal scorer, both sides of every triple (1vsall). Prints

- the time per step;
- the floating-point operations per second of its three matrix products, 3 x 2 x 2B x N x D: the
  scores, and the gradients of queries and of rows;
- for every rank the resident memory before the model, with the model, and at its peak.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import count

import torch
import torch.distributed as dist
from process_memory import resident_bytes
from random_graph import RandomGraph

from kge_torchrec.config.parser import load_config
from kge_torchrec.distributed.processes import processes
from kge_torchrec.environment import keep_large_blocks, peak_resident_bytes, set_threads
from kge_torchrec.training.assembly import build_backend, build_batches, build_pipeline

RELATIONS, TRIPLES = 200, 100_000


def main() -> None:
    options = _options()
    settings = {
        "model.scorer": options.scorer,
        "model.dim": options.dim,
        "loss.name": options.loss,
        "loss.n3": options.n3,
        "loss.relation_weight": 0.0,
        "negatives.regime": "1vsall",
        "train.batch_size": options.batch_size,
        "train.optimizer": options.optimizer,
        "train.precision": options.precision,
        "entities.engine": options.engine,
    }
    keep_large_blocks()
    with processes("cpu") as ranks:
        set_threads(options.threads, ranks.local_world_size)
        memory = [resident_bytes()]
        store = RandomGraph(options.entities, RELATIONS, TRIPLES)
        config = store.settled(load_config(None, settings))
        engine = build_backend(config, store, ranks)
        pipeline = build_pipeline(config, engine, ranks)
        if options.kept_mib is not None:
            pipeline.kept_bytes = options.kept_mib << 20
        batches = build_batches(config, store, ranks)
        stream = (batch for epoch in count() for batch in batches.epoch(epoch))
        memory.append(resident_bytes())
        milliseconds = statistics.median(_timed(pipeline, stream, options.steps))
        memory.append(peak_resident_bytes())
        every = torch.tensor(memory)
        gathered = [torch.empty_like(every) for _ in range(ranks.world_size)]
        dist.all_gather(gathered, every)
    if ranks.is_first:
        _report(options, milliseconds, torch.stack(gathered) / 2**20)


def _timed(pipeline, stream, steps: int) -> list[float]:
    for _ in range(3):
        pipeline.progress(stream)
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        pipeline.progress(stream)
        times.append((time.perf_counter() - started) * 1e3)
    return times


def _report(options: argparse.Namespace, milliseconds: float, memory: torch.Tensor) -> None:
    work = 3 * 2 * 2 * options.batch_size * options.entities * options.dim
    print(f"step {milliseconds:.1f} ms")
    print(f"products {work / milliseconds / 1e6:.1f} Gflop/s")
    print(f"scores_of_all_entities {8 * options.batch_size * options.entities / 2**20:.0f} MiB")
    for rank, (before, built, peak) in enumerate(memory.tolist()):
        print(f"rank{rank}_before {before:.0f} MiB")
        print(f"rank{rank}_with_model {built:.0f} MiB")
        print(f"rank{rank}_peak {peak:.0f} MiB")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entities", type=int, default=14_541)
    parser.add_argument("--dim", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=500)
    parser.add_argument("--scorer", default="complex")
    parser.add_argument("--loss", default="softmax")
    parser.add_argument("--n3", type=float, default=0.05)
    parser.add_argument("--optimizer", default="adagrad")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--engine", default="torchrec")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kept-mib", type=int, help="largest scores to keep, in MiB")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Measure a training step with and without torch.compile of scorer and loss (dense.compile).

python scripts/bench_compile.py [--scorers complex rotate ...] [--batch 1024] [--repeats 3]

Each scorer is trained with and without dense.compile, alternating, in a process with two threads.
The triples are synthetic: 100,000 entities, 200 relations, dim 256, 128 negatives shared by chunks
of 64 triples. Prints the median ms per step, the gain, and the seconds of compilation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from random_graph import RandomGraph

HERE = Path(__file__).resolve()
ENTITIES, RELATIONS, TRIPLES, DIM, NEGATIVES = 100_000, 200, 500_000, 256, 128
SCORERS = ("complex", "rotate", "transe_l2", "quate", "keci", "conve")


def step_times(scorer: str, compiled: bool, batch: int, steps: int) -> dict[str, float]:
    """Return {"ms": median of a step, "first": seconds of the first steps}."""
    from kge_torchrec.environment import keep_large_blocks, limit_spinning, set_threads

    limit_spinning()  # before torch is loaded, as the command line does

    from kge_torchrec.config.parser import load_config
    from kge_torchrec.data.batches import BatchPlan, Candidates
    from kge_torchrec.data.batches.triples import TripleBatches
    from kge_torchrec.data.negatives import UniformSampler
    from kge_torchrec.distributed.processes import processes
    from kge_torchrec.training.assembly import build_backend, build_pipeline

    keep_large_blocks()
    set_threads(2, 1)
    settings = {
        "model.scorer": scorer,
        "model.dim": DIM,
        "model.init_scale": 0.1,
        "loss.n3": 0.0,
        "loss.relation_weight": 0.0,
        "train.optimizer": "adam",
        "train.lr": 0.001,
        "dense.compile": compiled,
    }
    graph = RandomGraph(ENTITIES, RELATIONS, TRIPLES)
    with processes("cpu") as ranks:
        config = graph.settled(load_config(None, settings))
        engine = build_backend(config, graph, ranks)
        candidates = Candidates(UniformSampler(ENTITIES), NEGATIVES, chunk_size=64)
        batches = TripleBatches(graph.train, BatchPlan(batch, candidates=candidates)).epoch(0)
        pipeline = build_pipeline(config, engine, ranks)
        started = time.perf_counter()
        for _ in range(10):
            pipeline.progress(batches)
        first = time.perf_counter() - started
        times = []
        for _ in range(steps):
            started = time.perf_counter()
            pipeline.progress(batches)
            times.append(1e3 * (time.perf_counter() - started))
    return {"ms": statistics.median(times), "first": first}


def measure(*arguments: object) -> dict[str, float]:
    """Run this file as a worker."""
    command = [sys.executable, str(HERE), "--worker", *map(str, arguments)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(out.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scorers", nargs="+", default=SCORERS)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    for scorer in options.scorers:
        results: dict[bool, list[dict[str, float]]] = {False: [], True: []}
        for _ in range(options.repeats):
            for compiled in results:  # alternating, so that a busy minute affects both
                results[compiled].append(measure(scorer, compiled, options.batch, options.steps))
        plain, compiled = (statistics.median(x["ms"] for x in results[flag]) for flag in results)
        extra = results[True][0]["first"] - results[False][0]["first"]
        print(f"step_{scorer}_plain {plain:.2f} ms")
        print(f"step_{scorer}_compiled {compiled:.2f} ms")
        print(f"step_{scorer}_gain {plain / compiled:.2f} x")
        print(f"step_{scorer}_compiling {extra:.1f} s", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        name, flag, batch, steps = sys.argv[2:]
        print(json.dumps(step_times(name, flag == "True", int(batch), int(steps))))
    else:
        main()

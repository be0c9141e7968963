"""Measure step time and peak memory for growing tables; only the batch should matter.

python scripts/bench_scale.py [--repeats N] [--sizes ENTITIES ...]

DistMult, dim 64, batch 4,096, 64 shared negatives, Adam, on synthetic triples with uniform and
Zipf-distributed entities, in processes with two threads. Prints one line per figure.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from process_memory import resident_bytes
from random_graph import RandomGraph

HERE = Path(__file__).resolve()
SIZES = (100_000, 1_000_000, 10_000_000)
DIM, BATCH, NEGATIVES, TRIPLES, RELATIONS = 64, 4096, 64, 2_000_000, 200


def triples(entities: int, law: str) -> np.ndarray:
    """Return synthetic triples (T, 3) int32; Zipf ids have exponent 1 and are scattered."""
    stream = np.random.default_rng(0)

    def draw(count: int, zipf: bool) -> np.ndarray:
        unit = stream.random(TRIPLES)
        if not zipf:
            return (unit * count).astype(np.int64)
        rank = np.minimum((count**unit).astype(np.int64) - 1, count - 1)
        return rank * 2_654_435_761 % count

    zipf = law == "zipf"
    columns = [draw(entities, zipf), draw(RELATIONS, True) % RELATIONS, draw(entities, zipf)]
    return np.stack(columns, 1).astype(np.int32)


def ours(entities: int, law: str, steps: int) -> dict:
    """Return ms per step and the memory of the process."""
    from kge_torchrec.environment import (
        keep_large_blocks,
        limit_spinning,
        peak_resident_bytes,
        set_threads,
    )

    limit_spinning()  # before torch is loaded, as the command line does

    from kge_torchrec.config.parser import load_config
    from kge_torchrec.data.batches import BatchPlan, Delivery
    from kge_torchrec.data.batches.triples import TripleBatches
    from kge_torchrec.data.negatives import UniformSampler
    from kge_torchrec.distributed.processes import processes
    from kge_torchrec.embeddings.torchrec.collection import as_feature
    from kge_torchrec.training.assembly import build_backend, build_pipeline

    settings = {
        "model.scorer": "distmult",
        "model.dim": DIM,
        "model.reciprocal": False,
        "model.init_scale": 0.1,
        "loss.name": "bce",
        "loss.n3": 0.0,
        "loss.relation_weight": 0.0,
        "negatives.sides": "tail",
        "train.optimizer": "adam",
        "train.lr": 0.001,
    }
    keep_large_blocks()
    set_threads(2, 1)
    data = triples(entities, law)
    with processes("cpu") as ranks:
        base = resident_bytes()
        graph = RandomGraph(entities, RELATIONS, train=data)
        config = graph.settled(load_config(None, settings))
        engine = build_backend(config, graph, ranks)
        plan = BatchPlan(BATCH, 0, ("tail",), UniformSampler(entities), {"tail": NEGATIVES})
        batches = TripleBatches(data, plan, Delivery(feature=as_feature))
        pipeline, stream = build_pipeline(config, engine, ranks), batches.epoch(0)
        for _ in range(30):
            pipeline.progress(stream)
        times = []
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(steps):
                pipeline.progress(stream)
            times.append((time.perf_counter() - start) / steps * 1e3)
    table = entities * DIM * 4 * 3  # weights and two moments
    return {"times": times, "base": base, "table": table, "peak": peak_resident_bytes()}


def floor(entities: int, law: str, steps: int) -> dict:
    """Run the same work in peers/floor.py."""
    sys.path.insert(0, str(HERE.parent / "peers"))
    import torch
    from floor import Sampled

    torch.set_num_threads(2)
    data = torch.from_numpy(triples(entities, law).astype(np.int64))
    trainer = Sampled("DistMult", entities, RELATIONS, DIM, NEGATIVES, shared=True)
    parts = data.split(BATCH)
    for part in parts[:30]:
        trainer.step(part)
    times = []
    for i in range(5):
        start = time.perf_counter()
        for j in range(steps):
            trainer.step(parts[30 + (i * steps + j) % 400])
        times.append((time.perf_counter() - start) / steps * 1e3)
    return {"times": times}


def measure(*arguments: object) -> dict:
    """Run this file as a worker."""
    command = [sys.executable, str(HERE), "--worker", *map(str, arguments)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(out.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="ENTITIES")
    options = parser.parse_args()
    sizes = options.sizes
    for law in ("uniform", "zipf"):
        medians = {}
        for who in ("floor", "ours"):
            times: dict[int, list[float]] = {size: [] for size in sizes}
            for _ in range(options.repeats):
                for size in sizes:  # alternating, so that a busy minute affects all sizes
                    results = measure(who, size, law, options.steps)
                    times[size].append(statistics.median(results["times"]))
            for size in sizes:
                medians[who, size] = statistics.median(times[size])
                print(f"step_{law}_{size}_{who} {medians[who, size]:.2f} ms", flush=True)
            growth = medians[who, sizes[-1]] / medians[who, sizes[0]]
            print(f"step_{law}_largest_over_smallest_{who} {growth:.2f} x", flush=True)
    report_memory(results)


def report_memory(results: dict) -> None:
    """Print the peak memory of the last and largest process of this package."""
    mib = {key: results[key] / 2**20 for key in ("base", "table", "peak")}
    print(f"memory_base {mib['base']:.0f} MiB")
    print(f"memory_weights_and_state {mib['table']:.0f} MiB")
    print(f"memory_peak {mib['peak']:.0f} MiB")
    print(f"memory_ratio {mib['peak'] / (mib['base'] + mib['table']):.3f} x")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        who, size, law, steps = sys.argv[2:]
        print(json.dumps((ours if who == "ours" else floor)(int(size), law, int(steps))))
    else:
        main()

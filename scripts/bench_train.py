"""Training speed against the floor: hand-derived gradients in plain torch, no framework.

python scripts/bench_train.py [--data DIR] [--floor DIR] [--repeats N] [--only WORK]

FB15k-237, ComplEx with 256 real numbers, Adam, tails corrupted, logistic loss, 128 negatives
shared by the batch or drawn per triple.  Both sides run in processes of their own, by turns, on two
threads: both keeping freed blocks, both on glibc's defaults, each as it starts; one line a figure.
Then the time of one of our steps, part by part.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve()
SHARED = HERE.parents[2] / "shared"
# The allocator told to keep freed blocks, as our programs do for themselves.
KEEP = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(512 << 20),
    "MALLOC_TOP_PAD_": str(16 << 20),
    "GOMP_SPINCOUNT": "300000",  # OpenMP's own default, which ours would lower
}
# Any MALLOC_ setting keeps ours from changing the allocator.
DEFAULT = {"MALLOC_ARENA_MAX": "8", "GOMP_SPINCOUNT": "300000"}


def settings(data: Path, batch: int, chunk: int, folder: str) -> list[str]:
    """The floor's work as overrides of our config."""
    values = {
        "data.path": data,
        "model.scorer": "complex",
        "model.dim": 256,
        "model.reciprocal": False,
        "model.init_scale": 0.1,
        "loss.name": "bce",
        "negatives.count": 128,
        "negatives.sides": "tail",
        "negatives.chunk_size": chunk,
        "train.optimizer": "adam",
        "train.lr": 0.001,
        "train.batch_size": batch,
        "run.dir": folder,
        "run.progress": False,
        "threads": 2,
    }
    return [f"--{key}={value}" for key, value in values.items()]


def ours(data: Path, batch: int, chunk: int, steps: int, pipeline: str) -> dict:
    """Trains a few times ``steps`` steps; returns triples/s of each and the split of a step."""
    from kge_torchrec.environment import limit_spinning

    limit_spinning()  # as the command line does, before torch is loaded

    from kge_torchrec.comparison.speed import split_of_a_step
    from kge_torchrec.config.parser import load_config
    from kge_torchrec.distributed.processes import processes
    from kge_torchrec.training.assembly import build_batches
    from kge_torchrec.training.run_folder import RunFolder
    from kge_torchrec.training.session import Session
    from kge_torchrec.training.step import StepOptimizer, build_pipeline

    with tempfile.TemporaryDirectory() as folder, processes("cpu") as ranks:
        config = load_config(None, settings(data, batch, chunk, folder))
        session = Session(config, RunFolder(folder), ranks)
        batches = build_batches(config, session.store, ranks)
        # before the pipeline takes over
        train = replace(config.train, pipeline=pipeline)
        update = StepOptimizer(session.backend, train)
        parts = split_of_a_step(session.backend, update, batches.epoch(999), 60, ranks.device)
        trainer = build_pipeline(train, session.backend, ranks.device)
        rates = []
        for epoch in range(5):
            stream = batches.epoch(epoch)
            for _ in range(5 if epoch else 20):  # warm up
                trainer.progress(stream)
            start = time.perf_counter()
            for _ in range(steps):
                trainer.progress(stream)
            rates.append(steps * batch / (time.perf_counter() - start))
        return {"rates": rates, "parts": parts}


def floor(folder: Path, data: Path, batch: int, mode: str, steps: int) -> dict:
    """The same work in floor.py."""
    sys.path.insert(0, str(folder))
    import torch
    from common import load_ids
    from floor import Tr

    torch.set_num_threads(2)
    splits, entities, relations = load_ids(data.name)
    triples = torch.from_numpy(splits["train"])
    trainer = Tr("ComplEx", entities, relations, 256, batch, 128, mode)
    rates = []
    for epoch in range(5):
        order = torch.randperm(len(triples))
        for _ in range(5 if epoch else 20):
            trainer.step(triples[order[:batch]])
        start = time.perf_counter()
        for i in range(steps):
            at = (i * batch) % (len(triples) - batch)
            trainer.step(triples[order[at : at + batch]])
        rates.append(steps * batch / (time.perf_counter() - start))
    return {"rates": rates}


def measure(environment: dict, *arguments: object) -> dict:
    """Runs this file as a worker."""
    command = [sys.executable, str(HERE), "--worker", *map(str, arguments)]
    env = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")} | environment
    out = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
    return json.loads(out.splitlines()[-1])


def compare(name: str, env: tuple[dict, dict], options: argparse.Namespace, batch, chunk, steps):
    """Prints ours, the floor and the ratio of one piece of work."""
    mode = "pertriple" if chunk == 1 else "shared"
    rates: dict[str, list[float]] = {"ours": [], "floor": []}
    parts = None
    for _ in range(options.repeats):
        found = measure(env[1], "floor", options.floor, options.data, batch, mode, steps)
        rates["floor"] += found["rates"][1:]
        found = measure(env[0], "ours", options.data, batch, chunk, steps, options.pipeline)
        rates["ours"] += found["rates"][1:]
        parts = found["parts"]
    median = {who: statistics.median(values) for who, values in rates.items()}
    for who, values in rates.items():
        low, high = min(values), max(values)
        print(f"{name}_{who} {median[who]:.0f} triples/s (min {low:.0f} max {high:.0f})")
    print(f"{name}_ratio {median['ours'] / median['floor']:.3f} of the floor", flush=True)
    for part, milliseconds in (parts or {}).items():
        print(f"{name}_step_{part} {milliseconds:.3f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=SHARED / "data" / "fb15k-237")
    parser.add_argument("--floor", type=Path, default=SHARED / "tools" / "peers")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pipeline", default="sparse_dist", choices=("sparse_dist", "loop"))
    parser.add_argument("--only", choices=("b1024", "b4096", "pertriple"))
    options = parser.parse_args()
    works = {"b1024": (1024, 0, 200), "b4096": (4096, 0, 40), "pertriple": (1024, 1, 10)}
    for work, (batch, chunk, steps) in works.items():
        if options.only not in (None, work):
            continue
        # Both keep freed blocks; both run on glibc's defaults; each as it starts by itself.
        compare(f"{work}_blocks_kept", (KEEP, KEEP), options, batch, chunk, steps)
        compare(f"{work}_glibc_defaults", (DEFAULT, DEFAULT), options, batch, chunk, steps)
        compare(f"{work}_as_shipped", ({}, {}), options, batch, chunk, steps)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        who, *rest = sys.argv[2:]
        if who == "ours":
            found = ours(Path(rest[0]), int(rest[1]), int(rest[2]), int(rest[3]), rest[4])
        else:
            found = floor(Path(rest[0]), Path(rest[1]), int(rest[2]), rest[3], int(rest[4]))
        print(json.dumps(found))
    else:
        main()

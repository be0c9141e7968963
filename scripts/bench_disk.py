"""Train a random graph with its table in memory and on disk, and compare.

    python scripts/bench_disk.py [--entities 6_000_000] [--parts 32] [--buffer 4] [--folder DIR]

Each side trains one epoch in a process of its own. It prints triples per second, peak memory beside
the plan's, and for the disk the bytes that parts read and wrote beside the least possible.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from random_graph import RandomGraph

from kge_torchrec.config import Config
from kge_torchrec.config.parser import config_from_dict
from kge_torchrec.data.parts import PartLayout, least_exchanges
from kge_torchrec.distributed.processes import processes
from kge_torchrec.embeddings.init import EntityInit
from kge_torchrec.environment import keep_large_blocks, peak_resident_bytes, set_threads
from kge_torchrec.training.assembly import build_backend, build_batches, build_pipeline
from kge_torchrec.training.part_buffer import PartBuffer

GIB = 2**30


def config_of(options: argparse.Namespace, placement: str) -> Config:
    """Return DistMult with Adagrad and 128 candidates that a batch shares."""
    keys = {
        "data.path": "none", "model.scorer": "distmult", "model.dim": options.dim,
        "model.reciprocal": False, "negatives.count": 128, "train.batch_size": options.batch_size,
        "train.optimizer": "adagrad", "train.lr": 0.1, "train.epochs": 1, "threads": 1,
        "loss.relation_weight": 0.0, "evaluation.every": 0, "entities.placement": placement,
    }  # fmt: skip
    if placement == "disk":
        parts = {"parts": options.parts, "buffer": options.buffer}
        keys["entities.placement_options"] = parts
    return config_from_dict(keys)


def train(options: argparse.Namespace, placement: str) -> dict:
    """Train an epoch; return its figures."""
    keep_large_blocks()
    graph = RandomGraph(options.entities, 10, options.triples)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    with processes("cpu") as ranks:
        set_threads(1, 1)
        config = graph.settled(config_of(options, placement))
        backend, buffer = build_backend(config, graph, ranks), None
        layout = PartLayout.of_config(config, options.entities, 1)
        if layout is not None:
            init = EntityInit.of(config.model, 0)
            buffer = PartBuffer(backend, layout, folder / "parts", config.seed, init, ranks)
        batches = build_batches(config, graph, ranks, buffer)
        step, epoch = build_pipeline(config, backend, ranks), batches.epoch(0)
        start = time.perf_counter()
        for number in range(batches.steps_per_epoch):
            step.progress(epoch)
            if number == 0:
                warm, start = batches.positions(0, 0)[1], time.perf_counter()
        seconds = time.perf_counter() - start
        results = {
            "triples/s": round((options.triples - warm) / seconds),
            "seconds": round(seconds, 1),
            "peak GiB": round(peak_resident_bytes() / GIB, 2),
        }
        if buffer is not None:
            part = sum(t[: layout.part_rows].nbytes for t in buffer._tensors.values())
            exchanges = len(layout.buffers(config.seed, 0)) - 1
            results |= {
                "table GiB": round(part * layout.parts / GIB, 2),
                "in memory GiB": round(part * (layout.places + 2) / GIB, 2),
                "read and written GiB": round(2 * part * exchanges / GIB, 2),
                "at least GiB": round(
                    2 * part * least_exchanges(layout.parts, layout.places) / GIB, 2
                ),
            }
            buffer.close()
    shutil.rmtree(folder, ignore_errors=True)
    return results


def main() -> None:
    """Run both sides and print them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--entities", type=int, default=6_000_000)
    parser.add_argument("--triples", type=int, default=20_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=16_384)
    parser.add_argument("--parts", type=int, default=32)
    parser.add_argument("--buffer", type=int, default=4)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--only", choices=("memory", "disk"), help="train one side here")
    options = parser.parse_args()
    if options.only:
        print(json.dumps(train(options, options.only)))
        return
    for placement in ("memory", "disk"):
        command = [sys.executable, __file__, *sys.argv[1:], "--only", placement]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        print(placement, done.stdout.splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()

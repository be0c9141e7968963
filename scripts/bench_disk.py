"""Train a random graph with its table in memory and on disk, and compare.

    python scripts/bench_disk.py [--entities 6_000_000] [--parts 32] [--buffer 4] [--folder DIR]
    python scripts/bench_disk.py --biggraph PYTHON --parts 8 --buffer 2 --epochs 2

Each side trains in a process of its own. It prints triples per second, peak memory beside the
plan's, and for the disk the bytes that parts read and wrote beside the least possible. The speed is
that of the last epoch; of several epochs, it counts writing all parts at the end of the epoch.

``--biggraph`` names a Python that has PyTorch-BigGraph (see peer_biggraph.py). Then all sides
train its model: ComplEx with a relation for each side, softmax over 128 candidates that 128 queries
share, row-wise Adagrad. BigGraph has two parts in memory. Its variants: "background" reads and
writes in another process, "forget" keeps no pages of its files in memory, as this package does.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from process_memory import numbers, tree, tree_bytes
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
RELATIONS, CANDIDATES, LR = 10, 128, 0.1
AS_BIGGRAPH = {
    "model.scorer": "complex", "model.reciprocal": True, "train.optimizer": "rowwise_adagrad",
    "negatives.chunk_size": CANDIDATES, "loss.name": "softmax", "loss.n3": 0.0,
}  # fmt: skip


def add_sizes(parser: argparse.ArgumentParser, **sizes: int) -> None:
    """Add the sizes of a graph and of its table as options, with their defaults."""
    for name, default in {**sizes, "dim": 64, "batch-size": 16_384}.items():
        parser.add_argument(f"--{name}", type=int, default=default)


def config_of(options: argparse.Namespace, placement: str) -> Config:
    """Return DistMult with Adagrad and 128 candidates that a batch shares, or BigGraph's model."""
    keys = {
        "data.path": "none", "model.scorer": "distmult", "model.dim": options.dim,
        "model.reciprocal": False, "negatives.count": CANDIDATES, "train.lr": LR,
        "train.batch_size": options.batch_size, "train.optimizer": "adagrad",
        "train.epochs": options.epochs, "threads": options.threads,
        "loss.relation_weight": 0.0, "evaluation.every": 0, "entities.placement": placement,
    }  # fmt: skip
    if options.biggraph:
        keys |= AS_BIGGRAPH
    if placement == "disk":
        parts = {"parts": options.parts, "buffer": options.buffer}
        keys["entities.placement_options"] = parts
    return config_from_dict(keys)


def train(options: argparse.Namespace, placement: str) -> dict:
    """Train; return the figures of the last epoch."""
    keep_large_blocks()
    graph = RandomGraph(options.entities, RELATIONS, options.triples)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    with processes("cpu") as ranks:
        set_threads(options.threads, 1)
        config = graph.settled(config_of(options, placement))
        backend, buffer = build_backend(config, graph, ranks), None
        layout = PartLayout.of_config(config, options.entities, 1)
        if layout is not None:
            init = EntityInit.of(config.model, 0)
            buffer = PartBuffer(backend, layout, folder / "parts", config.seed, init, ranks)
        batches = build_batches(config, graph, ranks, buffer)
        step, last = build_pipeline(config, backend, ranks), options.epochs - 1
        for number in range(options.epochs):
            print("mark", flush=True)
            epoch, start, warm = batches.epoch(number), time.perf_counter(), 0
            for place in range(batches.steps_per_epoch):
                step.progress(epoch)
                if number == place == last == 0:
                    warm, start = batches.positions(0, 0)[1], time.perf_counter()
            if last and buffer is not None:
                buffer.write_all()
            seconds = time.perf_counter() - start
            print("mark", flush=True)
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


def watched(command: list[str], triples: int) -> tuple[list[str], dict]:
    """Run a command that prints marks; return its lines, and the figures of its last epoch.

    Memory is that of all its processes; what they share counts once.
    """
    environment = os.environ | {"GOMP_SPINCOUNT": "10000", "PYTHONWARNINGS": "ignore"}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    peak, lines, marks = 0, [], []

    def watch() -> None:
        nonlocal peak
        while child.poll() is None:
            peak = max(peak, tree_bytes(child.pid))
            time.sleep(0.5)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for line in child.stdout:
        if line != "mark\n":
            lines.append(line.strip())
            continue
        counts = [numbers(pid, "io") for pid in tree(child.pid)]
        names = ("rchar", "wchar", "read_bytes", "write_bytes")
        total = [sum(count.get(name, 0) for count in counts) for name in names]
        marks.append([time.perf_counter(), *total])
    watcher.join()
    if child.wait():
        raise SystemExit(f"{command} failed")
    seconds, *moved = np.subtract(marks[-1], marks[-2]).tolist()
    names = ("read", "written", "read from disk", "written to disk")
    return lines, {
        "triples/s": round(triples / seconds),
        "seconds": round(seconds, 1),
        "peak GiB": round(peak / GIB, 2),
    } | {f"{name} GiB": round(x / GIB, 2) for name, x in zip(names, moved, strict=True)}


def command_of(options: argparse.Namespace, side: str, graph: Path) -> list[str]:
    """Return the command that trains one side."""
    if not side.startswith("biggraph"):
        return [sys.executable, __file__, *sys.argv[1:], "--only", side]
    values = {
        "epochs": options.epochs, "dim": options.dim, "entities": options.entities, "lr": LR,
        "partitions": options.parts, "loss": "softmax", "negatives": CANDIDATES,
        "workers": options.threads, "folder": options.folder,
    }  # fmt: skip
    script, batch = Path(__file__).with_name("peer_biggraph.py"), str(options.batch_size)
    return [options.biggraph, str(script), str(graph), "complex", batch,
            *(f"--{name}={value}" for name, value in values.items()),
            *(f"--{variant}" for variant in side.split("-")[1:])]  # fmt: skip


def main() -> None:
    """Run all sides and print them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_sizes(parser, entities=6_000_000, triples=20_000_000, parts=32, buffer=4)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of BigGraph: its workers")
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--biggraph", metavar="PYTHON", help="a Python with PyTorch-BigGraph")
    parser.add_argument("--sides", nargs="+", help="memory, disk, biggraph[-background][-forget]")
    parser.add_argument("--only", choices=("memory", "disk"), help="train one side here")
    options = parser.parse_args()
    if options.only:
        print(json.dumps(train(options, options.only)))
        return
    sides = options.sides or ["memory", "disk", *(["biggraph"] if options.biggraph else [])]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        graph = Path(folder) / "graph.npy"
        if options.biggraph:
            np.save(graph, RandomGraph(options.entities, RELATIONS, options.triples).train)
        for side in sides:
            lines, figures = watched(command_of(options, side, graph), options.triples)
            print(side, lines[-1] if lines else "", json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()

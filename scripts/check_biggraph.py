"""Train ComplEx here and with PyTorch-BigGraph, both in parts, and rank both models here.

    python scripts/check_biggraph.py PYTHON DATA [--parts 8] [--buffer 2] [--passes 1] [--lr 0.1]

PYTHON is one that has PyTorch-BigGraph (see peer_biggraph.py); "none" trains only here. Both have a
relation for each side, softmax over candidates that as many triples share, row-wise Adagrad,
initial values of scale .001 and no regularizer. Prints the filtered MRR of valid and test, both
sides, and the speed of the epochs after the first.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import kge_torchrec
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.ranking.metrics import metrics
from kge_torchrec.trained_model import TrainedModel


def main() -> None:
    """Train and rank both, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("python")
    parser.add_argument("data")
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--buffer", type=int, default=2, help="parts in memory here")
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--negatives", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=2, help="of BigGraph: its workers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = kge_torchrec.train(config_of(options, folder / "run"))
        epochs = [x for x in run.history if x["kind"] == "epoch"][1:]
        report("here", run.model, statistics.median([x["triples_per_second"] for x in epochs]))
        if options.python != "none":
            report("BigGraph", *biggraph(options, folder, run))


def config_of(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Return the config of training here; one part is a table in memory."""
    keys = {
        "model.scorer": "complex", "model.reciprocal": True, "train.optimizer": "rowwise_adagrad",
        "loss.name": "softmax", "loss.n3": 0.0,
        "data.path": options.data, "run.dir": str(folder), "run.progress": False,
        "model.dim": options.dim, "model.init_scale": 0.001, "loss.relation_weight": 0.0,
        "negatives.count": options.negatives, "negatives.chunk_size": options.negatives,
        "train.lr": options.lr, "train.epochs": options.epochs, "threads": options.threads,
        "train.batch_size": options.batch_size, "evaluation.every": 0, "seed": options.seed,
    }  # fmt: skip
    if options.parts > 1:
        parts = {"parts": options.parts, "buffer": options.buffer, "passes": options.passes}
        keys |= {"entities.placement": "disk", "entities.placement_options": parts}
    return keys


def report(who: str, model: TrainedModel, speed: float) -> None:
    """Rank a model and print its line."""
    evaluation = kge_torchrec.EvaluationConfig()
    store, mrr = model.known("ranking"), []
    for split in ("valid", "test"):
        ranks = model.ranks_of(getattr(store, split), split, evaluation, hide_bar=True)
        mrr.append(metrics(ranks)["both"]["realistic"]["mrr"])
    print(f"{who}: MRR valid {mrr[0]:.4f}, test {mrr[1]:.4f}; {speed:,.0f} triples/s", flush=True)


def biggraph(options: argparse.Namespace, folder: Path, run: object) -> tuple[TrainedModel, float]:
    """Train with BigGraph; return its model and its speed with the exchange of partitions."""
    model = run.model
    store = model.known("training")
    np.save(folder / "graph.npy", store.train)
    values = {
        "entities": store.num_entities, "lr": options.lr, "epochs": options.epochs,
        "partitions": options.parts, "dim": options.dim, "loss": "softmax",
        "negatives": options.negatives, "workers": options.threads, "save": folder / "model.npz",
        "folder": folder,
    }  # fmt: skip
    command = [options.python, str(Path(__file__).with_name("peer_biggraph.py")),
               str(folder / "graph.npy"), "complex", str(options.batch_size),
               *(f"--{name}={value}" for name, value in values.items())]  # fmt: skip
    environment = os.environ | {"PYTHONWARNINGS": "ignore"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        marks = [time.perf_counter() for line in child.stdout if line == "mark\n"]
    seconds = np.diff(marks)[2::2]
    saved = np.load(folder / "model.npz")
    rows, relations = (_pairs(saved[name]) for name in ("entities", "relations"))
    with torch.no_grad():
        model.scorer.relations.copy_(relations)
    theirs = TrainedModel(model.scorer, EntityShard(rows, 0, len(rows)), store, store)
    return theirs, len(store.train) / float(np.median(seconds)) if len(seconds) else 0.0


def _pairs(rows: np.ndarray) -> torch.Tensor:
    """Return complex rows with alternating parts, from rows of real, then imaginary parts."""
    real, imaginary = torch.from_numpy(rows).chunk(2, 1)
    return torch.stack([real, imaginary], 2).flatten(1)


if __name__ == "__main__":
    main()

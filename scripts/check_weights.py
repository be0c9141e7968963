"""Measure the effect of triple weights on a graph with added noise of low weight.

Adds random triples until they are 30 % of train. They get low weights and the true triples high
weights; the ranges overlap, so no threshold separates them. Trains the same config on the clean
graph, and on the noisy graph without weights, with data.weights loss, and with sampling. Ranks are
filtered ranks of the original test triples.

    python scripts/check_weights.py DIRECTORY [--noise 0.3] [--seeds 3] [--key value ...]

DIRECTORY holds train, valid and test files of a small graph, such as Kinship or UMLS.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import mean, stdev

import numpy as np

import kge_torchrec
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.store import TripleStore

KEYS = {
    "model.dim": 64,
    "train.epochs": 15,
    "negatives.count": 64,
    "evaluation.every": 0,
    "checkpoint.keep": 1,
    "run.progress": False,
    "run.trackers.tensorboard": False,
}
CASES = {
    "clean": ("clean", "ignore"),
    "noisy, no weights": ("noisy", "ignore"),
    "noisy, weights in the loss": ("noisy", "loss"),
    "noisy, weights in the draw": ("noisy", "sampling"),
}


def with_noise(clean: TripleStore, share: float, path: Path) -> TripleStore:
    """Return the graph with added random triples that it does not hold, and all weights."""
    random, known = np.random.default_rng(0), set()
    for split in ("train", "valid", "test"):
        known |= set(map(tuple, clean.split(split).tolist()))
    wanted, noise = round(len(clean.train) * share / (1 - share)), set()
    high = (clean.num_entities, clean.num_relations, clean.num_entities)
    while len(noise) < wanted:
        noise |= set(map(tuple, random.integers(0, high, (wanted, 3)).tolist())) - known
    rows = [*clean.train.tolist(), *sorted(noise)[:wanted]]
    weights = np.concatenate(
        [random.beta(5, 2, len(clean.train)), random.beta(1.5, 9, wanted)]
    ).clip(0.01)
    labels = clean.entities.array.to_pylist(), clean.relations.array.to_pylist()

    def named(triples: list) -> list[tuple[str, str, str]]:
        return [(labels[0][h], labels[1][r], labels[0][t]) for h, r, t in triples]

    train = [(*row, float(w)) for row, w in zip(named(rows), weights, strict=True)]
    others = {split: named(clean.split(split).tolist()) for split in ("valid", "test")}
    return prepare({"train": train, **others}, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "--noise", type=float, default=0.3, help="noise as a share of train (default: 0.3)"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parsed, rest = parser.parse_known_args()
    overrides = dict(zip((key.removeprefix("--") for key in rest[::2]), rest[1::2], strict=True))
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        clean = prepare(parsed.directory, here / "clean", progress=False)
        noisy = with_noise(clean, parsed.noise, here / "noisy")
        weights = noisy.report["weights"]["train"]
        print(f"{len(clean.train):,} triples, {len(noisy.train) - len(clean.train):,} of noise")
        low, high, average = (weights[key] for key in ("min", "max", "mean"))
        print(f"weights from {low:.3g} to {high:.3g}, mean {average:.3g}\n")
        print("| train | MRR | of seeds | Hits@1 |\n|---|---|---|---|")
        for name, (graph, use) in CASES.items():
            runs = []
            for seed in range(parsed.seeds):
                where = here / f"{use}-{graph}-{seed}"
                keys = {**KEYS, **overrides, "seed": seed, "data.weights": use}
                keys |= {"data.path": str(here / graph), "run.dir": str(where)}
                runs.append(kge_torchrec.train(keys).evaluate()["both"]["realistic"])
            mrr = [run["mrr"] for run in runs]
            spread = f"{stdev(mrr):.4f}" if len(mrr) > 1 else ""
            hits = mean(run["hits@1"] for run in runs)
            print(f"| {name} | {mean(mrr):.4f} | {spread} | {hits:.4f} |", flush=True)


if __name__ == "__main__":
    main()

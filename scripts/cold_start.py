"""Measure recommendations of items that train has never seen, from features made of the graph.

Users are halved, and a tenth of the items is held back from train.  Half A only describes items: an
item's features are the groups of its visitors in half A, and how many there are.  Half B trains on
the other items and is tested on the held-back ones, which compete with each other.
Prints recall@20, averaged over the users of half B.

    python scripts/cold_start.py ../shared/data/gowalla --epochs 8
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from kge_torchrec import open_run, train
from kge_torchrec.data.prepare import prepare
from kge_torchrec.trained_model import TrainedModel

COLD, TOP = 0.1, 20


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    random = np.random.default_rng(args.seed)
    lines = (args.data / "train.txt").read_text("utf-8").splitlines()
    visits = np.array([line.split("\t")[::2] for line in lines if line])
    users, user = np.unique(visits[:, 0], return_inverse=True)
    items, item = np.unique(visits[:, 1], return_inverse=True)
    in_a, cold = random.random(len(users)) < 0.5, random.random(len(items)) < COLD
    of_a, of_b = in_a[user], ~in_a[user]
    warm = ~cold[item]
    pairs = np.stack([user, item], 1)
    counts = np.bincount(item[of_a], minlength=len(items))
    print(f"{(~in_a).sum():,} users, {cold.sum():,} cold items, {(of_b & ~warm).sum():,} answers")
    test, folder = pairs[of_b & ~warm], Path(tempfile.mkdtemp(prefix="cold_start_"))
    baselines: dict[str, Callable[[int], np.ndarray]] = {
        "chance": lambda _: random.random(int(cold.sum())),
        "popularity in half A": lambda _: counts[cold],
    }
    for name, scores in baselines.items():
        print(f"{name}: recall@{TOP} {recall(scores, test, cold):.4f}", flush=True)
    groups = grouped(pairs[of_a & warm], (len(users), len(items)), args.groups, args.seed)
    with (folder / "features.tsv").open("w", encoding="utf-8") as file:
        for one, group, weight in features(pairs[of_a], groups, counts):
            file.write(f"{items[one]}\t{group}\t{weight:.6f}\n")
    triples = [(users[u], "visits", items[i]) for u, i in pairs[of_b & warm]]
    answers = [(users[u], "visits", items[i]) for u, i in test]
    for name, file in (("no features", None), ("features", folder / "features.tsv")):
        store = prepare(
            {"train": triples, "test": answers}, folder / name, features=file, log_notes=False
        )
        config = {**settings(args), "data.path": str(store.path)}
        run = train({**config, "run.dir": str(folder / f"run of {name}")}, rank_test=False)
        with open_run(run.path) as opened:
            relation = opened.model.scorer.relations[0].detach().numpy()
            queries = rows_of(opened.model, users) * relation
            answer_rows = rows_of(opened.model, items[cold])
        scores = partial(products, queries, answer_rows)
        print(f"{name}: recall@{TOP} {recall(scores, test, cold):.4f}", flush=True)


def rows_of(model: TrainedModel, labels: np.ndarray) -> np.ndarray:
    """Return the vectors of labels, zeros where the model has no such entity."""
    ids = model.entity_labels.find(labels.tolist())
    return np.where(ids[:, None] < 0, 0, model.entities[ids])


def products(queries: np.ndarray, answers: np.ndarray, user: int) -> np.ndarray:
    """Return the scores of all answers for one user."""
    return answers @ queries[user]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="a folder with train.txt: user, relation, item")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--groups", type=int, default=500, help="groups of the users of half A")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def settings(args: argparse.Namespace) -> dict[str, object]:
    """Return the config of both runs; negatives are items of train."""
    return {
        "model.scorer": "distmult",
        "model.dim": args.dim,
        "model.reciprocal": False,
        "model.init_scale": 0.1,
        "loss.name": "softmax",
        "loss.n3": 0.0,
        "loss.relation_weight": 0.0,
        "negatives.sides": "tail",
        "negatives.count": 1024,
        "negatives.among": "seen",
        "train.optimizer": "adagrad",
        "train.lr": 0.1,
        "train.batch_size": 4096,
        "train.epochs": args.epochs,
        "evaluation.every": 0,
        "entities.engine": "handrolled",
        "checkpoint.every.epochs": 0,
        "run.trackers.tensorboard": False,
        "seed": args.seed,
        "threads": args.threads,
    }


def grouped(pairs: np.ndarray, shape: tuple[int, int], count: int, seed: int) -> np.ndarray:
    """Return the group of each user: k-means of a truncated SVD of the visits."""
    torch.manual_seed(seed)
    ones = torch.ones(len(pairs))
    matrix = torch.sparse_coo_tensor(torch.from_numpy(pairs.T.copy()), ones, shape).coalesce()
    rows, size, _ = torch.svd_lowrank(matrix, q=64, niter=3)
    points = torch.nn.functional.normalize(rows * size.sqrt())
    active = torch.from_numpy(np.unique(pairs[:, 0]))
    centers = points[active[torch.randperm(len(active))[:count]]]
    for _ in range(15):
        group = (points @ centers.T).argmax(1)
        sums = torch.zeros_like(centers).index_add_(0, group[active], points[active])
        centers = torch.nn.functional.normalize(sums)
    return group.numpy()


def features(
    pairs: np.ndarray, groups: np.ndarray, counts: np.ndarray
) -> list[tuple[int, str, float]]:
    """Return (item, feature, weight): its visitors' groups by share, and a class of size."""
    keys, numbers = np.unique(pairs[:, 1] * len(groups) + groups[pairs[:, 0]], return_counts=True)
    lines = []
    for key, number in zip(keys.tolist(), numbers.tolist(), strict=True):
        one, group = divmod(key, len(groups))
        lines.append((one, f"group {group}", number / int(counts[one])))
    lines += [(int(k), f"size {int(np.log2(counts[k]))}", 1.0) for k in np.flatnonzero(counts)]
    return lines


def recall(scores: Callable[[int], np.ndarray], test: np.ndarray, cold: np.ndarray) -> float:
    """Return recall@20 among cold items, the mean over users with an answer."""
    place = np.cumsum(cold) - 1
    values = []
    order = np.argsort(test[:, 0], kind="stable")
    users, starts = np.unique(test[order, 0], return_index=True)
    for user, answers in zip(users, np.split(test[order, 1], starts[1:]), strict=True):
        best = np.argpartition(-scores(user), TOP)[:TOP]
        values.append(len(np.intersect1d(best, place[answers])) / len(answers))
    return float(np.mean(values))


if __name__ == "__main__":
    main()

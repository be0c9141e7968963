"""Recall and NDCG of the recipe `gowalla`, computed by numpy only from an export of vectors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kge_torchrec import api
from kge_torchrec.cli import main
from kge_torchrec.config.parser import load_config

USERS, ITEMS, GROUPS = 60, 48, 4
SMALL = {"train.lr": 0.01, "train.schedule": "constant",  # few steps need a higher rate
         "model.dim": 10, "train.epochs": 25, "train.batch_size": 16,
         "threads": 1, "run.progress": False, "run.trackers.tensorboard": False}  # fmt: skip


def read_pairs(file: Path) -> dict[str, set[str]]:
    """The items of each user in a file of lines user, relation, item."""
    pairs: dict[str, set[str]] = {}
    for line in file.read_text().splitlines():
        user, _, item = line.split("\t")
        pairs.setdefault(user, set()).add(item)
    return pairs


def metrics_of_vectors(folder: Path, data: Path, k: int, users: list[str]) -> tuple[float, float]:
    """Mean recall and NDCG at k of users: the definitions, on all items that are not in train."""
    queries, items = (np.load(folder / f"{name}.npy") for name in ("queries", "items"))
    heads, tails = ((folder / f"{x}.txt").read_text().splitlines() for x in ("queries", "items"))
    row, place = ({label: i for i, label in enumerate(x)} for x in (heads, tails))
    known, hidden = (read_pairs(data / f"{split}.txt") for split in ("train", "test"))
    recalls, gains = [], []
    for user in users:
        scores = items @ queries[row[user]]
        scores[[place[item] for item in known[user]]] = -np.inf
        best = np.argsort(-scores, kind="stable")[:k]
        hits = np.array([tails[i] in hidden[user] for i in best])
        discounts = 1 / np.log2(np.arange(k) + 2)
        recalls.append(hits.sum() / len(hidden[user]))
        gains.append(discounts[hits].sum() / discounts[: len(hidden[user])].sum())
    return float(np.mean(recalls)), float(np.mean(gains))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Users of a group visit mostly the items of that group; every item is in train."""
    folder, random = tmp_path_factory.mktemp("visits"), np.random.default_rng(0)
    visits: dict[str, list[str]] = {"train": [], "test": []}
    for user in range(USERS):
        chance = np.where(np.arange(ITEMS) % GROUPS == user % GROUPS, 8.0, 1.0)
        items = random.choice(ITEMS, 10, replace=False, p=chance / chance.sum())
        held_out = random.integers(1, 4)
        own = {"test": items[:held_out], "train": {*items[held_out:], user % ITEMS}}
        own["test"] = [item for item in own["test"] if item not in own["train"]] or [items[0]]
        own["train"] -= {*own["test"]}
        for split, chosen in own.items():
            visits[split] += [f"u{user}\tvisits\ti{item}" for item in sorted(chosen)]
    for split, lines in visits.items():
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    labels = [f"u{i}\tuser" for i in range(USERS)] + [f"i{i}\titem" for i in range(ITEMS)]
    (folder / "types.tsv").write_text("\n".join(labels) + "\n")
    return folder


@pytest.mark.slow
def test_metrics_of_the_recipe_are_those_of_its_vectors(data, tmp_path):
    values = {"data.path": str(data), "data.types": str(data / "types.tsv"),
              "run.dir": str(tmp_path / "run"), **SMALL}  # fmt: skip
    api.train(load_config("gowalla", values))
    words = ["export", str(tmp_path / "run"), "-o", str(tmp_path / "out"), "--format", "vectors"]
    assert main([*words, "--relation", "visits"]) == 0
    results = api.evaluate(tmp_path / "run", recommend=[20, 5])["recommendation"]
    users = [*read_pairs(data / "test.txt")]
    assert (results["users"], results["candidates"]) == (len(users), ITEMS)
    for k in (20, 5):
        expected = metrics_of_vectors(tmp_path / "out" / "0", data, k, users)
        assert (results[f"recall@{k}"], results[f"ndcg@{k}"]) == pytest.approx(expected, abs=1e-9)
    assert results["recall@5"] > 2 * 5 / ITEMS  # of a random order it would be about 5 / ITEMS

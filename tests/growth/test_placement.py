"""Placed entities: they fit their own triples, and do not stand before the answers of others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from grown_runs import FIRST, OLD_ENTITIES, TABLE, TOLERANCE, base_run, new_triples, tensors
from oracle_training import batch_loss
from torch import Tensor
from training_runs import config_of
from worlds import run_world

from kge_torchrec import api, extend
from kge_torchrec.config import Config
from kge_torchrec.data.prepare import prepare_triples
from kge_torchrec.data.store import TripleStore
from kge_torchrec.training.run_folder import RunFolder


def rank_places(run, folder) -> dict:
    return extend(run, new_triples(), folder, place=True).results["extended"]["placed"]


def test_placing_moves_new_rows_alone_and_lowers_their_loss(tmp_path):
    run = base_run()
    placed = extend(run, new_triples(), tmp_path / "one", place=True).results["extended"]["placed"]
    run_world(2, rank_places, run, tmp_path / "two")
    extend(run, new_triples(), tmp_path / "drawn", epochs=0)
    drawn, one, two = (tensors(tmp_path / name, FIRST) for name in ("drawn", "one", "two"))
    for key, old in drawn.items():
        assert (one[key] - two[key]).abs().max() < TOLERANCE
        if key == TABLE:
            assert torch.equal(one[key][:OLD_ENTITIES], old[:OLD_ENTITIES])
            assert not (one[key][OLD_ENTITIES:] == old[OLD_ENTITIES:]).all(1).any()
        elif key.endswith("scorer.relations"):
            new, old = one[key].view(2, 5, -1), old.view(2, 5, -1)
            assert torch.equal(new[:, :3], old[:, :3])
            assert not (new[:, 3:] == old[:, 3:]).all(2).any()
        else:
            assert torch.equal(one[key], old)
    store = TripleStore.open(tmp_path / "one" / "store")
    config = RunFolder(tmp_path / "one").load_config()
    before, after = (loss_of_new(config, store, x) for x in (drawn, one))
    assert after < 0.97 * before
    assert (placed["entities"], placed["relation_rows"]) == (9, 4)
    assert placed["triples"] == len(store.train) - store.base.triples


def loss_of_new(config: Config, store: TripleStore, found: dict[str, Tensor]) -> float:
    """Of the new training triples against all entities, by the oracle's formulas."""
    rows = torch.from_numpy(store.train[store.base.triples :].astype(np.int64))
    every = torch.arange(store.num_entities).expand(len(rows), -1)
    relations = found["engine.model.objective.scorer.relations"].double()
    negatives = {"head": every, "tail": every}
    table = found[TABLE].double()
    shares = torch.full((len(rows),), 1 / len(rows), dtype=torch.float64)
    return float(batch_loss(config, store, table, relations, rows, negatives, set(), shares))


@pytest.mark.parametrize(
    "changes",
    [{"loss__name": "softmax"},
     {"model__scorer": "transe_l2", "loss__name": "self_adversarial", "loss__margin": 3.0},
     pytest.param({"loss__name": "bce"}, marks=pytest.mark.slow),
     pytest.param({"negatives__regime": "1vsall"}, marks=pytest.mark.slow)],
    ids=["softmax", "transe", "bce", "1vsall"],
)  # fmt: skip
def test_placed_towns_are_near_those_of_their_country(tmp_path, changes):
    towns = [(f"t{i}", i % 4) for i in range(40)]
    located = [(town, "in", f"c{country}") for town, country in towns]
    near = [(a, "near", b) for a, i in towns for b, j in towns if i == j and a != b]
    late = {"t36", "t37", "t38", "t39"}
    is_new = [bool(late & {a, b}) for a, _, b in near]
    old = [t for t, new in zip(near, is_new, strict=True) if not new]
    store = prepare_triples(
        {"train": old[9:] + located[:36], "valid": old[:9]}, tmp_path / "store"
    ).path
    given = {"model__scorer": "complex", "model__reciprocal": True, "model__dim": 16,
             "train__epochs": 30, "train__lr": 0.1, "negatives__count": 20, **changes}  # fmt: skip
    run = api.train(config_of(store, tmp_path / "run", **given))
    late_near = [t for t, new in zip(near, is_new, strict=True) if new]
    asked = late_near[::6]
    new = {"train": [t for t in late_near if t not in asked], "test": asked}
    placed = extend(run.path, new, tmp_path / "placed", place=True)
    results = placed.results
    assert results["test"]["both"]["realistic"]["mrr"] > 0.4  # of 44 entities, by chance .1
    before, after = (r.evaluate("valid")["both"]["realistic"]["mrr"] for r in (run, placed))
    assert after > 0.8 * before  # a few more entities are right answers there by now

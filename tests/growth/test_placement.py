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
from kge_torchrec import growth as extending
from kge_torchrec.config import Config
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.store import TripleStore
from kge_torchrec.growth import placement
from kge_torchrec.training.run_folder import RunFolder


def rank_places(run, folder) -> dict:
    return extend(run, new_triples(), folder, place=True).results["extended"]["placed"]


@pytest.mark.slow
def test_placement_moves_only_new_rows_and_lowers_their_loss(tmp_path):
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


def loss_of_new(
    config: Config, store: TripleStore, results: dict[str, Tensor], first_relation: int = 0
) -> float:
    """Return the loss of new training triples over all entities, by the oracle's formulas.

    first_relation: of those that count.
    """
    rows = torch.from_numpy(store.train[store.base.triples :].astype(np.int64))
    rows = rows[rows[:, 1] >= first_relation]
    every = torch.arange(store.num_entities).expand(len(rows), -1)
    relations = results["engine.model.objective.scorer.relations"].double()
    negatives = {"head": every, "tail": every}
    table = results[TABLE].double()
    shares = torch.full((len(rows),), 1 / len(rows), dtype=torch.float64)
    return float(batch_loss(config, store, table, relations, rows, negatives, set(), shares))


@pytest.mark.parametrize(
    "changes",
    [{"loss__name": "softmax"},
     pytest.param({"model__scorer": "transe_l2", "loss__name": "self_adversarial",
                   "loss__margin": 3.0}, marks=pytest.mark.slow),
     pytest.param({"loss__name": "bce"}, marks=pytest.mark.slow),
     pytest.param({"negatives__regime": "1vsall"}, marks=pytest.mark.slow)],
    ids=["softmax", "transe", "bce", "1vsall"],
)  # fmt: skip
@pytest.mark.slow
def test_placed_towns_are_near_towns_of_their_country(tmp_path, changes):
    towns = [(f"t{i}", i % 4) for i in range(40)]
    located = [(town, "in", f"c{country}") for town, country in towns]
    near = [(a, "near", b) for a, i in towns for b, j in towns if i == j and a != b]
    late = {"t36", "t37", "t38", "t39"}
    is_new = [bool(late & {a, b}) for a, _, b in near]
    old = [t for t, new in zip(near, is_new, strict=True) if not new]
    store = prepare({"train": old[9:] + located[:36], "valid": old[:9]}, tmp_path / "store").path
    inputs = {"model__scorer": "complex", "model__reciprocal": True, "model__dim": 16,
             "train__epochs": 30, "train__lr": 0.1, "negatives__count": 20, **changes}  # fmt: skip
    run = api.train(config_of(store, tmp_path / "run", **inputs))
    late_near = [t for t, new in zip(near, is_new, strict=True) if new]
    queries = late_near[::6]
    new = {"train": [t for t in late_near if t not in queries], "test": queries}
    placed = extend(run.path, new, tmp_path / "placed", place=True)
    results = placed.results
    assert results["test"]["both"]["realistic"]["mrr"] > 0.4  # of 44 entities, by chance .1
    before, after = (r.evaluate("valid")["both"]["realistic"]["mrr"] for r in (run, placed))
    assert after > 0.8 * before  # a few more entities are right answers there by now


def test_new_rows_start_at_the_mean_row_of_their_positions(tmp_path, monkeypatch):
    monkeypatch.setattr(placement._Placer, "_minimize", lambda *_: None)
    run = base_run()
    extend(run, new_triples(), tmp_path / "drawn", epochs=0)
    made = extend(run, new_triples(), tmp_path / "run", place=True)
    drawn, results = (tensors(tmp_path / name, FIRST)[TABLE] for name in ("drawn", "run"))
    store = TripleStore.open(made.path / "store")
    triples, old = store.train.tolist(), store.base.triples
    for entity in range(OLD_ENTITIES, store.num_entities):
        places = [(r, column) for *ends, r in ([h, t, r] for h, r, t in triples[old:])
                  for column, end in enumerate(ends) if end == entity]  # fmt: skip
        means = []
        for relation, column in places:
            in_train = [(h, t)[column] for h, r, t in triples[:old] if r == relation]
            means += [results[in_train].mean(0)] if in_train else []
        expected = torch.stack(means).mean(0) if means else drawn[entity]
        assert (results[entity] - expected).abs().max() < TOLERANCE


def test_learning_rate_decays_to_zero_and_old_relations_are_fixed(tmp_path, monkeypatch):
    rates = []

    class Adam(torch.optim.Adam):
        def step(self, closure=None):
            rates.append([group["lr"] for group in self.param_groups])
            return super().step(closure)

    def watched(model, config, old):
        before = model.scorer.relations.detach().clone().view(2, 5, -1)
        placed = placement.place(model, config, old)
        after = model.scorer.relations.detach().view(2, 5, -1)
        assert torch.equal(before[:, :3], after[:, :3])
        assert not (before[:, 3:] == after[:, 3:]).any()
        return placed

    monkeypatch.setattr(torch.optim, "Adam", Adam)
    monkeypatch.setattr(extending, "place", watched)
    extend(base_run(), new_triples(), tmp_path / "run", place=True)
    falling = torch.tensor(rates)
    steps = len(falling)
    assert steps >= placement.LEAST_STEPS
    left = 1 - torch.arange(steps) / steps
    assert torch.allclose(falling, falling[0] * left[:, None])


@pytest.mark.slow
def test_new_relations_are_placed_with_entities_of_all_blocks(tmp_path, monkeypatch):
    """A relation that the first block does not have, and one between two blocks."""
    names = [f"n{i}" for i in range(12)]
    new = [(name, "r0", f"e{i}") for i, name in enumerate(names)]
    new += [(a, "late", f"e{i}") for i, a in enumerate(names[8:])]
    new += [(names[i], "across", names[11 - i]) for i in range(4)] + [("e1", "old", "e2")]

    def loss_of_relations(rows: int) -> float:
        monkeypatch.setattr(placement, "BLOCK_ROWS", rows)
        path = extend(base_run(), {"train": new}, tmp_path / str(rows), place=True).path
        store, config = TripleStore.open(path / "store"), RunFolder(path).load_config()
        return loss_of_new(config, store, tensors(path, FIRST), store.base.relations)

    # Placed by only the first block, the ratio is 2.6.
    assert loss_of_relations(4) < 2.2 * loss_of_relations(12)

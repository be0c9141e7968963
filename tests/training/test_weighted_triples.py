"""Weighted triples on 1, 2 and 4 ranks against the dense oracles, in the loss and in the draw."""

from __future__ import annotations

import functools
import itertools
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import oracle_full_candidates
import oracle_training
import pytest
from training_runs import (
    config_of,
    fit,
    largest_difference,
    random_triples,
    shared_folder,
    start_and_end,
)
from worlds import run_world

from kge_torchrec.config import Config, ConfigError, RunConfig
from kge_torchrec.config.parser import config_from_dict
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.store import TripleStore
from kge_torchrec.errors import DataError

ALL = {"negatives__regime": "1vsall", "train__batch_size": 16}
VARIANTS = {
    "loss": {"data__weights": "loss", "negatives__chunk_size": 8, "loss__n3": 0.02,
             "negatives__in_batch": True, "train__accumulation": 3},
    "sampling": {"data__weights": "sampling", "negatives__filtered": True,
                 "entities__engine": "handrolled"},
    "all, loss": {"data__weights": "loss", **ALL, "loss__n3": 0.02, "loss__relation_weight": 0.5,
                  "train__accumulation": 3, "entities__engine": "handrolled"},
    "all, loss and dura": {"data__weights": "loss", **ALL, "loss__regularizers": {"dura": 0.02},
                           "model__reciprocal": False, "loss__name": "bce"},
    "relations": {"loss__relation_weights": {"r0": 3.0, "r2": 0.5}, "loss__name": "bpr",
                  "negatives__in_batch": "same_relation",
                  "negatives__chunk_size": 8, "negatives__filtered": True},
    "relations and triples": {"loss__relation_weights": {"r0": 3.0}, "data__weights": "loss",
                              "negatives__in_batch": "same_relation"},
    "all, relations": {"loss__relation_weights": {"r1": 0.2}, **ALL, "loss__name": "bpr"},
    "all, sampling": {"data__weights": "sampling", **ALL, "entities__engine": "handrolled"},
}  # fmt: skip
ON_FOUR = ("loss", "relations")


@functools.cache
def the_store() -> Path:
    random = np.random.default_rng(4)
    triples = [
        (*triple, float(weight) ** 3 + 0.01)
        for triple, weight in zip(random_triples(23, 3, 90), random.random(90) * 2, strict=True)
    ]
    return prepare({"train": triples}, shared_folder() / "store").path


def variant(name: str, folder: Path | None = None) -> Config:
    config = config_of(
        the_store(),
        train__epochs=1,
        train__lr=0.1,
        train__optimizer_options__eps=1e-3,
        seed=3,
        **VARIANTS[name],
    )
    quiet = {"progress": False, "trackers": {"tensorboard": False}}
    return replace(config, run=RunConfig(folder and str(folder), **quiet))


def rank_trains_all(store: Path, folder: Path, names: list[str]) -> dict:
    results = {}
    for name in names:
        config = variant(name, folder / name)
        config = replace(config, data=replace(config.data, path=str(store)))
        results[name] = start_and_end(config)
    return results


@functools.cache
def trained(world_size: int) -> dict[str, dict]:
    with tempfile.TemporaryDirectory() as folder:
        names = ON_FOUR if world_size == 4 else VARIANTS
        ranks = run_world(world_size, rank_trains_all, the_store(), Path(folder), list(names))
    return ranks[0]


@functools.cache
def dense(name: str) -> dict:
    is_full = "negatives__regime" in VARIANTS[name]
    oracle = oracle_full_candidates if is_full else oracle_training
    return oracle.train_dense(
        variant(name), TripleStore.open(the_store()), trained(1)[name]["start"]
    )


@pytest.mark.parametrize(
    "name, world_size",
    [
        *itertools.product(VARIANTS, (1, 2)),
        *(pytest.param(name, 4, marks=pytest.mark.slow) for name in ON_FOUR),
    ],
)
def test_weighted_training_equals_the_dense_oracle(name, world_size):
    actual, expected = trained(world_size)[name], dense(name)
    assert largest_difference(actual["start"], expected) > 0.05
    assert largest_difference(actual["end"], expected) < 1e-5


@pytest.mark.parametrize("regime", ["kvsall", "kvssample"])
@pytest.mark.parametrize("use", ["loss", "sampling"])
def test_queries_with_several_answers_reject_weights(regime, use):
    keys = {"data.weights": use, "negatives.regime": regime}
    with pytest.raises(ConfigError, match=f"data.weights {use}: queries of .* use sampled or 1vs"):
        config_from_dict(keys)


def test_in_batch_negatives_reject_weighted_sampling():
    keys = {"data.weights": "sampling", "negatives.log_q": True, "negatives.in_batch": True}
    with pytest.raises(ConfigError, match=r"with data.weights sampling set negatives.in_batch"):
        config_from_dict({**keys, "loss.name": "softmax"})


def test_missing_weights_are_reported(tmp_path):
    """Missing weights are reported for a store and for files, with the key that adds them."""
    store = prepare({"train": random_triples(9, 2, 20)}, tmp_path / "store")
    with pytest.raises(DataError, match=r"data.weights loss: the store has no weights"):
        fit(config_of(store.path, tmp_path / "run", data__weights="loss"))
    (tmp_path / "x.tsv").write_text("a\tr\tb\t0.5\n")
    with pytest.raises(DataError, match=r"read it with --data.weights loss$"):
        fit(config_of(tmp_path / "x.tsv", tmp_path / "other"))

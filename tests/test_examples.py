"""The example of triple classification; the others are tested beside what they show."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_runs import config_of, tiny_store

from kge_torchrec import api, load_model

EXAMPLE = runpy.run_path(
    str(Path(__file__).parents[1] / "docs" / "examples" / "triple_classification.py")
)


@given(st.lists(st.tuples(st.integers(-9, 9), st.booleans()), min_size=1, max_size=20))
def test_threshold_is_right_most_often(pairs):
    """No other threshold is right more often, also where scores are equal."""
    scores, is_true = np.array([x for x, _ in pairs], float), np.array([x for _, x in pairs])
    threshold = EXAMPLE["best_threshold"](scores, is_true)
    right = {t: ((scores >= t) == is_true).sum() for t in [*scores, np.inf]}
    assert ((scores >= threshold) == is_true).sum() == max(right.values())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("example")
    store = tiny_store(folder / "store", held_out=30)
    with api.train(config_of(store.path, folder / "run")) as run:
        return load_model(run.export(folder / "export"))


def test_false_triples_are_in_no_split_and_have_tails_of_their_relation(model):
    store = model.store
    everything = {tuple(row) for split in ("train", "valid", "test") for row in store.split(split)}
    ids, is_true = EXAMPLE["with_false"](store, "test")
    assert np.array_equal(ids[is_true], store.test) and 20 < (~is_true).sum() <= len(store.test)
    tails = {(r, t) for _, r, t in store.train.tolist()}
    for head, relation, tail in ids[~is_true].tolist():
        assert (head, relation, tail) not in everything and (relation, tail) in tails

"""Triple classification: thresholds by brute force, and what is right of test."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kge_torchrec.answers import classification
from kge_torchrec.answers.classification import Scored, best_threshold, thresholds_of
from kge_torchrec.config import ConfigError


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=1, max_size=12))
def test_best_threshold_matches_brute_force(pairs):
    scores = np.array([s for s, _ in pairs], np.float32)
    labels = np.array([x for _, x in pairs])
    results = ((scores >= best_threshold(scores, labels)) == labels).mean()
    cuts = [-10, *(s - 0.5 for s in scores), 10]
    assert results == max(((scores >= cut) == labels).mean() for cut in cuts)


def test_each_relation_has_a_threshold():
    relations = np.array([0, 0, 2, 2, 0, 2])
    scores = np.float32([1, 3, 10, 30, 2.5, 25])
    labels = np.array([False, True, False, True, True, False])
    thresholds, of_all = thresholds_of(Scored(relations, scores, labels), 4)
    assert thresholds.tolist() == [1.75, of_all, 27.5, of_all]
    assert of_all == best_threshold(scores, labels)


def test_accuracy_counts_correct_triples(run):
    results = run.classify()
    assert results["triples"] == 30 and results["among"] == "seen"
    parts = results["relations"].values()
    assert sum(part["triples"] for part in parts) == 30
    assert 0.3 < results["accuracy"] <= 1
    assert run.classify(among="all") != results
    assert run.classify(seed=1) != results
    with pytest.raises(ConfigError, match="among must be one of seen, all"):
        run.classify("types")


def test_valid_and_test_have_different_corruptions(run, monkeypatch):
    seeds, original = {}, classification.labelled

    def labelled(store, split, count, among, seed, limit):
        seeds.setdefault(seed, set()).add(split)
        return original(store, split, count, among, seed, limit)

    monkeypatch.setattr(classification, "labelled", labelled)
    run.classify(seed=0)
    run.classify(seed=1)
    assert sorted(len(splits) for splits in seeds.values()) == [1, 1, 1, 1]


def test_invalid_limit_or_seed_is_rejected(run):
    for options, words in (({"limit": -4}, "limit must be an integer >= 1, got -4"),
                           ({"seed": -1}, "seed must be an integer >= 0")):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            run.classify(**options)

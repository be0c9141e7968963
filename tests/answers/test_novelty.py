"""Novelty: lists and metrics of the scores minus a multiple of the log of popularity."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from training_runs import evaluate

from kge_torchrec.cli import main
from kge_torchrec.config import ConfigError

WEIGHTS = (0, 0.3, 5.0, -2.0)


def popularity(run, relation):
    """Return in how many training triples of a relation each entity is the tail."""
    train = np.asarray(run.model.store.train)
    (number,) = run.relation_labels.ids([relation])
    tails = train[train[:, 1] == number, 2]
    return np.bincount(tails, minlength=run.model.num_entities)


def by_hand(run, head, relation, weight, k):
    """Return all tails without the head by score minus penalty, both rounded to float32."""
    counts = popularity(run, relation)
    tails = run.predict(head, relation, k=run.model.num_entities)
    values = []
    for answer in tails:
        (tail,) = run.entity_labels.ids([answer.label]).tolist()
        penalty = np.float32(weight * math.log1p(counts[tail]))
        values.append((-(np.float32(answer.score) - penalty), tail, answer))
    values.sort(key=lambda value: value[:2])
    return [answer for *_, answer in values if answer.label != head][:k]


@pytest.mark.parametrize("weight", WEIGHTS)
def test_lists_are_ordered_by_score_minus_penalty(run, weight):
    for head, relation in (("e1", "r0"), ("e5", "r2")):
        options = {"candidates": "all", "novelty": weight}
        answers = run.recommend(head, relation, 9, **options)
        expected = by_hand(run, head, relation, weight, 9)
        assert [(a.label, a.score, a.known) for a in answers] == [
            (a.label, a.score, a.known) for a in expected
        ]
        assert [a.rank for a in answers] == list(range(1, 10))
        table = run.recommend([head], relation, 9, **options)
        assert table["tail"].to_pylist() == [a.label for a in answers]


def test_metrics_are_those_of_the_lists(run, capsys):
    """Recall and coverage by the scores themselves; here a head may recommend itself."""
    weight, k, store = 0.8, 5, run.model.store
    test, known = np.asarray(store.test), np.concatenate([store.train, store.valid])
    recalls, covered = [], set()
    for head, relation in np.unique(test[:, :2], axis=0).tolist():
        counts = popularity(run, run.relation_labels[relation])
        every = np.arange(run.model.num_entities)
        triples = np.stack([every * 0 + head, every * 0 + relation, every], 1)
        penalties = (weight * np.log1p(counts)).astype(np.float32)
        scores = np.array(run.score(triples), np.float32) - penalties
        scores[known[(known[:, :2] == (head, relation)).all(1), 2]] = -np.inf
        answers = test[(test[:, :2] == (head, relation)).all(1), 2]
        covered |= {*np.argsort(-scores, kind="stable")[:k].tolist()}
        others = np.delete(scores, answers)
        own = np.sort(scores[answers])[::-1]
        ranks = [1 + i + (others > score).sum() for i, score in enumerate(own)]
        recalls.append(np.mean([rank <= k for rank in ranks]))
    stats = evaluate(run.path, recommend=[k], novelty=weight)["recommendation"]
    assert stats["recall@5"] == pytest.approx(np.mean(recalls))
    assert stats["coverage@5"] == pytest.approx(len(covered) / run.model.num_entities)
    assert main(["evaluate", str(run.path), "--recommend", "5", "--novelty", "0.8",
                 "--format", "json"]) == 0  # fmt: skip
    assert json.loads(capsys.readouterr().out)["recommendation"] == stats
    off = evaluate(run.path, recommend=[k])["recommendation"]
    assert stats != off and evaluate(run.path, recommend=[k], novelty=0)["recommendation"] == off


def test_bad_novelties_are_refused(run):
    for value in (math.nan, math.inf):
        with pytest.raises(ConfigError, match=r"novelty must be a finite number, such as 0\.5"):
            run.recommend("e1", "r0", novelty=value)
    with pytest.raises(ConfigError, match="novelty 1 has no effect without recommend"):
        evaluate(run.path, novelty=1)

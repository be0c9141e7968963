"""Answers with any one part missing: right, the same from a run and its export, on all ranks."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from ranking_cases import make_known
from training_runs import config_of

from kge_torchrec import api
from kge_torchrec.answers import queries
from kge_torchrec.answers.queries import Choice, best
from kge_torchrec.config import ConfigError
from kge_torchrec.errors import DataError

PARTS = ("head", "relation", "tail")


def of_split(run, split):
    """Triples of labels."""
    store = run.model.store
    heads, relations, tails = np.asarray(store.split(split), np.int64).T
    labels = store.entities.labels
    return list(zip(labels(heads), store.relations.labels(relations), labels(tails), strict=True))


def without(triple, part):
    """The query for a part of a triple, and the answer."""
    query = dict(zip(PARTS, triple, strict=True))
    return query, query.pop(part)


@pytest.mark.parametrize("part", PARTS)
def test_answer_scores_match_triple_scores(run, part):
    for triple in of_split(run, "test")[:5]:
        query, _ = without(triple, part)
        answers = run.predict(**query, k=100)
        assert len(answers) == (3 if part == "relation" else 37)
        triples = [tuple({**query, part: a.label}[name] for name in PARTS) for a in answers]
        side = "head" if part == "head" else "tail"
        assert run.score(triples, side) == [a.score for a in answers]
        assert [a.score for a in answers] == sorted((a.score for a in answers), reverse=True)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_known_answers_are_marked_or_left_out(run, split, part):
    where = {triple: name for name in ("test", "valid", "train") for triple in of_split(run, name)}
    for triple in of_split(run, split)[:4]:
        query, answer = without(triple, part)
        every = run.predict(**query, k=100)
        assert {a.label: a.known for a in every}[answer] == split
        for a in every:
            whole = tuple({**query, part: a.label}[name] for name in PARTS)
            assert where.get(whole) == a.known
        new = run.predict(**query, k=100, known=False)
        assert [a.label for a in new] == [a.label for a in every if a.known is None]
        assert [a.rank for a in new] == list(range(1, len(new) + 1))


def test_default_is_ten_answers(run):
    assert len(run.predict("e1", "r1")) == 10
    with pytest.raises(ConfigError, match="k must be"):
        run.predict("e1", "r1", k=0)


def test_ranks_match_evaluation(run):
    """Filtered ranks of 1,000 queries, counted in the answers of predict; to the tie."""
    model = run.model
    store = model.store
    random = np.random.default_rng(0)
    triples = np.concatenate([store.train, store.valid, store.test]).astype(np.int64)
    triples = triples[random.integers(len(triples), size=500)]
    ranks = model.ranks_of(triples, "test", run.config.evaluation)
    for side, column in (("head", 0), ("tail", 2)):
        scores, ids = best(model, side, triples, Choice(37))
        index = store.filter_index()
        anchors, answers = triples[:, 2 - column], triples[:, column]
        known = index.contains(side, anchors, triples[:, 1], ids.numpy())
        own = ids.numpy() == answers[:, None]
        score = scores.numpy()
        true = score[own][:, None]
        rest = ~known
        optimistic = ((score > true) & rest).sum(1) + 1
        pessimistic = ((score >= true) & rest).sum(1) + 1
        assert optimistic.tolist() == ranks.optimistic[side].tolist()
        assert pessimistic.tolist() == ranks.pessimistic[side].tolist()


def test_other_models(run, tmp_path):
    settings = {"model__scorer": "conve", "model__reciprocal": True, "model__dim": 16}
    config = config_of(run.config.data.path, tmp_path, train__epochs=1, **settings)
    with api.train(config) as other:
        relations = other.predict(head="e1", tail="e2")
        triples = [("e1", a.label, "e2") for a in relations]
        assert other.score(triples) == [a.score for a in relations]
        tails = other.predict("e1", "r1", k=40)
        assert other.score([("e1", "r1", a.label) for a in tails]) == [a.score for a in tails]


def test_relation_scores_do_not_depend_on_blocks(run, monkeypatch):
    expected = run.predict(head="e1", tail="e2")
    monkeypatch.setattr(queries, "RELATIONS", 2)
    assert run.predict(head="e1", tail="e2") == expected


def test_tables_of_triples_are_scored(run):
    triples = of_split(run, "test")[:5]
    table = pa.table(dict(zip(PARTS, map(list, zip(*triples, strict=True)), strict=True)))
    scores = run.score(triples)
    assert run.score(table)["score"].to_pylist() == run.score(np.array(triples)) == scores
    with pytest.raises(DataError, match="triples: triple 0: unknown entity 'nobody'"):
        run.score(pa.table({"head": ["nobody"], "relation": ["r0"], "tail": ["e1"]}))


def test_scores_of_zero_and_many_triples(run, monkeypatch):
    from kge_torchrec.ranking import blocks

    assert run.score([]) == []
    triples = of_split(run, "train")
    expected = [run.score([triple])[0] for triple in triples]
    assert run.score(triples) == expected
    monkeypatch.setattr(blocks, "FETCH_BYTES", 1)  # 128 triples at once
    assert run.score(triples) == expected
    with pytest.raises(ValueError, match="side must be one of"):
        run.score(triples, "both")


def test_splits_are_looked_up_only_for_listed_answers():
    """A query may have a million known answers; train comes before valid and test."""
    entities = 1_000_000
    every = np.arange(entities)
    splits = {
        "train": make_known(np.stack([every * 0, every * 0, every], 1)[::2]),
        "valid": make_known([(0, 0, 2), (0, 0, 3)]),
        "test": make_known([(0, 0, 2), (0, 0, 3), (0, 0, 5)]),
    }
    model = SimpleNamespace(known_by_split=lambda: splits)
    query, ids = np.array([[0, 0, 0]]), np.array([[9, 2, 3, 5, 4, 0, -1]])
    queries.splits(model, "tail", query, ids)  # compiles
    tracemalloc.start()
    names = queries.splits(model, "tail", query, ids)[0].tolist()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert names == [None, "train", "valid", "test", "train", "train", None]
    assert peak < 1 << 20

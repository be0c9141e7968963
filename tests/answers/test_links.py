"""New links of a whole relation."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ranking_cases import whole

from kge_torchrec.answers import queries
from kge_torchrec.answers.queries import new_links
from kge_torchrec.config import ConfigError


def brute_force(run, relation, heads=None, tails=None, loops=False):
    """(score, head, tail) of every pair that is not known, best first; equal ones by id."""
    store = run.model.store
    (number,) = store.relations.ids([relation])
    known = {tuple(t) for s in ("train", "valid", "test") for t in store.split(s).tolist()}
    pairs = [
        (h, number, t)
        for h, t in itertools.product(range(store.num_entities), repeat=2)
        if (h, number, t) not in known and (loops or h != t)
        and (heads is None or h in heads) and (tails is None or t in tails)
    ]  # fmt: skip
    scores = run.model.scores(torch.tensor(pairs)).tolist()
    label = store.entities.labels(range(store.num_entities))
    order = sorted(range(len(pairs)), key=lambda i: (-scores[i], pairs[i]))
    return [(label[pairs[i][0]], label[pairs[i][2]], scores[i]) for i in order]


def as_tuples(results):
    return [(link.head, link.tail, link.score) for link in results]


@pytest.mark.parametrize("heads", [512, 5])
@pytest.mark.parametrize("loops", [False, True])
def test_new_links_match_brute_force(run, monkeypatch, heads, loops):
    monkeypatch.setattr(queries, "HEADS", heads)
    expected = brute_force(run, "r1", loops=loops)
    results = run.new_links("r1", 30, loops=loops)
    assert as_tuples(results) == expected[:30]
    assert [link.rank for link in results] == list(range(1, 31))
    assert {link.relation for link in results} == {"r1"}
    every = run.new_links("r1", 5000, loops=loops)
    assert as_tuples(every) == expected
    assert as_tuples(run.new_links("r1", loops=loops)) == expected[:10]


def test_new_links_among_seen_candidates(run):
    store = run.model.store
    (number,) = store.relations.ids(["r2"])
    train = np.asarray(store.train)
    train = train[train[:, 1] == number]
    expected = brute_force(run, "r2", set(train[:, 0].tolist()), set(train[:, 2].tolist()))
    assert as_tuples(run.new_links("r2", 40, "seen")) == expected[:40]
    with pytest.raises(ConfigError, match="candidates must be one of all, seen"):
        run.new_links("r2", 40, "types")
    with pytest.raises(ConfigError, match="k must be"):
        run.new_links("r2", 0)


@pytest.mark.parametrize("heads", [512, 5])
def test_equal_links_sort_by_head_and_tail(run, monkeypatch, heads):
    """Of a table whose rows are all equal, and of one whose rows are equal in pairs."""
    monkeypatch.setattr(queries, "HEADS", heads)
    rows = torch.from_numpy(run.entities.copy())
    for table in (rows[:1].expand_as(rows), rows[torch.arange(len(rows)) // 2]):
        model = replace(run.model, shard=whole(table.contiguous()))
        expected = brute_force(SimpleNamespace(model=model), "r1")
        assert as_tuples(new_links(model, "r1", 40, "all", False)) == expected[:40]


def test_links_without_a_score_are_left_out(run):
    rows = torch.from_numpy(run.entities.copy())
    rows[3], rows[5, 0] = torch.nan, torch.inf
    links = new_links(replace(run.model, shard=whole(rows)), "r1", 5000, "all", False)
    (label,) = run.entity_labels.labels([3])
    assert links and label not in {x for link in links for x in (link.head, link.tail)}
    assert all(link.score > -np.inf for link in links)

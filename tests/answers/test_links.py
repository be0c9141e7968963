"""New links of a whole relation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from kge_torchrec.answers import links
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
    monkeypatch.setattr(links, "HEADS", heads)
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


def test_equal_links_sort_by_head_and_tail():
    best = links._Best(3)
    nan = torch.nan
    best.offer(torch.tensor([4, 7]), 10, torch.tensor([[1.0, 1.0], [2.0, nan]]))
    best.offer(torch.tensor([4, 7]), 12, torch.tensor([[1.0, nan], [1.0, 0.0]]))
    best.offer(torch.tensor([2]), 10, torch.tensor([[1.0, -torch.inf]]))
    assert list(zip(*best.triples, strict=True)) == [(7, 10, 2.0), (2, 10, 1.0), (4, 10, 1.0)]

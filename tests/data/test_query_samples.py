from __future__ import annotations

from itertools import combinations
from math import comb
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kge_torchrec.data import SIDES
from kge_torchrec.data.batches import BatchPlan, Delivery
from kge_torchrec.data.batches.queries import QuerySampleBatches
from kge_torchrec.data.negatives import UniformSampler
from kge_torchrec.data.store import TripleStore
from kge_torchrec.training import assembly
from tests.ranking_cases import make_known
from tests.training_runs import config_of, small_store

ENTITIES, RELATIONS, COUNT = 9, 3, 4
IDS = [st.integers(0, size - 1) for size in (ENTITIES, RELATIONS, ENTITIES)]


def builder(triples, rank=0, world_size=1, **options) -> QuerySampleBatches:
    known = make_known(sorted(triples), ENTITIES, RELATIONS)
    deduplicate = options.pop("deduplicate", True)
    candidates = {"sampler": UniformSampler(ENTITIES), "counts": dict.fromkeys(SIDES, COUNT)}
    plan = BatchPlan(**{"batch_size": 5, "seed": 1} | options | candidates)
    return QuerySampleBatches(known, plan, Delivery(rank, world_size, deduplicate=deduplicate))


def read(batch, sides=SIDES):
    """[(side, anchor, relation, answers, sampled, known, weight)] by plain indexing."""
    ids = batch.ids
    every = (ids[batch.entities] if batch.deduplicated else ids).tolist()
    queries, answers = sum(batch.queries), sum(batch.answers)
    anchors, of_answers = every[:queries], every[queries : queries + answers]
    sampled = np.array(every[queries + answers :]).reshape(len(sides), COUNT)
    results, first_query, first_answer = [], 0, 0
    for position, side in enumerate(sides):
        for i in range(batch.queries[position]):
            q = first_query + i
            own = range(first_answer, first_answer + batch.answers[position])
            mine = [of_answers[j] for j in own if batch.query[j] == i]
            results.append((side, anchors[q], int(batch.relation[q]), sorted(mine),
                          sampled[position].tolist(), batch.known[q].tolist(),
                          float(batch.weight)))  # fmt: skip
        first_query += batch.queries[position]
        first_answer += batch.answers[position]
    return results


@given(
    triples=st.sets(st.tuples(*IDS), min_size=1, max_size=30),
    world_size=st.integers(1, 4),
    accumulation=st.integers(1, 2),
    deduplicate=st.booleans(),
)
def test_epoch_covers_all_queries_over_ranks(triples, world_size, accumulation, deduplicate):
    options = {"accumulation": accumulation, "deduplicate": deduplicate}
    single = builder(triples)
    steps = [read(batch) for batch in single.epoch(2)]
    assert len(steps) == single.steps_per_epoch
    expected = {}
    for head, relation, tail in triples:
        expected.setdefault(("tail", head, relation), set()).add(tail)
        expected.setdefault(("head", tail, relation), set()).add(head)
    queries = [query for step in steps for query in step]
    assert {query[:3]: set(query[3]) for query in queries} == expected
    assert len(queries) == len(expected) == single.examples  # each once
    assert sum(len(query[3]) for query in queries) == 2 * len(triples)
    for _, _, _, answers, sampled, known, _ in queries:
        assert known == [entity in answers for entity in sampled]

    ranks = [builder(triples, rank, world_size, **options) for rank in range(world_size)]
    streams = [rank.epoch(2) for rank in ranks]
    for step in steps:
        shares = [read(next(stream)) for stream in streams for _ in range(accumulation)]
        results = [query for share in shares for query in share]
        assert sorted(repr(query[:6]) for query in results) == sorted(
            repr(query[:6]) for query in step
        )
        weights = [query[6] / world_size for query in results]  # float32
        assert weights == pytest.approx([query[6] for query in step])
    assert all(next(stream, None) is None for stream in streams)


@given(
    triples=st.sets(st.tuples(*IDS), min_size=1, max_size=60),
    world_size=st.integers(1, 4),
    limit=st.integers(1, 4),
)
def test_a_query_with_many_answers_draws_some(triples, world_size, limit):
    """Different ones of its own; sampled entities that are known are marked as before."""
    unlimited = {query[:3]: query for batch in builder(triples).epoch(1) for query in read(batch)}
    single = [read(batch) for batch in builder(triples, max_answers=limit).epoch(1)]
    for query in (query for step in single for query in step):
        whole = unlimited[query[:3]]
        assert len(query[3]) == min(limit, len(whole[3])) == len(set(query[3]))
        assert set(query[3]) <= set(whole[3])
        assert (query[4:]) == whole[4:]
    streams = [
        builder(triples, rank, world_size, max_answers=limit).epoch(1) for rank in range(world_size)
    ]
    for step in single:
        shares = [query for stream in streams for query in read(next(stream))]
        assert sorted(repr(q[:6]) for q in shares) == sorted(repr(q[:6]) for q in step)


def test_both_sides_have_as_many_candidates_whatever_head_count_says():
    changes = {"negatives.regime": "kvssample", "negatives.count": 4, "negatives.head_count": 2}
    store, ranks = TripleStore.open(small_store()), SimpleNamespace(world_size=1)
    plan = assembly.batch_plan(config_of(store.path, **changes), store, ranks)
    assert plan.counts == {"head": 4, "tail": 4}


def test_answers_are_drawn_uniformly_and_anew_every_epoch():
    hub = {(0, 0, tail) for tail in range(ENTITIES)}
    batches = builder(hub, max_answers=3, sides=("tail",))
    drawn = [read(next(batches.epoch(epoch)), ("tail",))[0][3] for epoch in range(400)]
    assert drawn == [read(next(batches.epoch(epoch)), ("tail",))[0][3] for epoch in range(400)]
    pairs = [pair for answers in drawn for pair in combinations(answers, 2)]
    counts = np.unique(pairs, axis=0, return_counts=True)[1]
    expected = 400 * 3 / comb(ENTITIES, 2)  # each pair of answers alike
    assert len(counts) == comb(ENTITIES, 2)
    assert ((counts - expected) ** 2 / expected).sum() < 80  # 35 on average, 8 is a deviation

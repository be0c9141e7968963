import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kge_torchrec.data import SIDES
from kge_torchrec.data.batches import BatchPlan
from kge_torchrec.data.batches.queries import (
    DistinctQueries,
    EveryQuery,
    QueryBatches,
    TripleQueries,
)
from tests.ranking_cases import make_known

KINDS = ("1vsall", "kvsall", "allvsall")


@st.composite
def graphs(draw):
    """Sizes and distinct triples, at least one."""
    entities, relations = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    ids = [st.integers(0, size - 1) for size in (entities, relations, entities)]
    triples = draw(st.sets(st.tuples(*ids), min_size=1, max_size=40))
    return entities, relations, np.array(sorted(triples), np.int32)


def examples_of(kind, graph, sides):
    entities, relations, triples = graph
    if kind == "1vsall":
        return TripleQueries(triples, sides)
    cls = DistinctQueries if kind == "kvsall" else EveryQuery
    return cls(make_known(triples, entities, relations), sides)


def epoch_of(batches: QueryBatches, epoch=0):
    """(side, anchor, relation, sorted answers) of every query, in order."""
    results = []
    for batch in batches.epoch(epoch):
        for side in batch.queries_by_side:
            query, answer = side.answers.all()
            assert (np.diff(query) >= 0).all()
            for i, pair in enumerate(zip(side.anchor, side.relation, strict=True)):
                answers = sorted(answer[query == i].tolist())
                results.append((side.side, *map(int, pair), answers))
    return results


def expected_queries(kind, graph, sides):
    """By going through the triples."""
    entities, relations, triples = graph
    answers: dict[tuple, list[int]] = {}
    single = []
    for head, relation, tail in triples.tolist():
        for side in sides:
            anchor, answer = (head, tail) if side == "tail" else (tail, head)
            answers.setdefault((side, anchor, relation), []).append(answer)
            single.append((side, anchor, relation, [answer]))
    if kind == "1vsall":
        return single
    if kind == "allvsall":
        for side in sides:
            for anchor in range(entities):
                for relation in range(relations):
                    answers.setdefault((side, anchor, relation), [])
    return [(*query, sorted(results)) for query, results in answers.items()]


@given(
    graph=graphs(),
    kind=st.sampled_from(KINDS),
    sides=st.sampled_from([("head", "tail"), ("tail",), ("head",)]),
    batch_size=st.integers(1, 50),
    seed=st.integers(0, 3),
)
def test_epoch_has_every_query_once_with_all_training_answers(graph, kind, sides, batch_size, seed):
    batches = QueryBatches(examples_of(kind, graph, sides), BatchPlan(batch_size, seed))
    results = epoch_of(batches)
    assert sorted(results) == sorted(expected_queries(kind, graph, sides))
    steps = list(batches.epoch(0))
    assert len(steps) == batches.steps_per_epoch
    for step in steps:  # the loss is the mean over the queries of the step
        np.testing.assert_allclose(step.weight * step.queries, 1)
    count = sum(len(answers) for *_, answers in results)
    assert count == len(graph[2]) * len(sides)  # every training answer exactly once


def test_order_and_seeds_follow_seed_and_epoch():
    triples = np.array([[h, 0, h] for h in range(20)])

    def run(seed, epoch):
        batches = QueryBatches(TripleQueries(triples, SIDES), BatchPlan(6, seed))
        return epoch_of(batches, epoch), [batch.seed for batch in batches.epoch(epoch)]

    assert run(1, 2) == run(1, 2)
    for other in (run(1, 3), run(2, 2)):
        assert other[0] != run(1, 2)[0]
        assert not set(other[1]) & set(run(1, 2)[1])
    assert len(set(run(1, 2)[1])) == 4


def test_two_queries_of_a_triple_are_half_an_epoch_apart():
    triples = np.array([[h, 0, h + 30] for h in range(21)])
    tails, heads = [], []
    for batch in QueryBatches(TripleQueries(triples, SIDES), BatchPlan(4, seed=2)).epoch(1):
        head, tail = batch.queries_by_side
        assert (head.side, tail.side) == ("head", "tail")
        tails += tail.anchor.tolist()
        heads += (head.anchor - 30).tolist()
        assert not set(tails[-len(tail.anchor) :]) & set(heads[-len(head.anchor) :])
    assert tails == heads[10:] + heads[:10]

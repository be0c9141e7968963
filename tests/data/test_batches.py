"""Batches of all ranks together are those of an oracle in plain Python, at any number of ranks."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from dataclasses import is_dataclass
from itertools import combinations
from math import comb
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kge_torchrec.data import SIDES
from kge_torchrec.data.batches import BATCH_WORKERS, Bags, BatchPlan, Delivery, prefetched
from kge_torchrec.data.batches.queries import (
    DistinctQueries,
    EveryQuery,
    QueryBatches,
    QuerySampleBatches,
    TripleQueries,
)
from kge_torchrec.data.batches.triples import Batch, TripleBatches
from kge_torchrec.data.negatives import (
    Chunks,
    FilteredSampler,
    InBatchSampler,
    UniformSampler,
    random_numbers,
)
from kge_torchrec.data.shuffle import EpochShuffle
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.store.filter_index import Answers
from kge_torchrec.kernels.operators import distinct
from kge_torchrec.training import assembly
from tests.ranking_cases import make_known
from tests.training_runs import config_of, small_store

N, R, SEED, EPOCH = 11, 3, 5, 2
UNIFORM = UniformSampler(N)
IDS = st.tuples(st.integers(0, N - 1), st.integers(0, R - 1), st.integers(0, N - 1))
GRAPHS = st.sets(IDS, min_size=1, max_size=40).map(lambda rows: np.array(sorted(rows), np.int32))
SOME_SIDES = st.sampled_from([("head", "tail"), ("tail", "head"), ("tail",), ("head",)])
TRIPLES = np.random.default_rng(0).integers(0, (N, R, N), (35, 3)).astype(np.int32)


def entities_of(batch) -> list[int]:
    """Check the ids that a batch looks up; return the entity of each place."""
    if batch.deduplicated:
        assert (batch.ids.diff() > 0).all()
        assert set(batch.entities.tolist()) == set(range(len(batch.ids)))  # no id without a use
        return batch.ids[batch.entities].tolist()
    assert torch.equal(batch.ids, batch.entities)
    return batch.ids.tolist()


# Triples


def trained(batch, sides):
    """[(triple, weight, {side: (candidates, which are known)})] of the triples that count."""
    chunks, size = batch.relation.shape
    parts = list(torch.tensor(entities_of(batch)).split(batch.sizes))
    heads, tails = (x.view(chunks, size) for x in parts[:2])
    candidates = {s: x.view(chunks, -1) for s, x in zip(sides, parts[2:], strict=True) if chunks}
    known, results = {"head": batch.known_head, "tail": batch.known_tail}, []
    assert (chunks == 0) == (size == 0)
    for place in np.ndindex(chunks, size):
        if weight := float(batch.weight[place]):
            triple = tuple(int(x[place]) for x in (heads, batch.relation, tails))
            of_sides = {
                side: (tuple(own[place[0]].tolist()), tuple(known[side][place].tolist()))
                if known[side].numel() else (tuple(own[place[0]].tolist()), None)
                for side, own in candidates.items()
            }  # fmt: skip
            results.append((triple, weight, of_sides))
    rows = torch.stack([heads, batch.relation, tails], -1).view(-1, 3)
    padded = set(map(tuple, rows.tolist()))
    assert padded == {triple for triple, _, _ in results}  # padding repeats own triples
    return results


@settings(max_examples=40)
@given(
    triples=GRAPHS, sides=SOME_SIDES, batch_size=st.integers(1, 15), chunk_size=st.integers(0, 16),
    world=st.sampled_from([1, 2, 3, 4, 7]), accumulation=st.integers(1, 3),
    filtered=st.booleans(), deduplicate=st.booleans(),
)  # fmt: skip
def test_batches_of_triples(
    triples, sides, batch_size, chunk_size, world, accumulation, filtered, deduplicate
):
    """Each triple once, with the candidates of its chunk, in equal shares, some of them empty."""
    known = make_known(triples)
    sampler = FilteredSampler(UNIFORM, known) if filtered else UNIFORM
    counts = {"head": 3, "tail": 5}
    plan = BatchPlan(batch_size, SEED, sides, sampler, counts, chunk_size, False, accumulation)
    makers = [
        TripleBatches(triples, plan, Delivery(rank, world, deduplicate=deduplicate))
        for rank in range(world)
    ]
    streams = [maker.epoch(EPOCH) for maker in makers]
    order = EpochShuffle(len(triples), SEED, EPOCH)(np.arange(len(triples)))
    facts = set(map(tuple, triples.tolist()))
    for step, first in enumerate(range(0, len(triples), batch_size)):
        rows = triples[order[first : first + batch_size]].tolist()
        shares = [trained(next(own), sides) for own in streams for _ in range(accumulation)]
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        results = [one for share in shares for one in share]
        # A rank's weights sum to its share of the triples times the number of ranks.
        assert [weight for _, weight, _ in results] == pytest.approx(
            [world / len(rows)] * len(rows)
        )
        assert [triple for triple, _, _ in results] == list(map(tuple, rows))
        for place, (triple, _, of_sides) in enumerate(results):
            for side in sides:
                chunk = place // (chunk_size or batch_size)
                place_of = EPOCH, step, side
                numbers = random_numbers(SEED, place_of, range(chunk, chunk + 1), counts[side])
                drawn = tuple(UNIFORM.sample(Chunks(side, numbers))[0].tolist())
                replaced = [(e, *triple[1:]) if side == "head" else (*triple[:2], e) for e in drawn]
                are_facts = tuple(fact in facts for fact in replaced) if filtered else None
                assert of_sides[side] == (drawn, are_facts)
    assert all(next(own, None) is None for own in streams)


@pytest.mark.parametrize("sides", [("head", "tail"), ("tail",), ("head",)])
@pytest.mark.parametrize("in_batch", [False, True])
def test_how_often_a_chunk_has_each_candidate_is_counted_by_side(sides, in_batch):
    counts, size = {"head": 3, "tail": 7}, 5
    ends = {"head": TRIPLES[:, 0], "tail": TRIPLES[:, 2]}
    degrees = {side: np.bincount(own, minlength=N) for side, own in ends.items()}
    sampler = InBatchSampler(UNIFORM, degrees) if in_batch else UNIFORM
    plan = BatchPlan(10, SEED, sides, sampler, counts, size, log_q=True)
    for batch in TripleBatches(TRIPLES, plan).epoch(0):
        parts = torch.tensor(entities_of(batch)).split(batch.sizes)
        expected = []
        for side, own in zip(sides, parts[2:], strict=True):
            assert len(own) == len(batch.relation) * (counts[side] + size * in_batch)
            of_answers = in_batch * (size - 1) / (len(TRIPLES) - 1)
            expected += (counts[side] / N + of_answers * degrees[side][own]).tolist()
        assert batch.log_expected.exp().tolist() == pytest.approx(expected)


# Queries


def queries_of(kind, triples, sides) -> dict[tuple, list[int]] | list[tuple]:
    """[(side, anchor, relation, answers)] by going through the triples."""
    answers, single = defaultdict(list), []
    if kind == "allvsall":
        answers.update({(s, *pair): [] for s in sides for pair in np.ndindex(N, R)})
    for head, relation, tail in triples.tolist():
        for side in sides:
            anchor, answer = (head, tail) if side == "tail" else (tail, head)
            answers[side, anchor, relation].append(answer)
            single.append((side, anchor, relation, [answer]))
    return single if kind == "1vsall" else [(*key, sorted(own)) for key, own in answers.items()]


def examples_of(kind, triples, sides):
    if kind == "1vsall":
        return TripleQueries(triples, sides)
    known = make_known(triples)
    return DistinctQueries(known, sides) if kind == "kvsall" else EveryQuery(known, sides, (N, R))


def asked(batch) -> list[tuple]:
    """[(side, anchor, relation, answers)] of a batch."""
    results = []
    for side in batch.queries_by_side:
        query, answer = side.answers.all()
        for i, pair in enumerate(zip(side.anchor, side.relation, strict=True)):
            results.append((side.side, *map(int, pair), sorted(answer[query == i].tolist())))
    return results


@given(
    triples=GRAPHS, kind=st.sampled_from(["1vsall", "kvsall", "allvsall"]), sides=SOME_SIDES,
    batch_size=st.integers(1, 50), accumulation=st.integers(1, 3),
)  # fmt: skip
def test_batches_of_queries(triples, kind, sides, batch_size, accumulation):
    """Every query once, with all of its training answers; a step's weights sum to 1."""
    plan = BatchPlan(batch_size, SEED, sides, accumulation=accumulation)
    batches = QueryBatches(examples_of(kind, triples, sides), plan)
    made = list(batches.epoch(EPOCH))
    assert len(made) == batches.steps_per_epoch * accumulation
    results = [query for batch in made for query in asked(batch)]
    assert sorted(results) == sorted(queries_of(kind, triples, sides))
    weights = np.array([batch.weight * batch.queries for batch in made])
    np.testing.assert_allclose(weights.reshape(-1, accumulation).sum(1), 1)


def test_two_queries_of_a_triple_are_half_an_epoch_apart():
    triples = np.array([[h, 0, h + 30] for h in range(21)])
    tails, heads = [], []
    for batch in QueryBatches(TripleQueries(triples, SIDES), BatchPlan(4, seed=2)).epoch(1):
        head, tail = batch.queries_by_side
        tails += tail.anchor.tolist()
        heads += (head.anchor - 30).tolist()
    assert tails == heads[10:] + heads[:10]


def test_seeds_of_models_follow_seed_and_epoch():
    def seeds(seed, epoch):
        batches = QueryBatches(TripleQueries(TRIPLES, SIDES), BatchPlan(6, seed))
        return [batch.seed for batch in batches.epoch(epoch)]

    one = seeds(1, 2)
    assert one == seeds(1, 2) and len(set(one)) == 6
    assert not set(one) & {*seeds(1, 3), *seeds(2, 2)}


def query_samples(triples, delivery=None, **plan) -> QuerySampleBatches:
    drawn = {"sampler": UNIFORM, "counts": dict.fromkeys(SIDES, 4)}
    plan = BatchPlan(**{"batch_size": 5, "seed": SEED} | drawn | plan)
    return QuerySampleBatches(make_known(triples), plan, delivery)


def sampled(batch, sides=SIDES) -> list[tuple]:
    """[(side, anchor, relation, answers, candidates, which are known, weight)] of a batch."""
    every, results = entities_of(batch), []
    queries, answers = sum(batch.queries), sum(batch.answers)
    candidates = np.array(every[queries + answers :]).reshape(len(sides), -1).tolist()
    first, done = 0, queries
    for number, side in enumerate(sides):
        own = range(done, done + batch.answers[number])
        for i in range(batch.queries[number]):
            mine = sorted(every[j] for j in own if batch.query[j - queries] == i)
            q = first + i
            results.append((side, every[q], int(batch.relation[q]), mine, candidates[number],
                            batch.known[q].tolist(), float(batch.weight)))  # fmt: skip
        first, done = first + batch.queries[number], own.stop
    return results


@given(
    triples=GRAPHS, world=st.integers(1, 4), accumulation=st.integers(1, 2),
    deduplicate=st.booleans(), limit=st.integers(0, 4),
)  # fmt: skip
def test_batches_of_queries_with_sampled_candidates(
    triples, world, accumulation, deduplicate, limit
):
    """Every query once; of one with more answers than the limit some, the same on any ranks."""
    single = query_samples(triples, max_answers=limit)
    expected = {key[:3]: key[3] for key in queries_of("kvsall", triples, SIDES)}
    deliveries = [Delivery(rank, world, deduplicate=deduplicate) for rank in range(world)]
    options = {"max_answers": limit, "accumulation": accumulation}
    streams = [query_samples(triples, x, **options).epoch(EPOCH) for x in deliveries]
    seen = Counter()
    for step, batch in enumerate(single.epoch(EPOCH)):
        queries = sampled(batch)
        for side, anchor, relation, answers, candidates, known, weight in queries:
            every = expected[side, anchor, relation]
            assert set(answers) <= set(every) and len(set(answers)) == len(answers)
            assert len(answers) == min(limit or len(every), len(every))
            numbers = random_numbers(SEED, (EPOCH, step, side), range(1), 4)
            assert candidates == UNIFORM.sample(Chunks(side, numbers))[0].tolist()
            assert known == [entity in every for entity in candidates]
            assert weight == pytest.approx(1 / len(queries))
            seen[side, anchor, relation] += 1
        shares = [sampled(next(stream)) for stream in streams for _ in range(accumulation)]
        results = [query for share in shares for query in share]
        assert sorted(q[:6] for q in results) == sorted(q[:6] for q in queries)
        assert [q[6] for q in results] == pytest.approx([world / len(queries)] * len(queries))
    assert seen == Counter(expected.keys())


def test_answers_are_drawn_uniformly_and_anew_every_epoch():
    hubs = np.array([(head, 0, tail) for head in (0, 1) for tail in range(N)], np.int32)
    batches = query_samples(hubs, max_answers=3, sides=("tail",))
    queries = [sampled(next(batches.epoch(epoch)), ("tail",)) for epoch in range(400)]
    drawn, others = ([query[3] for step in queries for query in step if query[1] == hub]
                     for hub in (0, 1))  # fmt: skip
    assert sum(map(list.__eq__, drawn, others)) < 20  # each hub draws its own
    pairs = [pair for answers in drawn for pair in combinations(answers, 2)]
    counts = np.unique(pairs, axis=0, return_counts=True)[1]
    expected = 400 * 3 / comb(N, 2)  # each pair of answers alike
    assert len(counts) == comb(N, 2)
    assert ((counts - expected) ** 2 / expected).sum() < 110  # 54 on average, 10 is a deviation


def test_both_sides_have_as_many_candidates_whatever_head_count_says():
    changes = {"negatives.regime": "kvssample", "negatives.count": 4, "negatives.head_count": 2}
    store, ranks = TripleStore.open(small_store()), SimpleNamespace(world_size=1)
    plan = assembly.batch_plan(config_of(store.path, **changes), store, ranks)
    assert plan.counts == {"head": 4, "tail": 4}


# All kinds


def maker_of(kind, ahead=False):
    if kind == "kvssample":
        return query_samples(TRIPLES, Delivery(ahead=ahead), batch_size=10)
    if kind == "sampled":
        plan = BatchPlan(10, SEED, SIDES, UNIFORM, dict.fromkeys(SIDES, 3), 4)
        return TripleBatches(TRIPLES, plan, Delivery(ahead=ahead))
    plan = BatchPlan(10, SEED)
    return QueryBatches(examples_of(kind, TRIPLES, SIDES), plan, Delivery(ahead=ahead))


def content(value):
    """All that a batch holds, as lists."""
    if isinstance(value, Answers):
        return content(value.all())
    if is_dataclass(value):
        return content([*vars(value).values()])
    if isinstance(value, list | tuple):
        return [content(x) for x in value]
    return value.tolist() if hasattr(value, "tolist") else value


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kind", ["sampled", "kvssample", "1vsall", "kvsall"])
def test_an_epoch_resumes_at_any_step(kind, ahead):
    whole = content([*maker_of(kind).epoch(2)])
    for first in range(len(whole) + 1):
        assert content([*maker_of(kind, ahead).epoch(2, first)]) == whole[first:]
    assert content([*maker_of(kind).epoch(3)]) != whole


class Recorder:
    """Stands for a tensor and records the calls of its methods."""

    def __init__(self):
        self.calls = []

    def record_stream(self, s):  # as a tensor of torch calls it
        self.calls.append(s)

    def pin_memory(self):
        return "pinned"

    def to(self, device, non_blocking):
        return f"on {device}, {non_blocking}"


def test_every_field_moves_is_pinned_and_recorded():
    tensors = [Recorder() for _ in range(11)]
    fields = ["ids", "entities", "relation", "weight", "known_head", "known_tail", "log_expected"]
    moving = dict(zip(fields, tensors, strict=False))
    batch = Batch(**moving, deduplicated=True, bags=Bags(*tensors[7:]), sizes=(5, 5))
    for word, moved in (("pinned", batch.pin_memory()), ("on meta, True", batch.to("meta", True))):
        assert moved == Batch(
            **dict.fromkeys(moving, word), deduplicated=True, bags=Bags(*[word] * 4), sizes=(5, 5)
        )
    batch.record_stream("stream")
    assert all(field.calls == ["stream"] for field in tensors)


@pytest.mark.gpu
def test_to_cuda_and_back():
    batch = next(maker_of("sampled").epoch(0))
    pinned = batch.pin_memory()
    tensors = [x for x in vars(pinned).values() if torch.is_tensor(x) and x.numel()]
    assert all(x.is_pinned() for x in tensors)
    moved = pinned.to(torch.device("cuda"), non_blocking=True)
    moved.record_stream(torch.cuda.current_stream())
    torch.cuda.synchronize()
    assert content(moved.to(torch.device("cpu"))) == content(batch)


# Ahead of a GPU, in threads


@pytest.fixture
def threads():
    """Sets the number, and puts it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def in_a_new_thread(function):
    """Return what a function returns in a new thread."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.parametrize("cores, workers, share", [(1, 1, 1), (6, 6, 1), (16, BATCH_WORKERS, 2)])
def test_workers_share_the_cpus_and_other_threads_keep_theirs(threads, cores, workers, share):
    threads(cores)
    together, most = threading.Barrier(workers), 3 * workers

    def build(number: int) -> tuple[int, int]:
        together.wait(timeout=10)  # only as many workers as there should be come through
        return number, torch.get_num_threads(), threading.get_ident()

    results = list(prefetched(build, range(most)))
    assert [number for number, _, _ in results] == list(range(most))
    assert {number for _, number, _ in results} == {share}
    assert len({ident for _, _, ident in results}) == workers
    assert torch.get_num_threads() == in_a_new_thread(torch.get_num_threads) == cores


def test_number_of_prebuilt_batches_is_bounded(threads):
    threads(2)
    made = []
    batches = prefetched(lambda number: made.append(number) or number, range(100))
    assert next(batches) == 0
    batches.close()
    assert len(made) <= 4
    assert torch.get_num_threads() == 2


def test_error_is_raised_at_its_batch(threads):
    threads(2)
    batches = prefetched(lambda number: 1 / (number - 3), range(10))
    assert [next(batches) for _ in range(3)] == [-1 / 3, -1 / 2, -1]
    with pytest.raises(ZeroDivisionError):
        next(batches)


@settings(max_examples=200)
@given(bits=st.integers(0, 62), count=st.integers(0, 60) | st.just(5000), seed=st.integers(0, 99))
def test_distinct_ids_match_numpy(bits, count, seed):
    ids = np.random.default_rng(seed).integers(0, 2**bits, count, endpoint=True)
    ids[:3] = 2**bits  # the first id with one more bit
    unique, inverse = (x.numpy() for x in distinct(torch.from_numpy(ids.copy())))
    expected = np.unique(ids, return_inverse=True)
    assert np.array_equal(unique, expected[0]) and np.array_equal(inverse, expected[1])
    assert unique.dtype == inverse.dtype == np.int64

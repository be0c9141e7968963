"""Batches of all ranks together are the global batch, for any number of ranks.

Triple i of the test data has relation i, so that a test can identify each triple.
"""

from collections import Counter
from dataclasses import is_dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kge_torchrec.data import SIDES
from kge_torchrec.data.batches import Bags, BatchPlan, Delivery
from kge_torchrec.data.batches.queries import (
    DistinctQueries,
    QueryBatches,
    QuerySampleBatches,
    TripleQueries,
)
from kge_torchrec.data.batches.triples import Batch, TripleBatches, share_of
from kge_torchrec.data.negatives import (
    Chunks,
    FilteredSampler,
    InBatchSampler,
    UniformSampler,
    random_numbers,
)
from kge_torchrec.data.shuffle import EpochShuffle
from kge_torchrec.data.store.filter_index import Answers
from kge_torchrec.kernels.operators import distinct
from tests.ranking_cases import make_known

ENTITIES = 11
WORLDS = (1, 2, 3, 4, 7)
EASY = settings(max_examples=40)


def make_triples(count, seed=0):
    rng = np.random.default_rng(seed)
    ends = rng.integers(0, ENTITIES, (2, count))
    return np.stack([ends[0], np.arange(count), ends[1]], 1).astype(np.int32)


def builder(triples, rank=0, world=1, batch_size=10, negatives=3, seed=5, **options):
    sampler, known, sides = UniformSampler(ENTITIES), options.pop("known", None), SIDES
    if known is not None:
        sampler = FilteredSampler(sampler, known)
    chunk_size, sides = options.pop("chunk_size", 0), options.pop("sides", SIDES)
    counts = dict.fromkeys(SIDES, negatives)
    plan = BatchPlan(batch_size, seed, sides, sampler, counts, chunk_size)
    return TripleBatches(triples, plan, Delivery(rank, world, **options))


def decoded(batch, sides=("head", "tail")):
    """The batch with ids in place of positions: head, tail (C, b), negatives by side (C, K)."""
    chunks, triples = batch.relation.shape
    ids, count = batch.ids[batch.entities], chunks * triples
    negatives = ids[2 * count :].view(len(sides), chunks, -1) if chunks else [ids] * len(sides)
    return SimpleNamespace(
        head=ids[:count].view(chunks, triples),
        tail=ids[count : 2 * count].view(chunks, triples),
        negatives=dict(zip(sides, negatives, strict=True)),
    )


def trained(batch, sides=("head", "tail")):
    """[(triple, weight, {side: its negatives})] of the triples that count."""
    parts = decoded(batch, sides)
    out = []
    for c, i in np.ndindex(*batch.relation.shape):
        if weight := batch.weight[c, i].item():
            triple = tuple(int(x[c, i]) for x in (parts.head, batch.relation, parts.tail))
            negatives = {side: tuple(parts.negatives[side][c].tolist()) for side in sides}
            out.append((triple, weight, negatives))
    return out


# Which triples


@EASY
@given(
    st.integers(1, 40), st.integers(1, 15), st.integers(0, 16),
    st.sampled_from(WORLDS), st.integers(0, 3),
)  # fmt: skip
def test_an_epoch_covers_every_triple_once(count, batch_size, chunk_size, world, epoch):
    triples = make_triples(count)
    ranks = [
        builder(triples, rank, world, batch_size, chunk_size=chunk_size).epoch(epoch)
        for rank in range(world)
    ]
    trained_counts = Counter()
    for step, batches in enumerate(zip(*ranks, strict=True)):
        parts = [trained(batch) for batch in batches]
        size = min(batch_size, count - step * batch_size)
        # DDP averages over ranks, so the weights of one step must sum to the number of ranks.
        weights = [weight for part in parts for _, weight, _ in part]
        np.testing.assert_allclose(weights, world / size, rtol=1e-6)
        assert len(weights) == size
        trained_counts.update(triple for part in parts for triple, _, _ in part)
    assert trained_counts == Counter(map(tuple, triples.tolist()))


@EASY
@given(st.integers(0, 40), st.integers(1, 20), st.sampled_from(WORLDS))
def test_shares_partition_the_batch(size, chunk_size, world):
    dealt = []
    for rank in range(world):
        positions, inside = share_of(size, chunk_size, rank, world)
        assert positions.shape == inside.shape
        mine = positions[inside]
        dealt += mine.tolist()
        assert size // world <= len(mine) <= -(-size // world)  # equal to within one triple
        first = positions[0, 0] // chunk_size if len(mine) else 0
        cut = positions // chunk_size == first + np.arange(len(positions))[:, None]
        assert cut[inside].all()  # each row lies in the chunk whose negatives it gets
        if len(mine):
            assert set(positions.ravel()) == set(mine)  # padding repeats own triples
    assert dealt == list(range(size))


@pytest.mark.parametrize("chunk_size", [0, 1, 3, 10])
@pytest.mark.parametrize("sides", [("head", "tail"), ("tail",), ("head",)])
def test_batches_do_not_depend_on_the_world_size(chunk_size, sides):
    """Every triple has the same negatives at any world size; only who trains it differs."""
    triples = make_triples(27)
    expected = None
    for world in WORLDS:
        steps = Counter()
        for rank in range(world):
            batches = builder(triples, rank, world, chunk_size=chunk_size, sides=sides).epoch(1)
            for step, batch in enumerate(batches):
                for triple, weight, negatives in trained(batch, sides):
                    key = step, triple, round(weight / world, 6), tuple(negatives.items())
                    steps[key] += 1
        expected = expected or steps
        assert steps == expected


def maker_of(kind, ahead=False):
    """A maker of batches of one kind."""
    triples, delivery = make_triples(35), Delivery(ahead=ahead)
    if kind == "sampled":
        return builder(triples, chunk_size=4, ahead=ahead)
    known = make_known(triples, ENTITIES, 35)
    plan = BatchPlan(10, 5, SIDES, UniformSampler(ENTITIES), dict.fromkeys(SIDES, 3))
    if kind == "kvssample":
        return QuerySampleBatches(known, plan, delivery)
    examples = TripleQueries(triples, SIDES) if kind == "1vsall" else DistinctQueries(known, SIDES)
    return QueryBatches(examples, plan, delivery)


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
    steps = maker_of(kind).steps_per_epoch
    assert len(whole) == steps == -(-maker_of(kind).examples // 10)
    for first in range(steps + 1):
        assert content([*maker_of(kind, ahead).epoch(2, first)]) == whole[first:]
    assert content([*maker_of(kind).epoch(3)]) != whole


# Small batches


@pytest.mark.parametrize("chunk_size", [0, 1, 2])
@pytest.mark.parametrize("filtered", [False, True])
def test_ranks_without_triples_have_valid_empty_batches(chunk_size, filtered):
    """Every rank must take part in each exchange, with as many batches as the others."""
    triples = make_triples(12)
    known = make_known(triples, ENTITIES, len(triples)) if filtered else None
    for world in (4, 7):
        last = [
            list(builder(triples, r, world, chunk_size=chunk_size, known=known).epoch(0))[-1]
            for r in range(world)
        ]
        assert sum(len(trained(batch)) for batch in last) == 2
        empty = [batch for batch in last if not batch.relation.numel()]
        assert len(empty) == world - 2
        for batch in empty:
            assert batch.relation.shape == batch.weight.shape == (0, 0)
            assert batch.ids.shape == batch.entities.shape == (0,)
            assert batch.ids.dtype == batch.entities.dtype == torch.int64


def test_no_triples_are_rejected():
    with pytest.raises(ValueError, match="no training triples"):
        builder(np.zeros((0, 3), np.int32))


# What a batch holds


@pytest.mark.parametrize("chunk_size", [0, 1, 4])
@pytest.mark.parametrize("sides", [("head", "tail"), ("tail", "head"), ("tail",)])
def test_entities_are_unique_ids_and_positions_in_them(chunk_size, sides):
    triples = make_triples(30)
    building = builder(triples, batch_size=8, chunk_size=chunk_size, sides=sides)
    order = EpochShuffle(30, 5, 1)
    for step, batch in enumerate(building.epoch(1)):
        ids = batch.ids
        assert (ids.diff() > 0).all()
        assert set(batch.entities.tolist()) == set(range(len(ids)))  # no id without a use
        counted = batch.weight > 0
        parts = decoded(batch, sides)
        rows = torch.stack([x[counted] for x in (parts.head, batch.relation, parts.tail)], 1)
        here = order(np.arange(step * 8, min(step * 8 + 8, 30)))
        np.testing.assert_array_equal(rows, triples[here])
        sampler, chunks = building.sampler, len(batch.relation)
        for side in sides:
            numbers = random_numbers(5, (1, step, side), range(chunks), 3)
            drawn = sampler.sample(Chunks(side, numbers, lambda: None))
            assert torch.equal(parts.negatives[side], drawn)


@pytest.mark.parametrize(
    ("chunk_size", "sides", "world"),
    [(0, ("head", "tail"), 1), (1, ("tail",), 3), (4, ("head",), 1), (4, ("head", "tail"), 3)],
)
def test_known_facts_among_the_negatives_are_marked(chunk_size, sides, world):
    rng = np.random.default_rng(0)
    triples = np.unique(rng.integers(0, (ENTITIES, 2, ENTITIES), (90, 3)), axis=0)
    facts = set(map(tuple, triples.tolist()))
    marked = 0
    for rank in range(world):
        options = {
            "chunk_size": chunk_size,
            "sides": sides,
            "known": make_known(triples, ENTITIES, len(triples)),
        }
        for batch in builder(triples, rank, world, negatives=5, **options).epoch(0):
            parts = decoded(batch, sides)
            for side, mask in (("head", batch.known_head), ("tail", batch.known_tail)):
                if side not in sides:
                    assert mask.numel() == 0
                    continue
                assert mask.dtype == torch.bool and mask.shape == (*batch.relation.shape, 5)
                for c, i, k in np.ndindex(*mask.shape):
                    fact = [parts.head[c, i], batch.relation[c, i], parts.tail[c, i]]
                    fact[0 if side == "head" else 2] = parts.negatives[side][c, k]
                    assert mask[c, i, k].item() == (tuple(map(int, fact)) in facts)
                marked += mask.sum().item()
    assert marked


def test_without_known_facts_there_is_no_mask():
    batch = next(builder(make_triples(9)).epoch(0))
    assert batch.known_head.numel() == batch.known_tail.numel() == 0


@pytest.mark.parametrize("sides", [("head", "tail"), ("tail",), ("head",)])
@pytest.mark.parametrize("in_batch", [False, True])
def test_how_often_a_chunk_has_each_candidate_is_counted_by_side(sides, in_batch):
    triples, numbers, size = make_triples(40), {"head": 3, "tail": 7}, 5
    sides_of = {"head": triples[:, 0].tolist(), "tail": triples[:, 2].tolist()}
    degrees = {side: np.bincount(ends, minlength=ENTITIES) for side, ends in sides_of.items()}
    sampler = UniformSampler(ENTITIES)
    if in_batch:
        sampler = InBatchSampler(sampler, degrees)
    plan = BatchPlan(10, 5, tuple(sides), sampler, numbers, size, log_q=True)
    for batch in TripleBatches(triples, plan).epoch(0):
        expected = []
        ids = batch.ids[batch.entities][2 * batch.relation.numel() :].tolist()
        for side, size_of_side in zip(sides, batch.sizes[2:], strict=True):
            count = size_of_side // len(batch.relation)
            assert count == numbers[side] + (size if in_batch else 0)
            ids, own = ids[len(batch.relation) * count :], ids[: len(batch.relation) * count]
            of_answers = (size - 1) / (len(triples) - 1) if in_batch else 0
            expected += [numbers[side] / ENTITIES + of_answers * sides_of[side].count(entity)
                         for entity in own]  # fmt: skip
        assert batch.log_expected.exp().tolist() == pytest.approx(expected)


def test_without_deduplication_every_entity_is_looked_up_in_its_place():
    triples = make_triples(30)
    for plain, every in zip(
        builder(triples).epoch(0), builder(triples, deduplicate=False).epoch(0), strict=True
    ):
        assert plain.deduplicated and not every.deduplicated
        assert torch.equal(every.ids, plain.ids[plain.entities])
        assert torch.equal(every.entities, every.ids)
        assert torch.equal(every.relation, plain.relation)


# Moving


def fields_of(batch):
    return {name: value for name, value in vars(batch).items() if torch.is_tensor(value)}


def assert_same(one, other):
    one, other = fields_of(one), fields_of(other)
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype
        assert torch.equal(one[name].cpu(), other[name].cpu()), name


def test_to_keeps_everything():
    batch = next(builder(make_triples(9), known=make_known(make_triples(9), ENTITIES, 9)).epoch(0))
    assert_same(batch.to(torch.device("cpu"), non_blocking=True), batch)
    moved = batch.to(torch.device("meta"))
    assert all(value.device.type == "meta" for value in fields_of(moved).values())
    assert {n: v.shape for n, v in fields_of(moved).items()} == {
        n: v.shape for n, v in fields_of(batch).items()
    }


class Recorder:
    """Stands for a tensor and records the calls of its methods."""

    def __init__(self):
        self.calls = []

    def record_stream(self, s):  # as a tensor of torch calls it
        self.calls.append(s)

    def pin_memory(self):
        return "pinned"


def test_every_field_is_pinned_and_recorded():
    tensors = [Recorder() for _ in range(11)]
    ids, entities, *rest = tensors[:7]
    others = dict(zip(("relation", "weight", "known_head", "known_tail"), rest[:4], strict=True))
    batch = Batch(ids, entities, True, Bags(*tensors[7:]), **others, sizes=(5, 5),
                  log_expected=rest[4])  # fmt: skip
    pinned = vars(batch.pin_memory())
    assert pinned.pop("sizes") == (5, 5) and pinned.pop("deduplicated") is True
    assert pinned.pop("bags") == Bags(*["pinned"] * 4)
    assert list(pinned.values()) == ["pinned"] * 7
    batch.record_stream("stream")
    assert all(field.calls == ["stream"] for field in tensors)


@pytest.mark.gpu
def test_to_cuda_and_back():
    batch = next(builder(make_triples(9), known=make_known(make_triples(9), ENTITIES, 9)).epoch(0))
    pinned = batch.pin_memory()
    # Nothing has no memory to pin.
    assert all(value.is_pinned() for value in fields_of(pinned).values() if value.numel())
    moved = pinned.to(torch.device("cuda"), non_blocking=True)
    moved.record_stream(torch.cuda.current_stream())
    torch.cuda.synchronize()
    assert_same(moved, batch)


@given(
    ids=st.integers(0, 63).flatmap(lambda bits: st.lists(st.integers(0, 2**bits - 1), max_size=60))
)
@settings(max_examples=200)
def test_distinct_ids_match_numpy(ids):
    ids = np.array(ids, np.int64)
    unique, inverse = map(Tensor.numpy, distinct(torch.from_numpy(ids.copy())))
    expected = np.unique(ids, return_inverse=True)
    assert np.array_equal(unique, expected[0]) and np.array_equal(inverse, expected[1])
    assert unique.dtype == inverse.dtype == np.int64


@pytest.mark.parametrize("largest", [255, 256, 65_535, 65_536, 86_000_000, 2**62])
def test_many_distinct_ids_of_any_size(largest):
    ids = np.random.default_rng(0).integers(0, largest, 5000, endpoint=True)
    ids[:3] = largest
    unique, inverse = map(Tensor.numpy, distinct(torch.from_numpy(ids)))
    assert np.array_equal(unique, np.unique(ids)) and np.array_equal(unique[inverse], ids)

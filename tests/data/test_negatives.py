"""Negatives are in range, as frequent as asked, and found by position."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kge_torchrec.data.store.filter_index import Degrees
from kge_torchrec.data.negatives import STEP, DegreeDraw, NegativeSampler


def degrees_of(heads, tails=None) -> Degrees:
    """Of entities that are so often head and so often tail."""
    both = heads, np.zeros_like(heads) if tails is None else tails
    return Degrees(*(np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]) for counts in both))


def is_plausible(ids, shares):
    """Whether the chi-square of drawn ids lies within 5 standard deviations of its mean."""
    counts = np.bincount(ids.ravel(), minlength=len(shares))
    assert not counts[shares == 0].any()
    expected, counts = shares[shares > 0] / shares.sum() * ids.size, counts[shares > 0]
    statistic, freedom = ((counts - expected) ** 2 / expected).sum(), len(expected) - 1
    return abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 100), st.integers(1, 33), st.integers(0, 2**40), st.booleans(), st.data())
def test_any_range_of_chunks_is_a_slice_of_the_whole(entities, count, seed, weighted, data):
    by_degree = DegreeDraw(degrees_of(np.arange(entities) + 1), 1.0) if weighted else None
    sampler = NegativeSampler(entities, count, seed, by_degree)
    chunks = 20
    first = data.draw(st.integers(0, chunks))
    some = data.draw(st.integers(0, chunks - first))
    whole = sampler.draw(3, 4, 1, 0, chunks)
    assert whole.shape == (chunks, count) and whole.dtype == np.int64
    assert whole.min() >= 0 and whole.max() < entities
    np.testing.assert_array_equal(sampler.draw(3, 4, 1, first, some), whole[first : first + some])


def test_uniform_draws_are_uniform():
    for entities in (2, 7, 50):
        ids = NegativeSampler(entities, 1001, seed=1).draw(0, 0, 0, 0, 50)
        assert is_plausible(ids, np.ones(entities))


def test_steps_and_chunks_add_no_pattern():
    """One draw each of many chunks, steps and epochs is as uniform as many draws of one."""
    sampler = NegativeSampler(20, 1, seed=0)
    assert is_plausible(sampler.draw(0, 0, 0, 0, 20_000), np.ones(20))
    assert is_plausible(np.array([sampler.draw(0, s, 0, 0, 1) for s in range(4000)]), np.ones(20))
    assert is_plausible(np.array([sampler.draw(e, 0, 0, 0, 1) for e in range(4000)]), np.ones(20))


@pytest.mark.parametrize("power", [0.0, 0.75, 1.0])
def test_degree_draws_follow_the_weights(power):
    degrees = np.array([0, 0, 5, 1, 0, 100, 7, 0, 30, 0])
    weights = np.where(degrees > 0, degrees.clip(1).astype(float) ** power, 0)
    draw = DegreeDraw(degrees_of(degrees), power)
    ids = NegativeSampler(10, 500, 2, draw).draw(0, 0, 0, 0, 100)
    assert is_plausible(ids, weights)
    np.testing.assert_allclose(draw.chance(np.arange(10)), weights / weights.sum())


@settings(max_examples=60, deadline=None)
@given(data=st.data(), power=st.sampled_from([0.0, 0.5, 0.75, 1.0, 3.0]))
def test_degree_draws_are_places_in_the_sums_of_weights(data, power):
    """As if every entity's weight and their sums were in memory, over several blocks of them."""
    entities = data.draw(st.integers(1, 3 * STEP + 2))
    stream = np.random.default_rng(data.draw(st.integers(0, 99)))
    heads, tails = stream.zipf(1.7, (2, entities)) * (stream.random((2, entities)) < 0.3)
    degrees = heads + tails
    if not degrees.any():
        return
    sums = np.cumsum(np.where(degrees > 0, degrees.clip(1).astype(float) ** power, 0))
    unit = np.concatenate([stream.random(200), [0.0, np.nextafter(1.0, 0.0)]])
    drawn = DegreeDraw(degrees_of(heads, tails), power)(unit)
    np.testing.assert_array_equal(drawn, np.searchsorted(sums, unit * sums[-1], side="right"))
    assert degrees[drawn].all()  # nobody without a triple


@settings(deadline=None)
@given(st.lists(st.integers(0, 5) | st.just(10**12), max_size=40), st.integers(1, 7))
def test_degrees_are_counted_in_chunks(counts, chunk):
    counts = np.array(counts, np.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kge_torchrec.data.store.filter_index._CHUNK", chunk)
        found = degrees_of(counts, counts).histogram()
    for part, expected in zip(found, np.unique(2 * counts, return_counts=True), strict=True):
        np.testing.assert_array_equal(part, expected)


def test_no_entity_with_a_triple_is_refused():
    with pytest.raises(ValueError, match="no entity is in a triple"):
        DegreeDraw(degrees_of(np.zeros(4, np.int64)), 1.0)


def test_each_side_step_epoch_chunk_and_seed_draws_differently():
    places = [
        (0, 0, 0, 0, 0), (0, 0, 0, 0, 1), (0, 0, 0, 1, 0), (0, 0, 1, 0, 0), (0, 1, 0, 0, 0),
        (1, 0, 0, 0, 0), (2**32, 0, 0, 0, 0), (0, 2**32, 0, 0, 0), (0, 0, 2**40, 0, 0),
    ]  # fmt: skip
    drawn = []
    for seed, epoch, step, side, chunk in places:
        sampler = NegativeSampler(1000, 40, seed)
        drawn.append(sampler.draw(epoch, step, side, chunk, 1)[0])
        np.testing.assert_array_equal(drawn[-1], sampler.draw(epoch, step, side, chunk, 1)[0])
    for i, one in enumerate(drawn):
        for other in drawn[:i]:
            assert (one == other).mean() < 0.2  # by chance 1 in 1000


@pytest.mark.parametrize("entities", [2**24 + 3, 2**31 + 11, 2**33 + 7])
def test_many_entities(entities):
    """torch.multinomial ends at 2^24; float32 would skip odd ids from there on."""
    ids = NegativeSampler(entities, 5000, 0).draw(0, 0, 0, 0, 2)
    assert 0 <= ids.min() < entities / 100 and 0.99 * entities < ids.max() < entities
    assert 0.45 < (ids % 2).mean() < 0.55
    assert ids.mean() == pytest.approx(entities / 2, rel=0.05)
    last = NegativeSampler(entities, 1, 0)._to_ids(np.array([np.nextafter(1.0, 0.0)]))
    assert last == entities - 1


def test_many_weighted_entities():
    """Neither 2^24 entities nor a few among them take memory by entity."""
    entities = 2**24 + 5
    degrees = np.zeros(entities, np.int64)
    degrees[:2] = 1
    degrees[-3:] = 2, 0, 2
    of_graph = degrees_of(degrees)
    DegreeDraw(degrees_of(degrees[:2]), 1.0)(np.zeros(1))  # compiles
    tracemalloc.start()
    draw = DegreeDraw(of_graph, 1.0)
    ids = NegativeSampler(entities, 1000, 0, draw).draw(0, 0, 0, 0, 3)
    held, peak = tracemalloc.get_traced_memory()
    assert held < 3 << 20 and peak < 4 << 20  # of every 64th entity: 2 MiB
    assert [part.tolist() for part in of_graph.histogram()] == [[0, 1, 2], [entities - 4, 2, 2]]
    assert tracemalloc.get_traced_memory()[1] < 20 << 20  # all degrees: 128 MiB
    tracemalloc.stop()
    kept = np.flatnonzero(degrees)
    assert set(np.unique(ids)) == set(kept)
    assert is_plausible(np.searchsorted(kept, ids), degrees[kept])

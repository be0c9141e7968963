"""Negatives are in range, as frequent as asked, and found by position."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kge_torchrec.data.negatives import NegativeSampler, degree_weights


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
    weights = np.arange(entities) + 1.0 if weighted else None
    sampler = NegativeSampler(entities, count, seed, weights)
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
    weights = degree_weights(degrees, power)
    np.testing.assert_allclose(weights[degrees > 0], degrees[degrees > 0] ** power)
    assert not weights[degrees == 0].any()
    ids = NegativeSampler(10, 500, 2, weights).draw(0, 0, 0, 0, 100)
    assert is_plausible(ids, weights)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0.0, 1e-300, 1.0, 3.0, 1e15]), min_size=1, max_size=12))
def test_entities_without_weight_are_never_drawn(weights):
    weights = np.array(weights)
    if not weights.any():
        return
    sampler = NegativeSampler(len(weights), 64, 0, weights)
    assert (weights[sampler.draw(0, 0, 0, 0, 4)] > 0).all()
    ends = sampler._to_ids(np.array([0.0, np.nextafter(1.0, 0.0)]))  # the extreme unit draws
    assert (weights[ends] > 0).all()


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
    entities = 2**24 + 5
    weights = np.zeros(entities, np.float32)
    weights[:2] = 1
    weights[-3:] = 2, 0, 2
    ids = NegativeSampler(entities, 1000, 0, weights).draw(0, 0, 0, 0, 3)
    kept = np.flatnonzero(weights)
    assert set(np.unique(ids)) == set(kept)
    assert is_plausible(np.searchsorted(kept, ids), weights[kept])


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.ones(3), r"one weight an entity, \(4,\), got \(3,\)"),
        (np.zeros(4), "not all zero"),
        (np.array([1, -1, 1, 1]), ">= 0"),
        (np.array([1, np.nan, 1, 1]), "finite"),
        (np.array([1, np.inf, 1, 1]), "finite"),
    ],
)
def test_weights_that_make_no_sense_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        NegativeSampler(4, 2, 0, weights)

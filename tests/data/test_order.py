"""The epoch order is a bijection, looks random, and is the same for all callers."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kge_torchrec.data.shuffle import EpochShuffle

SEEDS = st.integers(0, 2**40)
HUGE = 2**33 + 7


def whole(size, seed=0, epoch=0):
    return EpochShuffle(size, seed, epoch)(np.arange(size))


@settings(max_examples=30)
@given(st.integers(1, 66) | st.integers(1, 5000), SEEDS, st.integers(0, 1000))
def test_every_triple_comes_once(size, seed, epoch):
    order = whole(size, seed, epoch)
    assert order.dtype == np.int64
    np.testing.assert_array_equal(np.sort(order), np.arange(size))


@settings(max_examples=30)
@given(st.integers(1, 5000), SEEDS, st.data())
def test_any_slice_agrees_with_the_whole(size, seed, data):
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    positions = np.arange(start, stop)
    results = EpochShuffle(size, seed, 3)(positions)
    np.testing.assert_array_equal(results, whole(size, seed, 3)[start:stop])
    np.testing.assert_array_equal(positions, np.arange(start, stop))  # the input is unchanged


def test_order_matches_its_recorded_values():
    """A resumed run continues where an earlier version stopped."""
    order = EpochShuffle(272_115, 3, 4)(np.arange(3000))
    places = [0, 1, 2, 1023, 1024, 2999]
    assert order[places].tolist() == [127761, 37632, 54665, 14803, 245195, 37623]


def test_seed_and_epoch_are_not_interchangeable():
    keys = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (0, 2), (2**32, 0), (0, 2**32), (2**32, 1)]
    orders = [whole(1000, *key).tolist() for key in keys]
    for i, order in enumerate(orders):
        assert order not in orders[:i], keys[i]


@pytest.mark.parametrize(("size", "epoch"), [(1000, 0), (4096, 1), (4097, 2), (20_011, 0)])
def test_neighbors_are_uncorrelated(size, epoch):
    order = whole(size, epoch=epoch)
    places = np.arange(size)
    bound = 4.5 / np.sqrt(size)  # standard deviations of a correlation of unrelated numbers
    assert abs(np.corrcoef(order, places)[0, 1]) < bound
    for lag in (1, 2, 7):
        assert abs(np.corrcoef(order[:-lag], order[lag:])[0, 1]) < bound
    assert abs(np.corrcoef(order, whole(size, epoch=epoch + 1))[0, 1]) < bound


@pytest.mark.parametrize("size", [3, 4])
def test_small_orders_are_equally_frequent(size):
    draws = 3000
    results = [tuple(whole(size, epoch=epoch)) for epoch in range(draws)]
    counts = np.unique(results, axis=0, return_counts=True)[1]
    permutations = {3: 6, 4: 24}[size]
    assert len(counts) == permutations
    expected = draws / permutations
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert statistic < permutations + 6 * np.sqrt(2 * permutations)


def test_huge_epoch_needs_memory_for_one_batch():
    """int32 positions would wrap; a stored permutation would take 64 GiB."""
    order = EpochShuffle(HUGE, 0, 0)
    order(np.arange(10))  # compiled outside the measurement
    positions = np.concatenate([np.arange(1000), np.arange(HUGE - 1000, HUGE)])
    tracemalloc.start()
    results = order(positions)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    assert results.min() >= 0 and results.max() < HUGE and len(np.unique(results)) == len(results)
    assert (results > 2**32).sum() > 500  # all of the range is reached
    assert results.mean() == pytest.approx(HUGE / 2, rel=0.1)


def test_no_positions():
    assert EpochShuffle(5, 0, 0)(np.empty(0, np.int64)).shape == (0,)

"""Random streams of batches: numpy and formulas in plain torch agree; see also `test_triton`."""

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kge_torchrec.data.batches.order import EpochShuffle
from kge_torchrec.kernels.random_formulas import numbers_formula, shuffle_formula, signed
from kge_torchrec.kernels.random_streams import philox_numbers, shuffled

LIKE = torch.empty(0)
WORD = st.integers(-(1 << 63), (1 << 63) - 1)


def keys_of(order):
    return list(map(signed, order._keys))


def some_positions(size):
    """The first and the last positions of an epoch."""
    ends = np.arange(min(size, 700)), size - 1 - np.arange(min(size, 50))
    return torch.from_numpy(np.unique(np.concatenate(ends)))


@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 5000) | st.integers(1, 1 << 40), seed=st.integers(0, 9))
@example(size=1, seed=0)
@example(size=(1 << 31) + 5, seed=1)  # more triples than 32 bits count
def test_the_formula_shuffles_as_the_kernel_of_the_loader(size, seed):
    order, positions = EpochShuffle(size, seed, 2), some_positions(size)
    expected = torch.from_numpy(order(positions.numpy()))
    arguments = positions, keys_of(order), order._half, size
    assert torch.equal(shuffle_formula(*arguments), expected)
    assert torch.equal(shuffled(*arguments), expected)
    assert torch.equal(order.of_tensor(positions), expected)


@settings(max_examples=30, deadline=None)
@given(
    key=st.tuples(WORD, WORD), counter=st.tuples(st.integers(0, 1 << 40), WORD, WORD, WORD),
    chunks=st.integers(0, 5), count=st.integers(0, 11),
)  # fmt: skip
def test_the_formula_draws_numpys_numbers(key, counter, chunks, count):
    drawn = philox_numbers(key, counter, chunks, count, LIKE)
    assert drawn.shape == (chunks, count) and drawn.dtype == torch.float64
    assert torch.equal(numbers_formula(key, counter, chunks, count, LIKE), drawn)


def test_operators_follow_torchs_rules():
    order = EpochShuffle(100, 0, 0)
    torch.library.opcheck(
        torch.ops.kge_torchrec.shuffled.default,
        (torch.arange(100), keys_of(order), order._half, 100),
    )
    torch.library.opcheck(
        torch.ops.kge_torchrec.philox_numbers.default, ([1, 2], [3, 4, 5, 6], 2, 7, LIKE)
    )

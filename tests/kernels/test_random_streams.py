"""Random streams of batches: numpy, formulas in plain torch and Triton kernels agree."""

import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kge_torchrec.data.batches.order import EpochShuffle
from kge_torchrec.kernels.random_formulas import numbers_formula, shuffle_formula, signed
from kge_torchrec.kernels.random_streams import philox_numbers, shuffled

LIKE = torch.empty(0)
WORD = st.integers(-(1 << 63), (1 << 63) - 1)
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def keys_of(order):
    return list(map(signed, order._keys))


def some_positions(size):
    """The first and the last positions of an epoch."""
    ends = np.arange(min(size, 700)), size - 1 - np.arange(min(size, 50))
    return torch.from_numpy(np.unique(np.concatenate(ends)))


@settings(max_examples=60, deadline=None)
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


@settings(max_examples=60, deadline=None)
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


INTERPRETED = """
import json, sys
import numpy as np, torch
from kge_torchrec.data.batches.order import EpochShuffle
from kge_torchrec.kernels import random_formulas, random_streams, triton_streams
from tests.kernels.test_random_streams import LIKE, keys_of, some_positions

cases = 0
for size in (1, 2, 3, 64, 65, 513, 4097, 272115, 2**31, 2**31 + 5, 10**11):
    order = EpochShuffle(size, 3, 2)
    positions = some_positions(size)
    images = triton_streams.shuffled(positions, keys_of(order), order._half, size)
    assert torch.equal(images, order.of_tensor(positions)), size
    cases += 1
for chunks, count in ((1, 1), (3, 5), (2, 512), (0, 4), (5, 0), (700, 7)):
    arguments = [-5, random_formulas.signed(2**64 - 77)], [1000, 7, 1, 0], chunks, count, LIKE
    drawn = triton_streams.numbers(*arguments)
    assert torch.equal(drawn, random_streams.philox_numbers(*arguments)), (chunks, count)
    cases += 1
print(json.dumps(cases))
"""


@needs_triton
def test_the_triton_kernels_agree_in_the_interpreter():
    out = subprocess.run(
        [sys.executable, "-c", INTERPRETED], capture_output=True, text=True, timeout=300,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert out.returncode == 0, out.stderr[-2000:]
    assert json.loads(out.stdout.splitlines()[-1]) == 17

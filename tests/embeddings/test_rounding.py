"""Stochastic rounding to bfloat16 and the random bits behind it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kge_torchrec.embeddings.all_to_all.sparse_optimizer import random_bits, round_stochastically


def neighbours(values):
    """The bfloat16 numbers on both sides, towards zero and away from it."""
    bits = values.view(torch.int32)
    return ((bits >> 16 << 16) + bump for bump in (0, 1 << 16))


def test_random_bits_match_splitmix64():
    mask = (1 << 64) - 1

    def split_mix(start, index):
        z = (start + (index + 1) * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    assert split_mix(0, 0) == 0xE220A8397B1DCDAF  # the published first number from 0
    rows = [0, 5, 10**10]
    bits = random_bits(torch.tensor(rows), columns=6, step=7, state=1)
    for place, row in enumerate(rows):
        key = split_mix(split_mix(split_mix(0, 7), 1), row)
        expected = [split_mix(key, d // 4) >> (16 * (d % 4)) & 0xFFFF for d in range(6)]
        assert bits[place].tolist() == expected


def test_random_bits_are_uniform_and_differ_by_step_state_row_and_column():
    rows = torch.arange(4096)
    bits = random_bits(rows, 64, step=3, state=0)
    counts = torch.bincount(bits.flatten() >> 8, minlength=256).double()
    expected = bits.numel() / 256
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert abs(chi_square - 255) < 5 * math.sqrt(2 * 255)
    rest = [
        random_bits(rows, 64, step=4, state=0),
        random_bits(rows, 64, step=3, state=1),
        random_bits(rows + 1, 64, step=3, state=0),
        bits.roll(1, dims=1),
    ]
    for other in rest:
        pair = torch.stack([bits.flatten(), other.flatten()]).double()
        assert abs(torch.corrcoef(pair)[0, 1].item()) < 5 / math.sqrt(bits.numel())


@given(
    values=st.lists(st.floats(width=32, allow_subnormal=True), min_size=1, max_size=9),
    step=st.integers(1, 2**31),
    first_row=st.integers(0, 2**40),
)
@settings(max_examples=30, deadline=None)
def test_rounding_returns_a_neighbor(values, step, first_row):
    values = torch.tensor([values], dtype=torch.float32)
    rows = torch.tensor([first_row])
    rounded = round_stochastically(values, rows, step, 0)
    assert rounded.dtype == torch.bfloat16
    finite = values.isfinite()
    low, high = neighbours(values)
    result = rounded.float().view(torch.int32)
    assert ((result == low) | (result == high))[finite].all()
    torch.testing.assert_close(
        rounded.float()[~finite], values[~finite], equal_nan=True, rtol=0, atol=0
    )
    exact = rounded.float()[finite].view(1, -1)
    again = round_stochastically(exact, rows, step + 1, 1).float()
    assert torch.equal(again, exact)


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, -1, -(0x80000000 - 0x7F800001)])
def test_nan_stays_nan(bits):
    values = torch.full((64, 8), bits, dtype=torch.int32).view(torch.float32)
    assert values.isnan().all()
    assert round_stochastically(values, torch.arange(64), 1, 0).isnan().all()


@pytest.mark.parametrize("value", [1.001, -1.001, 3e-5, -7.7e8])
def test_rounding_is_unbiased(value):
    values = torch.full((1 << 14, 16), value)
    rounded = round_stochastically(values, torch.arange(1 << 14), 5, 0).double()
    low, high = rounded.abs().aminmax()
    assert low < abs(value) < high
    error = (rounded.mean() - float(np.float32(value))).abs()
    assert error < 5 * (high - low) / 2 / math.sqrt(values.numel())


@pytest.mark.gpu
def test_random_bits_match_on_gpu_and_cpu():
    rows = torch.arange(1000) * 10**9
    expected = random_bits(rows, 37, step=9, state=1)
    assert torch.equal(random_bits(rows.cuda(), 37, step=9, state=1).cpu(), expected)

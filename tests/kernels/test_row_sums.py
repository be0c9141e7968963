"""Gradients of rows, summed for each row: as index_add_ does it, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kge_torchrec.kernels import jit
from kge_torchrec.kernels.rows import sums_by_row


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=7),
    rows=st.integers(1, 150),
    dim=st.integers(1, 19),
    seed=st.integers(0, 99),
)
def test_sums_of_any_parts_equal_index_add(sizes, rows, dim, seed):
    stream = torch.Generator().manual_seed(seed)
    index = torch.randint(rows, (sum(sizes),), generator=stream)
    parts = tuple(torch.randn(size, dim, generator=stream) for size in sizes)
    expected = torch.zeros(rows, dim).index_add_(0, index, torch.cat(parts))
    assert torch.equal(sums_by_row(index, parts, rows), expected)


def test_number_of_threads_changes_no_bit(monkeypatch):
    index, parts = torch.randint(500, (3000,)), (torch.randn(1000, 24), torch.randn(2000, 24))
    single_thread = sums_by_row(index, parts, 500)
    monkeypatch.setattr(jit, "SERIAL_ELEMENTS", 0)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(sums_by_row(index, parts, 500), single_thread)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("numbers, blocks, threads", [(1, 9, 1), (1 << 20, 1, 1), (1 << 20, 9, 2)])
def test_only_large_sums_use_threads(numbers, blocks, threads):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert jit.threads_for(blocks, numbers) == threads
    finally:
        torch.set_num_threads(before)


def test_process_of_one_thread_starts_no_others(monkeypatch):
    monkeypatch.setattr(jit.numba, "set_num_threads", lambda threads: pytest.fail("started"))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert jit.threads_for(9, 1 << 30) == 1
    finally:
        torch.set_num_threads(before)

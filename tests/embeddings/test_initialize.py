"""Initial values are a function of (seed, global row), whatever the sharding."""

from __future__ import annotations

import math
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.embeddings.init import CHUNK_ROWS, EntityInit, fill_rows, zeros_on_huge_pages

DISTRIBUTIONS = ("normal", "uniform", "xavier_normal", "xavier_uniform")


def filled(start: int, stop: int, dim: int = 2, seed: int = 0, dtype=torch.float32, **init):
    rows = torch.full((stop - start, dim), torch.nan, dtype=dtype)
    fill_rows(EntityShard(rows, start, num_entities=10**9), seed, EntityInit(**init))
    return rows


@given(
    distribution=st.sampled_from(DISTRIBUTIONS),
    start=st.integers(CHUNK_ROWS - 100, CHUNK_ROWS + 50),
    count=st.integers(0, 200),
)
@settings(max_examples=30)
def test_any_slice_matches_the_whole_table(distribution, start, count):
    whole = filled(0, CHUNK_ROWS + 300, distribution=distribution)
    part = filled(start, start + count, distribution=distribution)
    assert torch.equal(part, whole[start : start + count])


@pytest.fixture
def threads():
    """Sets the number, and puts it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_initial_values_do_not_depend_on_threads(threads, dtype, monkeypatch):
    drawn, stream = set(), np.random.Generator

    def watched(bits):
        drawn.add(threading.get_ident())
        time.sleep(0.01)  # so that no thread has done all before the others are there
        return stream(bits)

    monkeypatch.setattr(np.random, "Generator", watched)
    tables = []
    for number in (1, 4):
        threads(number)
        drawn.clear()
        rows = torch.full((5 * CHUNK_ROWS + 7, 2), torch.nan, dtype=dtype).requires_grad_()
        fill_rows(EntityShard(rows, 11, num_entities=10**9), 0, EntityInit())
        tables.append(rows.detach())
        assert len(drawn) == number
    assert torch.equal(*tables) and tables[0].isfinite().all()


def test_thread_errors_are_raised(monkeypatch):
    monkeypatch.setattr(EntityInit, "draw", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        filled(0, 3)


def test_seeds_and_chunks_have_separate_streams():
    first = filled(0, 2 * CHUNK_ROWS, seed=0)
    assert not torch.equal(first[:CHUNK_ROWS], first[CHUNK_ROWS:])
    assert not torch.equal(first, filled(0, 2 * CHUNK_ROWS, seed=1))


@pytest.mark.parametrize(
    ("distribution", "deviation", "bound"),
    [
        ("normal", 0.5, math.inf),
        ("uniform", 0.5 / math.sqrt(3), 0.5),
        ("xavier_normal", 0.5 * math.sqrt(2 / 16), math.inf),
        ("xavier_uniform", 0.5 * math.sqrt(2 / 16), 0.5 * math.sqrt(6 / 16)),
    ],
)
def test_initial_values_have_the_expected_spread(distribution, deviation, bound):
    rows = filled(0, 20_000, dim=16, distribution=distribution, scale=0.5)
    assert rows.std().item() == pytest.approx(deviation, rel=0.01)
    assert rows.mean().abs() < 0.01 * deviation
    assert rows.abs().max() <= bound


def test_16_bit_tables_get_rounded_float32_values():
    assert torch.equal(filled(3, 50, dtype=torch.bfloat16), filled(3, 50).bfloat16())


# Memory


@pytest.mark.parametrize("shape", [(0,), (0, 4), (5, 0), (3,), (7, 5), (1 << 20, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_zeros_are_writable_in_any_shape(shape, dtype):
    results = zeros_on_huge_pages(*shape, dtype=dtype)
    assert results.equal(torch.zeros(shape, dtype=dtype))
    results.fill_(3)
    assert results.equal(torch.full(shape, 3, dtype=dtype))


def test_memory_lives_as_long_as_a_view():
    rows = zeros_on_huge_pages(1000, 8)[10:20]
    rows += 1
    zeros_on_huge_pages(1000, 8).fill_(5)
    assert rows.sum() == 80

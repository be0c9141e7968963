"""Scores of pairs on a CPU, and their gradients, against the formulas in double precision."""

from __future__ import annotations

from typing import get_args

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kge_torchrec.models import ops, pair_kernels, row_sums
from kge_torchrec.models.distances import compared_at
from kge_torchrec.models.pair_kernels import pair_scores

COMPARISONS = get_args(ops.Comparison)
every_comparison = pytest.mark.parametrize("comparison", COMPARISONS)


def formula(comparison, query, rows, index):
    """With a copy of the rows for every chunk and (C, b, K, D) differences."""
    picked = rows[index]
    if comparison == "dot":
        return query @ picked.transpose(-1, -2)
    difference = query[:, :, None] - picked[:, None]
    if comparison == "manhattan":
        return difference.abs().sum(-1)
    if comparison == "moduli":
        squares = difference.square().unflatten(-1, (-1, 2)).sum(-1)
        return (squares + ops.EPSILON).sqrt().sum(-1)
    squares = difference.square().sum(-1)  # torch has no gradient of its root at 0
    return torch.where(squares > 0, squares, 1).sqrt() * (squares > 0)


def case(chunks=3, queries=5, candidates=7, rows=6, dim=10, seed=0):
    """A query and a row are equal, some rows are picked often and some never."""
    stream = torch.Generator().manual_seed(seed)
    query = torch.randn(chunks, queries, dim, generator=stream)
    table = torch.randn(rows, dim, generator=stream)
    index = torch.randint(max(1, rows - 1), (chunks, candidates), generator=stream)
    if query.numel() and index.numel():
        table[index[0, 0]] = query[0, 0]
    return query, table, index


def values_and_gradients(function, query, rows, index, dtype):
    query, rows = (x.to(dtype).requires_grad_() for x in (query, rows))
    scores = function(query, rows, index)
    weight = torch.linspace(-1, 2, scores.numel(), dtype=scores.dtype).view(scores.shape)
    return scores, *torch.autograd.grad((scores * weight).sum(), (query, rows))


@every_comparison
@settings(max_examples=60, deadline=None)
@given(
    chunks=st.integers(0, 4),
    queries=st.integers(0, 35),
    candidates=st.integers(0, 9),
    rows=st.integers(1, 40),
    half=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_any_sizes(comparison, chunks, queries, candidates, rows, half, seed):
    given = case(chunks, queries, candidates, rows, 2 * half, seed)
    found = values_and_gradients(lambda *x: pair_scores(comparison, *x), *given, torch.float32)
    expected = values_and_gradients(lambda *x: formula(comparison, *x), *given, torch.float64)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-4, atol=2e-4)


@every_comparison
def test_rows_of_each_chunk(comparison):
    query, table, index = case()
    picked = table[index]
    in_place = pair_scores(comparison, query, table, index)
    assert torch.equal(pair_scores(comparison, query, picked), in_place)


@every_comparison
def test_a_pair_scores_the_same_wherever_it_stands(comparison):
    query, table, index = case(1, 40, 11, 30, 50)
    scores = pair_scores(comparison, query, table, index)[0]
    for i in (0, 17, 39):
        for k in range(11):
            alone = pair_scores(comparison, query[:, i : i + 1], table, index[:, k : k + 1])
            assert torch.equal(alone[0, 0, 0], scores[i, k])


@every_comparison
def test_the_number_of_threads_changes_no_bit(comparison, monkeypatch):
    monkeypatch.setattr(row_sums, "SERIAL_NUMBERS", 0)
    used, tell = [], numba.set_num_threads
    monkeypatch.setattr(numba, "set_num_threads", lambda n: used.append(n) or tell(n))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            given = *case(9, 21, 13, 90, 24), torch.float32
            found.append(values_and_gradients(lambda *x: pair_scores(comparison, *x), *given))
    finally:
        torch.set_num_threads(before)
    assert set(used) == {2} or numba.config.NUMBA_NUM_THREADS == 1
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@every_comparison
def test_they_compile(comparison):
    compiled = torch.compile(
        lambda *x: 2 * pair_scores(comparison, *x), backend="aot_eager", fullgraph=True
    )
    found = values_and_gradients(compiled, *case(), torch.float32)
    plain = values_and_gradients(lambda *x: 2 * pair_scores(comparison, *x), *case(), torch.float32)
    for one, other in zip(found, plain, strict=True):
        assert torch.equal(one, other)
    torch._dynamo.reset()


def test_half_precision_is_computed_in_float32():
    given = *case(), torch.bfloat16
    scores, of_query, of_rows = values_and_gradients(
        lambda *x: pair_scores("manhattan", *x), *given
    )
    assert scores.dtype == torch.float32
    assert of_query.dtype == of_rows.dtype == torch.bfloat16


def test_gradients_that_nobody_asks_for_are_not_computed(monkeypatch):
    query, table, index = case()
    monkeypatch.setattr(pair_kernels, "by_row", None)
    scores = pair_scores("dot", query.requires_grad_(), table, index)
    scores.sum().backward()
    assert query.grad is not None


@pytest.mark.parametrize("wrong", [-1, 6])
def test_places_outside_the_table_are_refused(wrong):
    query, table, index = case()
    index[1, 2] = wrong
    with pytest.raises(IndexError, match="of 6 rows"):
        pair_scores("dot", query, table, index)


def test_what_has_no_kernels_copies_rows():
    """Double precision, as CUDA."""
    for comparison in COMPARISONS:
        query, table, index = (x.double() if x.is_floating_point() else x for x in case())
        found = compared_at(comparison, query, table, index)
        torch.testing.assert_close(found, formula(comparison, query, table, index))
        assert np.allclose(found, compared_at(comparison, query.float(), table.float(), index),
                           rtol=1e-4, atol=1e-4)  # fmt: skip

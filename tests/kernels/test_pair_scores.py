"""Scores of pairs on a CPU, and their gradients, against the formulas in double precision."""

from __future__ import annotations

from typing import get_args

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kge_torchrec.kernels import library, pair_scores, parallel
from kge_torchrec.kernels.comparisons import InnerProduct, distance

COMPARISONS, MAPPED = get_args(library.Compared), get_args(library.Mapped)
every_kind = pytest.mark.parametrize("kind", COMPARISONS + MAPPED)


def scores(kind, query, maps, rows, index=None):
    if kind not in MAPPED:
        return pair_scores.pair_scores(kind, query, rows, index)
    return pair_scores.pair_scores(kind, query, rows, index, maps)


def formula(kind, query, maps, rows, index):
    """Compute scores from copies of the rows per chunk and (C, b, K, D) differences."""
    chosen_rows = rows[index]
    if kind == "dot":
        return query @ chosen_rows.transpose(-1, -2)
    scale = maps[:, :, None] if kind.startswith("scaled") else 1
    difference = query[:, :, None] - scale * chosen_rows[:, None]
    if kind == "scaled_squares":
        return difference.square().sum(-1)
    if kind.endswith("manhattan"):
        return difference.abs().sum(-1)
    if kind == "moduli":
        squares = difference.square().unflatten(-1, (-1, 2)).sum(-1)
        return (squares + library.EPSILON).sqrt().sum(-1)
    squares = difference.square().sum(-1)  # torch has no gradient of its root at 0
    return torch.where(squares > 0, squares, 1).sqrt() * (squares > 0)


def case(chunks=3, queries=5, candidates=7, rows=6, dim=10, seed=0):
    """Inputs with one query equal to a row after its map; some rows repeat, some are unused."""
    stream = torch.Generator().manual_seed(seed)
    query = torch.randn(chunks, queries, dim, generator=stream)
    maps = torch.randn(query.shape, generator=stream)
    table = torch.randn(rows, dim, generator=stream)
    index = torch.randint(max(1, rows - 1), (chunks, candidates), generator=stream)
    if query.numel() and index.numel():
        table[index[0, 0]] = query[0, 0]
        maps[0, 0] = 1
    return query, maps, table, index


def values_and_gradients(function, kind, args, dtype):
    inputs, index = [x.to(dtype).requires_grad_() for x in args[:-1]], args[-1]
    result = function(kind, *inputs, index)
    weight = torch.linspace(-1, 2, result.numel(), dtype=result.dtype).view(result.shape)
    total = (result * weight).sum()
    return result, *torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("kind", ["scaled_squares", "manhattan", "dot"])
@settings(max_examples=30)
@given(
    chunks=st.integers(0, 4),
    queries=st.integers(0, 35),
    candidates=st.integers(0, 9),
    rows=st.integers(1, 40),
    half=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_scores_and_gradients_of_any_sizes_equal_the_formula(
    kind, chunks, queries, candidates, rows, half, seed
):
    inputs = case(chunks, queries, candidates, rows, 2 * half, seed)
    actual = values_and_gradients(scores, kind, inputs, torch.float32)
    expected = values_and_gradients(formula, kind, inputs, torch.float64)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-4, atol=5e-4)


@every_kind
def test_each_chunk_can_have_its_own_rows(kind):
    query, maps, table, index = case()
    in_place = scores(kind, query, maps, table, index)
    assert torch.equal(scores(kind, query, maps, table[index]), in_place)


@every_kind
def test_score_of_a_pair_does_not_depend_on_its_position(kind):
    query, maps, table, index = case(1, 40, 11, 30, 50)
    together = scores(kind, query, maps, table, index)[0]
    for i in (0, 17, 39):
        for k in range(11):
            one = slice(i, i + 1)
            single = scores(kind, query[:, one], maps[:, one], table, index[:, k : k + 1])
            assert torch.equal(single[0, 0, 0], together[i, k])


@every_kind
def test_number_of_threads_changes_no_bit(kind, monkeypatch):
    monkeypatch.setattr(parallel, "SERIAL_ELEMENTS", 0)
    used, tell = [], numba.set_num_threads
    monkeypatch.setattr(numba, "set_num_threads", lambda n: used.append(n) or tell(n))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            inputs = case(9, 21, 13, 90, 24)
            results.append(values_and_gradients(scores, kind, inputs, torch.float32))
    finally:
        torch.set_num_threads(before)
    assert set(used) == {2} or numba.config.NUMBA_NUM_THREADS == 1
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["dot", "scaled_squares"])
@pytest.mark.slow
def test_kernels_compile(kind):
    def doubled(*args):
        return 2 * scores(*args)

    compiled = torch.compile(doubled, backend="aot_eager", fullgraph=True)
    result = values_and_gradients(compiled, kind, case(), torch.float32)
    plain = values_and_gradients(doubled, kind, case(), torch.float32)
    for one, other in zip(result, plain, strict=True):
        assert torch.equal(one, other)
    torch._dynamo.reset()


def test_half_precision_is_computed_in_float32():
    for kind in ("manhattan", "scaled_manhattan"):
        result, *gradients = values_and_gradients(scores, kind, case(), torch.bfloat16)
        assert result.dtype == torch.float32
        assert {grad.dtype for grad in gradients} == {torch.bfloat16}


def test_unneeded_gradients_are_not_computed(monkeypatch):
    query, maps, table, index = case()
    monkeypatch.setattr(pair_scores, "by_row", None)
    scores("dot", query.requires_grad_(), maps, table, index).sum().backward()
    assert query.grad is not None


@pytest.mark.parametrize("wrong", [-1, 6])
def test_indices_outside_the_table_are_rejected(wrong):
    query, maps, table, index = case()
    index[1, 2] = wrong
    with pytest.raises(IndexError, match=r"candidates: .* not all in \[0, 6\)"):
        scores("dot", query, maps, table, index)


def test_scorers_without_kernels_copy_rows():
    """Double precision, as CUDA."""
    *numbers, index = case()

    def computed(kind, query, maps, table):
        if kind == "dot":
            return InnerProduct().matrix(query, table, index)
        maps = maps if kind in MAPPED else None
        return distance(kind, query, table, index, maps)

    for kind in COMPARISONS + MAPPED:
        exact = [x.double() for x in numbers]
        result = computed(kind, *exact)
        torch.testing.assert_close(result, formula(kind, *exact, index))
        assert np.allclose(result, computed(kind, *numbers), rtol=1e-4, atol=1e-4)

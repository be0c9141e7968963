"""Scores of pairs on a CPU, and their gradients, against the formulas in double precision."""

from __future__ import annotations

from typing import get_args

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kge_torchrec.kernels import jit, kinds, pair_scores
from kge_torchrec.kernels.comparisons import InnerProduct, distance

COMPARISONS, MAPPED = get_args(kinds.Compared), get_args(kinds.Mapped)
every_kind = pytest.mark.parametrize("kind", COMPARISONS + MAPPED)


def scores(kind, query, maps, rows, index=None):
    if kind not in MAPPED:
        return pair_scores.pair_scores(kind, query, rows, index)
    return pair_scores.pair_scores(kind, query, rows, index, as_taken(kind, maps))


def as_taken(kind, maps):
    return torch.nn.functional.normalize(maps, dim=-1) if kind == "hyperplane_squares" else maps


def formula(kind, query, maps, rows, index):
    """With a copy of the rows for every chunk and (C, b, K, D) differences."""
    picked = rows[index]
    if kind == "dot":
        return query @ picked.transpose(-1, -2)
    of_map = as_taken(kind, maps)[:, :, None]
    scale = of_map if kind.startswith("scaled") else 1
    difference = query[:, :, None] - scale * picked[:, None]
    if kind == "hyperplane_squares":
        along = (difference * of_map).sum(-1, keepdim=True)
        return (difference - along * of_map).square().sum(-1)
    if kind == "scaled_squares":
        return difference.square().sum(-1)
    if kind.endswith("manhattan"):
        return difference.abs().sum(-1)
    if kind == "moduli":
        squares = difference.square().unflatten(-1, (-1, 2)).sum(-1)
        return (squares + kinds.EPSILON).sqrt().sum(-1)
    squares = difference.square().sum(-1)  # torch has no gradient of its root at 0
    return torch.where(squares > 0, squares, 1).sqrt() * (squares > 0)


def case(chunks=3, queries=5, candidates=7, rows=6, dim=10, seed=0):
    """A query and a row, once mapped, are equal; some rows are picked often and some never."""
    stream = torch.Generator().manual_seed(seed)
    query = torch.randn(chunks, queries, dim, generator=stream)
    maps = torch.randn(query.shape, generator=stream)
    table = torch.randn(rows, dim, generator=stream)
    index = torch.randint(max(1, rows - 1), (chunks, candidates), generator=stream)
    if query.numel() and index.numel():
        table[index[0, 0]] = query[0, 0]
        maps[0, 0] = 1
    return query, maps, table, index


def values_and_gradients(function, kind, given, dtype):
    inputs, index = [x.to(dtype).requires_grad_() for x in given[:-1]], given[-1]
    found = function(kind, *inputs, index)
    weight = torch.linspace(-1, 2, found.numel(), dtype=found.dtype).view(found.shape)
    total = (found * weight).sum()
    return found, *torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)


@every_kind
@settings(max_examples=60, deadline=None)
@given(
    chunks=st.integers(0, 4),
    queries=st.integers(0, 35),
    candidates=st.integers(0, 9),
    rows=st.integers(1, 40),
    half=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_any_sizes(kind, chunks, queries, candidates, rows, half, seed):
    given = case(chunks, queries, candidates, rows, 2 * half, seed)
    found = values_and_gradients(scores, kind, given, torch.float32)
    expected = values_and_gradients(formula, kind, given, torch.float64)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-4, atol=5e-4)


def test_small_distances_on_a_hyperplane_keep_their_digits():
    """Between points far from each other, nearly along the normal."""
    normal = torch.nn.functional.normalize(torch.randn(1, 4, 32), dim=-1)
    rows = 0.01 * torch.randn(6, 32)
    given = 100 * normal, normal, rows, torch.arange(6)[None]
    found = values_and_gradients(scores, "hyperplane_squares", given, torch.float32)
    expected = values_and_gradients(formula, "hyperplane_squares", given, torch.float64)
    torch.testing.assert_close(found[0], expected[0].float(), rtol=0.01, atol=0)
    torch.testing.assert_close(found[3], expected[3].float(), rtol=0, atol=1e-3)


@every_kind
def test_rows_of_each_chunk(kind):
    query, maps, table, index = case()
    in_place = scores(kind, query, maps, table, index)
    assert torch.equal(scores(kind, query, maps, table[index]), in_place)


@every_kind
def test_a_pair_scores_the_same_wherever_it_stands(kind):
    query, maps, table, index = case(1, 40, 11, 30, 50)
    together = scores(kind, query, maps, table, index)[0]
    for i in (0, 17, 39):
        for k in range(11):
            one = slice(i, i + 1)
            alone = scores(kind, query[:, one], maps[:, one], table, index[:, k : k + 1])
            assert torch.equal(alone[0, 0, 0], together[i, k])


@every_kind
def test_the_number_of_threads_changes_no_bit(kind, monkeypatch):
    monkeypatch.setattr(jit, "SERIAL_ELEMENTS", 0)
    used, tell = [], numba.set_num_threads
    monkeypatch.setattr(numba, "set_num_threads", lambda n: used.append(n) or tell(n))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            given = case(9, 21, 13, 90, 24)
            found.append(values_and_gradients(scores, kind, given, torch.float32))
    finally:
        torch.set_num_threads(before)
    assert set(used) == {2} or numba.config.NUMBA_NUM_THREADS == 1
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@every_kind
def test_they_compile(kind):
    def doubled(*given):
        return 2 * scores(*given)

    compiled = torch.compile(doubled, backend="aot_eager", fullgraph=True)
    found = values_and_gradients(compiled, kind, case(), torch.float32)
    plain = values_and_gradients(doubled, kind, case(), torch.float32)
    for one, other in zip(found, plain, strict=True):
        assert torch.equal(one, other)
    torch._dynamo.reset()


def test_half_precision_is_computed_in_float32():
    for kind in ("manhattan", "scaled_manhattan"):
        found, *gradients = values_and_gradients(scores, kind, case(), torch.bfloat16)
        assert found.dtype == torch.float32
        assert {grad.dtype for grad in gradients} == {torch.bfloat16}


def test_gradients_that_nobody_asks_for_are_not_computed(monkeypatch):
    query, maps, table, index = case()
    monkeypatch.setattr(pair_scores, "by_row", None)
    scores("dot", query.requires_grad_(), maps, table, index).sum().backward()
    assert query.grad is not None


@pytest.mark.parametrize("wrong", [-1, 6])
def test_places_outside_the_table_are_refused(wrong):
    query, maps, table, index = case()
    index[1, 2] = wrong
    with pytest.raises(IndexError, match="of 6 rows"):
        scores("dot", query, maps, table, index)


def test_what_has_no_kernels_copies_rows():
    """Double precision, as CUDA."""
    *numbers, index = case()

    def computed(kind, query, maps, table):
        if kind == "dot":
            return InnerProduct().matrix(query, table, index)
        maps = as_taken(kind, maps) if kind in MAPPED else None
        return distance(kind, query, table, index, maps)

    for kind in COMPARISONS + MAPPED:
        exact = [x.double() for x in numbers]
        found = computed(kind, *exact)
        torch.testing.assert_close(found, formula(kind, *exact, index))
        assert np.allclose(found, computed(kind, *numbers), rtol=1e-4, atol=1e-4)

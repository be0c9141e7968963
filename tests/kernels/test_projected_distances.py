"""HousE's kernels against torch, which copies rows for every pair, in double precision."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kge_torchrec.kernels import comparisons
from kge_torchrec.kernels.projected_distances import projected_distances
from kge_torchrec.models.scorers import SCORERS

HousE = SCORERS["house"]


def numbers(chunks, queries, rows, blocks, block, projections, seed=0):
    """point, vectors, scales, rows"""
    draw, dim = torch.Generator().manual_seed(seed), blocks * block
    shapes = [(chunks, queries, dim), (chunks, queries, projections * dim),
              (chunks, queries, projections * blocks), (rows, dim)]  # fmt: skip
    return [torch.randn(shape, generator=draw) for shape in shapes]


def expected(point, vectors, scales, rows, block, index):
    """Compute the distances by the formula of the scorer, in double precision."""
    query = [x[:, :, None] for x in (point, vectors, scales)]
    return -comparisons.MinusProjected(block).pairs(query, rows[index][:, None])


def of(compute, inputs, block, index, dtype):
    """Distances, and the gradients of their sum with random weights, some of them 0."""
    inputs = [x.detach().to(dtype).requires_grad_() for x in inputs]
    distances = compute(*inputs, block, index)
    weights = torch.randn(distances.shape, generator=torch.Generator().manual_seed(1))
    weights[..., ::3] = 0
    total = (distances * weights.to(dtype)).sum()
    return distances.detach(), *torch.autograd.grad(total, inputs, materialize_grads=True)


@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(0, 6), st.integers(0, 9)),
    blocks=st.integers(1, 5),
    block=st.integers(1, 5),
    projections=st.integers(0, 3),
)
@settings(max_examples=30, deadline=None)
def test_distances_and_gradients_equal_the_formula(sizes, blocks, block, projections):
    """Some candidates belong to several queries, some to none."""
    chunks, queries, candidates = sizes
    index = torch.randint(7, (chunks, candidates), generator=torch.Generator().manual_seed(2))
    inputs = numbers(chunks, queries, 7, blocks, block, projections)
    exact = of(expected, inputs, block, index, torch.float64)
    actual = of(projected_distances, inputs, block, index, torch.float32)
    for one, other in zip(exact, actual, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=1e-4, atol=1e-4)


def test_each_chunk_can_have_its_own_rows():
    """Without an index."""
    inputs = numbers(2, 5, 12, 3, 4, 1)
    index = torch.arange(12).view(2, 6)
    *of_queries, rows = inputs
    result = projected_distances(*of_queries, rows.view(2, 6, 12), 4)
    assert torch.equal(result, projected_distances(*inputs, 4, index))


def test_number_of_threads_changes_no_bit():
    inputs = numbers(3, 40, 100, 16, 4, 1)
    index = torch.randint(100, (3, 50), generator=torch.Generator().manual_seed(2))
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(of(projected_distances, inputs, 4, index, torch.float32))
    finally:
        torch.set_num_threads(before)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_distance_of_a_pair_does_not_depend_on_its_position():
    """Or entities that score alike would not rank alike."""
    point, vectors, scales, rows = numbers(1, 3, 1, 16, 4, 1)
    index = torch.zeros(1, 7, dtype=torch.int64)
    results = projected_distances(point, vectors, scales, rows, 4, index)
    assert (results == results[..., :1]).all()


@pytest.mark.parametrize("number", [-1, 7])
def test_indices_outside_the_table_are_rejected(number):
    index = torch.tensor([[0, number]])
    with pytest.raises(
        IndexError, match=f"candidates {min(0, number)} to {max(0, number)} of 7 rows"
    ):
        projected_distances(*numbers(1, 1, 7, 2, 2, 1), 2, index)


def test_equal_points_have_a_finite_gradient():
    point, vectors, scales, rows = (x * 0 for x in numbers(1, 1, 1, 2, 2, 1))
    rows.requires_grad_()
    index = torch.zeros(1, 1, dtype=torch.int64)
    projected_distances(point, vectors, scales, rows, 2, index).sum().backward()
    assert torch.equal(rows.grad, torch.zeros(1, 4))


def test_rows_are_not_copied(monkeypatch):
    """Each query has its own candidates."""
    scorer = HousE(1, 8, False)
    torch.nn.init.normal_(scorer.relations)
    query = scorer.encode_query(torch.randn(2, 3, 8), torch.zeros(2, 3, dtype=torch.int64), "tail")
    rows, index = torch.randn(5, 8), torch.tensor([[0, 4], [2, 2]])
    copied = scorer.similarity_matrix(query, rows[index])
    monkeypatch.setattr(comparisons, "pick", None)
    torch.testing.assert_close(scorer.score_rows(query, rows, index), copied)


def test_empty_input_has_empty_distances():
    point, vectors, scales, rows = (x.requires_grad_() for x in numbers(1, 2, 0, 2, 2, 1))
    index = torch.zeros(1, 0, dtype=torch.int64)
    result = projected_distances(point, vectors, scales, rows, 2, index)
    result.sum().backward()
    assert result.shape == (1, 2, 0)
    assert rows.grad.shape == (0, 4)

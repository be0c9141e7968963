"""Against torch's products of copies, in double precision."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kge_torchrec.kernels.library import Action
from kge_torchrec.kernels.operators import times
from kge_torchrec.kernels.triple_products import EncodeTriples

ROWS, RELATIONS = 9, 4
NONE = torch.empty(0, dtype=torch.int64)


def queries_of(action, queries, candidates, seed=0, rows=ROWS):
    draw = torch.Generator().manual_seed(seed)
    ends = (torch.randint(rows, (queries,), generator=draw) for _ in range(2))
    relation = torch.randint(RELATIONS, (queries,), generator=draw)
    anchor, target = ends
    others = torch.randint(rows, (candidates,), generator=draw)
    return action, anchor, relation, target, others


def expected(rows, relations, sides, copied):
    results = []
    for action, anchor, relation, target, candidates in sides:
        numbers = relations[relation]
        if action == "real":
            query = rows[anchor] * numbers
        else:
            query = times(rows[anchor], numbers, conjugate=action == "conjugate")
        results += [query, (query * rows[target]).sum(-1), rows[candidates]]
    return [*results, rows[copied]]


def of(compute, rows, relations, sides, dtype, copied=NONE):
    """Return the outputs of ``compute`` and the gradients of their randomly weighted sum."""
    inputs = [x.detach().to(dtype).requires_grad_() for x in (rows, relations)]
    results = compute(*inputs, sides, copied)
    draw = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=draw).to(dtype) for x in results]
    total = sum((x * weight).sum() for x, weight in zip(results, weights, strict=True))
    return *(x.detach() for x in results), *torch.autograd.grad(total, inputs)


def flat(rows, relations, sides, copied):
    actions = [action for action, *_ in sides]
    positions = [index for _, *indices in sides for index in indices]
    return EncodeTriples.apply(rows, relations, actions, copied, *positions)


@given(
    actions=st.lists(st.sampled_from(get_args(Action)), min_size=1, max_size=2),
    queries=st.integers(0, 70),
    candidates=st.integers(0, 5),
    dim=st.integers(1, 20),
    copied=st.lists(st.integers(0, ROWS - 1), unique=True),
)
@settings(max_examples=30)
def test_queries_scores_and_gradients_equal_the_formula(actions, queries, candidates, dim, copied):
    if actions != ["real"] * len(actions):
        dim *= 2
    rows, relations = torch.randn(ROWS, dim), torch.randn(RELATIONS, dim)
    sides = [queries_of(x, queries, candidates, seed) for seed, x in enumerate(actions)]
    copied = torch.tensor(copied, dtype=torch.int64)
    exact = of(expected, rows, relations, sides, torch.float64, copied)
    actual = of(flat, rows, relations, sides, torch.float32, copied)
    assert len(exact) == len(actual) == 3 * len(actions) + 3
    for one, other in zip(exact, actual, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("action", get_args(Action))
def test_number_of_threads_changes_no_bit(action):
    """The batch is large enough for several threads, and many triples share a relation."""
    rows, relations = torch.randn(700, 128), torch.randn(RELATIONS, 128)
    sides = [queries_of(action, 1500, 30, seed, rows=700) for seed in range(2)]
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(of(flat, rows, relations, sides, torch.float32))
    finally:
        torch.set_num_threads(before)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["anchor", "relation", "target", "candidates"])
@pytest.mark.parametrize("number", [-1, None], ids=["below", "above"])
def test_indices_outside_the_tables_are_rejected(name, number):
    action, *indices = queries_of("real", 5, 3)
    place = ("anchor", "relation", "target", "candidates").index(name)
    index = indices[place].clone()
    count = RELATIONS if name == "relation" else ROWS
    index[1] = count if number is None else number
    indices[place] = index
    tables = torch.zeros(ROWS, 4), torch.zeros(RELATIONS, 4)
    with pytest.raises(IndexError, match=rf"{name}: .* are not all in"):
        flat(*tables, [(action, *indices)], NONE)


def test_unused_rows_have_zero_gradient():
    rows, relations = torch.randn(ROWS, 4), torch.randn(RELATIONS, 4)
    places = torch.tensor([2]), torch.tensor([1]), torch.tensor([3]), torch.tensor([5])
    *_, row_gradient, relation_gradient = of(
        flat, rows, relations, [("real", *places)], torch.float32
    )
    assert row_gradient.any(1).nonzero().flatten().tolist() == [2, 3, 5]
    assert relation_gradient.any(1).nonzero().flatten().tolist() == [1]

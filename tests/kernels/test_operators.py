"""Operators of ``torch.library`` against their formulas in plain torch, and by torch's own checks.

``torch.library.opcheck`` compares an operator's schema, its fake form and its autograd with what it
does; hypothesis compares its values and gradients with the formula of other devices.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

from kge_torchrec.kernels import (
    dropout,
    operators,
    pair_scores,
    projected_distances,
    rows,
    score_gradients,
    triple_products,
)


def made(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@pytest.mark.parametrize("softmax", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.first_tier("True-False", "False-True")
def test_torch_checks_log_sums(softmax, masked):
    mask = made(3, 4, 9) > 0 if masked else None
    opcheck(score_gradients.log_sums, (made(3, 4, 9), mask, softmax))


@pytest.mark.parametrize("softmax", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.first_tier("dtype0-True", "dtype1-False")
def test_torch_checks_full_scores(softmax, dtype):
    scores, out = made(5, 9).detach().to(dtype), torch.zeros(5, dtype=torch.float64)
    opcheck(score_gradients.normalizers, (scores, out, softmax))
    for rest in (None, made(5).detach().double()):
        opcheck(score_gradients.gradients, (scores, out, torch.ones(5), rest, softmax))


@settings(deadline=None)
@given(
    seed=st.integers(0, 999),
    size=st.tuples(st.integers(1, 5), st.integers(1, 90)),
    scale=st.sampled_from([0.1, 3.0, 60.0]),
    rests=st.booleans(),
    softmax=st.booleans(),
)
def test_kernels_of_full_scores_equal_torch(seed, size, scale, rests, softmax):
    """Columns of each query that are apart have no kernel, nor has double precision."""
    torch.manual_seed(seed)
    scores, weight = torch.randn(size) * scale, torch.rand(size[0]) + 0.5
    rest = torch.rand(size[0], dtype=torch.float64) / 5 if rests else None
    results = []
    for own in (scores.clone(), scores.t().contiguous().t(), scores.double()):
        normalizer = torch.empty(size[0], dtype=torch.float64)
        operators.normalizers(own, normalizer, softmax)
        operators.gradients(own, normalizer, weight.to(own.dtype), rest, softmax)
        results.append((normalizer, own.double()))
    assert score_gradients.takes(scores) and not score_gradients.takes(scores.double())
    for (normalizer, gradients), close in ((results[0], 1e-5), (results[1], 1e-4)):
        torch.testing.assert_close(normalizer, results[2][0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradients, results[2][1], rtol=close, atol=1e-6)


def test_torch_checks_dropout():
    opcheck(dropout.dropped, (made(5, 7), 0.3, 12345678901))
    opcheck(dropout.dropped, (made(5, 7).detach().t().requires_grad_(), 0.3, 12345678901))


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_torch_checks_sums_by_row(parts):
    index = torch.arange(3 * parts) % 4
    opcheck(rows.sums_by_row, (index, [made(3, 6, seed=i) for i in range(parts)], 5))


@pytest.mark.parametrize("kind", ["dot", "euclidean", "hyperplane_squares"])
@pytest.mark.first_tier("dot", "hyperplane_squares")
def test_torch_checks_pairs(kind):
    maps = torch.nn.functional.normalize(made(2, 3, 6).detach(), dim=-1).requires_grad_()
    maps = maps if kind == "hyperplane_squares" else made(2, 3, 0)
    index = torch.tensor([[0, 3, 3], [1, 0, 2]])
    query, rows = made(2, 3, 6), made(4, 6, seed=1)
    opcheck(pair_scores.score, (query, maps, rows, index, kind))
    inputs = (x.detach() for x in (query, maps, rows, index, made(2, 3, 3)))
    arguments = (*inputs, kind)
    opcheck(pair_scores.query_gradients, arguments)
    opcheck(pair_scores.row_gradients, arguments)


def test_torch_checks_projected_distances():
    """Check distances of 3 blocks with 2 elements and 2 projections."""
    inputs = made(2, 3, 2, 3), made(2, 3, 2, 2, 3), made(2, 3, 2, 3), made(5, 2, 3, seed=1)
    index = torch.tensor([[0, 4, 4], [1, 0, 2]])
    opcheck(projected_distances.distances, (*inputs, index))
    without = (x.detach() for x in inputs)
    opcheck(projected_distances.gradients, (*without, index, made(2, 3, 3).detach()))


@pytest.mark.parametrize("left", [True, False])
def test_torch_checks_relation_products(left):
    inputs = made(6, 5), made(3, 25, seed=1), torch.tensor([0, 2, 2, 0, 0, 2])
    opcheck(dropout.products, (*inputs, left, 0.3, 12345678901))
    without = (x.detach() for x in inputs)
    opcheck(dropout.gradients, (made(6, 5).detach(), *without, left, 0.3, 12345678901))


@pytest.mark.parametrize("sides", [1, 2])
@pytest.mark.first_tier("2")
def test_torch_checks_triple_products(sides):
    rows, relations = made(6, 4), made(3, 4, seed=1)
    relation, anchor = torch.tensor([0, 2, 2]), torch.tensor([5, 0, 1])
    positions = [anchor, relation, anchor.flip(0), torch.tensor([3, 0])] * sides
    copied = torch.tensor([4, 2])
    opcheck(triple_products.encode, (rows, relations, [1, 2][:sides], positions, copied))
    grads = [x.detach() for _ in range(sides) for x in (made(3, 4), made(3), made(2, 4))]
    without = rows.detach(), relations.detach(), [1, 2][:sides], positions, copied
    opcheck(triple_products.encode_backward, ([*grads, made(2, 4).detach()], *without))


@settings(max_examples=30, deadline=None)
@given(
    queries=st.integers(0, 6), dim=st.integers(1, 6), left=st.booleans(), seed=st.integers(0, 99)
)
def test_relation_products_and_gradients_equal_the_formula(queries, dim, left, seed):
    inputs = made(queries, dim, seed=seed), made(3, dim * dim, seed=seed + 1)
    relation = torch.arange(queries) % 3
    weights = made(queries, dim, seed=seed + 2).detach()
    results = []
    for dtype in (torch.float32, torch.float64):
        vectors, matrices = (x.to(dtype) for x in inputs)
        out = operators.relation_products(vectors, matrices, relation, left=left, share=0.0)
        results.append((out, *torch.autograd.grad((out * weights).sum(), inputs)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    queries=st.integers(0, 5), candidates=st.integers(1, 70), masked=st.booleans(),
    softmax=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_log_sums_and_gradients_equal_the_formula(queries, candidates, masked, softmax, seed):
    scores = made(queries, candidates, seed=seed)
    mask = made(queries, candidates, seed=seed + 1) > 0 if masked else None
    if mask is not None:
        mask[:, 0] = True  # where none counts, the least number differs between dtypes
    function = operators.log_sum_exp if softmax else operators.softplus_sum
    weights = made(queries, seed=seed + 2).detach()
    actual, expected = function(scores, mask), function(scores.double(), mask)
    torch.testing.assert_close(actual, expected.float(), rtol=1e-5, atol=1e-5)
    one, other = (torch.autograd.grad((x * weights).sum(), scores)[0] for x in (actual, expected))
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=6), rows=st.integers(1, 30),
    dim=st.integers(1, 9),
)  # fmt: skip
def test_sums_by_row_and_gradients_equal_the_formula(sizes, rows, dim):
    index = torch.randint(rows, (sum(sizes),), generator=torch.Generator().manual_seed(rows))
    parts = [made(size, dim, seed=i) for i, size in enumerate(sizes)]
    actual = operators.sums_by_row(index, parts, rows)
    expected = operators.sums_by_row(index, [part.double() for part in parts], rows)
    torch.testing.assert_close(actual, expected.float())
    weights = made(rows, dim, seed=7).detach()
    for one, other in zip(
        torch.autograd.grad((actual * weights).sum(), parts),
        torch.autograd.grad((expected * weights).sum(), parts),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def mixed(bits: torch.Tensor) -> torch.Tensor:
    """The hash of ``dropout.mixed``, of 32 bits in int64."""
    low = 0xFFFFFFFF
    bits = bits ^ (bits >> 16)
    bits = _product(bits, 0x7FEB352D) & low
    bits = bits ^ (bits >> 15)
    bits = _product(bits, 0x846CA68B) & low
    return bits ^ (bits >> 16)


def _product(bits: torch.Tensor, factor: int) -> torch.Tensor:
    """The low 32 bits of a product, without overflow of int64."""
    high, low = factor >> 16, factor & 0xFFFF
    return ((bits * high & 0xFFFF) << 16) + bits * low


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(0, 9), dim=st.integers(1, 9), key=st.integers(0, 2**62 - 1),
    share=st.floats(0.01, 0.99),
)  # fmt: skip
def test_dropout_is_a_hash_of_key_and_place(rows, dim, key, share):
    values = made(rows, dim)
    low, high = key & 0xFFFFFFFF, key >> 32
    drawn = mixed(mixed((torch.arange(rows * dim) + low) & 0xFFFFFFFF) ^ high)
    stays = (drawn >= min(round(share * 2**32), 2**32 - 1)).view(rows, dim)
    result = dropout.dropped(values, share, key)
    torch.testing.assert_close(result, torch.where(stays, values / (1 - share), 0))
    (gradient,) = torch.autograd.grad(result.sum(), values)
    torch.testing.assert_close(gradient, stays / torch.tensor(1 - share))


def test_double_precision_uses_the_formula(monkeypatch):
    monkeypatch.setattr(score_gradients, "log_sums", None)
    monkeypatch.setattr(rows, "sums_by_row", None)
    monkeypatch.setattr(dropout, "dropped", None)
    scores = made(2, 3).double()
    torch.testing.assert_close(operators.log_sum_exp(scores, None), scores.logsumexp(-1))
    assert operators.dropped(scores, 0.5).dtype == torch.float64
    assert operators.sums_by_row(torch.tensor([1, 1]), [scores], 3)[1].equal(scores.sum(0))

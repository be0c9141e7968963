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


@pytest.mark.parametrize("kind", ["dot", "euclidean", "scaled_squares"])
@pytest.mark.first_tier("dot", "scaled_squares")
def test_torch_checks_pairs(kind):
    maps = made(2, 3, 6 if kind == "scaled_squares" else 0)
    index = torch.tensor([[0, 3, 3], [1, 0, 2]])
    query, rows = made(2, 3, 6), made(4, 6, seed=1)
    opcheck(pair_scores.score, (query, maps, rows, index, kind))
    inputs = (x.detach() for x in (query, maps, rows, index, made(2, 3, 3)))
    arguments = (*inputs, kind)
    opcheck(pair_scores.query_gradients, arguments)
    opcheck(pair_scores.row_gradients, arguments)


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
    monkeypatch.setattr(dropout, "dropped", None)
    scores = made(2, 3).double()
    torch.testing.assert_close(operators.log_sum_exp(scores, None), scores.logsumexp(-1))
    assert operators.dropped(scores, 0.5).dtype == torch.float64

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

from kge_torchrec.kernels import dropout, ids, library, operators, pair_scores, scores


def made(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def calls() -> dict[str, tuple]:
    """Operators and arguments of each."""
    full, sums = made(5, 9).detach(), torch.zeros(5, dtype=torch.float64)
    weight, rest = torch.ones(5), made(5).detach().double()
    query, rows, index = made(2, 3, 6), made(4, 6, seed=1), torch.tensor([[0, 3, 3], [1, 0, 2]])
    none, maps = made(2, 3, 0), made(2, 3, 6)
    parts = [x.detach() for x in (query, maps, rows, index, made(2, 3, 3))]
    without = [parts[0], none.detach(), *parts[2:]]
    pairs, none_left = pair_scores, 0 * rest
    return {
        "normalizers": (scores.normalizers, full, sums, True),
        "normalizers of bfloat16": (scores.normalizers, full.bfloat16(), sums, False),
        "gradients": (scores.gradients, full, sums, weight, none_left, True),
        "gradients of bfloat16": (scores.gradients, full.bfloat16(), sums, weight, rest, False),
        "dropout": (dropout.dropped, made(5, 7), 0.3, 12345678901),
        "dropout of columns": (
            dropout.dropped, made(5, 7).detach().t().requires_grad_(), 0.3, 12345678901),
        "dot": (pairs.score, query, none, rows, index, "dot"),
        "gradients of queries, dot": (pairs.query_gradients, *without, "dot"),
        "gradients of rows, dot": (pairs.row_gradients, *without, "dot"),
        "squares": (pairs.score, query, maps, rows, index, "scaled_squares"),
        "gradients of queries": (pairs.query_gradients, *parts, "scaled_squares"),
        "gradients of rows": (pairs.row_gradients, *parts, "scaled_squares"),
    }  # fmt: skip


@pytest.mark.parametrize("name", calls())
def test_torch_checks_the_operator(name):
    operator, *arguments = calls()[name]
    opcheck(operator, tuple(arguments))


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


@settings(max_examples=30)
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
    monkeypatch.setattr(scores, "LogSums", None)
    monkeypatch.setattr(dropout, "dropped", None)
    values = made(2, 3).double()
    every = torch.ones(2, 3, dtype=torch.bool)
    torch.testing.assert_close(operators.log_sum_exp(values, every), values.logsumexp(-1))
    assert operators.dropped(values, 0.5).dtype == torch.float64


def test_a_compiler_that_does_not_exist_is_none(monkeypatch, tmp_path):
    """``CC`` decides alone: Triton takes no other compiler then."""
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: name)
    has_triton = library.has_triton.__wrapped__
    monkeypatch.setenv("CC", str(tmp_path / "no-compiler"))
    assert not has_triton()
    (tmp_path / "no-compiler").touch(0o755)
    assert has_triton()
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    assert not has_triton()


@pytest.mark.parametrize("low, high", [(-1, 4), (0, 5)])
def test_ids_outside_the_range_are_named(low, high):
    ids.check_within("rows", torch.tensor([[0, 2], [4, 4]]), 5)
    with pytest.raises(IndexError, match=rf"rows: {low} to {high} are not all in \[0, 5\)"):
        ids.check_within("rows", torch.tensor([low, 3, high]), 5)

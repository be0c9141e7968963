"""Products with a relation's matrix against torch's with a copy of it for each query."""

from __future__ import annotations

import numba
import pytest
import torch

from kge_torchrec.kernels import jit, operators
from kge_torchrec.kernels.dropout import dropped, relation_products
from kge_torchrec.models.scorers import SCORERS, bilinear

KEY = 0x2F3A_1B5C_9D7E_4081
RELATIONS = 5  # no query has the last one


def case(queries: int, dim: int):
    stream = torch.Generator().manual_seed(queries)
    vectors = torch.randn(queries, dim, generator=stream).requires_grad_()
    matrices = torch.randn(RELATIONS, dim * dim, generator=stream).requires_grad_()
    relation = torch.randint(RELATIONS - 1, (queries,), generator=stream)
    weight = torch.randn(queries, dim, generator=stream)
    return vectors, matrices, relation, weight


def with_copies(vectors, matrices, relation, left, share):
    copies = matrices[relation]
    if share:
        copies = copies * dropped(torch.ones_like(copies), share, KEY)
    copies = copies.unflatten(-1, (vectors.shape[-1], -1))
    product = vectors[:, None] @ copies if left else (copies @ vectors[..., None]).mT
    return product[:, 0]


def with_gradients(out, vectors, matrices, weight):
    return out, *torch.autograd.grad((out * weight).sum(), (vectors, matrices))


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.3])
@pytest.mark.parametrize("queries, dim", [(40, 24), (3, 1), (1, 17), (0, 8)])
def test_products_equal_those_of_copies(queries, dim, share, left):
    vectors, matrices, relation, weight = case(queries, dim)
    out = relation_products(vectors, matrices, relation, left=left, share=share, key=KEY)
    actual = with_gradients(out, vectors, matrices, weight)
    copied = with_copies(vectors, matrices, relation, left, share)
    expected = with_gradients(copied, vectors, matrices, weight)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert not actual[2][-1].any()


def test_nan_is_not_hidden():
    vectors, matrices, relation, _ = case(40, 24)
    with torch.no_grad():
        matrices[relation[0]] = torch.nan
    inputs = vectors, matrices, relation
    assert relation_products(*inputs, left=True, share=0.9, key=KEY)[0].isnan().all()


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="one core")
def test_number_of_threads_changes_no_bit(monkeypatch):
    monkeypatch.setattr(jit, "SERIAL_ELEMENTS", 0)
    vectors, matrices, relation, weight = case(90, 24)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            out = relation_products(vectors, matrices, relation, left=True, share=0.3, key=KEY)
            results.append(with_gradients(out, vectors, matrices, weight))
    finally:
        torch.set_num_threads(before)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("normalization, inverses", [("none", False), ("layer", True)])
def test_rescal_trains_with_relation_products(normalization, inverses):
    """The result equals that with copies, which double dropout and ranking still use."""
    shares = {"relation_dropout": 0.3, "hidden_dropout": 0.2, "normalization": normalization}
    scorer = SCORERS["rescal"](3, 24, inverses, **shares)
    torch.nn.init.normal_(scorer.relations)
    anchor, relation = torch.randn(1, 30, 24), torch.arange(30)[None] % 3

    def encoded(encode, side):
        torch.manual_seed(7)
        query = encode(scorer, anchor, relation, side)
        return query, torch.autograd.grad(query.square().sum(), scorer.relations)[0]

    for side in ("tail", "head"):
        fused, gradient = encoded(bilinear.RESCAL.encode_query, side)
        expected, gradient_with_copies = encoded(bilinear.TrilinearScorer.encode_query, side)
        assert not torch.equal(fused, expected)
        torch.testing.assert_close(fused, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(gradient, gradient_with_copies, rtol=1e-4, atol=1e-4)


class Doubled(SCORERS["rescal"]):
    """Overrides how a query is made."""

    def query(self, anchor, relation, side):
        return 2 * super().query(anchor, relation, side)


def test_which_scorers_multiply_without_copies(monkeypatch):
    """RESCAL in training; not where it ranks, drops twice, or a subclass overrides ``query``."""
    calls, anchor = [], torch.randn(1, 3, 24)
    products = operators.relation_products
    watched = lambda *x, **y: calls.append(1) or products(*x, **y)  # noqa: E731
    monkeypatch.setattr(bilinear, "relation_products", watched)
    relation = torch.zeros(1, 3, dtype=torch.int64)
    scorer = SCORERS["rescal"](3, 24)
    torch.nn.init.normal_(scorer.relations)
    query = scorer.encode_query(anchor, relation, "tail")
    assert calls == [1]
    others = [Doubled(3, 24), SCORERS["rescal"](3, 24, input_dropout=0.1), scorer.eval()]
    for other in others:
        other.load_state_dict(scorer.state_dict())
        encoded = other.encode_query(anchor, relation, "tail")
        if isinstance(other, Doubled):
            torch.testing.assert_close(encoded, 2 * query)
    assert calls == [1]

"""RESCAL's queries in training, by one product per relation, against a copied matrix per query."""

from __future__ import annotations

import pytest
import torch
from scorer_cases import RELATIONS, SCORERS, make, normal

from kge_torchrec.models.scorers import SIDES
from kge_torchrec.models.scorers.bilinear import RESCAL

DIM = 12


def rescal(reciprocal: bool = False, **shared) -> RESCAL:
    return make(("rescal", DIM, {}), reciprocal, **shared).train()


def encoded(scorer, anchor, relation, side):
    """The queries, and the gradients of anchors and relations."""
    query = scorer.encode(anchor, relation, side)
    weights = torch.linspace(-1, 2, query.numel(), dtype=query.dtype).view(query.shape)
    return query, *torch.autograd.grad((query * weights).sum(), (anchor, scorer.relations))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("normalization, reciprocal", [("none", False), ("layer", True)])
@pytest.mark.parametrize("queries", [0, 1, 30])
def test_queries_and_gradients_equal_those_of_copies(queries, normalization, reciprocal, side):
    scorer = rescal(reciprocal, normalization=normalization)
    anchor = normal(2, queries, DIM).requires_grad_()
    relation = torch.arange(2 * queries).view(2, queries) % 2
    actual = encoded(scorer, anchor, relation, side)
    expected = encoded(scorer.eval(), anchor, relation, side)  # evaluation copies matrices
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_relation_dropout_is_drawn_once_per_relation_and_batch():
    scorer = rescal(relation_dropout=0.4)
    torch.nn.init.ones_(scorer.relations)
    anchor = torch.eye(DIM, dtype=torch.float64).repeat(2, 1)[None]
    relation = torch.arange(2 * DIM)[None] // DIM
    rows = scorer.encode(anchor, relation, "tail")[0].detach()
    assert rows.unique().tolist() == [0.0, pytest.approx(1 / 0.6)]
    first, second = rows.split(DIM)  # the matrices of both relations
    again = scorer.encode(anchor, relation * 0, "tail")[0].detach()
    assert not torch.equal(first, second) and torch.equal(*again.split(DIM))


class Doubled(SCORERS["rescal"]):
    """Overrides how a query is made."""

    def query(self, anchor, relation, side):
        return 2 * super().query(anchor, relation, side)


def test_overridden_queries_are_used():
    scorer, doubled = rescal(), Doubled(RELATIONS, DIM).double()
    doubled.load_state_dict(scorer.state_dict())
    query = normal(1, 3, DIM), torch.tensor([[0, 1, 1]]), "tail"
    torch.testing.assert_close(doubled.encode(*query), 2 * scorer.encode(*query))


def test_only_matrices_of_the_batch_are_normalized():
    scorer, normalized = rescal(normalization="layer"), []
    scorer.relation_norm.register_forward_hook(lambda layer, rows, out: normalized.append(rows[0]))
    scorer.encode(normal(1, 5, DIM), torch.tensor([[2, 0, 2, 0, 0]]), "tail")
    assert [x.shape for x in normalized] == [(2, DIM * DIM)]

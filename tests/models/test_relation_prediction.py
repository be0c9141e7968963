"""The auxiliary loss -log p(r | h, t) against a loop over triples and relations."""

import math

import pytest
import torch
from scorer_cases import RELATIONS, SCORERS, make, normal

from kge_torchrec.models.model import relation_prediction


@pytest.mark.parametrize(("side", "inverses"), [("head", False), ("head", True), ("tail", False)])
def test_loss_is_cross_entropy_over_relations(side, inverses):
    """Scores of all relations equal those of triples for every scorer, see test_scorers."""
    scorer, dim = make(("complex", 6, {}), inverses), 6
    anchor, target = normal(2, 3, dim), normal(2, 3, dim)
    relation = torch.randint(RELATIONS, (2, 3))
    actual = relation_prediction(scorer, anchor, relation, target, side)
    assert actual.shape == (2, 3)
    for c in range(2):
        for i in range(3):
            # With inverses the question is a tail query, and every row may be the answer.
            query_side = "tail" if inverses else side
            rows = range(scorer.relation_rows)
            plain = [
                score_row(scorer, anchor[c, i], row, target[c, i], query_side).item()
                for row in rows
            ]
            answer = int(relation[c, i]) + (RELATIONS if inverses and side == "head" else 0)
            expected = math.log(sum(math.exp(s - max(plain)) for s in plain)) + max(plain)
            assert actual[c, i].item() == pytest.approx(expected - plain[answer], abs=1e-6)


def score_row(scorer, anchor, row, target, side):
    """The score with a row of the relation table, inverse or not, as a query of that side."""
    ids = torch.tensor(row)
    query = scorer.query(scorer.vectors(anchor), scorer.relation(ids), side)
    return scorer.comparison.pairs(query, scorer.vectors(target))


def test_training_learns_relations_of_pairs():
    """Only the auxiliary loss: afterwards the relation between two entities is the likeliest."""
    torch.manual_seed(0)
    scorer = SCORERS["complex"](4, 16)
    torch.nn.init.normal_(scorer.relations)
    table = torch.randn(10, 16, requires_grad=True)
    head, tail = torch.randint(10, (1, 12)), torch.randint(10, (1, 12))
    relation = (head + tail) % 4
    optimizer = torch.optim.Adam([table, scorer.relations], lr=0.1)
    losses = []
    for _ in range(60):
        loss = relation_prediction(scorer, table[head], relation, table[tail], "tail").mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    result = scorer.relation_scores(table[head], table[tail]).argmax(-1)
    assert losses[-1] < 0.05 < losses[0] and torch.equal(result, relation)


def test_no_triples_have_zero_loss():
    scorer = make(("distmult", 4, {}))
    empty = torch.zeros(1, 0, dtype=torch.int64)
    loss = relation_prediction(scorer, normal(1, 0, 4), empty, normal(1, 0, 4), "tail")
    assert loss.shape == (1, 0)

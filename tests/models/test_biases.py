"""Learned biases on top of every scorer that has none of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scorer_cases import (
    RELATIONS,
    SCORERS,
    candidate_scores,
    case_of,
    contrast,
    directions,
    make,
    normal,
)

from kge_torchrec.config import ConfigError, ModelConfig
from kge_torchrec.models.losses import SoftmaxLoss
from kge_torchrec.models.model import TripleObjective
from kge_torchrec.models.regularizers import Regularizers
from kge_torchrec.models.scorers import build_scorer
from kge_torchrec.ranking.blocks import score_block

NAMES = [name for name in SCORERS if not SCORERS[name].has_biases]


@pytest.mark.parametrize("name", NAMES)
def test_every_call_adds_the_biases_of_head_and_tail(name):
    """Biases are added to the scores of the vectors; with inverses the anchor is the head."""
    for side, inverses in directions(case_of(name)):
        check_biases(name, side, inverses)


def check_biases(name, side, inverses):
    inner = make(case_of(name), inverses, normalization="layer")
    scorer = make(case_of(name), inverses, normalization="layer", biases=True)
    scorer.load_state_dict(inner.state_dict())
    dim = scorer.row_dim
    assert dim == inner.row_dim + 2
    anchor, target, relation = normal(2, 3, dim), normal(2, 3, dim), torch.randint(3, (2, 3))
    table, index = normal(4, dim), torch.tensor([[0, 2, 2, 1, 0], [1, 1, 3, 1, 2]])
    as_head, as_tail = (-2, -1) if inverses or side == "tail" else (-1, -2)

    def of_triples(scores, anchor, target):
        return scores + anchor[..., as_head] + target[..., as_tail]

    def alone(rows):
        return rows[..., :-2]

    close = torch.testing.assert_close
    positive = of_triples(inner.score(alone(anchor), relation, alone(target), side), anchor, target)
    against = of_triples(
        candidate_scores(inner, alone(anchor), relation, alone(table[index]), side),
        anchor[:, :, None], table[index][:, None],
    )  # fmt: skip
    close(scorer.score(anchor, relation, target, side), positive)
    close(candidate_scores(scorer, anchor, relation, table[index], side), against)
    close(contrast(scorer, anchor, relation, target, table[index], side), (positive, against))
    encoded = scorer.encode(anchor, relation, side)
    close(scorer.matrix(encoded, table, index, exact=False), against)
    relation_scores = inner.relation_scores(alone(anchor), alone(target), side)
    close(
        scorer.relation_scores(anchor, target, side),
        of_triples(relation_scores, anchor[:, :, None], target[:, :, None]),
    )
    assert scorer.row_comparison.reads_in_place == inner.comparison.reads_in_place


@pytest.mark.parametrize("name", ["complex", "rotate", "transe_l2", "pairre"])
def test_ranking_agrees_with_triples_in_any_block(name):
    """Scores are computed in single precision, by kernels where the scorer has them."""
    scorer = make(case_of(name), dtype=torch.float32, biases=True)
    table, anchor = torch.randn(300, scorer.row_dim), torch.randn(20, scorer.row_dim)
    relation = torch.arange(20) % RELATIONS
    with torch.no_grad():
        one_block = score_block(scorer, anchor, relation, table, "head")
        for start, stop in ((0, 1), (3, 20), (5, 170)):
            part = score_block(scorer, anchor, relation, table[start:stop], "head")
            assert torch.equal(part, one_block[:, start:stop])
        single = scorer.score(anchor, relation, table[:20], "head")
    torch.testing.assert_close(one_block.diagonal(), single, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["complex", "distmult"])
def test_regularizers_leave_biases_out(name):
    """And read complex numbers as pairs of the vector, which the biases come after."""
    scorer = make((name, 2, {}), False, dtype=torch.float32, biases=True)
    torch.nn.init.zeros_(scorer.relations)
    objective = TripleObjective(scorer, SoftmaxLoss(), ("tail",), Regularizers(n3=1.0))
    rows = torch.tensor([[3.0, 4.0, 7.0, -9.0]]).expand(2, 4)
    penalty = objective.regularizers.of_entities(objective.scorer, rows[:1])
    assert penalty.item() == pytest.approx(125 if name == "complex" else 27 + 64)


def config(**changes):
    return ModelConfig(**{"scorer": "complex", "dim": 8, "biases": True, **changes})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"dim": 7}, r"dim must be even for complex, got 5; the biases leave complex 5 of"),
        ({"scorer": "mure", "biases": False, "dim": 2}, "at least 3 for mure with biases"),
        ({"dim": 2}, "model.dim must be at least 3 for complex with biases"),
        ({"scorer": "mure"}, "model.biases: mure has biases of its own"),
        ({"scorer": "conve", "reciprocal": False}, "model.reciprocal must be true for conve"),
    ],
)
def test_scorers_without_biases_reject_them(changes, message):
    with pytest.raises(ConfigError, match=message):
        config(**changes)


def test_config_builds_a_scorer_with_biases():
    scorer = build_scorer(config(dim=10, normalization="layer"), RELATIONS)
    assert (scorer.row_dim, scorer.dim) == (10, 8)
    assert scorer.entity_norm.normalized_shape == (8,)
    start = lambda stream, out: np.copyto(out, stream.normal(size=out.shape))  # noqa: E731
    with torch.no_grad():
        scorer.reset_parameters(start, np.random.default_rng(0))
    assert scorer.relations.std() > 0.5
    assert scorer.formula.endswith("; plus b_h + c_t, the biases of head and tail.")

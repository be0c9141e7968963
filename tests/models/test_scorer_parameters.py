"""Gradients of scores, and the parameters that they are of."""

from dataclasses import asdict

import numpy as np
import pytest
import torch
from scorer_cases import (
    RELATIONS,
    case_of,
    every_case,
    every_direction,
    make,
    normal,
)

from kge_torchrec.config import ModelConfig
from kge_torchrec.models.scorers import SCORERS, SIDES, build_scorer


@every_direction
@pytest.mark.covering
def test_gradients_equal_finite_differences(case, side, inverses):
    scorer, dim = make(case, inverses, normalization="layer"), case[1]
    relation = torch.tensor([[0, 1, 1]])
    anchor, target = (normal(1, 3, dim).requires_grad_() for _ in range(2))
    inputs = (anchor, target, *scorer.parameters())

    def triples(anchor, target, *_):
        return scorer.score_triples(anchor, relation, target, side)

    def candidates(anchor, target, *_):
        return scorer.score_candidates(anchor, relation, target, side)

    for scores in (triples, candidates):
        # A backward written by hand is compared number by number, torch's own by a projection.
        assert torch.autograd.gradcheck(scores, inputs, fast_mode=case[0] != "rotate")


@pytest.mark.parametrize(
    "name",
    [
        "transe_l1",
        "transe_l2",
        "transh",
        "rotate",
        "rotate_l2",
        "rote",
        "roth",
        "mure",
        "pyke",
        "pairre",
        "house",
    ],
)
@pytest.mark.parametrize("side", SIDES)
def test_gradients_are_finite_where_a_candidate_is_the_query_itself(name, side):
    case = case_of(name)
    scorer, dim = make(case, SCORERS[name].needs_reciprocal), case[1]
    with torch.no_grad():
        scorer.relations.zero_()
    relation = torch.zeros(1, 1, dtype=torch.int64)
    anchor = normal(1, 1, dim).requires_grad_()
    target = anchor.detach().clone().requires_grad_()
    for score in (scorer.score_triples, scorer.score_candidates):
        scores = score(anchor, relation, target, side)
        gradients = torch.autograd.grad(scores.sum(), (anchor, target, scorer.relations))
        assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("inverses", [False, True])
def test_relation_factors_are_the_rows_that_a_query_uses(side, inverses):
    scorer = make(case_of("complex"), inverses, normalization="layer", input_dropout=0.5).train()
    assert len(scorer.relations) == scorer.relation_rows == RELATIONS * (1 + inverses)
    inverse = RELATIONS if inverses and side == "head" else 0
    relation = torch.tensor([[2, 0]])
    factors = scorer.relation_factors(relation, side)
    torch.testing.assert_close(factors, scorer.relations[relation + inverse])


@every_case
@pytest.mark.parametrize("normalization", ["none", "layer"])
@pytest.mark.covering
def test_initial_values_depend_only_on_the_stream(case, normalization):
    name, dim, options = case

    def fill(stream, array):
        array[...] = stream.normal(size=array.shape)

    starts = []
    for seed in (1, 1, 2):
        torch.manual_seed(len(starts))  # plays no part
        scorer = SCORERS[name](50, dim, True, normalization=normalization, **options)
        scorer.reset_parameters(fill, np.random.default_rng(seed))
        starts.append(dict(scorer.named_parameters()))
    one, same, other = starts
    for key, value in one.items():
        assert torch.equal(value, same[key]) and value.isfinite().all()
        constant = (
            key.endswith("bias") or "norm" in key or key in ("coefficients", "output.2.weight")
        )
        assert constant == torch.equal(value, other[key]), key
        assert constant or value.std() > 0.01


@pytest.mark.parametrize(
    ("name", "dim", "reciprocal", "options", "message"),
    [
        ("complex", 5, True, {}, "model.dim must be even for complex .*got 5"),
        ("rotate", 5, True, {}, "model.dim must be even for rotate .*got 5"),
        ("omult", 12, True, {}, "model.dim must be a multiple of 8 for omult .*got 12"),
        ("keci", 8, True, {"p": 1}, "model.dim must be a multiple of 3 for keci .*got 8"),
        ("convo", 8, False, {}, "model.reciprocal must be true for convo"),
        ("conve", 8, True, {"kernel_size": 5}, "kernel_size 5 does not fit the image of conve"),
        ("house", 8, True, {"block": 0}, "model.options.block must be an integer >= 1, got 0"),
        ("mure", 2, True, {}, "model.dim must be at least 3 for mure"),
        ("roth", 8, False, {}, "model.reciprocal must be true for roth"),
        ("meim", 6, True, {}, "model.dim must be a multiple of 4 for meim .*parts of one size"),
    ],
)
def test_invalid_scorers_raise(name, dim, reciprocal, options, message):
    with pytest.raises(ValueError, match=message):
        SCORERS[name](RELATIONS, dim, reciprocal, **options)


@every_case
def test_scorer_is_built_from_its_config(case):
    name, dim, options = case
    config = ModelConfig(name, dim, normalization="layer", dropout={"input": 0.25}, options=options)
    scorer = build_scorer(config, RELATIONS)
    assert (scorer.name, scorer.dim, scorer.reciprocal) == (name, dim, True)
    assert asdict(scorer.options) == config.scorer_options()
    assert scorer.input_dropout.p == 0.25 and scorer.hidden_dropout.p == 0
    assert isinstance(scorer.entity_norm, torch.nn.LayerNorm)

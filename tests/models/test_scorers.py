"""Scorers against the papers' formulas, which tests/oracle_scorers.py writes out in loops."""

import numpy as np
import oracle_scorers
import pytest
import torch
from scorer_cases import (
    CASES,
    RELATIONS,
    case_of,
    every_case,
    every_direction,
    every_scorer,
    make,
    normal,
)

from kge_torchrec.config import SCORER_NAMES
from kge_torchrec.kernels import comparisons, operators
from kge_torchrec.models.scorers import SCORERS
from kge_torchrec.ranking.blocks import score_block


def oracle(scorer, anchor, relation, target, side):
    """The paper's score of every query; with reciprocal a head query takes the inverse relation."""
    out = np.empty(relation.shape)
    for place in np.ndindex(*out.shape):
        ends = anchor[place].tolist(), target[place].tolist()
        row, query_side = int(relation[place]), side
        if side == "head" and scorer.reciprocal:
            row, query_side = row + RELATIONS, "tail"
        head, tail = ends if query_side == "tail" else ends[::-1]
        out[place] = oracle_scorers.score(scorer, head, row, tail, query_side)
    return out


def test_every_scorer_has_a_formula_and_a_case():
    names = set(SCORER_NAMES)
    assert (
        names == set(SCORERS) == {*oracle_scorers.FORMULAS, "coke"} == {case[0] for case in CASES}
    )


@every_direction
def test_triples_score_as_in_the_paper(case, side, inverses):
    check_formula(make(case, inverses), side)


@every_case
@pytest.mark.parametrize("normalization", ["unit", "layer"])
@pytest.mark.covering
def test_normalized_triples_score_as_in_the_paper(case, normalization):
    check_formula(make(case, normalization=normalization), "head")


def check_formula(scorer, side):
    anchor, target = normal(4, scorer.dim), normal(4, scorer.dim)
    relation = torch.randint(RELATIONS, (4,))
    scores = scorer.score_triples(anchor, relation, target, side).detach().numpy()
    expected = oracle(scorer, anchor, relation, target, side)
    np.testing.assert_allclose(scores, expected, 1e-6, 1e-6)


@every_scorer
@pytest.mark.parametrize("shape", [(), (5,), (2, 4)])
@pytest.mark.covering
def test_scores_have_the_expected_shape_and_dtype(case, shape):
    scorer = make(case, dtype=torch.float32)
    anchor, target = (normal(*shape, case[1], dtype=torch.float32) for _ in range(2))
    relation = torch.randint(RELATIONS, shape)
    scores = scorer.score_triples(anchor, relation, target, "head")
    assert scores.shape == shape and scores.dtype == torch.float32
    exact = scorer.double().score_triples(anchor.double(), relation, target.double(), "head")
    torch.testing.assert_close(scores.double(), exact, rtol=1e-3, atol=1e-3)


@every_direction
@pytest.mark.covering
def test_all_methods_compute_the_same_scores(case, side, inverses):
    """Triples, candidates, contrast, all rows, and the queries prepared for several blocks."""
    scorer, dim = make(case, inverses, normalization="layer"), case[1]
    chunks, queries, count = 2, 3, 4
    anchor, target = normal(chunks, queries, dim), normal(chunks, queries, dim)
    candidates, relation = normal(chunks, count, dim), torch.randint(RELATIONS, (chunks, queries))
    spread = [
        x.expand(chunks, queries, count, dim) for x in (anchor[:, :, None], candidates[:, None])
    ]
    expected = scorer.score_triples(
        spread[0], relation[..., None].expand(-1, -1, count), spread[1], side
    )
    close = torch.testing.assert_close
    close(scorer.score_candidates(anchor, relation, candidates, side), expected)
    positive, against = scorer.score_contrast(anchor, relation, target, candidates, side)
    close(positive, scorer.score_triples(anchor, relation, target, side))
    close(against, expected)
    close(scorer.score_all(anchor[0], relation[0], candidates[0], side), expected[0])
    prepared = scorer.prepared(anchor[0], relation[0], side)
    close(torch.cat([prepared(rows) for rows in candidates[0].split(3)], -1), expected[0])


@every_direction
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)]
)
@pytest.mark.covering
def test_scores_of_table_rows_equal_scores_of_copies(case, side, inverses, dtype):
    """Named by their places among all rows, they score as copies of them do, and learn as much."""
    scorer, dim = make(case, inverses, normalization="layer", dtype=dtype), case[1]
    anchor, target = (normal(2, 3, dim, dtype=dtype) for _ in range(2))
    table, relation = normal(4, dim, dtype=dtype).requires_grad_(), torch.randint(RELATIONS, (2, 3))
    index = torch.tensor([[0, 2, 2, 1, 0], [1, 1, 1, 1, 2]])
    query = scorer.encode_query(anchor, relation, side)
    actual = scorer.score_pairs(query, target), scorer.score_rows(query, table, index)
    expected = scorer.score_contrast(anchor, relation, target, table[index], side)
    gradients = []
    for positive, against in (actual, expected):
        loss = positive.sum() + (against * torch.linspace(-1, 1, 5, dtype=dtype)).sum()
        inputs = table, *scorer.parameters()
        gradients.append(
            torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
        )
    for one, other in zip((*actual, *gradients[0]), (*expected, *gradients[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@every_direction
@pytest.mark.covering
def test_relation_scores_equal_triple_scores(case, side, inverses):
    scorer, dim = make(case, inverses, normalization="layer"), case[1]
    anchor, target = normal(2, 3, dim), normal(2, 3, dim)
    actual = scorer.score_relations(anchor, target, side)
    assert actual.shape == (2, 3, scorer.relation_rows)
    for relation in range(RELATIONS):
        ids = torch.full((2, 3), relation)
        column = scorer.direct(ids, side)[0][0, 0]
        expected = scorer.score_triples(anchor, ids, target, side)
        torch.testing.assert_close(actual[..., column], expected)


@every_case
def test_empty_input_has_empty_scores(case):
    scorer, dim = make(case), case[1]
    none, some = torch.zeros(1, 0, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64)
    few, many = normal(1, 3, dim), normal(1, 0, dim)
    assert scorer.score_candidates(normal(1, 0, dim), none, few, "tail").shape == (1, 0, 3)
    assert scorer.score_candidates(normal(1, 2, dim), some, many, "tail").shape == (1, 2, 0)
    assert scorer.score_triples(normal(0, dim), none[0], normal(0, dim)).shape == (0,)


@pytest.mark.parametrize("elements", [1, 100, 1 << 18])
def test_distances_do_not_depend_on_the_block_size(monkeypatch, elements):
    monkeypatch.setattr(operators, "BLOCK_ELEMENTS", {"cpu": elements})
    query, rows = (normal(2, n, 6, dtype=torch.float64).requires_grad_() for n in (5, 3))
    distance = comparisons.distance("moduli", query, rows)
    a, b = (torch.view_as_complex(x.unflatten(-1, (-1, 2))) for x in (query, rows))
    expected = (a[:, :, None] - b[:, None]).abs().sum(-1)
    torch.testing.assert_close(distance, expected)
    weight = normal(*distance.shape, dtype=torch.float64)
    for one, other in zip(
        torch.autograd.grad((distance * weight).sum(), (query, rows)),
        torch.autograd.grad((expected * weight).sum(), (query, rows)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["transh", "mure", "pairre", "house", "roth", "conve", "coke"])
@pytest.mark.parametrize("elements", [1, 60])
@pytest.mark.covering
def test_pairs_do_not_depend_on_the_block_size(monkeypatch, name, elements):
    """Neither values nor gradients; head queries of MuRE, relations of the networks."""
    case = case_of(name)
    reciprocal = SCORERS[name].needs_reciprocal
    scorer, dim = make(case, reciprocal), case[1]
    anchor, rows = normal(2, 5, dim).requires_grad_(), normal(2, 3, dim).requires_grad_()
    relation, inputs = torch.randint(RELATIONS, (2, 5)), (anchor, rows, *scorer.parameters())

    def values_and_gradients():
        pairs = scorer.score_candidates(anchor, relation, rows, "head")
        relations = scorer.score_relations(anchor[:, :3], rows)
        total = pairs.square().sum() + relations.square().sum()
        gradients = torch.autograd.grad(total, inputs, allow_unused=True)
        return pairs.detach(), relations.detach(), *(g for g in gradients if g is not None)

    expected = values_and_gradients()
    monkeypatch.setattr(operators, "BLOCK_ELEMENTS", {"cpu": elements})
    for one, other in zip(values_and_gradients(), expected, strict=True):
        torch.testing.assert_close(one, other)


# Digits


@pytest.mark.parametrize(
    "name", ["transe_l1", "transe_l2", "transh", "rotate", "rote", "mure", "pyke", "house"]
)
def test_small_distances_between_long_rows_keep_their_digits(name):
    """Ranking scores by candidates, training by triples: near the answer they must not differ."""
    scorer = make((name, 64, {}), dtype=torch.float32)
    relation = torch.zeros(1, 1, dtype=torch.int64)
    head = 100 * normal(1, 1, 64, dtype=torch.float32)
    query = scorer.encode_query(head, relation, "tail")
    query = query.inner if name in ("mure", "pyke") else query
    tail = (query if isinstance(query, torch.Tensor) else query.point).detach()
    if name == "house":
        tail = tail.mT.flatten(-2)
    if name == "mure":
        tail = torch.cat([tail, torch.zeros(1, 1, 2)], -1)
    tail = tail + 1e-3 * normal(1, 40, 64, dtype=torch.float32)
    scores = scorer.score_candidates(head, relation, tail, "tail")[0, 0]
    expected = scorer.score_triples(head.expand(1, 40, -1)[0], relation[0].expand(40), tail[0])
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-6 if name == "pyke" else 0)


@every_scorer
def test_bits_depend_only_on_the_query_and_the_row(case):
    """Exact ranking needs this: ties stay ties in every block."""
    name, dim, options = case
    scorer = make((name, dim, options), dtype=torch.float32, normalization="layer")
    table, anchor = torch.randn(300, dim), torch.randn(70, dim)
    relation = torch.arange(70) % RELATIONS
    with torch.no_grad():
        one_block = score_block(scorer, anchor, relation, table, "head")
        for start, stop in ((0, 1), (3, 20), (5, 170), (250, 300)):
            part = score_block(scorer, anchor, relation, table[start:stop], "head")
            assert torch.equal(part, one_block[:, start:stop])

"""Scorers against the papers' formulas, written out here on plain numpy arrays."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kge_torchrec.config import SCORER_NAMES
from kge_torchrec.models.scorers import SCORERS, SIDES
from kge_torchrec.models.scorers import complex_distance as blocked

RELATIONS, DIM = 3, 6


def numbers(rows):
    """Interleaved (re, im, re, im, ...) as complex numbers."""
    return rows[..., 0::2] + 1j * rows[..., 1::2]


# score(h, r, t) of rows; r is what the scorer keeps for a relation.
FORMULAS = {
    "transe_l1": lambda h, r, t: -np.abs(h + r - t).sum(-1),
    "transe_l2": lambda h, r, t: -np.sqrt(((h + r - t) ** 2).sum(-1)),
    "distmult": lambda h, r, t: (h * r * t).sum(-1),
    "complex": lambda h, r, t: (numbers(h) * numbers(r) * numbers(t).conj()).sum(-1).real,
    "rotate": lambda h, r, t: -np.abs(numbers(h) * np.exp(1j * r) - numbers(t)).sum(-1),
}
COMPLEX = ("complex", "rotate")

every_scorer = pytest.mark.parametrize("name", SCORERS)
both_sides = pytest.mark.parametrize("side", SIDES)
reciprocal_or_not = pytest.mark.parametrize("reciprocal", [False, True])


def make(name, reciprocal=False, dim=DIM, dtype=torch.float64, seed=0):
    scorer = SCORERS[name](RELATIONS, dim, reciprocal).to(dtype)
    torch.manual_seed(seed)
    with torch.no_grad():
        scorer.relations.normal_()
    return scorer


def normal(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


def formula(name, scorer, anchor, relation, target, side):
    """The paper's score of a query; with reciprocal a head query uses the relation's twin."""
    relations = scorer.relations.detach().double().numpy()
    anchor, target = (rows.detach().double().numpy() for rows in (anchor, target))
    score = FORMULAS[name]
    if side == "tail":
        return score(anchor, relations[relation.numpy()], target)
    if scorer.reciprocal:
        return score(anchor, relations[relation.numpy() + RELATIONS], target)
    return score(target, relations[relation.numpy()], anchor)


def test_config_names_these_scorers():
    assert set(SCORER_NAMES) == set(SCORERS) == set(FORMULAS)


@every_scorer
@both_sides
@reciprocal_or_not
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (5,), (2, 4)])
def test_triples_score_as_in_the_paper(name, side, reciprocal, dtype, shape):
    scorer = make(name, reciprocal, dtype=dtype)
    anchor, target = normal(*shape, DIM, dtype=dtype), normal(*shape, DIM, dtype=dtype)
    relation = torch.randint(RELATIONS, shape)
    scores = scorer.score_triples(anchor, relation, target, side)
    assert scores.shape == shape and scores.dtype == dtype
    expected = formula(name, scorer, anchor, relation, target, side)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    np.testing.assert_allclose(scores.detach().numpy(), expected, tolerance, tolerance)


@every_scorer
@both_sides
@reciprocal_or_not
def test_candidates_score_as_triples_do(name, side, reciprocal):
    scorer = make(name, reciprocal)
    chunks, queries, count = 2, 3, 4
    anchor, candidates = normal(chunks, queries, DIM), normal(chunks, count, DIM)
    relation = torch.randint(RELATIONS, (chunks, queries))
    scores = scorer.score_candidates(anchor, relation, candidates, side)
    assert scores.shape == (chunks, queries, count)
    for c, q, k in np.ndindex(*scores.shape):
        one = scorer.score_triples(anchor[c, q], relation[c, q], candidates[c, k], side)
        torch.testing.assert_close(scores[c, q, k], one)


@every_scorer
@both_sides
@reciprocal_or_not
def test_score_all_scores_every_row(name, side, reciprocal):
    scorer = make(name, reciprocal)
    anchor, rows, relation = normal(4, DIM), normal(7, DIM), torch.randint(RELATIONS, (4,))
    scores = scorer.score_all(anchor, relation, rows, side)
    assert scores.shape == (4, 7)
    for entity, row in enumerate(rows):
        one = scorer.score_triples(anchor, relation, row.expand(4, -1), side)
        torch.testing.assert_close(scores[:, entity], one)


@every_scorer
def test_nothing_to_score(name):
    scorer = make(name)
    none, some = torch.zeros(1, 0, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64)
    assert scorer.score_candidates(normal(1, 0, DIM), none, normal(1, 3, DIM), "tail").numel() == 0
    assert scorer.score_candidates(normal(1, 2, DIM), some, normal(1, 0, DIM), "tail").numel() == 0


@pytest.mark.parametrize("name", ["transe_l1", "transe_l2", "rotate"])
def test_small_distances_between_long_rows_keep_their_digits(name):
    """Ranking scores by candidates, training by triples: near the answer they must not differ."""
    scorer = make(name, dim=64, dtype=torch.float32)
    relation = torch.zeros(1, 1, dtype=torch.int64)
    head = 100 * normal(1, 1, 64, dtype=torch.float32)
    tail = scorer.query(head, relation, "tail") + 1e-3 * normal(1, 40, 64, dtype=torch.float32)
    scores = scorer.score_candidates(head, relation, tail, "tail")[0, 0]
    expected = scorer.score_triples(head[0], relation[0], tail[0])
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=0)


# Gradients


@every_scorer
@both_sides
@reciprocal_or_not
def test_gradients(name, side, reciprocal):
    scorer = make(name, reciprocal, dim=4)
    relation = torch.tensor([[0, 1, 1]])
    anchor, target = (normal(1, 3, 4).requires_grad_() for _ in range(2))

    def triples(anchor, target, _):
        return scorer.score_triples(anchor, relation, target, side)

    def candidates(anchor, target, _):
        return scorer.score_candidates(anchor, relation, target, side)

    for scores in (triples, candidates):
        assert torch.autograd.gradcheck(scores, (anchor, target, scorer.relations))


@every_scorer
@both_sides
def test_gradients_are_finite_where_a_candidate_is_the_query_itself(name, side):
    scorer = make(name)
    relation = torch.zeros(1, 1, dtype=torch.int64)
    anchor = normal(1, 1, DIM).requires_grad_()
    target = scorer.query(anchor, relation, side).detach().requires_grad_()
    for score in (scorer.score_triples, scorer.score_candidates):
        scores = score(anchor, relation, target, side)
        gradients = torch.autograd.grad(scores.sum(), (anchor, target, scorer.relations))
        assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("numbers_at_once", [1, 100, 1 << 18])
def test_distances_do_not_depend_on_the_block_size(monkeypatch, numbers_at_once):
    monkeypatch.setattr(blocked, "BLOCK_NUMBERS", numbers_at_once)
    query, rows = (normal(2, n, 6).requires_grad_() for n in (5, 3))
    distance = blocked.complex_distance(query, rows)
    a, b = (torch.view_as_complex(x.unflatten(-1, (-1, 2))) for x in (query, rows))
    expected = (a[:, :, None] - b[:, None]).abs().sum(-1)
    torch.testing.assert_close(distance, expected)
    weight = normal(*distance.shape)
    for one, other in zip(
        torch.autograd.grad((distance * weight).sum(), (query, rows)),
        torch.autograd.grad((expected * weight).sum(), (query, rows)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


# What the papers say of each model.  Rows: head, tail, and whatever else the statement needs.

ROWS = arrays(np.float64, (4, DIM), elements=st.floats(-4, 4, width=32))
EASY = settings(max_examples=30, deadline=None)


def score(name, head, relation, tail):
    """Score of a triple whose relation is given as a row."""
    scorer = make(name)
    row = torch.as_tensor(relation, dtype=torch.float64)
    with torch.no_grad():
        scorer.relations[1] = row
        rows = torch.as_tensor(np.array(head)), torch.as_tensor(np.array(tail))
        return scorer.score_triples(rows[0], torch.tensor(1), rows[1]).item()


@EASY
@given(ROWS)
def test_distmult_is_symmetric(rows):
    head, relation, tail, _ = rows
    assert score("distmult", head, relation, tail) == pytest.approx(
        score("distmult", tail, relation, head)
    )


@EASY
@given(ROWS)
def test_complex_is_symmetric_for_real_and_antisymmetric_for_imaginary_relations(rows):
    head, relation, tail, _ = rows
    real, imaginary = relation.copy(), relation.copy()
    real[1::2], imaginary[0::2] = 0, 0
    forth, back = score("complex", head, real, tail), score("complex", tail, real, head)
    assert forth == pytest.approx(back, abs=1e-9)
    forth, back = score("complex", head, imaginary, tail), score("complex", tail, imaginary, head)
    assert forth == pytest.approx(-back, abs=1e-9)


@EASY
@given(ROWS)
def test_transe_sees_differences_only(rows):
    head, relation, tail, shift = rows
    for name in ("transe_l1", "transe_l2"):
        moved = score(name, head + shift, relation, tail + shift)
        assert moved == pytest.approx(score(name, head, relation, tail), abs=1e-9)
        assert score(name, head, relation, head + relation) == pytest.approx(0, abs=1e-9)


@EASY
@given(ROWS)
def test_rotate_inverts_and_composes(rows):
    head, tail, first, second = rows
    first, second = first[: DIM // 2], second[: DIM // 2]
    # -r undoes r.  sqrt(1e-12) = 1e-6 per number is what the score of a perfect match may miss.
    forth, back = score("rotate", head, first, tail), score("rotate", tail, -first, head)
    assert forth == pytest.approx(back, abs=1e-5)
    middle = numbers(head) * np.exp(1j * first)
    middle = np.stack([middle.real, middle.imag], -1).reshape(-1)
    composed = score("rotate", head, first + second, tail)
    assert composed == pytest.approx(score("rotate", middle, second, tail), abs=1e-5)
    assert score("rotate", head, first, middle) == pytest.approx(0, abs=1e-5)


# Parameters


@pytest.mark.parametrize("name", COMPLEX)
def test_odd_dim_raises(name):
    with pytest.raises(ValueError, match=rf"dim must be even for {name}.*got 5"):
        SCORERS[name](RELATIONS, 5)


@every_scorer
@both_sides
@reciprocal_or_not
def test_relation_factors_are_the_rows_a_query_uses(name, side, reciprocal):
    scorer = make(name, reciprocal)
    assert len(scorer.relations) == scorer.relation_rows == RELATIONS * (1 + reciprocal)
    twin = RELATIONS if reciprocal and side == "head" else 0
    relation = torch.tensor([[2, 0]])
    factors = scorer.relation_factors(relation, side)
    torch.testing.assert_close(factors, scorer.relations[relation + twin])


@every_scorer
def test_start_is_a_function_of_the_stream(name):
    def fill(stream, array):
        array[...] = stream.normal(size=array.shape)

    scorers = [SCORERS[name](50, DIM) for _ in range(3)]
    for scorer, seed in zip(scorers, (1, 1, 2), strict=True):
        scorer.reset_parameters(fill, np.random.default_rng(seed))
    one, same, other = (scorer.relations for scorer in scorers)
    assert torch.equal(one, same) and not torch.equal(one, other) and one.isfinite().all()
    if name == "rotate":  # phases, all over the circle whatever the fill
        assert one.abs().max() <= math.pi and (one.abs() > math.pi / 2).any()

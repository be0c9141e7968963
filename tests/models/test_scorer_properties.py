"""Identities that tie scorers together: special cases of one are another."""

import math

import numpy as np
import pytest
import torch
from scorer_cases import SCORERS, candidate_scores

DIM = 16
seeds = pytest.mark.parametrize("seed", range(2))


def score(name, head, relation, tail, /, set_up=None, **options):
    """Score of a triple of rows; ``set_up(scorer)`` may change parameters before."""
    kind = SCORERS[name]
    scorer = kind(1, len(head) - 2 * kind.has_biases, kind.needs_reciprocal, **options)
    scorer = scorer.double().eval()
    with torch.no_grad():
        scorer.relations[0] = torch.as_tensor(relation)
        if set_up is not None:
            set_up(scorer)
        rows = torch.as_tensor(head), torch.as_tensor(tail)
        return scorer.score(rows[0], torch.tensor(0), rows[1]).item()


def rows(seed, count, dim=DIM):
    return np.random.default_rng(seed).normal(size=(count, dim))


def close(value):
    return pytest.approx(value, rel=1e-6, abs=1e-6)


def interleaved(*parts):
    """Components as rows of numbers: (a_0, b_0, ..., a_1, b_1, ...)."""
    return np.stack(parts, -1).reshape(-1)


# Distances


@seeds
def test_mure_without_scale_and_bias_is_a_squared_transe(seed):
    head, relation, tail = rows(seed, 3)
    biases = np.zeros(2)
    result = score(
        "mure", np.concatenate([head, biases]), np.concatenate([np.ones(DIM), relation]),
        np.concatenate([tail, biases]),
    )  # fmt: skip
    assert result == close(-(score("transe_l2", head, -relation, tail) ** 2))


@seeds
def test_rote_without_translation_is_a_squared_rotation_and_the_inverse_undoes_it(seed):
    head, tail, shift = rows(seed, 3)
    phases = rows(seed + 10, 1, DIM // 2)[0]
    relation = np.concatenate([phases, shift])
    numbers = (head[0::2] + 1j * head[1::2]) * np.exp(1j * phases)
    moved = interleaved(numbers.real, numbers.imag) + shift
    assert score("rote", head, relation, tail) == close(-np.sum((moved - tail) ** 2))
    still = np.concatenate([0 * phases, shift])
    assert score("rote", head, still, tail) == close(-(score("transe_l2", head, shift, tail) ** 2))
    assert score("rote", head, relation, moved) == close(0)


def curved(phases, shift, c):
    """A relation of RotH of curvature c."""
    return np.concatenate([phases, shift, [math.log(math.expm1(c))]])


@seeds
def test_roth_of_little_curvature_is_rote(seed):
    """Lengths in the ball are twice those of the tangent space at 0."""
    head, tail, shift = rows(seed, 3)
    phases = rows(seed + 10, 1, DIM // 2)[0]
    result = score("roth", head, curved(phases, shift, 1e-9), tail)
    assert result == close(4 * score("rote", head, np.concatenate([phases, shift]), tail))


@pytest.mark.parametrize("length", [0.0, 1e-20, 1e-4, 1.0, 5.0, 20.0, 1e4])
def test_roth_has_finite_scores_and_gradients_in_single_precision(length):
    """At 0, near the boundary and far beyond what tanh tells apart; also of a point with itself."""
    torch.manual_seed(0)
    scorer = SCORERS["roth"](1, DIM, True)
    torch.nn.init.normal_(scorer.relations)
    with torch.no_grad():
        scorer.relations[1:, DIM // 2 : -1] = 0
    anchor, others = (torch.nn.functional.normalize(torch.randn(1, n, DIM), dim=-1) for n in (4, 5))
    anchor, others = (length * anchor).requires_grad_(), (length * others)
    others[0, 0] = anchor[0, 0].detach()
    others.requires_grad_()
    for relation in (0, 1):
        ids = torch.full((1, 4), relation)
        for scores in (
            candidate_scores(scorer, anchor, ids, others, "tail"),
            scorer.score(anchor, ids, others[:, :4], "tail"),
        ):
            assert scores.isfinite().all() and (scores <= 0).all()
            results = torch.autograd.grad(scores.sum(), (anchor, others, scorer.relations))
            assert all(gradient.isfinite().all() for gradient in results)


@seeds
def test_house_in_the_plane_is_rotate(seed):
    """Two reflections rotate by twice the angle between their mirrors."""
    head, tail = rows(seed, 2)
    first, second = rows(seed + 10, 2, DIM // 2)
    mirrors = [interleaved(np.cos(angle), np.sin(angle)) for angle in (first, second)]
    result = score("house", head, np.concatenate(mirrors), tail, block=2, projections=0)
    assert result == close(score("rotate", head, 2 * (first - second), tail))


# Special cases


@seeds
def test_models_that_contain_distmult(seed):
    head, relation, tail = rows(seed, 3)
    expected = score("distmult", head, relation, tail)
    for name in ("keci", "ckeci"):
        assert score(name, head, relation, tail, p=0, q=0) == close(expected)
    assert score("decal", head, relation, tail, p=0, q=0, r=0) == close(expected)
    assert score("lfmult", head, relation, tail, degree=0) == close(expected)
    assert score("rescal", head, np.diag(relation).reshape(-1), tail) == close(expected)
    for name, size in (("complex", 2), ("qmult", 4), ("omult", 8)):
        real = lambda row, n=size: interleaved(row, *np.zeros((n - 1, DIM)))  # noqa: E731
        assert score(name, real(head), real(relation), real(tail)) == close(expected)

    def superdiagonal(scorer):
        scorer.core.zero_()
        for k in range(DIM):
            scorer.core[k, k, k] = 1

    assert score("tucker", head, relation, tail, superdiagonal) == close(expected)


def fixed_coefficients(scorer):
    scorer.coefficients.fill_(1)


@seeds
def test_models_that_contain_complex(seed):
    head, relation, tail = rows(seed, 3)
    expected = score("complex", head, relation, tail)
    assert score("ckeci", head, relation, tail, p=0, q=1) == close(expected)
    assert score("decal", head, relation, tail, p=0, q=1, r=0) == close(expected)
    assert score("keci", head, relation, tail, fixed_coefficients, p=0, q=1) == close(expected)
    wide = lambda row: interleaved(row[0::2], row[1::2], *np.zeros((2, DIM // 2)))  # noqa: E731
    assert score("qmult", wide(head), wide(relation), wide(tail)) == close(expected)

    def convolution_of(value):
        def set_up(scorer):
            for parameter in scorer.convolution.parameters():
                parameter.fill_(0.3)
            scorer.convolution.output_norm.weight.zero_()
            scorer.convolution.output_norm.bias.fill_(value)

        return set_up

    assert score("conex", head, relation, tail, convolution_of(1)) == close(expected)
    assert score("aconex", head, relation, tail, convolution_of(0)) == close(expected)
    for name, plain in (("convq", "qmult"), ("convo", "omult")):
        expected = score(plain, head, relation, tail)
        assert score(name, head, relation, tail, convolution_of(1)) == close(expected)


@seeds
def test_tucker_with_all_matrices_is_rescal(seed):
    head, tail = rows(seed, 2, 4)
    matrix = rows(seed + 10, 1, 16)[0]

    def all_matrices(scorer):
        scorer.core.copy_(torch.eye(16).view(16, 4, 4))

    result = score("tucker", head, matrix, tail, all_matrices, relation_dim=16)
    assert result == close(score("rescal", head, matrix, tail))


@seeds
def test_meim_of_one_partition_is_tucker_and_of_all_is_distmult(seed):
    head, relation, tail = rows(seed, 3, 6)
    core = rows(seed + 10, 1, 6**3)[0].reshape(6, 6, 6)

    def the_core(scorer):
        scorer.core.copy_(torch.as_tensor(core).view_as(scorer.core))

    one = score("meim", head, relation, tail, the_core, partitions=1)
    assert one == close(score("tucker", head, relation, tail, the_core))
    ones = lambda scorer: scorer.core.fill_(1)  # noqa: E731
    every = score("meim", head, relation, tail, ones, partitions=6)
    assert every == close(score("distmult", head, relation, tail))


@seeds
def test_duale_without_its_second_part_is_quate(seed):
    head, relation, tail = rows(seed, 3)
    wide = lambda row: np.concatenate(  # noqa: E731
        [row.reshape(-1, 4), np.zeros((DIM // 4, 4))], 1
    ).reshape(-1)
    expected = score("quate", head, relation, tail)
    assert score("duale", wide(head), wide(relation), wide(tail)) == close(expected)


@seeds
def test_quate_ignores_the_length_of_relations(seed):
    head, relation, tail = rows(seed, 3)
    lengths = np.repeat(np.exp(rows(seed + 10, 1, DIM // 4)[0]), 4)
    assert score("quate", head, lengths * relation, tail) == close(
        score("quate", head, relation, tail)
    )
    unit = relation.reshape(-1, 4) / np.linalg.norm(relation.reshape(-1, 4), axis=1)[:, None]
    assert score("qmult", head, unit.reshape(-1), tail) == close(
        score("quate", head, relation, tail)
    )


# Operators


@seeds
@pytest.mark.parametrize(("name", "size", "options"), [
    ("distmult", 4, {"head": "diagonal"}), ("distmult", 4, {"tail": "diagonal"}),
    ("complex", 4, {"head": "complex"}), ("rescal", 16, {"head": "linear"}),
    ("transe_l2", 4, {"head": "translation", "comparator": "l2"}),
])  # fmt: skip
def test_one_operator_is_a_scorer_of_its_own(seed, name, size, options):
    head, tail, relation = *rows(seed, 2, 4), rows(seed + 10, 1, size)[0]
    result = score("operator", head, relation, tail, **options)
    assert result == close(score(name, head, relation, tail))


@pytest.mark.parametrize("operator", ["diagonal", "complex", "linear", "translation"])
def test_operators_start_near_the_identity(operator):
    def fill(stream, array):
        array[...] = stream.normal(scale=1e-3, size=array.shape)

    scorer = SCORERS["operator"](2, 8, head=operator, tail=operator)
    with torch.no_grad():
        scorer.reset_parameters(fill, np.random.default_rng(0))
    head, tail = torch.from_numpy(rows(0, 2, 8)).float()
    result = scorer.score(head, torch.tensor(1), tail)
    assert result.item() == pytest.approx((head * tail).sum().item(), abs=0.1)

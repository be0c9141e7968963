"""Properties of scorers from their papers: symmetries, inverses, special cases."""

import math

import numpy as np
import pytest
import torch

from kge_torchrec.models.scorers import SCORERS

DIM = 16
seeds = pytest.mark.parametrize("seed", range(3))


def score(name, head, relation, tail, /, set_up=None, **options):
    """Score of a triple of rows; ``set_up(scorer)`` may change parameters before."""
    scorer = SCORERS[name](1, len(head), SCORERS[name].needs_reciprocal, **options)
    scorer = scorer.double().eval()
    with torch.no_grad():
        scorer.relations[0] = torch.as_tensor(relation)
        if set_up is not None:
            set_up(scorer)
        rows = torch.as_tensor(head), torch.as_tensor(tail)
        return scorer.score_triples(rows[0], torch.tensor(0), rows[1]).item()


def rows(seed, count, dim=DIM):
    return np.random.default_rng(seed).normal(size=(count, dim))


def close(value):
    return pytest.approx(value, rel=1e-6, abs=1e-6)


def interleaved(*parts):
    """Components as rows of numbers: (a_0, b_0, ..., a_1, b_1, ...)."""
    return np.stack(parts, -1).reshape(-1)


# Symmetric, antisymmetric, inverse


@seeds
@pytest.mark.parametrize(
    ("name", "options"),
    [("distmult", {}), ("pyke", {}), ("lfmult", {"degree": 3}), ("keci", {"p": 0, "q": 0})],
)
def test_symmetric_in_head_and_tail(seed, name, options):
    head, relation, tail = rows(seed, 3)
    forth, back = score(name, head, relation, tail, **options), score(
        name, tail, relation, head, **options
    )  # fmt: skip
    assert forth == close(back)


@seeds
@pytest.mark.parametrize(("name", "size"), [("complex", 2), ("qmult", 4), ("quate", 4),
                                            ("omult", 8)])  # fmt: skip
def test_real_relations_are_symmetric_and_imaginary_ones_antisymmetric(seed, name, size):
    head, relation, tail = rows(seed, 3)
    real, imaginary = relation.reshape(-1, size).copy(), relation.reshape(-1, size).copy()
    real[:, 1:], imaginary[:, 0] = 0, 0
    real, imaginary = real.reshape(-1), imaginary.reshape(-1)
    assert score(name, head, real, tail) == close(score(name, tail, real, head))
    assert score(name, head, imaginary, tail) == close(-score(name, tail, imaginary, head))


@seeds
def test_rescal_transposes(seed):
    head, tail = rows(seed, 2, 4)
    matrix = rows(seed + 10, 4, 4)
    of = lambda m, h, t: score("rescal", h, m.reshape(-1), t)  # noqa: E731
    assert of(matrix, head, tail) == close(of(matrix.T, tail, head))
    assert of(matrix - matrix.T, head, tail) == close(-of(matrix - matrix.T, tail, head))


@seeds
def test_simple_swaps_a_relation_with_its_inverse(seed):
    head, relation, tail = rows(seed, 3)
    swapped = np.roll(relation, DIM // 2)
    assert score("simple", head, relation, tail) == close(score("simple", tail, swapped, head))


@seeds
def test_pairre_is_symmetric_inverts_and_ignores_lengths(seed):
    head, relation, tail = rows(seed, 3)
    of_head, of_tail = rows(seed + 10, 2)
    both = lambda a, b: np.concatenate([a, b])  # noqa: E731
    forth = score("pairre", head, both(of_head, of_tail), tail)
    assert forth == close(score("pairre", tail, both(of_tail, of_head), head))
    assert forth == close(score("pairre", 3 * head, both(of_head, of_tail), 0.2 * tail))
    same = both(of_head, np.sign(relation) * of_head)  # squares agree, entry by entry
    assert score("pairre", head, same, np.sign(relation) * head) == close(0)


@seeds
def test_householder_reflection_undoes_itself(seed):
    head, relation, tail = rows(seed, 3)
    options = {"block": 4, "reflections": 1, "projections": 0}
    forth, back = (score("house", *t, **options)
                   for t in ((head, relation, tail), (tail, relation, head)))  # fmt: skip
    assert forth == close(back)


# Distances


@seeds
@pytest.mark.parametrize("name", ["transe_l1", "transe_l2"])
def test_transe_depends_only_on_differences(seed, name):
    head, relation, tail, shift = rows(seed, 4)
    assert score(name, head + shift, relation, tail + shift) == close(
        score(name, head, relation, tail)
    )
    assert score(name, head, relation, head + relation) == close(0)


@seeds
def test_transh_depends_only_on_the_hyperplane(seed):
    head, normal, tail, shift = rows(seed, 4)
    relation = np.concatenate([normal, shift])
    expected = score("transh", head, relation, tail)
    assert score("transh", head + 2 * normal, relation, tail - normal) == close(expected)
    assert score("transh", head, np.concatenate([5 * normal, shift]), tail) == close(expected)
    assert score("transh", head, relation, head + shift + 7 * normal) == close(0)


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
def test_rotate_inverts_and_composes(seed):
    head, tail = rows(seed, 2)
    first, second = rows(seed + 10, 2, DIM // 2)
    assert score("rotate", head, first, tail) == close(score("rotate", tail, -first, head))
    numbers = (head[0::2] + 1j * head[1::2]) * np.exp(1j * first)
    middle = interleaved(numbers.real, numbers.imag)
    composed = score("rotate", head, first + second, tail)
    assert composed == close(score("rotate", middle, second, tail))
    assert score("rotate", head, first, middle) == pytest.approx(0, abs=1e-4)


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


@seeds
@pytest.mark.parametrize("c", [0.1, 1.0, 3.0])
def test_roth_translations_along_a_line_add_up(seed, c):
    """Along a line through 0 translations add up, and distances are twice the differences."""
    unit, zero = rows(seed, 1)[0], np.zeros(DIM // 2)
    unit /= np.linalg.norm(unit)
    result = score("roth", 0.5 * unit, curved(zero, 0.7 * unit, c), 0.2 * unit)
    assert result == close(-((2 * (0.5 + 0.7 - 0.2)) ** 2))
    # A rotation of all keeps every distance.
    head, tail = rows(seed + 5, 2) / 4
    turn = np.full(DIM // 2, 0.8)
    numbers = (tail[0::2] + 1j * tail[1::2]) * np.exp(0.8j)
    turned = interleaved(numbers.real, numbers.imag)
    without = score("roth", head, curved(zero, 0 * head, c), tail)
    assert score("roth", head, curved(turn, 0 * head, c), turned) == close(without)


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
            scorer.score_candidates(anchor, ids, others, "tail"),
            scorer.score_triples(anchor, ids, others[:, :4], "tail"),
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


@seeds
@pytest.mark.parametrize("name", ["quate", "house"])
def test_rotations_keep_lengths(seed, name):
    """<h r, h r> = <h, h>: no tail of a length scores higher than the rotated head."""
    head, relation = rows(seed, 2)
    if name == "quate":
        scorer = SCORERS[name](1, DIM).double()
        relation = torch.as_tensor(relation)
    else:
        scorer = SCORERS[name](1, DIM, block=4, projections=0).double()
        relation = torch.as_tensor(rows(seed + 10, 1, scorer.relations.shape[1])[0])
    with torch.no_grad():
        scorer.relations[0] = relation
        query = scorer.encode_query(torch.as_tensor(head), torch.tensor(0), "tail")
    turned = query if name == "quate" else query.point
    assert turned.norm().item() == close(np.linalg.norm(head))


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
def test_keci_scales_its_basis_vectors(seed):
    """At the start only the numbers along 1 count; a factor c weighs e_1 by c, e_1 e_1 by c c."""
    head, relation, tail = rows(seed, 3)
    real = score("distmult", head[0::2], relation[0::2], tail[0::2])
    assert score("keci", head, relation, tail, lambda s: s.coefficients.zero_()) == close(real)

    def third(scorer):
        scorer.coefficients.fill_(1 / 3)

    mixed = sum(
        head[i] * relation[i + 1] * tail[i + 1] + head[i + 1] * relation[i] * tail[i + 1]
        for i in range(0, DIM, 2)
    )
    square = score("distmult", head[1::2], relation[1::2], tail[0::2])
    for (p, q), sign in (((0, 1), -1), ((1, 0), 1)):
        result = score("keci", head, relation, tail, third, p=p, q=q)
        assert result == close(real + mixed / 3 + sign * square / 9)


@seeds
def test_clifford_bivectors_ignore_the_tail(seed):
    """With t = 0 the score is the sum of h_i r_k - h_k r_i, antisymmetric in h and r."""
    head, relation = rows(seed, 2, 15)
    for name, options in (("ckeci", {"p": 2, "q": 2}), ("decal", {"p": 1, "q": 2, "r": 1})):
        forth, back = (score(name, x, y, np.zeros(15), **options)
                       for x, y in ((head, relation), (relation, head)))  # fmt: skip
        assert forth == close(-back) and abs(forth) > 1e-3
    assert score("ckeci", head, relation, np.zeros(15), p=1, q=3) == close(
        score("ckeci", head, relation, np.zeros(15), p=3, q=1)
    )


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


@pytest.mark.parametrize("reciprocal", [False, True])
def test_meim_is_penalised_for_matrices_that_are_not_orthogonal(reciprocal):
    torch.manual_seed(0)
    scorer = SCORERS["meim"](2, 6, reciprocal, partitions=2, relation_dim=4, orthogonality=0.3)
    for parameter in scorer.double().parameters():
        torch.nn.init.normal_(parameter)
    relation = torch.tensor([[0, 1, 1]])
    actual = scorer.relation_penalty(relation, "head").detach()
    assert actual.shape == (1, 3)
    for place, ident in enumerate((0, 1, 1)):
        row = scorer.relations.detach()[ident + 2 * reciprocal].view(2, 4)
        expected = 0.0
        for k in range(2):
            matrix = sum(row[k, w] * scorer.core.detach()[k, w] for w in range(4)).numpy()
            expected += 0.3 * np.sum((matrix.T @ matrix - np.eye(3)) ** 2)
        assert actual[0, place].item() == close(expected)
    assert not SCORERS["meim"](2, 6, partitions=2).penalizes_relations


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


def test_lfmult_equals_hand_computed_integral():
    """int_0^1 (1 + 2 x) x (3 - x) dx = 3/2 + 5/3 - 1/2."""
    result = score("lfmult", np.array([1.0, 2.0]), np.array([0.0, 1.0]), np.array([3.0, -1.0]))
    assert result == close(3 / 2 + 5 / 3 - 2 / 4)


def test_shallom_ranks_by_the_score_of_the_relation_between_two_entities():
    """Its own task: the best relation of (h, t) is where the triple scores highest."""
    torch.manual_seed(0)
    scorer = SCORERS["shallom"](5, 4).double()
    torch.nn.init.normal_(scorer.relations)
    head, tail = torch.randn(4).double(), torch.randn(4).double()
    spread = [x.expand(5, -1) for x in (head, tail)]
    triples = scorer.score_triples(spread[0], torch.arange(5), spread[1])
    assert scorer.score_relations(head, tail).argmax() == triples.argmax()
    torch.testing.assert_close(scorer.score_relations(head, tail), triples)


def test_coke_predicts_a_side_by_masking_it():
    """Without inverses a head query is another sequence, so the two scores of a triple differ."""
    torch.manual_seed(0)
    scorer = SCORERS["coke"](2, 8, layers=1, heads=2).double().eval()
    for parameter in scorer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    head, tail, relation = torch.randn(8).double(), torch.randn(8).double(), torch.tensor(1)
    as_tail = scorer.score_triples(head, relation, tail, "tail").item()
    as_head = scorer.score_triples(tail, relation, head, "head").item()
    assert not math.isclose(as_tail, as_head, abs_tol=1e-3)


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
    scorer.reset_parameters(fill, np.random.default_rng(0))
    head, tail = torch.from_numpy(rows(0, 2, 8)).float()
    result = scorer.score_triples(head, torch.tensor(1), tail)
    assert result.item() == pytest.approx((head * tail).sum().item(), abs=0.1)

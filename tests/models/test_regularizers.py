"""Penalties against their definitions: of rows, of triples, and by which scorers they are taken."""

import pytest
import torch
from scorer_cases import CASES, RELATIONS, SCORERS, case_of, make, normal

from kge_torchrec.config import ConfigError
from kge_torchrec.models.regularizers import DURA, IVR, L2, N3, Regularizers
from kge_torchrec.models.scorers import SIDES

close = torch.testing.assert_close
IVR_WEIGHTS = {"alpha": 2.25, "lambda1": 0.3, "lambda2": 0.2}
# Scorers that IVR takes and elements per part: the paper's P.
PARTS = {"distmult": 1, "complex": 2, "qmult": 4, "quate": 4}
BILINEAR = [name for name in SCORERS if SCORERS[name].is_bilinear]
TRIPLES = [("dura", name) for name in BILINEAR] + [("ivr", name) for name in PARTS]


def norms(parts, alpha):
    """Sum over the parts of their norm to the power of alpha: (K, ...) -> ()."""
    return parts.flatten(1).norm(dim=1).pow(alpha).sum()


def dura(scorer, head, relation, tail, side):
    """Read the matrix of the bilinear score off unit vectors; q' belongs to the adjoint query."""
    dim = len(head)
    unit = torch.eye(dim, dtype=torch.float64)
    sizes = unit[:, None].expand(dim, dim, dim), torch.full((dim, dim), relation)
    matrix = scorer.score(*sizes, unit.expand(dim, dim, dim), side)
    anchor, answer = (head, tail) if side == "tail" else (tail, head)
    return sum(part.square().sum() for part in (anchor @ matrix, answer, matrix @ answer, anchor))


def ivr(scorer, head, relation, tail, side):
    """The paper's general form: every intermediate variable, built from the core tensor W."""
    size, (alpha, lambda1, lambda2) = PARTS[scorer.name], IVR_WEIGHTS.values()
    ids, real_side = scorer.direct(torch.tensor(relation), side)
    head, tail = (tail, head) if real_side != side else (head, tail)
    cores, unit = SCORERS[scorer.name](size, size).double(), torch.eye(size, dtype=torch.float64)
    cores.relations = torch.nn.Parameter(unit)
    places = torch.meshgrid(*[torch.arange(size)] * 3, indexing="ij")
    core = cores.score(unit[places[0]], places[1], unit[places[2]]).detach()
    h, r, t = (x.view(-1, size) for x in (head, scorer.relation(ids), tail))
    one = [norms(x, alpha) for x in (h, r, t)]
    two = [norms(torch.einsum("ki, kj -> kij", x, y), alpha) for x, y in ((h, r), (r, t), (t, h))]
    for pattern, x in zip(("ijm, ki -> kjm", "ijm, kj -> kim", "ijm, km -> kij"), (h, r, t),
                          strict=True):  # fmt: skip
        one.append(norms(torch.einsum(pattern, core, x) / size**0.5, alpha))
    pairs = ("ijm, ki, kj -> km", h, r), ("ijm, kj, km -> ki", r, t), ("ijm, km, ki -> kj", t, h)
    two += [norms(torch.einsum(pattern, core, x, y), alpha) for pattern, x, y in pairs]
    return lambda1 * sum(one) + lambda2 * sum(two)


@pytest.mark.parametrize(("penalty", "name"), TRIPLES)
@pytest.mark.parametrize("reciprocal", [False, True])
def test_penalties_of_triples_equal_their_definition(penalty, name, reciprocal):
    """Values and gradients, of both sides; biases have no part in them."""
    case = next(case for case in CASES if case[0] == name)
    part, formula = (DURA(0.3), dura) if penalty == "dura" else (IVR(**IVR_WEIGHTS), ivr)
    scorer, biased = make(case, reciprocal), make(case, reciprocal, biases=True)
    biased.load_state_dict(scorer.state_dict())
    head, tail, relation = normal(2, case[1]), normal(2, case[1]), torch.tensor([1, 0])
    weight = 1.0 if penalty == "ivr" else 0.3
    for side in SIDES:
        rows = [x.clone().requires_grad_() for x in (head, tail)]
        anchor, answer = rows if side == "tail" else rows[::-1]
        each = zip(*rows, relation.tolist(), strict=True)
        expected = torch.stack([weight * formula(scorer, h, r, t, side) for h, t, r in each])
        regularizers = Regularizers(others=[part])
        actual = regularizers.of_triples(scorer, anchor, relation, answer, side)
        close(actual, expected)
        inputs, share = (*rows, *scorer.parameters()), torch.tensor([0.3, 1.7])
        close(*(torch.autograd.grad((x * share).sum(), inputs) for x in (actual, expected)))
        longer = (torch.cat([x, normal(2, 2)], -1) for x in (anchor, answer))
        again = regularizers.of_triples(biased, next(longer), relation, next(longer), side)
        close(again, expected)


def test_only_some_scorers_take_penalties_of_triples():
    """Linear scorers: the score doubles with the head and with the tail, for both sides."""
    for name, scorer in SCORERS.items():
        for kind, taken in ((DURA, BILINEAR), (IVR, PARTS)):
            if name in taken:
                kind.check_scorer(scorer, "key")
                continue
            with pytest.raises(ConfigError, match=rf"^key: {kind.__name__} takes .*{name}[; ]"):
                kind.check_scorer(scorer, "key")
        case = case_of(name)
        made, ends = make(case), (normal(case[1]), normal(case[1]))
        once, of_head, of_tail = (
            made.score(a * ends[0], torch.tensor(0), b * ends[1]).item()
            for a, b in ((1, 1), (2, 1), (1, 2))
        )
        doubles = (of_head, of_tail) == (pytest.approx(2 * once), pytest.approx(2 * once))
        one_way = scorer.needs_reciprocal or name in ("keci", "ckeci", "decal", "operator")
        assert made.is_bilinear == (doubles and not one_way), name


def test_ivr_without_weights_is_left_out():
    assert not Regularizers(others=[IVR()]).on_triples
    assert Regularizers(others=[IVR(lambda2=0.1)]).on_triples


def test_penalties_of_rows_equal_hand_computed_values():
    """|3 + 4i| = 5; biases, the last two elements, are left out."""
    for name, of_n3 in (("complex", 125), ("distmult", 27 + 64)):
        scorer, rows = make((name, 2, {}), biases=True), torch.tensor([[3.0, 4.0, 7.0, -9.0]])
        for part, expected in ((N3(0.1), of_n3), (L2(0.1), 25)):
            penalty = Regularizers(others=[part]).of_entities(scorer, rows)
            assert penalty.item() == pytest.approx(0.1 * expected)


@pytest.mark.parametrize("of_relations", [None, 0.0, 0.4])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("inverses", [False, True])
def test_penalties_of_relations_are_of_the_rows_that_a_query_uses(side, inverses, of_relations):
    """With a weight of their own; without normalization and dropout."""
    shares = {"normalization": "layer", "input_dropout": 0.5}
    scorer = make(case_of("complex"), inverses, **shares).train()
    inverse = RELATIONS if inverses and side == "head" else 0
    relation, penalty = torch.tensor([[2, 0]]), L2(0.1)
    penalty.relation_weight = of_relations
    rows = scorer.relations[relation + inverse]
    expected = 0.5 * N3().penalty(rows, True)
    expected = expected + (0.1 if of_relations is None else of_relations) * rows.square().sum(-1)
    close(Regularizers(0.5, [penalty]).of_relations(scorer, relation, side), expected)


def test_gradients_at_zero_are_finite_and_those_of_moduli_right():
    rows = torch.zeros(2, 1, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.grad(N3().penalty(rows, True).sum(), rows)[0].isfinite().all()
    moduli = normal(3, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda rows: N3().penalty(rows, True), moduli)
    for name in PARTS:
        scorer = make((name, 8, {}))
        torch.nn.init.zeros_(scorer.relations)
        for alpha in (1.0, 2.25):
            total = IVR(alpha, 0.1, 0.1).penalty_of_triples(
                scorer, rows[0], torch.tensor([0]), rows[1], "tail"
            )
            for gradient in torch.autograd.grad(total.sum(), (rows, *scorer.parameters())):
                assert gradient.isfinite().all()

"""IVR against the paper's general form: every intermediate variable built from a core tensor."""

import pytest
import torch
from scorer_cases import SCORERS, make, normal

from kge_torchrec.config import ConfigError
from kge_torchrec.models.regularizers import IVR, Regularizers
from kge_torchrec.models.scorers import SIDES

# Scorer, dim and elements per part: the paper's D and P.
CASES = [("distmult", 3, 1), ("complex", 6, 2), ("qmult", 8, 4), ("quate", 8, 4)]
WEIGHTS = {"alpha": 2.25, "lambda1": 0.3, "lambda2": 0.2}


def core_of(name, size):
    """W of the score sum_ijk W_ijk h_i r_j t_k of one part, read off unit vectors: (P, P, P)."""
    scorer, unit = SCORERS[name](size, size), torch.eye(size)
    scorer.relations = torch.nn.Parameter(unit)
    heads, relations, tails = torch.meshgrid(*[torch.arange(size)] * 3, indexing="ij")
    return scorer.score(unit[heads], relations, unit[tails]).detach().double()


def norms(parts, alpha):
    """Sum over the parts of their norm to the power of alpha: (K, ...) -> ()."""
    return parts.flatten(1).norm(dim=1).pow(alpha).sum()


def dense(core, h, r, t, alpha, lambda1, lambda2):
    """The regularizer of one triple, all intermediate variables built: rows (D,) -> ()."""
    size = len(core)
    h, r, t = (x.view(-1, size) for x in (h, r, t))
    of_rows = [norms(x, alpha) for x in (h, r, t)]
    of_pairs = [
        norms(torch.einsum("ki, kj -> kij", x, y), alpha) for x, y in ((h, r), (r, t), (t, h))
    ]
    one = "ijm, ki -> kjm", "ijm, kj -> kim", "ijm, km -> kij"
    with_one = [
        norms(torch.einsum(pattern, core, x) / size**0.5, alpha)
        for pattern, x in zip(one, (h, r, t), strict=True)
    ]
    two = ("ijm, ki, kj -> km", h, r), ("ijm, kj, km -> ki", r, t), ("ijm, km, ki -> kj", t, h)
    with_two = [norms(torch.einsum(pattern, core, x, y), alpha) for pattern, x, y in two]
    sums = (sum(terms) for terms in (of_rows, of_pairs, with_one, with_two))
    weights = lambda1, lambda2, lambda1, lambda2
    return sum(weight * total for weight, total in zip(weights, sums, strict=True))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("reciprocal", [False, True])
@pytest.mark.parametrize("name, dim, size", CASES)
def test_ivr_equals_the_norms_of_all_intermediate_variables(name, dim, size, reciprocal, side):
    scorer = make((name, dim, {}), reciprocal)
    core = core_of(name, size)
    anchor, answer = normal(1, 2, dim).requires_grad_(), normal(1, 2, dim).requires_grad_()
    relation = torch.tensor([[1, 0]])
    ids, real_side = scorer.direct(relation, side)
    head, tail = (anchor, answer) if real_side == "tail" else (answer, anchor)
    rows = scorer.relation(ids)
    triples = zip(head[0], rows[0], tail[0], strict=True)
    expected = torch.stack([dense(core, *triple, **WEIGHTS) for triple in triples])[None]
    regularizers = Regularizers(others=[IVR(**WEIGHTS)])
    actual = regularizers.of_triples(scorer, anchor, relation, answer, side)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=0)
    inputs = anchor, answer, *scorer.parameters()
    share = torch.tensor([[0.3, 1.7]])
    ours, theirs = (
        torch.autograd.grad((x * share).sum(), inputs, retain_graph=True, allow_unused=True)
        for x in (
            IVR(**WEIGHTS).penalty_of_triples(scorer, anchor, relation, answer, side),
            expected,
        )
    )
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)
    biased = (torch.cat([x, normal(1, 2, 2)], -1) for x in (anchor, answer))
    scorer = make((name, dim, {}), reciprocal, biases=True)
    again = IVR(**WEIGHTS).penalty_of_triples(scorer, next(biased), relation, next(biased), side)
    torch.testing.assert_close(again, expected)


def test_ivr_without_weights_is_left_out():
    assert not Regularizers(others=[IVR()]).on_triples
    assert Regularizers(others=[IVR(lambda2=0.1)]).on_triples


@pytest.mark.parametrize("name, dim, size", CASES)
@pytest.mark.parametrize("alpha", [1.0, 2.25])
def test_gradients_of_ivr_at_zero_are_finite(name, dim, size, alpha):
    scorer = make((name, dim, {}))
    torch.nn.init.zeros_(scorer.relations)
    rows = torch.zeros(2, 1, dim, dtype=torch.float64, requires_grad=True)
    total = IVR(alpha, 0.1, 0.1).penalty_of_triples(
        scorer, rows[0], torch.tensor([0]), rows[1], "tail"
    )
    for gradient in torch.autograd.grad(total.sum(), (rows, *scorer.parameters())):
        assert gradient.isfinite().all()


def test_what_ivr_refuses():
    for name, scorer in SCORERS.items():
        if name in {case[0] for case in CASES}:
            IVR.check_scorer(scorer, "loss.regularizers.ivr")
            continue
        with pytest.raises(
            ConfigError, match=rf"^loss.regularizers.ivr: IVR takes .*, not {name};"
        ):
            IVR.check_scorer(scorer, "loss.regularizers.ivr")

"""The objective of a batch: padding, penalties, empty batches; test_exact trains by it."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scorer_cases import CASES, SCORERS, normal
from scorer_cases import make as make_scorer
from triple_batches import DIM, ENTITIES, RELATIONS, Triples, random_batch

from kge_torchrec.kernels.side_rows import Gather
from kge_torchrec.models.losses import SoftmaxLoss
from kge_torchrec.models.model import TripleObjective
from kge_torchrec.models.regularizers import DURA, L2, N3, Regularizers
from kge_torchrec.models.scorers import SIDES


def make(name="complex", reciprocal=False):
    scorer = SCORERS[name](RELATIONS, DIM, reciprocal).double()
    torch.nn.init.normal_(scorer.relations)
    return scorer


def normal_rows():
    return torch.randn(ENTITIES, DIM, dtype=torch.float64, requires_grad=True)


def test_answer_is_never_a_negative():
    torch.manual_seed(2)
    batch = random_batch(1, 1, 3)
    batch.tail[...] = 4
    batch.negatives["tail"] = torch.tensor([[4, 4, 4]])
    rows, objective = normal_rows(), TripleObjective(make(), SoftmaxLoss(), ("tail",))
    batch.negatives.pop("head")
    assert objective(rows, batch).item() == pytest.approx(0)
    batch.negatives["tail"] = torch.tensor([[4, 5, 4]])  # its gradient comes only from 5
    without_answer = replace(batch, negatives={"tail": torch.tensor([[5]])})
    torch.testing.assert_close(objective(rows, batch), objective(rows, without_answer))


def test_padding_has_no_effect():
    torch.manual_seed(3)
    rows = normal_rows()
    objective = TripleObjective(make("rotate"), SoftmaxLoss(), SIDES, Regularizers(0.1, [L2(0.1)]))
    batch = random_batch(2, 3, 5)
    batch.weight[:, 1:] = 0
    short = replace(batch, **{name: getattr(batch, name)[:, :1]
                              for name in ("head", "tail", "relation", "weight")})  # fmt: skip
    inputs = rows, objective.scorer.relations
    padded, unpadded = objective(rows, batch), objective(rows, short)
    torch.testing.assert_close(padded, unpadded)
    torch.testing.assert_close(
        torch.autograd.grad(padded, inputs), torch.autograd.grad(unpadded, inputs)
    )


def test_penalties_equal_hand_computed_values():
    batch = Triples(*(torch.tensor([[i]]) for i in (0, 1, 0)), torch.tensor([[0.5]]), {})
    batch.negatives["tail"] = torch.tensor([[1]])  # the answer: no loss, only regularizers
    rows = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    of = {}
    for name in ("complex", "distmult"):
        scorer = SCORERS[name](1, 2)
        torch.nn.init.ones_(scorer.relations)
        for penalty in (N3(0.1), L2(0.1)):
            regularizers = Regularizers(others=[penalty])
            objective = TripleObjective(scorer, SoftmaxLoss(), ("tail",), regularizers)
            of[name, isinstance(penalty, N3)] = objective(rows, batch).item()
    # |3 + 4i| = 5, |2i| = 2, |1 + i| = sqrt(2)
    assert of["complex", True] == pytest.approx(0.05 * (125 + 8 + 2**1.5))
    assert of["distmult", True] == pytest.approx(0.05 * (27 + 64 + 8 + 1 + 1))
    assert of["complex", False] == of["distmult", False] == pytest.approx(0.05 * (25 + 4 + 2))


@pytest.mark.parametrize("of_relations", [None, 0.0, 0.4])
def test_relations_have_their_own_weight(of_relations):
    penalty = L2(0.1)
    penalty.relation_weight = of_relations
    regularizers, rows = Regularizers(n3=0.01, others=[penalty]), torch.tensor([[1.0, -2.0]])
    scorer = SCORERS["distmult"](1, 2)
    scorer.relations.data.copy_(rows)
    of_entities = regularizers.of_entities(scorer, rows)
    assert of_entities.item() == pytest.approx(0.01 * 9 + 0.1 * 5)
    weight = 0.1 if of_relations is None else of_relations
    actual = regularizers.of_relations(scorer, torch.tensor([0]), "tail")
    assert actual.item() == pytest.approx(0.01 * 9 + weight * 5)


def with_biases(scorer, case):
    """The same scorer with biases, whose rows have two more elements."""
    biased = make_scorer(case, scorer.reciprocal, biases=True)
    biased.load_state_dict(scorer.state_dict())
    return biased


BILINEAR = [name for name in SCORERS if SCORERS[name].is_bilinear]


@pytest.mark.parametrize("name", BILINEAR)
@pytest.mark.parametrize("reciprocal", [False, True])
def test_dura_penalizes_the_query_and_its_adjoint(name, reciprocal):
    """q and q' by the matrix of the bilinear score, read off unit vectors."""
    case = next(case for case in CASES if case[0] == name)
    scorer, dim = make_scorer(case, reciprocal), case[1]
    h, t, unit = normal(dim), normal(dim), torch.eye(dim, dtype=torch.float64)
    for side in SIDES:
        anchor, answer = (h, t) if side == "tail" else (t, h)
        ids = torch.full((dim, dim), 1)
        every = scorer.score(
            unit[:, None].expand(dim, dim, dim), ids, unit.expand(dim, dim, dim), side
        )
        parts = anchor @ every, answer, every @ answer, anchor
        expected = 0.3 * sum((part @ part).item() for part in parts)
        inputs = scorer, anchor[None], torch.tensor([1]), answer[None], side
        actual = Regularizers(others=[DURA(0.3)]).of_triples(*inputs)
        assert actual.shape == (1,) and actual.item() == pytest.approx(expected)
        biased = (torch.cat([x, normal(1, 2)], -1) for x in (anchor[None], answer[None]))
        again = DURA().penalty_of_triples(
            with_biases(scorer, case), next(biased), torch.tensor([1]), next(biased), side
        )
        assert again.item() == pytest.approx(expected / 0.3)


def test_which_scorers_are_linear_in_both_entities():
    """Linear scorers: the score doubles with the head and with the tail, for both sides."""
    for case in CASES:
        scorer = make_scorer(case, SCORERS[case[0]].needs_reciprocal)
        head, relation, tail = normal(case[1]), torch.tensor(0), normal(case[1])
        once, of_head, of_tail = (
            scorer.score(a * head, relation, b * tail).item() for a, b in ((1, 1), (2, 1), (1, 2))
        )
        doubles = (of_head, of_tail) == (pytest.approx(2 * once), pytest.approx(2 * once))
        needs = SCORERS[case[0]].needs_reciprocal
        of_matrices = (
            doubles and not needs and case[0] not in ("keci", "ckeci", "decal", "operator")
        )
        assert scorer.is_bilinear == of_matrices, case


@pytest.mark.parametrize("reciprocal", [False, True])
@pytest.mark.parametrize("sides", [SIDES, ("head",)])
def test_relation_prediction_is_the_cross_entropy_of_all_relations(reciprocal, sides):
    """For each side: that of the triple's relation, or of its inverse, by scores of triples."""
    rows, batch = normal_rows(), random_batch(3, 2, 5, sides=sides)
    scorer, expected = make(reciprocal=reciprocal), 0.0
    value = {
        weight: TripleObjective(scorer, SoftmaxLoss(), sides, relation_weight=weight)(rows, batch)
        for weight in (0.0, 0.5)
    }
    for side, (c, i) in itertools.product(sides, itertools.product(range(3), range(2))):
        anchor, target = rows[batch.head[c, i]], rows[batch.tail[c, i]]
        if side == "head":
            anchor, target = target, anchor
        right, asked = int(batch.relation[c, i]), side
        if reciprocal:
            right, asked = right + RELATIONS * (side == "head"), "tail"
        queries = (scorer.query(anchor, row, asked) for row in scorer.relations)
        scores = torch.stack([query @ target for query in queries])
        loss = scores.exp().sum().log() - scores[right]
        expected = expected + 0.5 * loss * batch.weight[c, i] / len(sides)
    torch.testing.assert_close(value[0.5] - value[0.0], expected)


def test_gradients_of_cubed_moduli_are_right():
    rows = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda rows: N3().penalty(rows, True), rows)


def test_n3_has_a_finite_gradient_at_zero():
    rows = torch.zeros(ENTITIES, DIM, requires_grad=True)
    scorer = SCORERS["complex"](RELATIONS, DIM)
    torch.nn.init.zeros_(scorer.relations)
    objective = TripleObjective(scorer, SoftmaxLoss(), SIDES, Regularizers(n3=1.0))
    batch = random_batch(1, 2, 3)
    for gradient in torch.autograd.grad(objective(rows, batch), (rows, scorer.relations)):
        assert gradient.isfinite().all()


@pytest.mark.parametrize(("name", "unique"), [("transe_l1", 0), ("complex", 3), ("rotate", 0)])
def test_no_triples_have_zero_loss_and_gradients(name, unique):
    scorer = make(name)
    objective = TripleObjective(scorer, SoftmaxLoss(), SIDES, Regularizers(0.1, [L2(0.1)]))
    empty = torch.zeros(0, 0, dtype=torch.int64)
    batch = Triples(empty, empty, empty, empty.double(), dict.fromkeys(SIDES, empty))
    rows = torch.randn(unique, DIM, dtype=torch.float64, requires_grad=True)
    loss = objective(rows, batch)
    loss.backward()
    assert loss.item() == 0
    assert rows.grad.shape == rows.shape and not rows.grad.any()
    assert scorer.relations.grad is not None and not scorer.relations.grad.any()


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(0, 12), st.integers(0, 99))
def test_take_rows_equals_indexing(count, taken, seed):
    torch.manual_seed(seed)
    rows, index = torch.randn(count, 3, requires_grad=True), torch.randint(count, (taken,))
    weight = torch.randn(taken, 3)
    sizes = [taken // 3, 0, taken - taken // 3]
    parts = Gather.apply(rows, index, sizes)
    assert [len(part) for part in parts] == sizes
    assert torch.equal(torch.cat(parts), rows[index])
    torch.testing.assert_close(
        torch.autograd.grad((torch.cat(parts) * weight).sum(), rows),
        torch.autograd.grad((rows[index] * weight).sum(), rows),
    )


def test_gradients_of_a_row_are_summed_in_their_order():
    """Also with several threads, so that runs repeat bit for bit."""
    index, weights = torch.randint(50, (3000,)), torch.randn(3000, 300)
    expected, before, sums = torch.zeros(50, 300), torch.get_num_threads(), []
    for place, weight in zip(index, weights, strict=True):
        expected[place] += weight
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            rows = torch.zeros(50, 300, requires_grad=True)
            torch.autograd.backward(
                Gather.apply(rows, index, [1000, 2000]), weights.split([1000, 2000])
            )
            sums.append(rows.grad)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(sums[0], expected) and torch.equal(sums[1], expected)

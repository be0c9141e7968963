"""Scorers against the papers' formulas, which tests/oracle_scorers.py writes out in loops."""

import itertools
from functools import partial

import numpy as np
import oracle_scorers
import pytest
import torch
from scorer_cases import (
    CASES,
    RELATIONS,
    SCORERS,
    candidate_scores,
    case_of,
    contrast,
    directions,
    every_case,
    make,
    normal,
)

from kge_torchrec.config import SCORER_NAMES, ConfigError, ModelConfig
from kge_torchrec.config.model import Dropout
from kge_torchrec.config.registry import resolve
from kge_torchrec.kernels import operators
from kge_torchrec.models.scorers import SIDES, build_scorer
from kge_torchrec.ranking.blocks import score_block

close = torch.testing.assert_close


def test_every_scorer_has_a_formula_and_a_case():
    names = set(SCORER_NAMES)
    assert (
        names == set(SCORERS) == {*oracle_scorers.FORMULAS, "coke"} == {case[0] for case in CASES}
    )


@every_case
def test_scorer_has_the_properties_of_all(case):
    """Its scores are those of the paper by each of its methods; see the checks below."""
    for side, inverses in directions(case):
        check_formula(make(case, inverses), side)
        scorer = make(case, inverses, normalization="layer")
        check_all_methods(scorer, side)
        check_rows_of_a_table(make(case, inverses, torch.float32, normalization="layer"), side)
        check_relations(scorer, side)
        if side == "tail" or not inverses:  # a head query of an inverse is a tail query
            check_gradients(scorer, side)
        if not scorer.has_biases:
            check_biases(scorer, make(case, inverses, normalization="layer", biases=True), side)
    for normalization in ("unit", "layer"):
        check_formula(make(case, normalization=normalization), "head")
    check_shapes(case)
    check_empty(make(case))
    check_bits(make(case, dtype=torch.float32, normalization="layer"))
    check_initial_values(case)
    check_built_from_config(case)


def check_formula(scorer, side):
    """The paper's score of every query; with reciprocal a head query takes the inverse relation."""
    anchor, target = normal(4, scorer.row_dim), normal(4, scorer.row_dim)
    relation = torch.randint(RELATIONS, (4,))
    expected = []
    for row, *ends in zip(relation.tolist(), anchor.tolist(), target.tolist(), strict=True):
        query_side = side
        if side == "head" and scorer.reciprocal:
            row, query_side = row + RELATIONS, "tail"
        head, tail = ends if query_side == "tail" else ends[::-1]
        expected.append(oracle_scorers.score(scorer, head, row, tail, query_side))
    scores = scorer.score(anchor, relation, target, side).detach().numpy()
    np.testing.assert_allclose(scores, expected, 1e-6, 1e-6)


def check_shapes(case):
    scorer = make(case, dtype=torch.float32)
    for shape in ((), (5,), (2, 4)):
        anchor, target = (normal(*shape, case[1], dtype=torch.float32) for _ in range(2))
        relation = torch.randint(RELATIONS, shape)
        scores = scorer.float().score(anchor, relation, target, "head")
        assert scores.shape == shape and scores.dtype == torch.float32
        exact = scorer.double().score(anchor.double(), relation, target.double(), "head")
        close(scores.double(), exact, rtol=1e-3, atol=1e-3)


def check_all_methods(scorer, side):
    """Triples, candidates, both for a loss, and encoded queries against several blocks."""
    dim, chunks, queries, count = scorer.row_dim, 2, 3, 4
    anchor, target = normal(chunks, queries, dim), normal(chunks, queries, dim)
    candidates, relation = normal(chunks, count, dim), torch.randint(RELATIONS, (chunks, queries))
    spread = [
        x.expand(chunks, queries, count, dim) for x in (anchor[:, :, None], candidates[:, None])
    ]
    expected = scorer.score(spread[0], relation[..., None].expand(-1, -1, count), spread[1], side)
    close(candidate_scores(scorer, anchor, relation, candidates, side), expected)
    positive, against = contrast(scorer, anchor, relation, target, candidates, side)
    close(positive, scorer.score(anchor, relation, target, side))
    close(against, expected)
    query = scorer.encode(anchor, relation, side)
    close(torch.cat([scorer.matrix(query, rows) for rows in candidates.split(3, 1)], -1), expected)


def check_rows_of_a_table(scorer, side):
    """Named by their places among all rows, they score as copies of them do, and learn as much."""
    dim, float32 = scorer.row_dim, {"dtype": torch.float32}
    anchor, target = normal(2, 3, dim, **float32), normal(2, 3, dim, **float32)
    table, relation = normal(4, dim, **float32).requires_grad_(), torch.randint(RELATIONS, (2, 3))
    index = torch.tensor([[0, 2, 2, 1, 0], [1, 1, 1, 1, 2]])
    query = scorer.encode(anchor, relation, side)
    actual = scorer.pairs(query, target), scorer.matrix(query, table, index, exact=False)
    expected = contrast(scorer, anchor, relation, target, table[index], side)
    gradients = []
    for positive, against in (actual, expected):
        loss = positive.sum() + (against * torch.linspace(-1, 1, 5)).sum()
        inputs = table, *scorer.parameters()
        gradients.append(
            torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
        )
    for one, other in zip((*actual, *gradients[0]), (*expected, *gradients[1]), strict=True):
        close(one, other, rtol=1e-4, atol=1e-4)


def check_relations(scorer, side):
    """Scores of all relations are those of triples."""
    anchor, target = normal(2, 3, scorer.row_dim), normal(2, 3, scorer.row_dim)
    actual = scorer.relation_scores(anchor, target, side)
    assert actual.shape == (2, 3, scorer.relation_rows)
    for relation in range(RELATIONS):
        ids = torch.full((2, 3), relation)
        column = scorer.direct(ids, side)[0][0, 0]
        close(actual[..., column], scorer.score(anchor, ids, target, side))


def check_biases(inner, scorer, side):
    """Biases are added to the scores of the vectors; with inverses the anchor is the head."""
    scorer.load_state_dict(inner.state_dict())
    dim = scorer.row_dim
    assert dim == inner.row_dim + 2
    anchor, target, relation = normal(2, 3, dim), normal(2, 3, dim), torch.randint(3, (2, 3))
    table, index = normal(4, dim), torch.tensor([[0, 2, 2, 1, 0], [1, 1, 3, 1, 2]])
    as_head, as_tail = (-2, -1) if inner.reciprocal or side == "tail" else (-1, -2)

    def with_biases(scores, anchor, target):
        return scores + anchor[..., as_head] + target[..., as_tail]

    alone = [x[..., :-2] for x in (anchor, target, table[index])]
    positive = with_biases(inner.score(alone[0], relation, alone[1], side), anchor, target)
    against = with_biases(
        candidate_scores(inner, alone[0], relation, alone[2], side),
        anchor[:, :, None], table[index][:, None],
    )  # fmt: skip
    close(scorer.score(anchor, relation, target, side), positive)
    close(candidate_scores(scorer, anchor, relation, table[index], side), against)
    close(contrast(scorer, anchor, relation, target, table[index], side), (positive, against))
    close(scorer.matrix(scorer.encode(anchor, relation, side), table, index, exact=False), against)
    close(
        scorer.relation_scores(anchor, target, side),
        with_biases(inner.relation_scores(*alone[:2], side), anchor[:, :, None],
                    target[:, :, None]),
    )  # fmt: skip
    if inner.name in ("complex", "rotate", "transe_l2", "pairre"):  # a way each to add biases
        check_bits(scorer.float())


def check_gradients(scorer, side):
    """Gradients equal finite differences."""
    relation = torch.tensor([[0, 1, 1]])
    anchor, target = (normal(1, 3, scorer.row_dim).requires_grad_() for _ in range(2))
    for method in (scorer.score, partial(candidate_scores, scorer)):
        scores = lambda anchor, target, *_, method=method: method(anchor, relation, target, side)  # noqa: E731
        inputs = (anchor, target, *scorer.parameters())
        assert torch.autograd.gradcheck(scores, inputs, fast_mode=True)


def check_empty(scorer):
    dim = scorer.row_dim
    none, some = torch.zeros(1, 0, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64)
    few, many = normal(1, 3, dim), normal(1, 0, dim)
    assert candidate_scores(scorer, normal(1, 0, dim), none, few, "tail").shape == (1, 0, 3)
    assert candidate_scores(scorer, normal(1, 2, dim), some, many, "tail").shape == (1, 2, 0)
    assert scorer.score(normal(0, dim), none[0], normal(0, dim)).shape == (0,)


def check_bits(scorer):
    """Bits depend only on the query and the row, as exact ranking needs: ties stay ties."""
    table, anchor = torch.randn(300, scorer.row_dim), torch.randn(70, scorer.row_dim)
    relation = torch.arange(70) % RELATIONS
    with torch.no_grad():
        one_block = score_block(scorer, anchor, relation, table, "head")
        for start, stop in ((0, 1), (3, 20), (5, 170), (250, 300)):
            part = score_block(scorer, anchor, relation, table[start:stop], "head")
            assert torch.equal(part, one_block[:, start:stop])
        for start, stop in ((0, 1), (3, 20), (1, 66), (5, 70)):
            some = slice(start, stop)
            part = score_block(scorer, anchor[some], relation[some], table, "head")
            if scorer.name in ("keci", "coke"):  # MKL rounds products of 2 to 5 columns by place
                torch.testing.assert_close(part, one_block[some], rtol=1e-5, atol=1e-5)
            else:
                assert torch.equal(part, one_block[some])


def check_initial_values(case):
    """They depend only on the stream."""
    name, dim, options = case

    def fill(stream, array):
        array[...] = stream.normal(size=array.shape)

    starts = []
    for seed in (1, 1, 2):
        torch.manual_seed(len(starts))  # plays no part
        kind = resolve("scorer", name)
        dim_of_vector = dim - 2 * kind.has_biases
        scorer = kind(50, dim_of_vector, True, normalization="layer", **options)
        with torch.no_grad():
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


def check_built_from_config(case):
    name, dim, options = case
    config = ModelConfig(
        name, dim, normalization="layer", dropout=Dropout(input=0.25), options=options
    )
    scorer = build_scorer(config, RELATIONS)
    assert type(scorer) is resolve("scorer", name)
    assert (scorer.row_dim, scorer.reciprocal) == (dim, True)
    assert scorer.options == config.options_in("options")
    assert scorer.input_dropout.p == 0.25 and scorer.hidden_dropout.p == 0
    assert isinstance(scorer.entity_norm, torch.nn.LayerNorm)
    if not scorer.has_biases:
        biased = ModelConfig(name, dim + 2, biases=True, normalization="layer", options=options)
        scorer = build_scorer(biased, RELATIONS)
        assert (scorer.row_dim, scorer.dim) == (dim + 2, dim)
        assert scorer.entity_norm.normalized_shape == (dim,)
        assert scorer.formula.endswith("; plus b_h + c_t, the biases of head and tail.")


@pytest.mark.parametrize(
    ("name", "elements"),
    [("rotate", 100), ("mure", 60), ("pairre", 1), ("house", 60), ("roth", 1), ("conve", 60)],
)
def test_pairs_do_not_depend_on_the_block_size(monkeypatch, name, elements):
    """Neither values nor gradients; head queries of MuRE, relations of the networks."""
    case = case_of(name)
    reciprocal = SCORERS[name].needs_reciprocal
    scorer, dim = make(case, reciprocal), case[1]
    anchor, rows = normal(2, 5, dim).requires_grad_(), normal(2, 3, dim).requires_grad_()
    relation, inputs = torch.randint(RELATIONS, (2, 5)), (anchor, rows, *scorer.parameters())

    def values_and_gradients():
        pairs = candidate_scores(scorer, anchor, relation, rows, "head")
        relations = scorer.relation_scores(anchor[:, :3], rows)
        total = pairs.square().sum() + relations.square().sum()
        gradients = torch.autograd.grad(total, inputs, allow_unused=True)
        return pairs.detach(), relations.detach(), *(g for g in gradients if g is not None)

    expected = values_and_gradients()
    monkeypatch.setattr(operators, "BLOCK_ELEMENTS", {"cpu": elements})
    for one, other in zip(values_and_gradients(), expected, strict=True):
        close(one, other)


@pytest.mark.parametrize(
    "name", ["transe_l1", "transe_l2", "transh", "rotate", "rote", "mure", "house"]
)
def test_small_distances_between_long_rows_keep_their_digits(name):
    """Ranking scores by candidates, training by triples: near the answer they must not differ."""
    scorer = make((name, 64, {}), dtype=torch.float32)
    relation = torch.zeros(1, 1, dtype=torch.int64)
    head = 100 * normal(1, 1, 64, dtype=torch.float32)
    query = scorer.encode(head, relation, "tail")
    query = query[0] if name == "mure" else query
    tail = (query if isinstance(query, torch.Tensor) else query[0]).detach()
    if name == "house":
        tail = tail.mT.flatten(-2)
    if name == "mure":
        tail = torch.cat([tail, torch.zeros(1, 1, 2)], -1)
    tail = tail + 1e-3 * normal(1, 40, 64, dtype=torch.float32)
    scores = candidate_scores(scorer, head, relation, tail, "tail")[0, 0]
    expected = scorer.score(head.expand(1, 40, -1)[0], relation[0].expand(40), tail[0])
    close(scores, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "name",
    ["transe_l1", "transe_l2", "transh", "rotate", "rotate_l2", "rote", "roth", "mure", "pyke",
     "pairre", "house"],
)  # fmt: skip
def test_gradients_are_finite_where_a_candidate_is_the_query_itself(name):
    case = case_of(name)
    scorer, dim = make(case, SCORERS[name].needs_reciprocal), case[1]
    with torch.no_grad():
        scorer.relations.zero_()
    relation = torch.zeros(1, 1, dtype=torch.int64)
    anchor = normal(1, 1, dim).requires_grad_()
    target = anchor.detach().clone().requires_grad_()
    for score, side in itertools.product((scorer.score, partial(candidate_scores, scorer)), SIDES):
        scores = score(anchor, relation, target, side)
        gradients = torch.autograd.grad(scores.sum(), (anchor, target, scorer.relations))
        assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("length", [0.0, 1e-20, 1e-4, 1.0, 5.0, 20.0, 1e4])
def test_roth_has_finite_scores_and_gradients_in_single_precision(length):
    """At 0, near the boundary and far beyond what tanh tells apart; also of a point with itself."""
    scorer = make(("roth", 16, {}), dtype=torch.float32)
    with torch.no_grad():
        scorer.relations[1, 8:-1] = 0
    unit = torch.nn.functional.normalize
    anchor, others = (length * unit(normal(1, n, 16).float(), dim=-1) for n in (4, 5))
    others[0, 0] = anchor[0, 0]
    inputs = anchor.requires_grad_(), others.requires_grad_(), scorer.relations
    for relation in (0, 1):
        ids = torch.full((1, 4), relation)
        for scores in (
            candidate_scores(scorer, anchor, ids, others, "tail"),
            scorer.score(anchor, ids, others[:, :4], "tail"),
        ):
            assert scores.isfinite().all() and (scores <= 0).all()
            assert all(x.isfinite().all() for x in torch.autograd.grad(scores.sum(), inputs))


@pytest.mark.parametrize("operator", ["diagonal", "complex", "linear", "translation"])
def test_operators_start_near_the_identity(operator):
    def fill(stream, array):
        array[...] = stream.normal(scale=1e-3, size=array.shape)

    scorer = SCORERS["operator"](2, 8, head=operator, tail=operator)
    with torch.no_grad():
        scorer.reset_parameters(fill, np.random.default_rng(0))
    head, tail = normal(2, 8).float()
    result = scorer.score(head, torch.tensor(1), tail)
    assert result.item() == pytest.approx((head * tail).sum().item(), abs=0.1)


PRODUCTS = {
    "product": (operators.times, 8),
    "conjugate": (lambda rows, factor: operators.times(rows, factor, conjugate=True), 8),
    "rotation": (operators.rotated, 4),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_both_forms_of_complex_numbers_compute_the_same_product(monkeypatch, name):
    """Inductor does not fuse complex numbers, so compiled code has none."""
    product, width = PRODUCTS[name]
    rows, factor = normal(3, 5, 8).requires_grad_(), normal(3, 5, width).requires_grad_()
    weight = normal(3, 5, 8)

    def value_and_gradients():
        out = product(rows, factor)
        return out, *torch.autograd.grad((out * weight).sum(), (rows, factor))

    expected = value_and_gradients()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(torch, "view_as_complex", None)
    close(value_and_gradients(), expected)


def test_compiler_unrolls_few_blocks(monkeypatch):
    """A block at a time is compiled anew each: hundreds took minutes."""
    queries, rows, blocks = torch.ones(1, 50, 8), torch.ones(1, 3, 8), []

    def score(query, row):
        blocks.append(query.shape[1])
        return (query * row).sum(-1)

    monkeypatch.setitem(operators.BLOCK_ELEMENTS, "cpu", 2 * 3 * 8)
    expected = operators.pairwise(score, [queries], [rows], 8)
    assert blocks == [2] * 25
    blocks.clear()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(operators.pairwise(score, [queries], [rows], 8), expected)
    assert blocks == [13, 13, 13, 11]


WRONG = [
    ("complex", 5, {}, "model.dim must be even for complex, got 5"),
    ("omult", 12, {}, "model.dim must be a multiple of 8 for omult, got 12"),
    ("keci", 8, {"options": {"p": 1}}, "model.dim must be a multiple of 3 for keci .*got 8"),
    ("meim", 6, {}, "multiple of 4 for meim with these model.options, got 6"),
    ("conve", 8, {"options": {"kernel_size": 5}}, "kernel_size 5 does not fit the image of conve"),
    ("convo", 8, {"reciprocal": False}, "model.reciprocal must be true for convo"),
    ("roth", 10, {"reciprocal": False, "biases": True}, "model.reciprocal must be true for roth"),
    ("complex", 7, {"biases": True}, "even for complex, got 5; the biases leave complex 5 of"),
    ("complex", 2, {"biases": True}, "model.dim must be at least 3 for complex with biases"),
    ("mure", 2, {}, "at least 3 for mure with biases"),
    ("mure", 8, {"biases": True}, "model.biases: mure has biases of its own"),
]


@pytest.mark.parametrize(("name", "dim", "keys", "message"), WRONG)
def test_invalid_scorers_raise(name, dim, keys, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig(name, dim, **keys)

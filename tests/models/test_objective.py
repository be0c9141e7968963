"""The objective of a batch: how it reads rows, what is dropped; test_exact trains by it."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from scorer_cases import RELATIONS, SCORERS, contrast, every_scorer, make, normal
from triple_batches import DIM, ENTITIES, random_batch

from kge_torchrec.kernels import side_rows
from kge_torchrec.kernels.comparisons import MinusDistance
from kge_torchrec.kernels.side_rows import Gather, SideRows
from kge_torchrec.models.losses import SoftmaxLoss
from kge_torchrec.models.model import EntityDropout, QueryObjective, TripleObjective
from kge_torchrec.models.regularizers import DURA, L2, N3, Regularizers
from kge_torchrec.models.scorers import SIDES


def made(name, *args, **shared):
    """A scorer of a name or a class, in single precision, with random relations."""
    scorer = SCORERS.get(name, name)(RELATIONS, DIM, *args, **shared)
    torch.nn.init.normal_(scorer.relations)
    return scorer


def batch_of(*shape, **options):
    batch = random_batch(*shape, **options)
    batch.weight = batch.weight.float()
    return batch


def nothing(positive, query, negative, mask):
    """A loss."""
    return positive * 0


def test_answer_is_never_a_negative():
    """The gradient of a candidate that is the answer too comes only from the others."""
    batch = batch_of(1, 1, 3, sides=("tail",))
    batch.tail[...] = 4
    batch.negatives["tail"] = torch.tensor([[4, 5, 4]])
    without_answer = replace(batch, negatives={"tail": torch.tensor([[5]])})
    objective = TripleObjective(made("complex"), SoftmaxLoss(), ("tail",))
    rows = torch.randn(ENTITIES, DIM, requires_grad=True)
    losses = objective(rows, batch), objective(rows, without_answer)
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(x, rows) for x in losses))


@pytest.mark.parametrize("reciprocal", [False, True])
@pytest.mark.parametrize("sides", [SIDES, ("head",)])
def test_relation_prediction_is_the_cross_entropy_of_all_relations(reciprocal, sides):
    """For each side: that of the triple's relation, or of its inverse, by scores of triples."""
    rows, batch = normal(ENTITIES, DIM), random_batch(3, 2, 5, sides=sides)
    scorer, expected = make(("complex", DIM, {}), reciprocal), 0.0
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


def test_gradients_of_a_row_are_summed_in_their_order():
    """Also with several threads, so that runs repeat bit for bit."""
    index, weights, sizes = torch.randint(50, (3000,)), torch.randn(3000, 300), [1000, 0, 2000]
    expected, before, rows = torch.zeros(50, 300), torch.get_num_threads(), torch.randn(50, 300)
    for place, weight in zip(index, weights, strict=True):
        expected[place] += weight
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            leaf = rows.clone().requires_grad_()
            parts = Gather.apply(leaf, index, sizes)
            assert [len(part) for part in parts] == sizes
            assert torch.equal(torch.cat(parts), rows[index])
            torch.autograd.backward(parts, weights.split(sizes))
            assert torch.equal(leaf.grad, expected)
    finally:
        torch.set_num_threads(before)


# How scores read their rows


def how_rows_are_read(objective, batch, rows):
    """Run the objective and return what its scores read, the same for all sides."""
    ways, loss_of_side = set(), objective._loss_of_side

    def watched(side, inputs, *others):
        if inputs.encoded is not None:
            ways.add("encoded")
        else:
            ways.add("gathered" if inputs.positions is None else "in place")
        return loss_of_side(side, inputs, *others)

    objective._loss_of_side = watched
    objective(rows, batch)
    (kind,) = ways
    return kind


class Compared(SCORERS["distmult"]):
    """Has a comparison of its own."""

    comparison = MinusDistance("manhattan")


class Scaled(SCORERS["complex"]):
    """Overrides how it reads relations."""

    def relation(self, ids, drop=True):
        return 2 * super().relation(ids, drop)


# Scorer, settings, triples per chunk, distinct rows, how they are read.
READ = [
    ("distmult", {}, 1, ENTITIES, "in place"),
    ("transe_l1", {}, 32, ENTITIES, "in place"),
    ("transe_l1", {}, 33, ENTITIES, "gathered"),  # a copy pays
    ("house", {}, 1, ENTITIES, "in place"),  # its comparison copies
    ("distmult", {}, 33, ENTITIES, "encoded"),
    ("distmult", {}, 1, 999, "encoded"),  # fewer candidates than rows
    ("complex", {"reciprocal": True}, 40, ENTITIES, "encoded"),
    ("complex", {"penalty": N3(0.1)}, 40, ENTITIES, "encoded"),
    *(
        (scorer, settings, 40, ENTITIES, "gathered")
        for scorer, settings in [
            ("simple", {}), (Compared, {}), (Scaled, {}),
            ("complex", {"normalization": "unit"}), ("complex", {"normalization": "layer"}),
            ("complex", {"relation_dropout": 0.2}), ("complex", {"input_dropout": 0.2}),
            ("complex", {"hidden_dropout": 0.2}), ("complex", {"entity_dropout": 0.2}),
            ("complex", {"relation_weight": 0.1}), ("complex", {"penalty": DURA(0.1)}),
            ("complex", {"compiled": True}), ("complex", {"double": True}),
        ]
    ),
]  # fmt: skip


@pytest.mark.parametrize(("scorer", "settings", "triples", "count", "expected"), READ)
def test_which_scorers_read_rows_without_copies(
    monkeypatch, scorer, settings, triples, count, expected
):
    settings, options = dict(settings), {}
    for name in {"entity_dropout", "relation_weight"} & settings.keys():
        options[name] = settings.pop(name)
    penalty, compiled, double = (settings.pop(k, 0) for k in ("penalty", "compiled", "double"))
    penalties = Regularizers(others=[penalty] if penalty else [])
    objective = TripleObjective(
        made(scorer, **settings), SoftmaxLoss(), SIDES, penalties, **options
    )
    if compiled:
        monkeypatch.setattr(torch, "compile", lambda function: function)
        objective.compile_parts()
    batch, rows = batch_of(4 if triples < 40 else 2, triples, 5), torch.randn(count, DIM)
    if double:
        objective, rows, batch.weight = objective.double(), rows.double(), batch.weight.double()
    assert how_rows_are_read(objective, batch, rows) == expected


@pytest.mark.parametrize("triples", [1, 40])
def test_subclass_is_scored_by_its_own_comparison(triples):
    torch.manual_seed(4)
    scorer, calls = made(Compared), []
    batch, rows = batch_of(4, triples, 5), torch.randn(ENTITIES, DIM)
    TripleObjective(scorer, lambda *scores: calls.append(scores) or scores[0] * 0)(rows, batch)
    assert len(calls) == 2
    for side, (positive, _, negative, _) in zip(SIDES, calls, strict=True):
        anchor, target = batch.head, batch.tail
        if side == "head":
            anchor, target = target, anchor
        query = scorer.encode(rows[anchor], batch.relation, side)
        close = torch.testing.assert_close
        close(positive, scorer.pairs(query, rows[target]).flatten())
        close(negative, scorer.matrix(query, rows[batch.negatives[side]]).flatten(0, 1))


@pytest.mark.parametrize("scorer", ["distmult", "complex"])
@pytest.mark.parametrize(
    "reciprocal, sides, shape",
    [(False, ("tail",), (1, 40, 7)), (True, SIDES, (1, 40, 7)), (False, SIDES, (3, 35, 5))],
)
def test_rows_without_copies_equal_copies(monkeypatch, scorer, reciprocal, sides, shape):
    """Loss and gradients, with known facts, corrected scores and penalties."""
    model = made(scorer, reciprocal)
    batch = batch_of(*shape, sides=sides, known=True)
    batch.weight[:, -3:] = 0  # as of padding
    batch.log_expected = torch.randn(shape[0] * shape[2] * len(sides))
    rows = torch.randn(ENTITIES, DIM, requires_grad=True)
    penalties = Regularizers(0.1, [L2(0.2)])
    objective = TripleObjective(model, SoftmaxLoss(), sides, penalties)
    results = []
    for takes in (True, False):
        if not takes:
            monkeypatch.setattr(side_rows, "_encodes", lambda scorer, rows: False)
        loss = objective(rows, batch)
        results.append((loss, *torch.autograd.grad(loss, (rows, model.relations))))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrong", ["negative", "relation"])
def test_positions_outside_the_tables_are_refused(wrong):
    batch = batch_of(1, 40, 5)
    (batch.negatives["tail"] if wrong == "negative" else batch.relation)[0, 0] = -1
    with pytest.raises(IndexError, match=r"-1 to . are not all in \[0, "):
        TripleObjective(made("distmult"), nothing)(torch.randn(ENTITIES, DIM), batch)


def test_penalties_count_each_row_once(monkeypatch):
    """However many sides and triples it is in."""
    batch, penalized, penalty = batch_of(1, 40, 5), [], N3.penalty
    objective = TripleObjective(made("distmult"), nothing, SIDES, Regularizers(n3=0.1))
    monkeypatch.setattr(N3, "penalty", lambda *x: penalized.append(len(x[1])) or penalty(*x))
    objective(torch.randn(ENTITIES, DIM), batch)
    touched = len(torch.cat([batch.head, batch.tail]).unique())
    assert penalized == [touched] + 2 * [len(batch.relation.unique())]


# Dropout


def scores(scorer, seed, dim):
    generator = torch.Generator().manual_seed(3)
    anchor, target, candidates = (
        torch.randn(1, n, dim, generator=generator, dtype=torch.float64) for n in (3, 3, 4)
    )
    relation = torch.tensor([[0, 1, 2]])
    torch.manual_seed(seed)
    positive, negative = contrast(scorer, anchor, relation, target, candidates, "tail")
    return torch.cat([positive[..., None], negative], -1).detach()


def dropping(case):
    """All kinds of dropout that the scorer has."""
    name, dim, options = case
    shares = {"input_dropout": 0.4}
    if not SCORERS[name].is_distance:
        shares["hidden_dropout"] = 0.4
    if hasattr(SCORERS[name].Options, "feature_dropout"):
        options = {**options, "feature_dropout": 0.4}
    return (name, dim, options), shares


@every_scorer
def test_dropout_acts_in_training_once_for_all_candidates_and_answers_of_a_query(case, monkeypatch):
    """A query has one draw: equal rows score alike."""
    case, shares = dropping(case)
    scorer, dim = make(case, **shares), case[1]
    plain = make((case[0], dim, {k: v for k, v in case[2].items() if k != "feature_dropout"}))
    assert torch.equal(scores(scorer, 0, dim), scores(plain, 1, dim))  # evaluation
    scorer.train()
    first, again, other = (scores(scorer, seed, dim) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.isfinite().all()
    encoded, encode, results = [], scorer.query_of_ids, []
    monkeypatch.setattr(scorer, "query_of_ids", lambda *x: encoded.append(x) or encode(*x))
    row, query = normal(1, dim), torch.tensor([0, 0, 1, 1, 1])
    objective = QueryObjective(scorer, lambda *x: results.append(x) or x[2].sum(1), ("tail",))
    rows = torch.cat([normal(2, dim), row.expand(8, dim)])  # anchors, answers, candidates
    batch = SimpleNamespace(
        relation=torch.tensor([0, 1]), queries=[2], answers=[5], query=query, weight=1.0,
        known=torch.zeros(2, 3, dtype=torch.bool), bags=None, entities=None, deduplicated=False,
    )  # fmt: skip
    objective(rows, batch)
    ((positive, _, negative, _),) = results
    torch.testing.assert_close(negative, negative[:, :1].expand(2, 3))
    torch.testing.assert_close(positive, negative[query, 0])
    assert [anchor.shape for anchor, _, _ in encoded] == [(1, 2, dim - 2 * scorer.has_biases)]
    scorer.eval()
    assert torch.equal(scores(scorer, 0, dim), scores(plain, 0, dim))


@pytest.mark.parametrize("triples", [32, 33])
def test_candidates_are_dropped_place_by_place_in_chunks_of_any_size(monkeypatch, triples):
    """Chunks that share candidates do not share what is dropped of them."""
    objective = TripleObjective(made("transe_l1"), SoftmaxLoss(), ("tail",), entity_dropout=0.5)
    batch, dropped = batch_of(4, triples, 5, sides=("tail",)), []
    drop = objective.entity_dropout.forward
    monkeypatch.setattr(
        objective.entity_dropout, "forward", lambda rows: dropped.append(rows.shape) or drop(rows)
    )
    objective(torch.randn(ENTITIES, DIM), batch)
    assert dropped == [(4, triples, DIM), (4, triples, DIM), (4, 5, DIM)]


def test_rows_of_entities_are_dropped_but_not_their_biases():
    layer, rows = EntityDropout(0.5, biases=2), torch.ones(100, 12)
    dropped = layer(rows)
    assert set(dropped[:, :10].unique().tolist()) == {0.0, 2.0}
    assert torch.equal(dropped[:, 10:], rows[:, 10:])
    assert torch.equal(layer.eval()(rows), rows)


def test_penalties_use_rows_before_dropout():
    """Only scores are of what dropout left, of candidates as of queries (as LibKGE has it)."""
    penalized = []
    scorer = make(("distmult", 6, {}))

    def watch(name, place):
        method = getattr(scorer, name)

        def watched(*args, **options):
            penalized.append(args[place].detach())
            return method(*args, **options)

        setattr(scorer, name, watched)

    for name, place in (("encode", 0), ("pairs", 1), ("matrix", 1)):
        watch(name, place)
    objective = TripleObjective(
        scorer, nothing, ("tail",), Regularizers(others=[L2(1.0)]), entity_dropout=0.5
    )
    anchors, relation = normal(1, 3, 6), torch.tensor([[0, 1, 2]])
    rows, weight = SideRows(anchors, anchors * 2, anchors * 3), torch.ones(1, 3)
    mask = torch.ones(1, 3, 3, dtype=torch.bool)
    objective.train()._loss_of_side("tail", rows, relation, weight, mask)
    assert len(penalized) == 3 and all((x == 0).any() and (x != 0).any() for x in penalized)
    penalty = objective.regularizers.of_entities
    torch.testing.assert_close(penalty(scorer, anchors), penalty(scorer.eval(), anchors))


# RESCAL's queries in training, by one product per relation


WIDTH = 12


def encoded(scorer, anchor, relation, side):
    """The queries, and the gradients of anchors and relations."""
    query = scorer.encode(anchor, relation, side)
    weights = torch.linspace(-1, 2, query.numel(), dtype=query.dtype).view(query.shape)
    return query, *torch.autograd.grad((query * weights).sum(), (anchor, scorer.relations))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("normalization, reciprocal", [("none", False), ("layer", True)])
@pytest.mark.parametrize("queries", [0, 1, 30])
def test_queries_and_gradients_equal_those_of_copies(queries, normalization, reciprocal, side):
    scorer = make(("rescal", WIDTH, {}), reciprocal, normalization=normalization).train()
    anchor = normal(2, queries, WIDTH).requires_grad_()
    relation = torch.arange(2 * queries).view(2, queries) % 2
    actual = encoded(scorer, anchor, relation, side)
    expected = encoded(scorer.eval(), anchor, relation, side)  # evaluation copies matrices
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_relation_dropout_is_drawn_once_per_relation_and_batch():
    scorer = make(("rescal", WIDTH, {}), False, relation_dropout=0.4).train()
    torch.nn.init.ones_(scorer.relations)
    anchor = torch.eye(WIDTH, dtype=torch.float64).repeat(2, 1)[None]
    relation = torch.arange(2 * WIDTH)[None] // WIDTH
    rows = scorer.encode(anchor, relation, "tail")[0].detach()
    assert rows.unique().tolist() == [0.0, pytest.approx(1 / 0.6)]
    first, second = rows.split(WIDTH)  # the matrices of both relations
    again = scorer.encode(anchor, relation * 0, "tail")[0].detach()
    assert not torch.equal(first, second) and torch.equal(*again.split(WIDTH))


class Doubled(SCORERS["rescal"]):
    """Overrides how a query is made."""

    def query(self, anchor, relation, side):
        return 2 * super().query(anchor, relation, side)


def test_overridden_queries_are_used_and_only_matrices_of_the_batch_normalized():
    scorer, normalized = make(("rescal", WIDTH, {}), False, normalization="layer").train(), []
    scorer.relation_norm.register_forward_hook(lambda layer, rows, out: normalized.append(rows[0]))
    doubled = Doubled(RELATIONS, WIDTH, normalization="layer").double()
    doubled.load_state_dict(scorer.state_dict())
    query = normal(1, 5, WIDTH), torch.tensor([[2, 0, 2, 0, 0]]), "tail"
    torch.testing.assert_close(doubled.encode(*query), 2 * scorer.encode(*query))
    assert [x.shape for x in normalized] == [(2, WIDTH * WIDTH)]

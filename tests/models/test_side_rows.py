"""How the scores of a batch read their rows: encoded, in place or gathered."""

import pytest
import torch
from scorer_cases import SCORERS
from triple_batches import DIM, ENTITIES, RELATIONS, random_batch

from kge_torchrec.kernels import side_rows
from kge_torchrec.kernels.comparisons import MinusDistance
from kge_torchrec.models.losses import SoftmaxLoss
from kge_torchrec.models.model import TripleObjective
from kge_torchrec.models.regularizers import DURA, L2, N3, Regularizers
from kge_torchrec.models.scorers import SIDES


@pytest.mark.parametrize(
    "scorer, triples, rows, expected",
    [
        (SCORERS["distmult"], 1, ENTITIES, "in place"),
        (SCORERS["transe_l1"], 32, ENTITIES, "in place"),
        (SCORERS["transe_l1"], 33, ENTITIES, "gathered"),  # a copy pays
        (SCORERS["distmult"], 33, ENTITIES, "encoded"),
        (SCORERS["distmult"], 1, 999, "encoded"),  # fewer candidates than rows
        (SCORERS["house"], 1, ENTITIES, "gathered"),  # has no kernel
    ],
)
def test_candidates_of_few_queries_are_not_copied(scorer, triples, rows, expected):
    """Nor are heads and tails where an operator encodes the queries."""
    made = scorer(RELATIONS, DIM)
    torch.nn.init.normal_(made.relations)
    batch = random_batch(4, triples, 5)
    batch.weight = batch.weight.float()
    assert how_rows_are_read(TripleObjective(made, SoftmaxLoss()), batch, rows) == expected


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
    objective(rows if torch.is_tensor(rows) else torch.randn(rows, DIM), batch)
    (kind,) = ways
    return kind


class Compared(SCORERS["distmult"]):
    """Has a comparison of its own."""

    comparison = MinusDistance("manhattan")


@pytest.mark.parametrize("triples", [1, 40])
def test_subclass_is_scored_by_its_own_comparison(triples):
    torch.manual_seed(4)
    made = Compared(RELATIONS, DIM)
    torch.nn.init.normal_(made.relations)
    batch, rows = random_batch(4, triples, 5), torch.randn(ENTITIES, DIM)
    batch.weight = batch.weight.float()
    calls = []
    TripleObjective(made, lambda *scores: calls.append(scores) or scores[0] * 0)(rows, batch)
    assert len(calls) == 2
    for side, (positive, _, negative, _) in zip(SIDES, calls, strict=True):
        anchor, target = batch.head, batch.tail
        if side == "head":
            anchor, target = target, anchor
        query = made.encode(rows[anchor], batch.relation, side)
        close = torch.testing.assert_close
        close(positive, made.pairs(query, rows[target]).flatten())
        close(negative, made.matrix(query, rows[batch.negatives[side]]).flatten(0, 1))


@pytest.mark.parametrize("triples", [32, 33])
def test_candidates_are_dropped_place_by_place_in_chunks_of_any_size(monkeypatch, triples):
    """Chunks that share candidates do not share what is dropped of them."""
    made = SCORERS["transe_l1"](RELATIONS, DIM)
    torch.nn.init.normal_(made.relations)
    objective = TripleObjective(made, SoftmaxLoss(), ("tail",), entity_dropout=0.5)
    batch, dropped = random_batch(4, triples, 5, ("tail",)), []
    batch.weight = batch.weight.float()
    drop = objective.entity_dropout.forward
    monkeypatch.setattr(
        objective.entity_dropout, "forward", lambda rows: dropped.append(rows.shape) or drop(rows)
    )
    objective(torch.randn(ENTITIES, DIM), batch)
    assert dropped == [(4, triples, DIM), (4, triples, DIM), (4, 5, DIM)]


class Scaled(SCORERS["complex"]):
    """A scorer that overrides how it reads relations."""

    def relation(self, ids, drop=True):
        return 2 * super().relation(ids, drop)


@pytest.mark.parametrize(
    "scorer, settings, reason",
    [
        ("distmult", {}, ""),
        ("complex", {"reciprocal": True}, ""),
        ("simple", {}, "it has no kernel"),
        (Compared, {}, "it compares in a way of its own"),
        (Scaled, {}, "it does more to a relation"),
        ("complex", {"normalization": "unit"}, "rows are normalised"),
        ("complex", {"normalization": "layer"}, "rows and relations are normalised"),
        ("complex", {"relation_dropout": 0.2}, "relations are dropped"),
        ("complex", {"input_dropout": 0.2}, "anchors are dropped"),
        ("complex", {"hidden_dropout": 0.2}, "queries are dropped"),
        ("complex", {"entity_dropout": 0.2}, "rows are dropped"),
        ("complex", {"relation_weight": 0.1}, "relations are predicted"),
        ("complex", {"penalty": N3(0.1)}, ""),
        ("complex", {"penalty": DURA(0.1)}, "a triple is penalised as a whole"),
        ("complex", {"compiled": True}, "it is compiled"),
        ("complex", {"double": True}, "numbers are double"),
    ],
)
def test_which_scorers_read_rows_without_copies(monkeypatch, scorer, settings, reason):
    settings = dict(settings)
    objective_options = {k: settings.pop(k) for k in ("entity_dropout", "relation_weight")
                    if k in settings}  # fmt: skip
    penalty, compiled, double = (settings.pop(k, 0) for k in ("penalty", "compiled", "double"))
    if penalty:
        objective_options["regularizers"] = Regularizers(others=[penalty])
    scorer = SCORERS.get(scorer, scorer)(RELATIONS, DIM, **settings)
    torch.nn.init.normal_(scorer.relations)
    made = TripleObjective(scorer, SoftmaxLoss(), **objective_options)
    if compiled:
        monkeypatch.setattr(torch, "compile", lambda function: function)
        made.compile_parts()
    batch, rows = random_batch(2, 40, 5), torch.randn(ENTITIES, DIM)
    if double:
        made, rows = made.double(), rows.double()
    else:
        batch.weight = batch.weight.float()
    assert how_rows_are_read(made, batch, rows) == ("gathered" if reason else "encoded")


@pytest.mark.parametrize("scorer", ["distmult", "complex"])
@pytest.mark.parametrize(
    "reciprocal, sides, shape",
    [(False, ("tail",), (1, 40, 7)), (True, SIDES, (1, 40, 7)), (False, SIDES, (3, 35, 5))],
)
def test_rows_without_copies_equal_copies(monkeypatch, scorer, reciprocal, sides, shape):
    """Loss and gradients, with known facts, corrected scores, the hardest candidates, penalties."""
    made = SCORERS[scorer](RELATIONS, DIM, reciprocal)
    torch.nn.init.normal_(made.relations)
    batch = random_batch(*shape, sides, known=True)
    batch.weight = batch.weight.float()
    batch.weight[:, -3:] = 0  # as of padding
    batch.log_expected = torch.randn(shape[0] * shape[2] * len(sides))
    rows = torch.randn(ENTITIES, DIM, requires_grad=True)
    penalties = Regularizers(0.1, [L2(0.2)])
    objective = TripleObjective(made, SoftmaxLoss(), sides, penalties, hardest=4)
    results = []
    for takes in (True, False):
        if not takes:
            monkeypatch.setattr(side_rows, "_encodes", lambda scorer, rows: False)
        loss = objective(rows, batch)
        results.append((loss, *torch.autograd.grad(loss, (rows, made.relations))))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrong", ["negative", "relation"])
def test_positions_outside_the_tables_are_refused(wrong):
    made = SCORERS["distmult"](RELATIONS, DIM)
    batch = random_batch(1, 40, 5)
    (batch.negatives["tail"] if wrong == "negative" else batch.relation)[0, 0] = -1
    with pytest.raises(IndexError, match=r"-1 to . are not all in \[0, "):
        how_rows_are_read(TripleObjective(made, SoftmaxLoss()), batch, ENTITIES)


def test_penalties_count_each_row_once(monkeypatch):
    """However many sides and triples it is in."""
    made = SCORERS["distmult"](RELATIONS, DIM)
    torch.nn.init.normal_(made.relations)
    batch = random_batch(1, 40, 5)
    batch.weight = batch.weight.float()
    objective, penalized = TripleObjective(made, SoftmaxLoss(), SIDES, Regularizers(n3=0.1)), []
    penalty = N3.penalty
    monkeypatch.setattr(N3, "penalty", lambda *x: penalized.append(len(x[1])) or penalty(*x))
    objective(torch.randn(ENTITIES, DIM), batch)
    touched = len(torch.cat([batch.head, batch.tail]).unique())
    assert penalized == [touched] + 2 * [len(batch.relation.unique())]

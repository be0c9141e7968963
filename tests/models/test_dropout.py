"""Dropout of scorers: in training only, a function of torch's generator, on what it should be."""

from types import SimpleNamespace

import pytest
import torch
from scorer_cases import RELATIONS, SCORERS, contrast, every_scorer, make, normal

from kge_torchrec.kernels.side_rows import SideRows
from kge_torchrec.models.model import EntityDropout, QueryObjective, TripleObjective
from kge_torchrec.models.regularizers import L2, Regularizers


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


@pytest.mark.parametrize("share", [0.2, 0.7])
def test_expected_score_is_the_score_without_dropout(share):
    torch.manual_seed(0)
    anchor, target = normal(8), normal(8)
    count = 40_000
    spread = [x.expand(count, -1) for x in (anchor, target)]
    relation = torch.zeros(count, dtype=torch.int64)
    for key in ("input_dropout", "hidden_dropout"):
        scorer = SCORERS["distmult"](RELATIONS, 8, **{key: share}).double().train()
        torch.nn.init.normal_(scorer.relations)
        result = scorer.score(spread[0], relation, spread[1]).detach()
        plain = scorer.eval().score(anchor, relation[0], target).item()
        assert abs(result.mean().item() - plain) < 5 * result.std().item() / count**0.5
        assert result.std().item() > 0.1


def test_rows_of_entities_are_dropped_but_not_their_biases():
    torch.manual_seed(0)
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


def nothing(positive, query, negative, mask):
    return positive * 0

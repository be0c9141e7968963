"""How other systems rank, each by its rule in a few lines, against our own evaluation.

docs/explanation/evaluation.md has the same rules as a table. The scores are small integers, so
they tie often and exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from ranking_cases import make_scorer, whole

from kge_torchrec.config import EvaluationConfig
from kge_torchrec.data.prepare import prepare_triples
from kge_torchrec.data.store import TripleStore
from kge_torchrec.models.scorers import SIDES
from kge_torchrec.ranking.metrics import Ranks, metrics
from kge_torchrec.trained_model import TrainedModel

ENTITIES, RELATIONS, DIM = 30, 3, 4
ALL = ("train", "valid", "test")


@dataclass
class Case:
    """A model, and its scores as other systems see them."""

    model: TrainedModel
    store: TripleStore
    scores: dict[str, Callable[[tuple[int, int, int]], np.ndarray]]  # side: triple -> (N,)

    def ours(self, split: str | None, triples: np.ndarray, **evaluation) -> Ranks:
        return self.model.ranks_of(triples, split, EvaluationConfig(**evaluation), True)

    def queries(self, triples: np.ndarray, filter_splits: tuple[str, ...]):
        """Yield side, scores with filtered entities at -inf, and the true entity."""
        known = {tuple(row) for split in filter_splits for row in self.store.split(split).tolist()}
        for side, column in (("head", 0), ("tail", 2)):
            for triple in triples.tolist():
                scores, true = self.scores[side](tuple(triple)), triple[column]
                for entity in range(len(scores)):
                    other = (*triple[:column], entity, *triple[column + 1 :])
                    if entity != true and other in known:
                        scores[entity] = -np.inf
                yield side, scores, true


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Case:
    random, rows = np.random.default_rng(1), {}
    for split, count in (("train", 200), ("valid", 40), ("test", 40)):
        heads, tails = random.integers(ENTITIES - 2, size=(2, count))
        relations = random.integers(RELATIONS, size=count)
        rows[split] = [
            (f"e{h}", f"r{r}", f"e{t}") for h, r, t in zip(heads, relations, tails, strict=True)
        ]
    rows["test"] += [("new", "r0", "e1"), ("e2", "r1", "newer")]  # not in train
    store = prepare_triples(rows, tmp_path_factory.mktemp("graph") / "store")
    scorer = make_scorer("distmult", RELATIONS, DIM)
    table = torch.from_numpy(random.integers(-3, 4, size=(store.num_entities, DIM))).float()
    with torch.no_grad():
        relations = random.integers(1, 3, size=(2 * RELATIONS, DIM))
        for parameter in scorer.parameters():
            parameter.copy_(torch.from_numpy(relations[: len(parameter)]))
    weights = next(scorer.parameters()).detach().numpy()
    rows_of = table.numpy()

    def scores(anchor_at: int) -> Callable[[tuple[int, int, int]], np.ndarray]:
        return lambda triple: rows_of @ (weights[triple[1]] * rows_of[triple[anchor_at]])

    by_side = {"head": scores(2), "tail": scores(0)}
    return Case(TrainedModel(scorer, whole(table), store, store), store, by_side)


def figures(ranks) -> dict[str, float]:
    """Return metrics of a list of ranks, the mean over the queries of both sides."""
    ranks = np.array(ranks, float)
    hits = {f"hits@{k}": (ranks <= k).mean() for k in (1, 3, 10)}
    return {"mrr": (1 / ranks).mean(), "mr": ranks.mean(), **hits}


def mean_ranks(ranks: Ranks, kind: str) -> dict[str, float]:
    return metrics(ranks)["both"][kind]


def test_pykeen(case):
    """Optimistic, realistic (the mean) and pessimistic ranks; valid is filtered without test."""
    for split, splits in (("test", ALL), ("valid", ("train", "valid"))):
        triples = case.store.split(split)
        queries = list(case.queries(triples, splits))
        first = np.array([1 + (s > s[true]).sum() for _, s, true in queries])
        last = np.array([(s >= s[true]).sum() for _, s, true in queries])
        ours = case.ours(split, triples)
        assert (first < last).any()
        for kind, ranks in (
            ("optimistic", first), ("pessimistic", last), ("realistic", (first + last) / 2)
        ):  # fmt: skip
            assert mean_ranks(ours, kind) == pytest.approx(figures(ranks))


def libkge_rank(scores: np.ndarray, true: int) -> int:
    """Mean rank rounded up; scores within a tolerance count as ties."""
    ties = np.isclose(scores, scores[true], rtol=1e-4, atol=1e-5)
    return 1 + ((scores > scores[true]) & ~ties).sum() + ties.sum() // 2


def test_libkge(case):
    """LibKGE chooses models on valid by ranks that are filtered with test as well."""
    for split in ("test", "valid"):
        triples = case.store.split(split)
        ranks = [libkge_rank(s, true) for _, s, true in case.queries(triples, ALL)]
        # Triples of your own are filtered by all splits, so valid is as LibKGE ranks it.
        ours = case.ours(None, triples)
        rounded = np.ceil(ours.values("both", "realistic"))
        assert rounded.tolist() == ranks
        assert figures(ranks)["mrr"] < mean_ranks(ours, "realistic")["mrr"]  # rounded up
    valid = case.ours("valid", case.store.valid)
    assert mean_ranks(valid, "realistic")["mrr"] < mean_ranks(ours, "realistic")["mrr"]
    assert libkge_rank(np.array([1.0, 1.0 + 5e-5, 0.5]), 0) == 2  # a tie for LibKGE, not for us


def test_dice_embeddings(case):
    """The place in a sorted list, so ties are in any order; test is in the filter for valid too."""
    for split in ("test", "valid"):
        triples = case.store.split(split)
        queries = list(case.queries(triples, ALL))
        ranks = [1 + np.argsort(-s, kind="stable").tolist().index(true) for _, s, true in queries]
        ours = case.ours(None, triples)
        first, last = (ours.values("both", kind) for kind in ("optimistic", "pessimistic"))
        assert (first <= ranks).all() and (ranks <= last).all()
        untied = first == last
        assert untied.any() and (np.array(ranks) == first)[untied].all()
        # One mean of 1 / head rank and 1 / tail rank per triple, which is our mean over queries.
        heads, tails = np.split(1 / np.array(ranks), 2)
        assert ((heads + tails) / 2).mean() == pytest.approx(figures(ranks)["mrr"])


def test_dgl_ke(case):
    """Pessimistic ranks; the filter is the whole graph, also for valid."""
    for split in ("test", "valid"):
        triples = case.store.split(split)
        queries = case.queries(triples, ALL)
        ranks = [1 + (np.delete(s, true) >= s[true]).sum() for _, s, true in queries]
        ours = case.ours(None, triples)
        assert mean_ranks(ours, "pessimistic") == pytest.approx(figures(ranks))


def test_ampligraph(case):
    """Worst ranks of scores in thousandths; triples with entities that train lacks are skipped."""
    trained = set(case.store.train[:, ::2].ravel().tolist())
    test = case.store.test
    kept = test[[h in trained and t in trained for h, _, t in test.tolist()]]
    assert 0 < len(kept) < len(test)
    ranks, surplus = ({side: [] for side in SIDES} for _ in "ab")
    for side, scores, true in case.queries(kept, ALL):
        thousandths = np.trunc(scores * 1000)  # -inf stays
        better = thousandths >= thousandths[true]
        in_train = np.isin(np.arange(len(scores)), list(trained))
        ranks[side].append(better[in_train].sum())
        surplus[side].append(better[~in_train].sum())  # no candidates there, but ours
    # "s,o", the default: ranks of both sides.
    ours = case.ours(None, kept)
    for side in SIDES:
        expected = np.array(ranks[side]) + surplus[side]
        assert ours.pessimistic[side].tolist() == expected.tolist()
    assert sum(map(sum, surplus.values()))
    # "s+o" ranks heads and tails in one list, which none of our options does.
    joint = np.array(ranks["head"]) + np.array(ranks["tail"]) - 1
    assert figures(joint)["mrr"] < figures(ranks["head"] + ranks["tail"])["mrr"]


def test_ogb(case, tmp_path):
    """Given candidates, unfiltered, and the mean of the best and the worst rank."""
    test, random = case.store.test, np.random.default_rng(2)
    lists = {f"{side}_neg": random.integers(ENTITIES - 2, size=(len(test), 20)) for side in SIDES}
    np.savez(tmp_path / "lists.npz", **lists)
    ranks = []
    for side, column in (("head", 0), ("tail", 2)):
        for triple, candidates in zip(test.tolist(), lists[f"{side}_neg"], strict=True):
            scores = case.scores[side](tuple(triple))
            others, true = scores[candidates], scores[triple[column]]
            ranks.append(1 + ((others > true).sum() + (others >= true).sum()) / 2)
    options = {"candidates_options": {"file": str(tmp_path / "lists.npz")}}
    ours = case.ours("test", test, candidates="fixed", **options)
    assert mean_ranks(ours, "realistic") == pytest.approx(figures(ranks))


def ogb_scores(case, lists, side) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores (T,) of the true answers and (T, m) of candidates, as OGB takes them."""
    column, rows = (0 if side == "head" else 2), case.store.test.tolist()
    scores = [case.scores[side](tuple(triple)) for triple in rows]
    true = [row[triple[column]] for row, triple in zip(scores, rows, strict=True)]
    others = [row[candidates] for row, candidates in zip(scores, lists, strict=True)]
    return torch.tensor(np.array(true)), torch.tensor(np.array(others))


@pytest.mark.slow
def test_the_evaluator_of_ogb_agrees(case, tmp_path):
    linkproppred = pytest.importorskip("ogb.linkproppred", reason="ogb is not installed")
    evaluator = linkproppred.Evaluator("ogbl-wikikg2")
    random, by_metric = np.random.default_rng(2), {}
    lists = {side: random.integers(ENTITIES, size=(len(case.store.test), 500)) for side in SIDES}
    np.savez(tmp_path / "lists.npz", head_neg=lists["head"], tail_neg=lists["tail"])
    for side in SIDES:
        true, others = ogb_scores(case, lists[side], side)
        results = evaluator.eval({"y_pred_pos": true, "y_pred_neg": others})
        for name, values in results.items():
            by_metric.setdefault(name.removesuffix("_list"), []).append(values)
    options = {"candidates_options": {"file": str(tmp_path / "lists.npz")}}
    ours = mean_ranks(
        case.ours("test", case.store.test, candidates="fixed", **options), "realistic"
    )
    expected = {
        name: torch.cat(values).double().mean().item() for name, values in by_metric.items()
    }
    assert len(expected) == 4
    assert {name: ours[name] for name in expected} == pytest.approx(expected, abs=1e-6)

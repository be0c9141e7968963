"""The engine and the baselines against plain loops; baselines on several ranks and in results."""

from __future__ import annotations

import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ranking_cases import ColumnScorer, whole
from training_runs import config_of, evaluate, tiny_store
from worlds import run_world

from kge_torchrec import api
from kge_torchrec.cli import main
from kge_torchrec.commands.evaluate import unbeaten
from kge_torchrec.config import EvaluationConfig
from kge_torchrec.data.store.filter_index import FilterIndex, build_side
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.models.scorers import SIDES
from kge_torchrec.ranking import neighbors as knn_file
from kge_torchrec.ranking.blocks import ModelScores
from kge_torchrec.ranking.candidates import Frequencies
from kge_torchrec.ranking.neighbors import NeighborScores, is_feasible
from kge_torchrec.ranking.popularity import FrequentScores
from kge_torchrec.ranking.search import RankOptions, compare

N, R = 12, 2
TRIPLES = st.sets(
    st.tuples(st.integers(0, N - 1), st.integers(0, R - 1), st.integers(0, N - 1)),
    min_size=1, max_size=60,
)  # fmt: skip


class Seen:
    """Entities that some triples have on a side of the relation, and one more."""

    def __init__(self, triples):
        self.seen = {side: {(r, (h, t)[side == "tail"]) for h, r, t in triples} for side in SIDES}

    def mask(self, side, relation, first, stop):
        entities = np.arange(first, stop)
        return self.contain(side, entities * 0 + relation, entities)

    def contain(self, side, relations, entities):
        pairs = zip(relations.tolist(), entities.tolist(), strict=True)
        return np.array([entity == 7 or (relation, entity) in self.seen[side]
                         for relation, entity in pairs], bool)  # fmt: skip


def indexed(*splits):
    return FilterIndex.of(*map(rows, splits))


def rows(triples):
    return np.array(sorted(triples), np.int64).reshape(-1, 3)


def store_of(train):
    sides = {side: build_side(side, rows(train)) for side in SIDES}
    return SimpleNamespace(
        num_entities=N, num_relations=R, side_index=lambda split, side: sides[side],
        filter_index=lambda splits: indexed(train),
    )  # fmt: skip


SHARD = EntityShard(torch.empty(N, 0), 0, N)


def frequency(train, side, relation, anchor):
    """Return the score of each entity: how often train has it on that side."""
    return [sum((r, (h, t)[side == "tail"]) == (relation, e) for h, r, t in train)
            for e in range(N)]  # fmt: skip


def knn(train, side, relation, anchor, neighbors):
    """Return the sum of cosines to the user's items, of those among an item's nearest ones."""
    pairs = [((h, t), (t, h))[side == "head"] for h, r, t in train if r == relation]
    users = {item: {u for u, i in pairs if i == item} for _, item in pairs}
    own = sorted(item for user, item in pairs if user == anchor)
    scores = []
    for item in range(N):
        cosines = {}
        for other in users if item in users else ():
            shared = len(users[item] & users[other])
            if shared and other != item:
                degrees = len(users[item]) * len(users[other])
                cosines[other] = float(np.float32(shared / math.sqrt(degrees)))
        nearest = sorted(cosines, key=lambda other: (-cosines[other], other))[:neighbors]
        scores.append(float(np.float32(math.fsum(cosines[x] for x in own if x in nearest))))
    return scores


def by_hand(side, only, triples, scores_of, is_lists, known):
    """{triple: (better, equal, pool)} by one loop per answer."""
    anchor, answer = (0, 2) if side == "tail" else (2, 0)
    counts = {}
    for triple in triples.tolist():
        relation, own = triple[1], triple[answer]
        taken = {
            row[answer] for row in known if (row[1], row[anchor]) == (relation, triple[anchor])
        }
        if is_lists:
            taken |= {row[answer] for row in triples.tolist()
                      if (row[1], row[anchor]) == (relation, triple[anchor])}  # fmt: skip
        scores = scores_of(relation, triple[anchor])
        pool = [
            e
            for e in range(N)
            if e not in taken
            and (only is None or only.contain(side, np.array([relation]), np.array([e]))[0])
        ]  # fmt: skip
        counts[tuple(triple)] = (
            sum(e != own and not scores[e] <= scores[own] for e in pool),  # a NaN is better
            sum(scores[e] == scores[own] and e != own for e in pool),
            len(pool),
        )
    return counts


def as_counts(counts, triples):
    """The same of the engine."""
    columns = counts.better.tolist(), counts.equal.tolist(), counts.pool.tolist()
    found = zip(*columns, strict=True)
    return dict(zip(map(tuple, triples[counts.order].tolist()), found, strict=True))


@pytest.mark.parametrize("side", SIDES)
@settings(max_examples=25)
@given(
    TRIPLES, TRIPLES, TRIPLES, st.booleans(), st.integers(1, 5), st.integers(1, 9),
    st.lists(st.sampled_from([0.0, 1.0, np.nan, np.inf, -np.inf]), min_size=N, max_size=N),
)  # fmt: skip
@example({(0, 0, 1)}, {(0, 0, 2)}, {(0, 1, 3), (0, 0, 1)}, True, 1, 1, [0.0] * N)
def test_counts_match_loops_over_all_candidates(
    side, train, valid, ranked, is_restricted, neighbors, batch, values
):
    triples, known, store = rows(ranked), train | valid, store_of(train)
    only = Seen(train) if is_restricted else None
    options = RankOptions(only, batch_size=batch)

    def check(scores, scores_by_hand, is_lists):
        k = 0 if is_lists else None
        counts = compare(scores, triples, side, indexed(train, valid), options, k)
        expected = by_hand(side, only, triples, scores_by_hand, is_lists, known)
        assert as_counts(counts, triples) == expected
        is_known = [tuple(row) in known for row in triples[counts.order].tolist()]
        assert counts.is_known.tolist() == is_known

    special = ModelScores(ColumnScorer(), whole(torch.tensor(values)[:, None]))
    frequent = FrequentScores(SHARD, Frequencies(store, (0, N)))
    for is_lists in (False, True):
        check(frequent, lambda r, a: frequency(train, side, r, a), is_lists)
        check(special, lambda r, a: values, is_lists)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knn_file, "NEIGHBORS", neighbors)
        nearest = NeighborScores(SHARD, store, side, triples[:, 1])
        check(nearest, lambda r, a: knn(train, side, r, a, neighbors), True)


def test_item_knn_is_left_out_where_it_takes_too_long(monkeypatch):
    store, relations = store_of(set(itertools.product(range(4), [0], range(4)))), np.zeros(1, int)
    assert is_feasible(store, "tail", relations)
    for name in ("PAIRS", "ITEMS"):
        with monkeypatch.context() as patch:
            patch.setattr(knn_file, name, 3)
            assert not is_feasible(store, "tail", relations)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("baselines")
    store = tiny_store(folder / "store", train=160, held_out=40)
    api.train(config_of(store.path, folder / "run", evaluation__metric="recall@3",
                        evaluation__every=1, train__epochs=1))  # fmt: skip
    return folder / "run"


KINDS = ("all", "seen")


def on_ranks(path):
    """Return the baselines of a run, as every rank hears them."""
    with api.open_run(path) as run:
        model, results = run.model, {}
        triples = model.store.test
        for kind in KINDS:
            evaluation = EvaluationConfig(candidates=kind)
            results[kind] = model.baselines_of(triples, "test", evaluation)
            for side in SIDES:
                found = model.list_baselines_of(triples, "test", evaluation, [1, 3], side)
                results[kind, side] = found
        return results


def test_every_rank_hears_the_same_baselines(run):
    (expected,) = run_world(1, on_ranks, run)
    assert expected["all"] != expected["seen"]
    assert run_world(2, on_ranks, run) == [expected] * 2


def test_results_and_tables_have_the_baselines(run, capsys):
    results = json.loads((run / "results.json").read_text())["test"]
    popular, nearest = results["recommendation_baselines"].values()
    assert {"recall@3", "ndcg@3"} <= popular.keys() == nearest.keys()
    assert results["baselines"]["most frequent"].keys() == {"head", "tail", "both"}
    assert results["baselines"] == evaluate(run)["baselines"]
    listed = evaluate(run, recommend=[1, 3])["recommendation_baselines"]
    assert listed["item-kNN"]["recall@3"] == nearest["recall@3"]
    capsys.readouterr()
    for arguments in (["train", "--resume", str(run)], ["evaluate", str(run)]):
        assert main(arguments) == 0
        text = capsys.readouterr().out
        mrr = results["baselines"]["most frequent"]["both"]["realistic"]["mrr"]
        assert any(
            line.startswith("most frequent") and f"{mrr:.4f}" in line for line in text.splitlines()
        )
        for sentence in unbeaten(results if arguments[0] == "train" else evaluate(run)):
            assert sentence in text
    assert main(["evaluate", str(run), "--recommend", "3"]) == 0
    text = capsys.readouterr().out
    for name, values in (("most popular", popular), ("item-kNN", nearest)):
        (line,) = [line for line in text.splitlines() if f"3  {name}" in line]
        assert line.split()[-6:-4] == [f"{values['recall@3']:.4f}", f"{values['ndcg@3']:.4f}"]


def test_a_model_that_does_not_beat_a_baseline_is_named():
    def ranked(mrr):
        return {"both": {"realistic": {"mrr": mrr}}}

    links = {**ranked(0.2), "baselines": {"most frequent": ranked(0.1)}}
    assert unbeaten(links) == []
    (sentence,) = unbeaten({**ranked(0.1), "baselines": {"most frequent": ranked(0.1)}})
    assert sentence.startswith("The model does not beat the most frequent heads and tails")
    model, popular = {"recall@5": 0.3, "ndcg@5": 0.2}, {"recall@5": 0.2, "ndcg@5": 0.25}
    lists = {"most popular": popular, "item-kNN": None}
    (sentence,) = unbeaten({"recommendation": model, "recommendation_baselines": lists})
    assert sentence == (
        "The model does not beat the most popular unseen items: ndcg@5 0.2000 against 0.2500."
    )


def test_the_most_similar_items_come_before_ties():
    """Item 0 shares a user with 1 and 2 (cosine .5 each) and both of its users with 3 (1)."""
    from kge_torchrec.ranking.neighbors import similar_items

    users_of = [[0, 1], [0, 2], [1, 3], [0, 1]]
    users = np.concatenate(users_of)
    items = np.repeat(np.arange(4), 2)
    order = np.argsort(users, kind="stable")
    items_at = np.append(0, np.cumsum(np.bincount(users)))
    ids, cosines = similar_items(items_at, items[order], np.arange(0, 9, 2), users, 0, 4, 2)
    assert sorted(ids[0].tolist()) == [1, 3] and sorted(cosines[0].tolist()) == [0.5, 1.0]

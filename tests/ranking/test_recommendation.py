"""Recommendations against plain loops over the full matrix, on 1, 2 and 4 ranks, and in runs."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_ranking import dense_scores
from ranking_cases import (
    ColumnScorer,
    make_known,
    make_scorer,
    my_shard,
    on_every_rank,
    random_triples,
    whole,
)
from training_runs import config_of, evaluate, fit, tiny_store

from kge_torchrec import api
from kge_torchrec.cli import main
from kge_torchrec.config import ConfigError
from kge_torchrec.models.scorers import SIDES
from kge_torchrec.ranking.blocks import ModelScores
from kge_torchrec.ranking.groups import Grouping
from kge_torchrec.ranking.recommendation import (
    grouped_recommendations,
    recommend,
    recommendation_metrics,
    sample_users,
)
from kge_torchrec.ranking.search import RankOptions
from kge_torchrec.training.session import validation_triples

N, R, D, K = 60, 3, 8, 7
CUTOFFS = (1, 3, K)


class Parity:
    """Candidates of even relations are even entities, and those of odd ones are odd."""

    label = "entities of the relation's parity"

    def mask(self, side, relation, first, stop):
        return np.arange(first, stop) % 2 == relation % 2

    def contain(self, side, relations, entities):
        return entities % 2 == relations % 2


CASES = [(side, candidates) for side in SIDES for candidates in (None, Parity())]


def case():
    """Rows in equal pairs far apart: ties across blocks and shards; some answers are known."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(N // 2, D, generator=generator).repeat(2, 1)
    triples = np.unique(random_triples(150, N, R, 1).numpy() // [4, 1, 1], axis=0)
    known = np.unique(random_triples(300, N, R, 2).numpy() // [4, 1, 1], axis=0)
    return table, triples, np.concatenate([known, triples[:3]])


def on_my_shard(table, triples, known):
    """Return the metrics and lists of every side and kind of candidates."""
    scorer, shard, results = make_scorer("complex", R, D), my_shard(table), {}
    for side, candidates in CASES:
        options = RankOptions(candidates, block_bytes=1, batch_size=9)
        ranked = recommend(ModelScores(scorer, shard), triples, make_known(known), K, options, side)
        metrics = recommendation_metrics(ranked, CUTOFFS)
        results[side, candidates is None] = metrics, ranked.lists.tolist()
    return results


@pytest.fixture(scope="module")
def found():
    """The results of every rank of several worlds."""
    return [*on_every_rank(on_my_shard, *case())]


def lists_by_definition(scores, triples, known, side, candidates):
    """{user: (its scores with None where nothing competes, its answers)}, user by user."""
    anchor, answer = (0, 2) if side == "tail" else (2, 0)
    users: dict = {}
    for triple, row in zip(triples.tolist(), scores.tolist(), strict=True):
        users.setdefault((triple[1], triple[anchor]), (row, set()))[1].add(triple[answer])
    for (relation, entity), (row, _) in users.items():
        for triple in known.tolist():
            if (triple[1], triple[anchor]) == (relation, entity):
                row[triple[answer]] = None
        if candidates is not None:
            mask = candidates.mask(side, relation, 0, len(row))
            row[:] = [s if inside else None for s, inside in zip(row, mask, strict=True)]
    return dict(sorted(users.items()))


def metrics_by_definition(users, cutoffs, pool):
    """The means over the users, from loops and one sort per user."""
    values: dict = {}
    covered = {k: set() for k in cutoffs}
    for row, answers in users.values():
        others = [s for i, s in enumerate(row) if s is not None and i not in answers]
        ranks, below = [], []
        scores = [row[i] for i in answers]
        for s in sorted((s for s in scores if s is not None and s == s), reverse=True):
            # A NaN is better than every score, infinity too.
            better = sum(not o <= s for o in others) + sum(o == s for o in others) / 2
            ranks.append(len(ranks) + 1 + better)
            below.append(1 - better / max(1, len(others)))
        below += [0.0] * (len(answers) - len(below)) if others else [1.0]
        values.setdefault("auc", []).append(np.mean(below[: len(answers)]))
        listed = [i for i, s in enumerate(row) if s is not None]
        listed.sort(key=lambda i: (row[i] == row[i], -row[i], i))  # NaN is above infinity
        for k in cutoffs:
            covered[k] |= set(listed[:k])
            hits = [rank for rank in ranks if rank <= k]
            ideal = sum(1 / math.log2(place + 2) for place in range(min(k, len(answers))))
            own = {
                "recall": len(hits) / len(answers),
                "precision": len(hits) / k,
                "hit_rate": float(bool(hits)),
                "ndcg": sum(1 / math.log2(rank + 1) for rank in hits) / ideal,
                "map": sum((i + 1) / rank for i, rank in enumerate(hits)) / min(k, len(answers)),
            }
            for name, value in own.items():
                values.setdefault(f"{name}@{k}", []).append(value)
    means = {name: float(np.mean(of)) for name, of in values.items()}
    return means | {f"coverage@{k}": len(covered[k]) / pool for k in cutoffs}


@pytest.mark.parametrize(("side", "candidates"), CASES)
def test_metrics_match_the_definition_on_every_world_size(found, side, candidates):
    table, triples, known = case()
    scores = dense_scores(make_scorer("complex", R, D), table, torch.from_numpy(triples), side)
    users = lists_by_definition(scores, triples, known, side, candidates)
    expected = metrics_by_definition(users, CUTOFFS, N)
    for of_rank in found:
        results, lists = of_rank[side, candidates is None]
        stats = results["recommendation"]
        assert stats.pop("users") == len(users) and stats.pop("answers") == len(triples)
        assert stats.pop("candidates") == N
        assert stats == pytest.approx(expected)
        for row, (of_user, _) in zip(lists, users.values(), strict=True):
            best = sorted((-s, i) for i, s in enumerate(of_user) if s is not None)[:K]
            assert row == [i for _, i in best] + [-1] * (K - len(best))
        if candidates is not None:
            outside = sum(of[i] is None for of, answers in users.values() for i in answers)
            assert results["candidates"]["answers_outside"] == {side: outside}


SPECIAL = st.sampled_from([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan])
PAIRS = st.sets(st.tuples(st.integers(0, 2), st.integers(0, 8)), min_size=1, max_size=12)


@settings(max_examples=30)
@given(st.lists(SPECIAL, min_size=9, max_size=9), PAIRS, PAIRS)
def test_ties_masks_and_special_scores_count_as_documented(values, pairs, known):
    table = torch.tensor(values)[:, None]
    triples, masked = (np.array([(h, 0, t) for h, t in sorted(of)]) for of in (pairs, known))
    scores = table[:, 0].expand(len(triples), -1)
    users = lists_by_definition(scores, triples, masked, "tail", None)
    ranked = recommend(ModelScores(ColumnScorer(), whole(table)), triples, make_known(masked), 4)
    stats = recommendation_metrics(ranked, (1, 2, 4))["recommendation"]
    expected = metrics_by_definition(users, (1, 2, 4), 9)
    assert {name: stats[name] for name in expected} == pytest.approx(expected)


@given(st.integers(1, 130), st.integers(0, 5))
@settings(max_examples=30)
def test_samples_have_whole_users(limit, seed):
    triples = case()[1]
    drawn = sample_users(triples, limit, seed)
    users, of = {tuple(row[:2]) for row in drawn}, [tuple(row[:2]) for row in triples]
    assert np.array_equal(drawn, triples[[pair in users for pair in of]])
    assert len(drawn) <= limit or len(users) == 1
    assert not np.array_equal(drawn, sample_users(triples, limit, seed + 1)) or limit > 120


def test_groups_divide_answers_and_lists():
    table, triples, known = case()
    ranked = recommend(
        ModelScores(make_scorer("complex", R, D), whole(table)), triples, make_known(known), K
    )
    listed = ranked.listed()
    groups = np.append(ranked.triples, listed, 0)[:, 2] % 3
    results = grouped_recommendations(
        ranked, CUTOFFS, Grouping("", ["0", "1", "2"], {"tail": groups})
    )
    parts = [group["recommendation"] for group in results["groups"]]
    total = results["total"]["recommendation"]
    assert sum(part["answers"] for part in parts) == total["answers"] == len(triples)
    for k in CUTOFFS:
        assert sum(part[f"listed@{k}"] for part in parts) == pytest.approx(1)
        covered = sum(part[f"coverage@{k}"] for part in parts)
        assert covered == pytest.approx(total[f"coverage@{k}"])
    of_one = ranked.triples[ranked.triples[:, 2] % 3 == 1]
    ranks = {tuple(t): rank for t, rank in zip(ranked.triples, ranked.ranks, strict=True)}
    users: dict = {}
    for triple in of_one:
        users.setdefault(tuple(triple[:2]), []).append(ranks[tuple(triple)] <= 3)
    assert parts[1]["recall@3"] == pytest.approx(np.mean([np.mean(hit) for hit in users.values()]))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tiny_store(tmp_path_factory.mktemp("graph") / "store", train=160, held_out=40)


@pytest.fixture(scope="module")
def run(store, tmp_path_factory):
    """A run whose best model by recall is not the last one."""
    folder = tmp_path_factory.mktemp("run") / "run"
    api.train(config_of(store.path, folder, train__epochs=8, train__lr=0.5, evaluation__every=1,
                        evaluation__patience=0, evaluation__metric="recall@3",
                        model__scorer="complex", model__reciprocal=False))  # fmt: skip
    return folder


def test_validation_by_recall_chooses_the_best_checkpoint(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    values = [line["recommendation"]["recall@3"] for line in lines if line["kind"] == "valid"]
    results = json.loads((run / "results.json").read_text())
    assert len(values) == 8 and max(values) > values[-1]
    assert results["valid"] == {"metric": "recall@3", "best": max(values)}
    assert results["checkpoint"]["epoch"] == values.index(max(values)) + 1
    best = evaluate(run, "valid", recommend=[3])["recommendation"]
    assert best["recall@3"] == max(values)
    again = evaluate(run, recommend=[3])["recommendation"]
    assert results["test"]["recommendation"] == again and "both" in results["test"]


def test_train_prints_the_lists_that_it_was_selected_by(run, capsys):
    assert main(["train", "--resume", str(run)]) == 0
    text = capsys.readouterr().out
    value = json.loads((run / "results.json").read_text())["test"]["recommendation"]["recall@3"]
    assert "recommendations among all entities: " in text and f"{value:.4f}" in text
    assert "filtered ranks among all entities" in text


def test_evaluate_prints_lists_and_groups(run, capsys):
    assert main(["evaluate", str(run), "--recommend", "2", "5", "--by", "popularity"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("recommendations among all entities: ") and "AUC 0." in text
    assert "by popularity" in text and "listed" in text
    groups = evaluate(run, recommend=[2, 5], by=["popularity"])["by"]["popularity"]["groups"]
    assert sum(group["recommendation"]["listed@5"] for group in groups) == pytest.approx(1)
    assert main(["evaluate", str(run), "--recommend", "2", "--candidates", "seen", "--side", "head",
                 "--split", "train", "--by", "relation"]) == 0  # fmt: skip
    text = capsys.readouterr().out
    assert text.startswith("RESTRICTED candidates") and "recommendations among entities" in text


def test_validations_name_restricted_candidates_once(store, tmp_path, capfd):
    keys = {"evaluation__candidates": "seen", "evaluation__every": 1, "train__epochs": 3}
    fit(config_of(store.path, tmp_path / "run", **keys))
    lines = [line for line in capfd.readouterr().err.splitlines() if "valid" in line]
    (named,) = [line for line in lines if "validations rank among entities seen" in line]
    of_each = [line for line in lines if "valid mrr" in line]
    assert len(of_each) == 3 and max(map(len, of_each)) < 80 and len(named) < 130


def test_validation_samples_whole_users(tmp_path):
    """Users have two valid triples on average, so that a sample of triples would divide some."""
    store = tiny_store(tmp_path / "store", entities=20, relations=1, train=160, held_out=40)
    keys = {"evaluation__metric": "ndcg@10", "evaluation__max_triples": 9, "evaluation__every": 1}
    session = fit(config_of(store.path, tmp_path / "run", **keys))
    triples = validation_triples(session.config, store).tolist()
    users = {tuple(row[:2]) for row in triples}
    whole_users = [row for row in store.valid.tolist() if tuple(row[:2]) in users]
    assert triples == whole_users and len(whole_users) <= 9
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    valid = [line for line in lines if line["kind"] == "valid"]
    assert {line["triples"] for line in valid} == {len(whole_users)}
    assert {line["recommendation"]["answers"] for line in valid} == {len(whole_users)}
    assert not any("both" in line for line in valid)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"recommend": [0]}, "recommend must be whole numbers >= 1, such as .10, 20., got .0."),
        ({"recommend": ["5"]}, "recommend must be whole numbers"),
        ({"recommend": [5], "triples": [("e0", "r0", "e1")]}, "recommend: it takes a split"),
        ({"recommend": [5], "side": "relation"}, "side must be one of head, tail"),
        ({"side": "head"}, "side head has no effect without recommend"),
        ({"recommend": [5], "candidates": "fixed", "candidate_file": "x.npz"},
         "candidates of single triples"),
        ({"recommend": [5], "split": "own"}, "split must be one of"),
    ],
)  # fmt: skip
def test_bad_arguments_raise(run, arguments, message):
    with pytest.raises(ConfigError, match=message):
        evaluate(run, **arguments)


@pytest.mark.parametrize(
    "metric", ["recall", "recall@0", "recall@-1", "recall@x", "auc@3", "ndgc@5"]
)
def test_unknown_metrics_raise(metric):
    with pytest.raises(ConfigError, match=r"evaluation.metric must be .* such as recall@20, got"):
        config_of("countries", evaluation__every=1, evaluation__metric=metric)


def test_metrics_of_lists_need_lists_of_users():
    keys = {"evaluation__every": 1, "evaluation__metric": "auc",
            "evaluation__candidate_file": "x.npz"}  # fmt: skip
    with pytest.raises(
        ConfigError, match=r"evaluation.candidates fixed: .* use all, seen or types"
    ):
        config_of("countries", evaluation__candidates="fixed", **keys)

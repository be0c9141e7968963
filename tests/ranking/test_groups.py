"""Ranks in groups: what the groups are, by hand, and that they add up to the whole."""

from __future__ import annotations

import json

import numpy as np
import pytest
from training_runs import config_of, evaluate

from kge_torchrec import api
from kge_torchrec.cli import main
from kge_torchrec.config import ConfigError
from kge_torchrec.data.prepare import prepare
from kge_torchrec.errors import DataError
from kge_torchrec.models.scorers import SIDES
from kge_torchrec.ranking import groups
from kge_torchrec.ranking.groups import GROUPINGS, by_category, by_frequency, grouped
from kge_torchrec.ranking.ranks import Ranks, metrics
from kge_torchrec.trained_model import TrainedModel

TRAIN = [
    ("a", "one", "b"), ("c", "one", "d"),  # 1-1
    ("a", "many_tails", "b"), ("a", "many_tails", "c"), ("d", "many_tails", "e"),  # 1.5 a head
    ("a", "many_heads", "e"), ("b", "many_heads", "e"), ("c", "many_heads", "d"),
    ("a", "both", "b"), ("a", "both", "c"), ("b", "both", "b"), ("b", "both", "c"),
]  # fmt: skip
TEST = [("b", "one", "c"), ("f", "many_tails", "a"), ("b", "many_heads", "d"), ("c", "both", "e"),
        ("a", "new", "g"), ("a", "one", "e")]  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("groups") / "store"
    return prepare({"train": TRAIN, "test": TEST}, path, {"allow_unseen_relations": True})


def test_categories_match_hand_counts(store):
    grouping = by_category(store, store.test)
    labels = [grouping.labels[place] for place in grouping.groups["head"]]
    assert labels == ["1-1", "1-N", "N-1", "N-N", "not in train", "1-1"]


def test_frequency_groups_count_the_answer(store):
    degree = {
        label: sum(label in (h, t) for h, _, t in TRAIN) + sum(h == t == label for h, _, t in TRAIN)
        for label in "abcdefg"
    }
    assert [degree[label] for label in "fdb"] == [0, 3, 7]
    grouping = by_frequency(store, store.test)
    assert grouping.labels == ["0", "1", "2-3", "4-7"]
    for side, column in (("head", 0), ("tail", 2)):
        expected = ["0" if not (n := degree[row[column]]) else "1" if n == 1
                    else "2-3" if n < 4 else "4-7" for row in TEST]  # fmt: skip
        assert [grouping.labels[place] for place in grouping.groups[side]] == expected


@pytest.mark.parametrize("name", GROUPINGS)
def test_groups_add_up_to_the_whole(store, name):
    """Counts exactly, means to rounding; and each group is the metrics of its queries."""
    random = np.random.default_rng(0)
    triples = store.train[random.integers(len(store.train), size=500)]
    first = {side: random.integers(1, 40, size=500) for side in SIDES}
    last = {side: first[side] + random.integers(3, size=500) for side in SIDES}
    ranks, grouping = Ranks(first, last), GROUPINGS[name](store, triples)
    results = grouped(ranks, grouping)
    assert results["total"] == metrics(ranks)
    for side, number in (("head", 500), ("tail", 500), ("both", 1000)):
        assert sum(group[side]["queries"] for group in results["groups"]) == number
        for kind in ("optimistic", "realistic", "pessimistic"):
            for metric, value in results["total"][side][kind].items():
                parts = [group[side]["queries"] * group[side][kind][metric]
                         for group in results["groups"] if group[side]["queries"]]  # fmt: skip
                assert sum(parts) == pytest.approx(number * value, rel=1e-12)
    for group in results["groups"]:
        place = grouping.labels.index(group["group"])
        own = {side: grouping.groups[side] == place for side in SIDES}
        if all(mask.any() for mask in own.values()):
            single = metrics(Ranks(*({s: of[s][own[s]] for s in SIDES} for of in (first, last))))
            for side in ("head", "tail", "both"):
                for kind, expected in single[side].items():
                    assert group[side][kind] == pytest.approx(expected, rel=1e-12)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grouped") / "run"
    config = config_of("countries", folder, model__dim=16, train__batch_size=256, train__epochs=2)
    api.train(config).close()
    return folder


def test_evaluate_by_ranks_once(run, capsys, monkeypatch):
    ranked = []
    ranks_of = TrainedModel.ranks_of
    monkeypatch.setattr(
        TrainedModel, "ranks_of", lambda *args: ranked.append(args) or ranks_of(*args)
    )
    monkeypatch.setattr(groups, "LINES", 2)
    names = ["relation", "category", "frequency"]
    assert main(["evaluate", str(run), "--by", *names]) == 0
    assert len(ranked) == 2  # by the model, and by its baseline
    text = capsys.readouterr().out
    assert "more groups, in --format json" in text and "all entities" in text
    assert main(["evaluate", str(run), "--by", *names, "--format", "json"]) == 0
    results = json.loads(capsys.readouterr().out)
    expected = json.loads((run / "results.json").read_text())["test"]
    del expected["baselines"]
    for name in names:
        assert f"by {name}: " in text
        assert results["by"][name]["groups"]
        assert results["by"][name]["total"] == expected  # of the ungrouped ranking, to the last bit


def test_restricted_evaluation_is_labeled_everywhere(run, capsys):
    arguments = ["evaluate", str(run), "--split", "valid", "--candidates", "seen"]
    assert main([*arguments, "--by", "category"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("RESTRICTED") and text.count("RESTRICTED") == 2
    assert main([*arguments, "--by", "category", "--format", "json"]) == 0
    restricted = json.loads(capsys.readouterr().out)
    total = restricted["by"]["category"]["total"]
    assert restricted["candidates"] == total["candidates"]
    assert "seen" in total["candidates"]["restricted_to"]
    with api.open_run(run) as opened:  # each evaluation has its own candidates
        assert opened.evaluate("valid", candidates="seen")["both"] == restricted["both"]
        whole = opened.evaluate("valid")
    assert "candidates" not in whole
    assert restricted["both"]["realistic"]["mrr"] > whole["both"]["realistic"]["mrr"]


def test_invalid_choices_are_rejected(run):
    with pytest.raises(ConfigError, match="by must be one of relation, category, frequency"):
        evaluate(run, by=["entity"])
    with pytest.raises(DataError, match="has no types of entities"):
        evaluate(run, candidates="types")

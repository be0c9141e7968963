"""The standings of a race: which settings the results so far let continue."""

from __future__ import annotations

from dataclasses import replace

import pytest
from training_runs import tiny_store

from kge_torchrec.config import Config
from kge_torchrec.distributed.processes import processes
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import validation_triples
from kge_torchrec.training.stop_signal import TrainingStopped
from kge_torchrec.tuning.race import (
    PORTFOLIO,
    Racer,
    _queries,
    _Track,
    _winner,
)
from kge_torchrec.tuning.standings import PROJECTED, Standings


@pytest.mark.parametrize(
    "values, stops",
    [
        ([0.3, 0.1, 0.2, 0.25], "softmax_weak_n3"),  # rote rises slowly
        ([0.1, 0.2, 0.4, 0.3], "softmax_n3"),
        ([0.2, 0.3, 0.2, 0.2], "kvsall_adam"),  # the last one of equal ones
        ([0.1, None, 0.2, 0.3], "softmax_n3"),
        ([0.1, 0.2, None, None], "kvsall_adam"),
    ],
)
def test_worst_setting_stops_unless_it_rises_slowly(values, stops):
    values = {name: [value] for name, value in zip(PORTFOLIO, values, strict=True)}
    standings = Standings("mrr", {}, [0.1, 0.2, 0.4], 0.5, values=values)
    stay = [name for name in PORTFOLIO if name != stops]
    assert standings.staying(PORTFOLIO, 0) == stay
    for name in stay:  # a resumed race knows what came later
        standings.values[name] += [None]
    assert standings.staying(PORTFOLIO, 0) == stay


def test_setting_that_rises_stays_before_one_that_does_not():
    """The projection counts after the second comparison."""
    values = {"softmax_n3": [0.2, 0.29], "rote": [0.1, 0.1], "softmax_weak_n3": [0.3, 0.3]}
    standings = Standings("mrr", {}, [0.1, 0.2, 0.4], 0.5, values=values)
    assert standings.staying(list(values), 0) == ["rote", "softmax_weak_n3"]
    assert standings.staying(list(values), 1) == ["softmax_n3", "rote"]


def test_order_of_racers():
    values = {"a": [3.0], "b": [2.0], "c": [None], "d": [2.0]}
    standings = Standings("mr", {}, [0.5], 0.5, values=values)
    assert standings.order("abcd") == ["b", "d", "a", "c"]
    standings.metric = "mrr"
    assert standings.order("abcd") == ["a", "b", "d", "c"]


def test_slow_setting_that_still_rises_beats_a_fast_one():
    """A share of its last gain for each of the four doublings from an eighth to two trainings."""
    values = {"fast": [0.30, 0.31], "slow": [0.20, 0.29], "falls": [0.32, 0.31]}
    standings = Standings("mrr", {}, [0.0625, 0.125], 0.5, values=values)
    assert standings.projected("slow") == pytest.approx(0.29 + PROJECTED * 4 * 0.09)
    assert standings.projected("falls") == 0.31
    assert standings.order(["fast", "slow", "falls"]) == ["slow", "fast", "falls"]
    standings.metric = "mr"
    assert standings.projected("slow") == 0.29


def test_last_two_that_valid_cannot_tell_apart_keep_the_order_of_the_portfolio():
    """Ahead by a standard error, which fewer queries make larger, the later one continues."""
    values = {"first": [0.50, 0.50], "later": [0.50, 0.51], "worse": [0.47, 0.47]}
    standings = Standings("mrr", {}, [1.0, 2.0], 0.5, values=values)  # no time is left
    assert standings.finalists(["first", "later"]) == ["later", "first"]
    standings.queries = 2600  # 0.0098
    assert standings.finalists(["first", "later"]) == ["later", "first"]
    standings.queries = 2400  # 0.0102
    assert standings.finalists(["first", "later"]) == ["first", "later"]
    assert standings.finalists(["worse", "later"]) == ["later", "worse"]
    assert standings.finalists(["first", "worse"]) == ["first", "worse"]
    values["later"][-1] = None
    assert standings.finalists(["later", "first"]) == ["first", "later"]


def test_results_within_a_standard_error_are_compared_again():
    """A resumed race knows later results, which do not count."""
    values = {"first": [0.4, 0.50, 0.9], "later": [0.1, 0.51, 0.6]}
    standings = Standings("mrr", {}, [0.5, 1.0, 2.0], 0.5, values=values)
    assert standings.tells_apart(["first", "later"], 1)  # no noise is known
    standings.queries = 2600  # 0.0098
    assert standings.tells_apart(["first", "later"], 1)
    standings.queries = 2400  # 0.0102
    assert not standings.tells_apart(["first", "later"], 1)
    assert not standings.tells_apart(["later", "first"], 1)
    assert standings.tells_apart(["first", "later"], 2)
    values["later"] = [0.1, None]
    assert standings.tells_apart(["first", "later"], 1)


def test_projections_within_a_standard_error_are_compared_again():
    """The results differ by .0084, the projections by .0042; a standard error is .0081."""
    values = {"rote": [0.3568, 0.3693, 0.3845], "softmax_weak_n3": [0.3805, 0.3888, 0.3929]}
    standings = Standings("mrr", {}, [0.086, 0.171, 0.343], 0.6, values=values, queries=3654)
    assert not standings.tells_apart(list(values), 2)
    assert standings.finalists(list(values)) == ["softmax_weak_n3", "rote"]
    standings.queries = 4 * 3654
    assert standings.tells_apart(list(values), 2)


@pytest.mark.parametrize("last, rungs", [(0.1, 3), (0.29, 4)], ids=["apart", "close"])
def test_close_results_are_compared_again(tmp_path, last, rungs):
    """Also by a race that was killed while the second of the last two trained for that."""
    values = {"softmax_n3": [0.2, 0.2, 0.3, 0.3], "rote": [0.1, 0.1, last, 0.5]}
    values["kvsall_adam"] = [0.01]
    runs = []

    class Track(_Track):
        def run(self, racer, rung):
            runs.append((racer.name, rung))
            if runs.count(("rote", 3)) == 1 and runs[-1] == ("rote", 3):
                raise TrainingStopped("killed")
            return values.get(racer.name, [0.05, 0.04])[rung]

    racers = [Racer(name, Config(), 1.0, (1, 2, 3, 4)) for name in PORTFOLIO]
    standings = Standings("mrr", {}, [0.1, 0.2, 0.4, 0.8], 0.5, queries=1000)
    with processes("cpu") as ranks:
        track = Track(Config(), RunFolder(tmp_path), None, ranks)
        if rungs == 4:
            with pytest.raises(TrainingStopped):
                _winner(racers, standings, track)
            standings = Standings.read(track.folder)
        winner = _winner(racers, standings, track).name
    assert winner == ("rote" if rungs == 4 else "softmax_n3")
    assert [len(standings.values[name]) for name in PORTFOLIO] == [rungs, rungs, 2, 1]
    assert len(runs) == 4 + 3 + 2 * (rungs - 2) + (rungs == 4)  # one of them was killed


def test_the_lower_mean_rank_continues():
    values = {"first": [90.0, 80.0], "later": [90.0, 70.0]}
    standings = Standings("mr", {}, [1.0, 2.0], 0.5, values=values)
    assert standings.finalists(["first", "later"]) == ["later", "first"]
    assert standings.finalists(["later", "first"]) == ["later", "first"]


@pytest.mark.parametrize(
    ("metric", "limit", "queries"),
    [("mrr", 0, 20), ("hits@10", 5, 10), ("mr", 0, 0), ("coverage@5", 0, 0)],
)
def test_noise_follows_from_the_triples_of_a_validation(tmp_path, metric, limit, queries):
    opened = tiny_store(tmp_path / "store")
    assert len(opened.valid) == 10
    assert _queries(validated_by(metric, limit), opened) == queries


@pytest.mark.parametrize("limit", [0, 9])
def test_noise_of_recommendations_follows_from_the_users(tmp_path, limit):
    opened = tiny_store(tmp_path / "store", entities=20, relations=1, train=160, held_out=40)
    triples = validation_triples(validated_by("recall@5", limit), opened)
    users = len({(head, relation) for head, relation, _ in triples.tolist()})
    assert users < len(triples)
    for metric in ("recall@5", "ndcg@5", "auc"):
        assert _queries(validated_by(metric, limit), opened) == users


def validated_by(metric: str, limit: int) -> Config:
    config = Config()
    evaluation = replace(config.evaluation, metric=metric, max_triples=limit)
    return replace(config, evaluation=evaluation)

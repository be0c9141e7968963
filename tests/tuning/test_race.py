"""The race of defaults: what continues, what a kill leaves, when rules decide, what it costs."""

from __future__ import annotations

import importlib
import json
import math
import signal
import sys
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count, pairwise
from operator import attrgetter
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_runs import (
    config_of,
    largest_difference,
    open_config,
    parameters,
    rank,
    tiny_store,
)
from worlds import run_world

from kge_torchrec import api
from kge_torchrec.config import Config, ConfigError, GraphSize, sizing
from kge_torchrec.config.parser import as_config, config_from_dict, load_config, values_of
from kge_torchrec.config.sizing import is_raced
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.store import TripleStore
from kge_torchrec.distributed.processes import processes
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import load_trained, validation_triples
from kge_torchrec.training.stop_signal import TrainingStopped
from kge_torchrec.training.trainer import NonFiniteLoss, Trainer
from kge_torchrec.tuning import race
from kge_torchrec.tuning.race import FIELDS, PROJECTED, Race
from kge_torchrec.tuning.trials import PORTFOLIO

EPOCHS = 4


@contextmanager
def short(most: int = 4):
    """A context in which rules take few epochs, and racers train for at least one each."""
    few = patch.object(sizing, "_epochs", lambda config, graph: EPOCHS)
    with few, patch.object(race, "FIELDS", {"base": (most, 1.5)}):
        yield


@pytest.fixture(autouse=True)
def _short():
    with short():
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory, store) -> api.Run:
    """A raced run that nothing disturbed."""
    with short():
        return api.train(open_config(store, tmp_path_factory.mktemp("whole") / "run"))


def kill() -> None:
    raise KeyboardInterrupt


@contextmanager
def at_call(owner: type, name: str, number: int, act: Callable[[], object], counts=lambda _: True):
    """A context in which ``act`` is called before a call of a method, counted from 0."""
    called, calls = getattr(owner, name), count()

    def wrapper(self, *arguments):
        if counts(self) and next(calls) == number:
            act()
        return called(self, *arguments)

    with patch.object(owner, name, wrapper):
        yield


def at_step(step: int, act: Callable[[], object] = kill):
    return at_call(Trainer, "train_step", step, act)


def killed_at(step: int, config: Config) -> None:
    """Train until a kill at a step."""
    with at_step(step), pytest.raises(KeyboardInterrupt):
        api.train(config)


def table_of(path: Path) -> dict[str, torch.Tensor]:
    folder = RunFolder(path)
    with processes("cpu") as ranks:
        return parameters(load_trained(folder.load_config(), folder, ranks, "newest")[0])


def standings_of(path: Path) -> dict:
    return json.loads((path / "race.json").read_text())


def test_best_setting_continues_as_if_it_had_never_raced(tmp_path, whole):
    """By the rules; one unbroken curve; its config from the start gives the same table."""
    standings = standings_of(whole.path)
    values = standings["values"]
    full = {name: seen + 9 * [0.0] for name, seen in values.items()}  # the rules read no more
    queries = standings["queries"]
    winner, trained = by_the_rules(full, standings["rungs"], "mrr", queries, "base")
    assert standings["winner"] == winner
    assert {name: len(seen) for name, seen in values.items()} == trained
    assert queries == 20  # both sides of ten valid triples
    chosen = RunFolder(whole.path).load_config()
    assert chosen.decided_by is not None and chosen.model.dim == 8
    for key, value in values_of(winner).items():
        assert attrgetter(key)(chosen) == value
    lines = RunFolder(whole.path).load_metrics()
    epochs = [line["epoch"] for line in lines if line["kind"] == "epoch"]
    assert epochs == list(range(1, chosen.train.epochs + 1))
    assert whole.results["train"]["epochs"] == len(epochs)
    api.train(replace(chosen, run=replace(chosen.run, dir=str(tmp_path / "alone"))))
    assert largest_difference(table_of(tmp_path / "alone"), table_of(whole.path)) == 0


ENDS = {  # where and how a race ends early, and how it is taken up
    "by SIGTERM": (lambda: at_step(12, lambda: signal.raise_signal(signal.SIGTERM)), "auto"),
    "as the winner moves in": (
        lambda: at_call(Path, "replace", 1, kill, lambda path: path.parent.parent.name == "race"),
        "never",
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_race_that_ends_early_resumes(tmp_path, store, whole, end):
    """The table, the results and the race are those of an undisturbed run, bit for bit.

    The same command takes it up, or ``resume``; on GPUs or not, as it started.
    """
    path, (ends, how) = tmp_path / "run", ENDS[end]
    config = open_config(store, path, run__resume=how)
    with ends(), pytest.raises((KeyboardInterrupt, TrainingStopped)) as caught:
        api.train(config)
    if "SIGTERM" in end:
        said = f"stopped in the race of defaults; resume with `train --resume {path}`"
        assert said in str(caught.value)
        started = standings_of(path)
        assert (started["on_cuda"], started["world_size"]) == (False, 1)
        (path / "race.json").write_text(json.dumps(started | {"on_cuda": True, "world_size": 4}))
    assert not (path / "results.json").exists()
    with patch.object(race, "racers", side_effect=race.racers) as racers:
        api.train(config) if how == "auto" else api.resume(path)
    if "SIGTERM" in end:
        assert racers.call_args.args[2] == (True, 4)
        api.train(config)  # the run has ended; the same command finds it
    assert largest_difference(table_of(path), table_of(whole.path)) == 0  # as small a graph
    place = {"on_cuda": False, "world_size": 1}
    assert standings_of(path) | place == standings_of(whole.path)
    mine, other = (json.loads((p / "results.json").read_text()) for p in (path, whole.path))
    assert mine["test"] == other["test"] and mine["valid"] == other["valid"]
    assert not (path / "race").exists()


def test_race_ends_where_a_resume_says_how_to_train(tmp_path, store):
    """Nothing of the race stays; rules complete the config. A race.json of others is refused."""
    path = tmp_path / "run"
    killed_at(0, open_config(store, path))
    assert (path / "race").is_dir()
    for text in ('{"metric": "mrr", "share": 0.5}', '{"on_cuda": false}', "{"):
        (path / "race.json").write_text(text)
        with pytest.raises(ConfigError, match=r"race\.json is not of this version .* delete it"):
            api.resume(path)
    (path / "race.json").unlink()
    resumed = api.resume(path, {"train.lr": 0.05})
    assert resumed.config.train.lr == 0.05 and resumed.config.train.epochs == EPOCHS
    assert not {"race", "race.json"} & {file.name for file in path.iterdir()}


def race_on(folder: str, store: str) -> tuple[dict, dict]:
    """Race on the ranks of a world; return race.json and results.json."""
    with short(2):
        path = Path(folder)
        api.train(open_config(Path(store), path))
        if rank():
            return {}, {}
    return standings_of(path), json.loads((path / "results.json").read_text())


def test_ranks_race_as_one_process_does(tmp_path, store):
    standings, results = run_world(2, race_on, str(tmp_path / "run"), str(store))[0]
    with short(2):
        one = standings_of(api.train(open_config(store, tmp_path / "one")).path)
    assert standings["epochs"] == one["epochs"] and standings["winner"] in PORTFOLIO
    for name, values in standings["values"].items():
        both = min(len(values), len(one["values"][name]))  # close ones may be compared again
        assert values[:both] == pytest.approx(one["values"][name][:both], abs=2e-3)
    assert results["train"]["epochs"] == 2 * EPOCHS and results["train"]["world_size"] == 2


def test_setting_that_diverges_is_dropped_and_the_race_says_what_it_does(tmp_path, store, capsys):
    """It loses against all others; if all diverge, the error says what to set."""
    fit, names = race.train_trial, ("softmax_n3",)

    def diverges(config, folder, *args, **options):
        if folder.path.name in names:
            raise NonFiniteLoss("the loss is nan")
        return fit(config, folder, *args, **options)

    with patch.object(race, "train_trial", diverges):
        api.train(open_config(store, tmp_path / "run", run__progress=True))
        standings, err = standings_of(tmp_path / "run"), capsys.readouterr().err
        names = PORTFOLIO
        with pytest.raises(NonFiniteLoss, match="every"):
            api.train(open_config(store, tmp_path / "all"))
    assert not (tmp_path / "all").exists()
    assert set(standings["values"]["softmax_n3"]) == {None}
    assert standings["winner"] != "softmax_n3" and "softmax_n3 diverged" in err
    first = next(line for line in err.splitlines() if "race of defaults" in line)
    assert "4 settings train for a short time and the best one continues" in first
    assert "% of a training's time" in first and "--default rules skips it" in first
    for name, epochs in standings["epochs"].items():
        scorer = "rote" if name == "rote" else "complex"
        assert f"{name} ({scorer}) {', '.join(map(str, epochs))}" in first
    assert f"race of defaults: {standings['winner']} (" in err
    assert "wins and continues (valid mrr" in err


@pytest.mark.parametrize("why", ["valid has no triples", "a race takes too long"])
def test_rules_where_there_is_nothing_to_compare(tmp_path, store, capsys, why):
    if "valid" in why:
        lines = [("a", "r", "b"), ("b", "r", "c"), ("c", "r", "a")]
        prepare({"train": lines}, tmp_path / "store")
        store = tmp_path / "store"
    config = open_config(store, tmp_path / "run", run__progress=True)
    with patch.object(race, "FIELDS", {"base": (4, 0.01 if "long" in why else 1.0)}):
        api.train(config)
    assert f"default: rules, because {why}" in capsys.readouterr().err
    chosen = RunFolder(tmp_path / "run").load_config()
    assert chosen.model.scorer == "complex" and chosen.train.optimizer == "adagrad"
    assert not (tmp_path / "run" / "race.json").exists()


# when a race decides

GIVEN = {
    "default is rules": {"default": "rules"},
    "model.scorer is given": {"model.scorer": "distmult"},
    "loss.regularizers is given": {"loss.regularizers.l2": 0.1},
    "train.epochs is given": {"train.epochs": 3},
    "evaluation.every is 0": {"evaluation.every": 0},
    "data.weights is loss": {"data.weights": "loss"},
    "dense.compile is true": {"dense.compile": True},
    None: {"model.dim": 32, "seed": 3, "evaluation.metric": "hits@1", "train.precision": "bf16"},
}


@pytest.mark.parametrize("why", GIVEN)
def test_rules_decide_where_something_is_given(why):
    assert config_from_dict(GIVEN[why]).decided_by == why


def test_key_at_its_default_counts_as_given(tmp_path):
    """From the command line, in a file and in a dict; a file may say otherwise."""
    named, raced = tmp_path / "named.yaml", tmp_path / "raced.yaml"
    named.write_text("model:\n  scorer: complex\n")
    raced.write_text("default: race\nmodel:\n  scorer: complex\n")
    given = ["--model.scorer", "complex"]
    for config in (load_config("default", given), load_config(named), as_config({"loss.n3": None})):
        assert config.default == "rules"
    for config in (load_config("default"), load_config(raced), as_config(None),
                   as_config({"seed": 1}), as_config(Config().to_dict())):  # fmt: skip
        assert config.decided_by is None
    for words in (["--loss.name", "softmax"], ["--evaluation.every", "0"]):
        with pytest.raises(ConfigError, match=r"default race has no effect here: .*(given|is 0)"):
            load_config("default", ["--default", "race", *words])


def test_portfolio_sets_only_what_a_race_decides():
    """Each of them is a config that trains, and decides nothing that a user might have given."""
    for name in PORTFOLIO:
        assert values_of(name) and all(map(is_raced, values_of(name)))
        load_config(name).settled(GraphSize(50, 3, 1000, 10))


# the time of a race


@patch.object(race, "FIELDS", FIELDS)
@given(
    works=st.lists(st.floats(0.3, 40), min_size=2, max_size=4),
    epochs=st.integers(5, 100),
    size=st.sampled_from(sorted(FIELDS)),
)
def test_losers_take_no_more_than_the_limit(works, epochs, size):
    """However the race goes, if every racer trains at least one epoch within its first rung."""
    racers, rungs, share = race.entered(dict(zip(PORTFOLIO, works, strict=False)), epochs, size)
    most, limit = FIELDS[size]
    assert share <= limit and len(racers) <= most
    if not racers:
        return
    assert [*racers] == [*PORTFOLIO[: len(racers)]]
    assert all(later == 2 * rung for rung, later in pairwise(rungs))
    for reached in racers.values():
        assert len(reached) == len(rungs) and reached == sorted(reached)
        assert reached[0] >= 1 and reached[-1] <= 2 * epochs


@patch.object(race, "FIELDS", FIELDS)
@pytest.mark.parametrize("size", FIELDS)
def test_race_uses_the_share_of_its_size(tmp_path, store, size):
    """Fewer race with a setting whose epochs are expensive."""
    config = open_config(store, tmp_path / "run", size=size)
    opened = TripleStore.open(store)
    with processes("cpu") as ranks:
        configs = race.racers(config, opened, (False, 1))
        works = {name: race.work_of(each, opened, ranks) for name, each in configs.items()}
    most, limit = FIELDS[size]
    racers, rungs, share = race.entered(works, 60, size)
    assert len(racers) == most and len(rungs) == (2 if size == race.ONCE else 4)
    assert 0.8 * limit < share <= limit
    assert race.entered(works | {"rote": 1000 * works["rote"]}, 60, size)[0] == {}


def test_work_counts_scores_and_steps(store):
    opened = TripleStore.open(store)

    def work(**changes):
        config = config_of(store, **changes).settled(opened.size)
        with processes("cpu") as ranks:
            return race.work_of(config, opened, ranks) - race.STEP_WORK * steps

    steps = 5  # 130 triples in batches of 32
    assert work() == 130 * 2 * 6 * 8
    assert work(negatives__count=12, model__dim=16) == 4 * work()
    assert work(negatives__regime="1vsall", negatives__count=None) == 130 * 2 * 37 * 8
    queries = len({(h, r) for h, r, _ in opened.train}) + len({(r, t) for _, r, t in opened.train})
    steps = -(-queries // 32)
    assert work(negatives__regime="kvsall", negatives__count=None) == queries * 37 * 8


# what the results so far let continue


@patch.object(race, "FIELDS", FIELDS)
@settings(max_examples=200)
@given(st.data())
def test_race_follows_its_rules(data):
    """Random results against the rules in plain words; a race that was killed takes them up.

    Many are equal, and some settings diverge: ties keep the order of the portfolio.
    """
    metric = data.draw(st.sampled_from(["mrr", "mr"]))
    queries = 0 if metric == "mr" else data.draw(st.sampled_from([0, 50, 2000]))
    value = st.one_of(st.none(), st.sampled_from([0.3, 0.31]), st.floats(0.01, 0.99))
    works = [data.draw(st.floats(0.5, 4)) for _ in PORTFOLIO]
    size = data.draw(st.sampled_from(sorted(FIELDS)))
    epochs, rungs, _ = race.entered(dict(zip(PORTFOLIO, works, strict=True)), 50, size)
    if not epochs:
        return
    results = {name: [data.draw(value) for _ in rungs] for name in epochs}
    for values in results.values():  # what diverged stays so
        if None in values:
            values[values.index(None) :] = [None] * (len(values) - values.index(None))

    def run(state: Race, until: int) -> str:
        """The winner, after at most ``until`` trainings."""
        trained: list[str] = []

        def train(name, epochs):
            if len(trained) == until:
                raise TrainingStopped("killed")
            trained.append(name)
            rung = len(state.values[name])
            assert epochs == state.epochs[name][rung]
            return results[name][rung]

        return state.run(train, lambda: None)[0]

    expected, trained = by_the_rules(results, rungs, metric, queries, size)
    state, again = (Race(metric, epochs, rungs, queries) for _ in range(2))
    assert run(state, 10**6) == expected
    assert {name: len(values) for name, values in state.values.items()} == trained
    with suppress(TrainingStopped):
        run(again, data.draw(st.integers(0, 6)))
    assert run(again, 10**6) == expected and again.values == state.values


def by_the_rules(
    results: dict, rungs: list[float], metric: str, queries: int, size: str
) -> tuple[str, dict[str, int]]:
    """The winner, and how often each setting trains: what the module says, written plainly."""
    sign = -1 if metric == "mr" else 1

    def at_the_end(name: str, rung: int) -> float:
        now, before = results[name][rung], results[name][rung - 1] if rung else None
        if now is None:
            return -math.inf
        gain = max(0, now - before) if rung and metric != "mr" else 0
        return sign * now + PROJECTED * math.log2(2 / rungs[rung]) * gain

    def noise(share: float) -> float:
        return math.sqrt(share * (1 - share) / queries) if queries else 0

    left, trained = list(results), dict.fromkeys(results, 0)
    for rung in range(len(rungs)):
        trained |= dict.fromkeys(left, rung + 1)
        if len(left) > 2:  # the later one of equal ones stops
            left.remove(min(reversed([name for name in left if name != "rote"]),
                            key=lambda name: at_the_end(name, rung)))  # fmt: skip
            continue
        if rung == len(rungs) - 2 and size != "small":
            one, two = (results[name][rung] for name in left)
            ends = [at_the_end(name, rung) for name in left]
            if None in (one, two) or (
                min(abs(one - two), abs(ends[0] - ends[1])) >= noise(max(one, two))
            ):
                break
    ends = [at_the_end(name, rung) for name in left]
    best = left[ends.index(max(ends))]
    if min(ends) > -math.inf and abs(ends[0] - ends[1]) < noise(results[best][rung]):
        best = next(name for name in left if name != "rote")
    return best, trained


def test_projections_within_a_standard_error_are_compared_again():
    """The results differ by .0084, the projections by .0042; a standard error is .0081."""
    values = {"rote": [0.3568, 0.3693, 0.3845], "softmax_weak_n3": [0.3805, 0.3888, 0.3929]}
    state = Race("mrr", {}, [0.086, 0.171, 0.343], values=values, queries=3654)
    assert state.is_close(list(values), 2)
    state.queries = 4 * 3654
    assert not state.is_close(list(values), 2)


@pytest.mark.parametrize(
    ("metric", "limit", "queries"),
    [("mrr", 0, 20), ("hits@10", 5, 10), ("mr", 0, 0), ("coverage@5", 0, 0), ("recall@5", 9, None),
     ("ndcg@5", 0, None), ("auc", 0, None)],
)  # fmt: skip
def test_noise_follows_from_the_triples_or_users_of_a_validation(tmp_path, metric, limit, queries):
    """Metrics of recommendations are means over users, which several triples share."""
    config = config_from_dict({"evaluation.metric": metric, "evaluation.max_triples": limit})
    many = {"entities": 20, "relations": 1, "train": 160, "held_out": 40} if not queries else {}
    opened = tiny_store(tmp_path / "store", **many)
    if queries is None:
        triples = validation_triples(config, opened)
        queries = len({(head, relation) for head, relation, _ in triples.tolist()})
        assert queries < len(triples)
    assert race.queries_of(config, opened) == queries


def test_a_race_needs_no_optuna(monkeypatch):
    """Which only ``tune`` installs."""
    monkeypatch.setitem(sys.modules, "optuna", None)
    for name in [name for name in sys.modules if name.startswith("kge_torchrec.tuning.")]:
        monkeypatch.delitem(sys.modules, name)
    importlib.import_module("kge_torchrec.tuning.race")
    with pytest.raises(ConfigError, match=r"tune needs Optuna: pip install -e '.\[tune\]'"):
        importlib.import_module("kge_torchrec.tuning.study")

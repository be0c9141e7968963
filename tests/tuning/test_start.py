"""The start of a study."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import pytest
from training_runs import tiny_store

import kge_torchrec
from kge_torchrec import api
from kge_torchrec.config import Config, ConfigError, sizing
from kge_torchrec.config.keys import all_values
from kge_torchrec.config.parser import config_from_dict, load_config, values_of
from kge_torchrec.tuning.race import PORTFOLIO
from kge_torchrec.tuning.space import SearchSpace, with_values
from kge_torchrec.tuning.start import Start, chosen_start
from kge_torchrec.tuning.study import Settings, Study

RATES = {"train.lr": {"low": 0.01, "high": 1.0, "log": True}}


@pytest.fixture(autouse=True)
def _short():
    with patch.object(sizing, "_epochs", lambda config, graph: 3):
        yield


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    return tiny_store(tmp_path_factory.mktemp("graph") / "store").path


def open_config(store: Path, **changes) -> Config:
    """A config that leaves training open; ``changes`` are keys with __ for the dot."""
    values = {
        "data.path": str(store),
        "model.dim": 8,
        "threads": 1,
        "device": "cpu",
        "run.progress": False,
        "run.trackers.tensorboard": False,
    }
    return config_from_dict(values | {k.replace("__", "."): v for k, v in changes.items()})


def made(folder: Path, config: Config, space: dict | None = None, **changes) -> Study:
    settings = {"trials": 9, "halving": "epochs", "metric": "mrr", "seed": 0, "start": "auto"}
    ranges = None if space is None else SearchSpace(space)
    return Study.open_or_make(folder, config, ranges, Settings(**{**settings, **changes}))


def race_of(folder: Path, values: dict[str, list], metric="mrr", winner=None) -> str:
    """The folder of a run whose race has these results."""
    epochs = {name: [1, 2, 4, 8] for name in values}
    race = {"metric": metric, "epochs": epochs, "rungs": [0.05, 0.1, 0.2, 0.4], "share": 0.5}
    folder.mkdir(exist_ok=True)
    (folder / "race.json").write_text(json.dumps({**race, "values": values, "winner": winner}))
    return str(folder)


def first_trials(study: Study, count: int) -> list[dict]:
    """The values of the first trials, which end without training."""
    study.enqueue_first()
    values = []
    for number in range(1, count + 1):
        with study.next_trial(number) as (trial, chosen):
            study.optuna.tell(trial.number, 0.1 * number)
            values.append(chosen)
    return values


def test_open_config_starts_from_the_portfolio(tmp_path, store, capsys):
    """Each member as the race trains it, and then values around the members."""
    study = made(tmp_path, open_config(store))
    assert "start: the portfolio: softmax_n3, rote" in capsys.readouterr().err
    trials = first_trials(study, 16)
    assert [trial["start"] for trial in trials[:4]] == list(PORTFOLIO)
    for values in trials[:4]:
        member = with_values(open_config(store), values_of(values["start"])).settled(study.size)
        config = study.config_of(values)
        sections = ("model", "loss", "negatives")
        assert [getattr(config, name) for name in sections] == [
            getattr(member, name) for name in sections
        ]
        assert config.train == member.train and config.train.epochs == 3
    assert len({str(trial) for trial in trials}) == 16
    for values in trials:
        config = study.config_of(values)
        assert config.decided_by is not None and config.model.dim == 8
        assert all(all_values(config)[key] == v for key, v in values.items() if key != "start")
        member = values_of(values["start"])
        assert config.model.scorer == member.get("model.scorer", "complex")
        assert config.negatives.regime == member.get("negatives.regime", "sampled")


def test_config_that_says_how_to_train_is_the_only_start(tmp_path, store, capsys):
    study = made(tmp_path / "given", open_config(store, train__lr=0.3))
    said = "start: the config, because train.lr is given (--start portfolio"
    assert said in capsys.readouterr().err
    assert first_trials(study, 1)[0]["train.lr"] == 0.3 and not study.space.starts
    study = made(tmp_path / "asked", open_config(store, train__lr=0.3), start="portfolio")
    assert [values["start"] for values in first_trials(study, 4)] == list(PORTFOLIO)
    study = made(tmp_path / "refused", open_config(store), start="config")
    assert not study.space.starts and "loss.n3" in first_trials(study, 1)[0]


def test_own_space_varies_its_keys_only(tmp_path, store):
    study = made(tmp_path / "own", open_config(store), RATES)
    assert first_trials(study, 1) == [{"train.lr": 0.1}] and study.settings.start == "config"
    study = made(tmp_path / "both", open_config(store), RATES, start="portfolio")
    trials = first_trials(study, 4)
    assert [set(values) for values in trials] == [{"start", "train.lr"}] * 4
    assert trials[1]["train.lr"] == 0.1 and trials[2]["train.lr"] != 0.001  # outside the space
    assert made(tmp_path / "both", open_config(store), RATES).space.starts == PORTFOLIO
    listed = {"start": ["rote", "kvsall_adam"], **RATES}
    study = made(tmp_path / "listed", open_config(store), listed)
    assert [values["start"] for values in first_trials(study, 2)] == ["rote", "kvsall_adam"]
    conditions = {"train.lr": {**RATES["train.lr"], "when": {"train.optimizer": "adam"}}}
    study = made(tmp_path / "when", open_config(store), {**listed, **conditions})
    assert [len(values) for values in first_trials(study, 2)] == [1, 2]


@pytest.mark.parametrize(
    ("values", "metric", "order", "lost"),
    [
        ({"softmax_n3": [0.1, 0.2], "rote": [0.1, 0.2, 0.3], "softmax_weak_n3": [0.1, 0.2, 0.39]},
         "mrr", "softmax_weak_n3 rote softmax_n3 kvsall_adam", ""),
        ({"softmax_n3": [0.1, 0.1], "rote": [0.1, 0.2, 0.3], "kvsall_adam": [0.1, 0.2, 0.39]},
         "mrr", "kvsall_adam rote softmax_weak_n3", "softmax_n3, mrr 0.1000 where kvsall_adam had"),
        ({"softmax_n3": [0.1, 0.2], "rote": [0.1, 0.2, 0.3], "sampled_adam": [0.1, 0.2, 0.39]},
         "mrr", "rote softmax_n3 softmax_weak_n3 kvsall_adam", ""),  # of an earlier version
        ({"softmax_n3": [9.0, 8.0], "rote": [9.0, 80.0], "softmax_weak_n3": [9.0, None]},
         "mr", "softmax_n3 kvsall_adam", "rote, mr 80.0000 where softmax_n3 had 8.0000; "
                                         "softmax_weak_n3, diverged"),
    ],
)  # fmt: skip
def test_race_orders_the_start(tmp_path, values, metric, order, lost):
    folder = race_of(tmp_path, values, metric)
    start = chosen_start(folder, Config(), None, 100)
    assert start.members == tuple(order.split()) and start.kind == folder
    assert start.words.startswith(f"the race of {folder}: {', '.join(start.members)}")
    assert lost in start.words and ("left out" in start.words) == bool(lost)


@pytest.mark.slow
def test_winner_of_a_race_is_first(tmp_path, store, capsys):
    values = {"softmax_n3": [0.3, 0.3], "rote": [0.2, 0.29]}
    folder = race_of(tmp_path / "run", values, winner="rote")
    study = made(tmp_path / "study", open_config(store), start=folder)
    assert f"start: the race of {folder}: rote, softmax_n3" in capsys.readouterr().err
    expected = ["rote", "softmax_n3", "softmax_weak_n3", "kvsall_adam"]
    assert [values["start"] for values in first_trials(study, 4)] == expected
    assert made(study.path, open_config(store)).space.starts == tuple(expected)
    with pytest.raises(ConfigError, match="different start"):
        made(study.path, open_config(store), start="portfolio")


def test_winner_of_a_race_is_first_though_another_was_a_little_better(tmp_path):
    values = {"softmax_n3": [0.3, 0.3], "rote": [0.2, 0.301], "kvsall_adam": [0.25]}
    folder = race_of(tmp_path, values, winner="softmax_n3")
    start = chosen_start(folder, Config(), None, 30_001)
    assert start.members[:3] == ("softmax_n3", "rote", "kvsall_adam")


def test_many_entities_leave_full_scoring_out():
    start = chosen_start("auto", Config(), None, 30_001)
    assert start.members == ("softmax_n3", "rote", "softmax_weak_n3") and "30,000" in start.words
    assert chosen_start("auto", Config(), None, 30_000).members == PORTFOLIO
    assert isinstance(start, Start) and start.kind == "portfolio"


def test_unusable_starts_are_refused(tmp_path, store):
    config = open_config(store)
    empty = race_of(tmp_path / "empty", {})
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "race.json").write_text('{"metric": "mrr"}')
    (tmp_path / "long.yaml").write_text("train: {epochs: 3}\n")
    for words, space, start in (
        ("nowhere has no race.json; name config, portfolio, or a run", None, "nowhere"),
        ("the race has no result yet", None, empty),
        ("is not of this program version", None, str(tmp_path / "old")),
        ("already lists start", {"start": ["rote"], **RATES}, "portfolio"),
    ):
        ranges = None if space is None else SearchSpace(space)
        with pytest.raises(ConfigError, match=words):
            chosen_start(start, config, ranges, 100)
    long = str(tmp_path / "long.yaml")
    for words, value in (
        ("sets train.epochs, which all trials of a study share", [long]),
        ("must be a list of names", [1, 2]),
        ("must be a list of names", {"low": 1, "high": 2}),
        ("no config file 'rotate_n3'", ["rotate_n3"]),
    ):
        with pytest.raises(ConfigError, match=words):
            SearchSpace({"start": value})
    log_q = open_config(store, negatives__log_q=True)
    with pytest.raises(ConfigError, match=r"start rote: negatives\.log_q corrects"):
        made(tmp_path / "study", log_q, start="portfolio")
    assert not (tmp_path / "study" / "study.json").exists()


def test_members_are_tried_once_by_several_processes_and_after_a_kill(tmp_path, store):
    study = made(tmp_path, open_config(store))
    study.enqueue_first()
    with study.next_trial(9) as (_, killed):
        other = Study(tmp_path)
        other.enqueue_first()
        with other.next_trial(9) as (second, values):
            assert [killed["start"], values["start"]] == list(PORTFOLIO[:2])
            other.optuna.tell(second.number, 0.1)
    names = []  # the lock of the first trial is free, as if its process had been killed
    for _ in range(3):
        with study.next_trial(9) as (trial, values):
            study.optuna.tell(trial.number, 0.1)
            names.append(values["start"])
            if values["start"] == killed["start"]:
                assert values == killed and "from" in trial.user_attrs
    assert sorted(names) == sorted([*PORTFOLIO[2:], killed["start"]])


@pytest.fixture(scope="module")
def trained(tmp_path_factory, store) -> tuple[Path, dict]:
    """A study of an open config with trained trials."""
    folder = tmp_path_factory.mktemp("portfolio") / "study"
    with patch.object(sizing, "_epochs", lambda config, graph: 3):
        return folder, kge_torchrec.tune(open_config(store), trials=7, study=folder)


@pytest.mark.slow
def test_members_run_to_their_end(trained):
    _, results = trained
    assert [trial["state"] for trial in results["trials"][:4]] == ["complete"] * 4
    assert {trial["state"] for trial in results["trials"]} <= {"complete", "pruned"}


@pytest.mark.slow
def test_best_config_of_a_portfolio_reproduces_the_best_value(trained, tmp_path):
    folder, results = trained
    best = load_config(folder / "best.yaml", {"run.dir": str(tmp_path / "run")})
    name = results["best"]["values"]["start"]
    assert best.model.scorer == values_of(name).get("model.scorer", "complex")
    run = api.train(best)
    assert run.results["valid"]["best"] == results["best"]["value"]

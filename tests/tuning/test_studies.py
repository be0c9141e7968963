"""Studies of a few trials on the countries: what they write, survive and refuse."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from optuna.trial import TrialState
from training_runs import QUIET, config_of

import kge_torchrec
from kge_torchrec import api
from kge_torchrec.cli import main
from kge_torchrec.config import Config, ConfigError, sizing
from kge_torchrec.config.parser import config_from_dict, load_config, values_of
from kge_torchrec.training.run_data import check_start, facts_of
from kge_torchrec.training.stop_signal import TrainingStopped
from kge_torchrec.tuning import trials as trials_of
from kge_torchrec.tuning.race import PORTFOLIO
from kge_torchrec.tuning.space import SearchSpace, with_values
from kge_torchrec.tuning.study import Settings, Study, _fitting, first_rung

SMALL = {**QUIET, "train.batch_size": 512, "train.epochs": 9, "entities.engine": "handrolled"}
SPACE = {
    "train.lr": {"low": 0.01, "high": 1.0, "log": True},
    "model.init_scale": [0.5, 0.001],
}


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> tuple[Path, dict]:
    """Six trials with halving on epochs, test being out of sight."""
    folder = tmp_path_factory.mktemp("tune") / "study"
    config = config_of("countries", **SMALL)
    results = kge_torchrec.tune(config, trials=6, study=folder, space=SPACE)
    return folder, results


def test_study_writes_trials_and_best_config(study):
    folder, results = study
    trials = results["trials"]
    assert [trial["number"] for trial in trials] == list(range(6))
    assert {trial["state"] for trial in trials} <= {"complete", "pruned"}
    assert trials[0]["values"] == {"train.lr": 0.05, "model.init_scale": 0.5}  # the config's own
    done = [trial["value"] for trial in trials if trial["state"] == "complete"]
    assert results["best"]["value"] == max(done)
    assert json.loads((folder / "trials.json").read_text()) == results
    best = load_config(folder / "best.yaml")
    assert best.train.lr == results["best"]["values"]["train.lr"] and best.data.path == "countries"


def test_best_config_reproduces_the_best_value(study, tmp_path):
    folder, results = study
    run = api.train(with_folder(folder / "best.yaml", tmp_path / "run"))
    assert run.results["valid"]["best"] == results["best"]["value"]
    assert run.results["test"]
    small = Study(folder)
    small.config = replace(small.config, size="small")
    config = config_from_dict(yaml.safe_load(small._best_yaml(small.best())))
    check_start(config, facts_of(config))  # train takes it


def with_folder(file: Path, folder: Path):
    return config_from_dict({**yaml.safe_load(file.read_text()), "run": {"dir": str(folder)}})


def test_study_never_ranks_test(study):
    folder, _ = study
    runs = sorted(folder.glob("trials/0*"))
    assert len(runs) == 6
    for run in runs:
        results = run / "results.json"
        assert not results.exists() or json.loads(results.read_text())["test"] is None
        assert '"kind": "valid"' in (run / "metrics.jsonl").read_text()
        assert not list(run.glob("checkpoints/*"))


def test_poor_trials_are_pruned(study):
    """By the definition of asynchronous successive halving, from what each trial reported."""
    folder, _ = study
    opened = Study(folder)
    rungs, values_at = [1, 3], {1: [], 3: []}
    assert first_rung(opened.config) == 1
    for trial in opened.ended():
        for rung in rungs:
            value = trial.intermediate_values.get(rung)
            if value is None:
                break
            better = sum(other > value for other in values_at[rung])
            values_at[rung].append(value)
            if better >= max(1, len(values_at[rung]) // 3):
                assert (trial.state, trial.last_step) == (TrialState.PRUNED, rung)
                break
        else:
            assert trial.state is TrialState.COMPLETE


def test_study_can_be_extended_with_more_trials(study, capsys):
    folder, results = study
    assert main(["tune", "--resume", str(folder), "--trials", "7", "--threads", "1"]) == 0
    text = capsys.readouterr().out
    assert "best of 7 trials" in text and "best.yaml" in text
    again = json.loads((folder / "trials.json").read_text())["trials"]
    assert again[:6] == results["trials"] and len(again) == 7


def test_failed_trial_is_reported_and_study_continues(tmp_path, capsys):
    space = {"negatives.regime": ["sampled", "allvsall"], "train.lr": [0.05, 0.1]}
    config = config_of("countries", **{**SMALL, "train.epochs": 1}, loss__name="softmax")
    results = kge_torchrec.tune(config, trials=6, study=tmp_path, space=space, halving="none")
    failed = {t["values"]["negatives.regime"]: t["error"]
              for t in results["trials"] if t["state"] == "fail"}  # fmt: skip
    assert [*failed] == ["allvsall"] and "softmax has nothing to learn" in failed["allvsall"]
    assert len(results["trials"]) == 6 and results["best"]["value"] > 0
    assert "softmax has nothing to learn" in capsys.readouterr().err


def test_study_stops_if_the_first_trials_all_fail(tmp_path):
    space = {"train.optimizer_options.weight_decay": {"low": 0.1, "high": 0.2}}
    config = config_of("countries", **SMALL)
    with pytest.raises(ConfigError, match=r"the first 5 trials all failed.*no option of Adagrad"):
        kge_torchrec.tune(config, trials=9, study=tmp_path, space=space)
    assert json.loads((tmp_path / "trials.json").read_text())["best"] is None


def settings(**changes) -> Settings:
    return Settings(**{"trials": 9, "halving": "epochs", "metric": "mrr", "seed": 0, **changes})


def some_study(folder: Path, **changes) -> Study:
    config = config_of("countries", **SMALL)
    return Study.open_or_make(folder, config, SearchSpace(SPACE), settings(**changes))


@pytest.mark.parametrize(("metric", "best"), [("mrr", 0.5), ("mr", 0.25)])
def test_best_trial_is_largest_except_for_mean_rank(tmp_path, metric, best):
    study = some_study(tmp_path, metric=metric)
    for number, value in enumerate((0.375, 0.5, 0.25), 1):
        with study.next_trial(number) as (trial, _):
            study.optuna.tell(trial.number, value)
    assert study.best().value == study.optuna.best_trial.value == best


def test_trial_of_a_killed_process_is_retried(tmp_path, caplog):
    study = some_study(tmp_path)
    with study.next_trial(2) as taken:
        values = taken[1]
        with Study(tmp_path).next_trial(2) as other:  # it runs: its values are not taken
            assert other is not None and other[0].number == 1
            with study.next_trial(2) as third:
                assert third is None
    # Both locks are free, as if their processes had been killed.
    with study.next_trial(2) as again:
        assert again[0].number == 2 and again[1] == values
    assert "the values are tried again" in caplog.text
    with study.next_trial(2) as last:  # of the second one, and the first has been killed twice
        assert last[1] == other[1]
    assert [t.user_attrs.get("error") for t in study.ended()] == [
        "the process was killed 2 times with these values"
    ]


def test_incomplete_journal_line_is_dropped(tmp_path):
    study = some_study(tmp_path)
    with study.next_trial(1) as (trial, _):
        study.optuna.tell(trial.number, 0.5)
    with (tmp_path / "journal.log").open("ab") as file:
        file.write(b'{"op_code": 5, "trial')
    again = Study(tmp_path)
    with again.next_trial(2) as (second, _):
        again.optuna.tell(second.number, 0.25)
    assert [t.value for t in Study(tmp_path).ended()] == [0.5, 0.25]


def test_signal_stops_the_study_and_keeps_the_trial(tmp_path, monkeypatch):
    study = some_study(tmp_path)

    def stopped(*_, **__):
        raise TrainingStopped("stopped by a signal")

    monkeypatch.setattr(trials_of, "train_run", stopped)
    with pytest.raises(TrainingStopped):
        trials_of.Worker(study).work(3)
    monkeypatch.undo()
    trials_of.Worker(study).work(1)
    assert [t.state.name for t in study.ended()] == ["COMPLETE"]


def test_ctrl_c_stops_the_whole_study(tmp_path, monkeypatch, capsys, ctrl_c):
    folder = some_study(tmp_path / "study").path
    with monkeypatch.context() as patched:
        patched.setattr(trials_of._Halving, "__call__", lambda *_: ctrl_c())
        assert main(["tune", "--resume", str(folder)]) == 130
    said = capsys.readouterr().err
    assert said == f"kge-torchrec: interrupted; resume with `tune --resume {folder}`.\n"
    again = kge_torchrec.tune(Study(folder).config, 1, folder, SPACE)
    assert [trial["state"] for trial in again["trials"]] == ["complete"]


# Studies of configs that leave training open


@pytest.fixture
def short(monkeypatch):
    """Three epochs, whatever the graph."""
    monkeypatch.setattr(sizing, "_epochs", lambda config, graph: 3)


def open_config(store: Path, **changes) -> Config:
    """A config that leaves training open; ``changes`` are keys with __ for the dot."""
    values = {"data.path": str(store), "model.dim": 8, "threads": 1, "device": "cpu"}
    values |= {"run.progress": False, "run.trackers.tensorboard": False}
    return config_from_dict(values | {k.replace("__", "."): v for k, v in changes.items()})


def made(folder: Path, config: Config, space: dict | None = None) -> Study:
    ranges = None if space is None else SearchSpace(space)
    return Study.open_or_make(folder, config, ranges, settings())


def first_trials(study: Study, count: int) -> list[tuple[str | None, dict]]:
    """The source and values of the first trials, which end without training."""
    study.enqueue_first()
    values = []
    for number in range(1, count + 1):
        with study.next_trial(number) as (trial, chosen):
            study.optuna.tell(trial.number, 0.1 * number)
            values.append((trial.user_attrs.get("from"), chosen))
    return values


def test_open_config_starts_with_the_settings_of_the_race(tmp_path, store, short, capsys):
    """Each as the race trains it; the later trials vary the config."""
    study = made(tmp_path, open_config(store))
    assert "first trials: the settings of the race, softmax_n3, rote" in capsys.readouterr().err
    trials = first_trials(study, 12)
    assert [name for name, _ in trials] == [*PORTFOLIO, *[None] * 8]
    for name, values in trials[:4]:
        raced = with_values(open_config(store), values_of(name)).settled(study.size)
        config = study.config_of(values)
        for section in ("model", "loss", "negatives", "train"):
            assert getattr(config, section) == getattr(raced, section)
        assert config.train.epochs == 3
    for _, values in trials[4:]:
        config = study.config_of(values)
        assert config.model.scorer == "complex" and config.train.lr == values["train.lr"]
    assert len({str(values) for _, values in trials}) == 12
    assert made(tmp_path, open_config(store)).settings == Study(tmp_path).settings


def test_a_config_that_says_how_to_train_is_the_first_trial(tmp_path, store, short):
    study = made(tmp_path / "given", open_config(store, train__lr=0.3))
    ((name, values),) = first_trials(study, 1)
    assert name == "the config" and values["train.lr"] == 0.3
    study = made(tmp_path / "space", open_config(store), {"train.lr": SPACE["train.lr"]})
    assert first_trials(study, 1) == [("the config", {"train.lr": 0.1})]


def test_many_entities_leave_full_scoring_out(store):
    config = open_config(store)
    assert _fitting(config, 30_000) == list(PORTFOLIO)
    assert _fitting(config, 30_001) == ["softmax_n3", "rote", "softmax_weak_n3"]


def test_settings_of_the_race_are_tried_once_by_several_processes_and_after_a_kill(
    tmp_path, store, short
):
    study = made(tmp_path, open_config(store))
    study.enqueue_first()
    with study.next_trial(9) as (_, killed):
        other = Study(tmp_path)
        other.enqueue_first()
        with other.next_trial(9) as (second, values):
            assert [killed, values] == [values_of(name) for name in PORTFOLIO[:2]]
            other.optuna.tell(second.number, 0.1)
    tried = []  # the lock of the first trial is free, as if its process had been killed
    for _ in range(3):
        with study.next_trial(9) as (trial, values):
            study.optuna.tell(trial.number, 0.1)
            assert values == values_of(trial.user_attrs["from"])
            tried.append(trial.user_attrs["from"])
    assert sorted(tried) == sorted([*PORTFOLIO[2:], PORTFOLIO[0]])


def test_best_config_of_an_open_study_reproduces_the_best_value(tmp_path, store, short):
    results = kge_torchrec.tune(open_config(store), trials=6, study=tmp_path / "study")
    assert [trial["from"] for trial in results["trials"][:4]] == list(PORTFOLIO)
    assert {trial["state"] for trial in results["trials"][:4]} == {"complete"}
    best = load_config(tmp_path / "study" / "best.yaml", {"run.dir": str(tmp_path / "run")})
    assert api.train(best).results["valid"]["best"] == results["best"]["value"]


# Refusals


def test_different_study_and_invalid_settings_are_rejected(study, tmp_path, capsys):
    folder, _ = study
    config = config_of("countries", **SMALL)
    for words, changes in (
        ("a different config", {"config": config_of("countries", **{**SMALL, "model.dim": 16})}),
        ("a different search space", {"space": {"train.lr": [0.1, 0.2]}}),
        ("a different way of dropping", {"halving": "none"}),
    ):
        with pytest.raises(ConfigError, match=words):
            kge_torchrec.tune(**{"config": config, "space": SPACE, "study": folder, **changes})
    with pytest.raises(ConfigError, match="halving must be one of"):
        kge_torchrec.tune(config, study=tmp_path / "new", halving="tail")
    assert not (tmp_path / "new").exists()
    for arguments, words in (
        (["--resume", str(tmp_path)], "is no study"),
        (["--resume", str(folder), "--train.lr=1"], "train.lr: the trials of a study share"),
        (["--resume", str(folder), "--space", "x.yaml"], "reads the settings of the study"),
        (["demo", "--space", "nowhere.yaml"], "there is no file nowhere.yaml"),
    ):
        assert main(["tune", *arguments]) == 1
        assert words in capsys.readouterr().err


def test_a_study_and_a_run_do_not_share_a_folder(study, capsys):
    folder, _ = study
    trial = Study(folder).folder_of(0)
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    for arguments, words in (
        (
            ["tune", "demo", "--study", str(trial), "--trials", "1"],
            f"{trial} is no study and not empty",
        ),
        (["train", "--resume", str(folder)], "is a study of `tune` and no run; train its best"),
        (["train", "demo", "--run.dir", str(folder)], "is a study of `tune` and no run"),
        (["report", str(folder)], "is a study of `tune` and no run"),
    ):
        assert main(arguments) == 1
        assert words in capsys.readouterr().err
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before


def command(folder: Path, *more: str) -> subprocess.Popen:
    """A process of a study on the countries with trials of a second or so."""
    values = {**SMALL, "train.epochs": 45, "evaluation.every": 45}
    keys = [f"--{key}={str(value).lower()}" for key, value in values.items()]
    space = folder.parent / "space.yaml"
    space.write_text(yaml.safe_dump(SPACE))
    words = [sys.executable, "-m", "kge_torchrec", "tune", "demo", *keys, "--space", str(space),
             "--halving=none", "--study", str(folder), *more]  # fmt: skip
    return subprocess.Popen(words, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


def wait_for(condition, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_killed_study_resumes(tmp_path):
    """After a kill at any time, the study resumes and repeats the trial that was running."""
    folder = tmp_path / "study"
    for runs in (1, 3, 5):
        process = command(folder, "--trials=6")
        wait_for(lambda runs=runs: (folder / "trials" / f"{runs:04d}" / "metrics.jsonl").exists())
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert command(folder, "--trials=6").wait() == 0
    results = json.loads((folder / "trials.json").read_text())
    assert [trial["state"] for trial in results["trials"]] == ["complete"] * 6
    again = [trial for trial in results["trials"] if "again" in trial]
    assert again
    trials = Study(folder).optuna.trials
    killed = {t.number: t for t in trials if "tried again" in t.user_attrs.get("error", "")}
    for trial in again:
        assert killed[trial["again"]].params.items() >= trial["values"].items()


@pytest.mark.slow
def test_two_processes_share_a_study(tmp_path):
    folder = tmp_path / "study"
    processes = [command(folder, "--trials=8"), command(folder, "--trials=8")]
    assert [process.wait() for process in processes] == [0, 0]
    study = Study(folder)
    results = study.ended()
    assert len(results) == 8 and {trial.state for trial in results} == {TrialState.COMPLETE}
    spans = sorted((trial.datetime_start, trial.datetime_complete) for trial in results)
    assert any(one[1] > other[0] for one, other in pairwise(spans))
    assert len({str(trial.params) for trial in results}) == 8  # nobody draws what another has drawn
    single = json.loads((folder / "trials.json").read_text())
    assert len(single["trials"]) == 8


def test_zero_trials_are_rejected(tmp_path, capsys):
    assert main(["tune", "demo", "--trials", "0", "--study", str(tmp_path / "study")]) == 1
    assert "trials must be an integer >= 1, got 0" in capsys.readouterr().err
    assert not (tmp_path / "study").exists()

"""Studies of a few trials on the countries: what they write, survive and refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import optuna
import pytest
import yaml
from optuna.trial import TrialState
from training_runs import QUIET, config_of

import kge_torchrec
from kge_torchrec import api
from kge_torchrec.cli import main
from kge_torchrec.config import Config, ConfigError, GraphSize, sizing
from kge_torchrec.config.parser import config_from_dict, load_config, values_of
from kge_torchrec.data.store import TripleStore
from kge_torchrec.training.run_data import check_start, facts_of
from kge_torchrec.training.stop_signal import TrainingStopped
from kge_torchrec.tuning import study as study_of
from kge_torchrec.tuning.race import PORTFOLIO, with_values
from kge_torchrec.tuning.space import default_search
from kge_torchrec.tuning.study import Study, _ended, make_study

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
    small.write_results(small.load())
    config = load_config(folder / "best.yaml")
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
    assert opened.first_rung == 1
    for trial in _ended(opened.load()):
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
    assert text.endswith(f"optuna-dashboard sqlite:///{folder}/optuna.db\n")
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


def some_study(folder: Path, trials: int = 9, **changes) -> Study:
    config = config_of("countries", **SMALL, **changes)
    return make_study(config, trials, folder, SPACE, "epochs", None)


def without_training(study: Study, monkeypatch, value=0.5) -> list[dict]:
    """Let trials end without training; return a list of the values of those that follow."""
    tried = []

    def trained(number, config, watch):
        tried.append(config)
        return value(len(tried)) if callable(value) else value

    monkeypatch.setattr(study, "_trained", trained)
    return tried


@pytest.mark.parametrize(("metric", "best"), [("mrr", 0.5), ("mr", 0.25)])
def test_best_trial_is_largest_except_for_mean_rank(tmp_path, monkeypatch, metric, best):
    study = some_study(tmp_path, evaluation__metric=metric, evaluation__every=3)
    without_training(study, monkeypatch, lambda count: (0.375, 0.5, 0.25)[count - 1])
    assert study.run(3)["best"]["value"] == best


def test_seed_decides_the_values_of_a_trial(tmp_path, monkeypatch):
    """Two studies of one seed draw the same, and each trial of a study draws for itself."""
    drawn = []
    for folder in ("one", "two"):
        study = some_study(tmp_path / folder)
        without_training(study, monkeypatch)
        drawn.append([trial["values"] for trial in study.run(8)["trials"]])
    assert drawn[0] == drawn[1] and len({str(values) for values in drawn[0]}) == 8


def test_search_space_may_hold_the_seed(tmp_path, monkeypatch):
    config = config_of("countries", **SMALL)
    study = make_study(config, 6, tmp_path, {"seed": [0, 1, 2]}, "none", None)
    configs = without_training(study, monkeypatch)
    results = study.run()
    assert [trial["values"]["seed"] for trial in results["trials"]] == [c.seed for c in configs]
    assert {c.seed for c in configs} <= {0, 1, 2} and len({c.seed for c in configs}) > 1


@pytest.mark.parametrize("ends", [TrainingStopped, KeyboardInterrupt, OSError])
def test_trial_that_is_stopped_runs_again_once(tmp_path, monkeypatch, ends):
    """By a signal, Ctrl-C or a full disk; twice, it counts as failed."""
    study = some_study(tmp_path)

    def stopped(*_):
        raise ends("stopped")

    monkeypatch.setattr(study, "_trained", stopped)
    for _ in range(2):
        with pytest.raises(ends, match=r"stopped|interrupted"):
            study.run(3)
    without_training(study, monkeypatch)
    trials = study.run(3)["trials"]
    assert [(trial["number"], trial["state"]) for trial in trials] == [
        (1, "fail"), (2, "complete"), (3, "complete")]  # fmt: skip
    assert trials[0]["again"] == 0 and trials[0]["error"] == "the process ended twice"
    other = some_study(tmp_path / "other")
    monkeypatch.setattr(other, "_trained", stopped)
    with pytest.raises(ends):
        other.run(2)
    without_training(other, monkeypatch)
    assert [trial["number"] for trial in other.run(2)["trials"]] == [1, 2]


def test_report_that_fails_does_not_hide_the_first_error(tmp_path, monkeypatch):
    study = some_study(tmp_path)

    def failing(*_):
        raise TrainingStopped("the first error")

    def unwritable(*_):
        raise OSError("no space left")

    monkeypatch.setattr(study, "_trained", failing)
    monkeypatch.setattr(study, "write_results", unwritable)
    with pytest.raises(TrainingStopped, match="the first error"):
        study.run(2)


def test_verbosity_of_optuna_is_that_of_the_caller(tmp_path, monkeypatch):
    """Also on a system that does not say on which cores a process may run."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.DEBUG)
    try:
        config = config_of("countries", **{**SMALL, "train.epochs": 1})
        kge_torchrec.tune(config, 1, tmp_path / "study", {"train.lr": [0.1]})
        assert optuna.logging.get_verbosity() == optuna.logging.DEBUG
    finally:
        optuna.logging.set_verbosity(before)


def test_ctrl_c_stops_the_whole_study(tmp_path, monkeypatch, capsys, ctrl_c):
    folder = some_study(tmp_path / "study").path
    with monkeypatch.context() as patched:
        patched.setattr(study_of, "value_of", lambda *_: ctrl_c() or 0.5)
        assert main(["tune", "--resume", str(folder)]) == 130
    said = capsys.readouterr().err
    assert said == f"kge-torchrec: interrupted; resume with `tune --resume {folder}`.\n"
    again = kge_torchrec.tune(config_of("countries", **SMALL), 1, folder, SPACE)
    assert [trial["state"] for trial in again["trials"]] == ["complete"]
    assert again["trials"][0]["again"] == 0


def test_config_of_a_run_is_tuned(tmp_path, monkeypatch):
    """The run keeps its folder, and its triples are those of the trials."""
    run = api.train(config_of("countries", tmp_path / "run", **{**SMALL, "train.epochs": 1}))
    monkeypatch.setattr(Study, "_trained", lambda *_: 0.5)
    space = tmp_path / "space.yaml"
    space.write_text("train.lr: [0.1, 0.2]\n")
    words = ["--study", str(tmp_path / "study"), "--space", str(space), "--threads", "1"]
    assert main(["tune", str(run.path), "--trials", "2", *words]) == 0
    study = Study(tmp_path / "study")
    assert study.config.model == run.config.model and study.config.run.dir is None
    assert study.store.fingerprint == TripleStore.open(run.path / "store").fingerprint


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
    return make_study(config, 9, folder, space, "epochs", None)


def first_trials(study: Study, count: int, monkeypatch) -> list[tuple[str | None, dict]]:
    """The source and values of the first trials, which end without training."""
    without_training(study, monkeypatch)
    return [(trial["from"], trial["values"]) for trial in study.run(count)["trials"]]


def test_open_config_starts_with_the_settings_of_the_race(
    tmp_path, store, short, capsys, monkeypatch
):
    """Each as the race trains it; the later trials vary the config."""
    study = made(tmp_path, open_config(store))
    assert "first trials: the settings of the race, softmax_n3, rote" in capsys.readouterr().err
    trials = first_trials(study, 12, monkeypatch)
    assert [name for name, _ in trials] == [*PORTFOLIO, *[None] * 8]
    for name, values in trials[:4]:
        raced = with_values(open_config(store), values_of(name)).settled(study.store.size)
        config = study.config_of(values)
        for section in ("model", "loss", "negatives", "train"):
            assert getattr(config, section) == getattr(raced, section)
        assert config.train.epochs == 3
    for _, values in trials[4:]:
        config = study.config_of(values)
        assert config.model.scorer == "complex" and config.train.lr == values["train.lr"]
    assert len({str(values) for _, values in trials}) == 12
    assert made(tmp_path, open_config(store)).given == study.given


def test_a_config_that_says_how_to_train_is_the_first_trial(tmp_path, store, short, monkeypatch):
    study = made(tmp_path / "given", open_config(store, train__lr=0.3))
    ((name, values),) = first_trials(study, 1, monkeypatch)
    assert name == "the config" and values["train.lr"] == 0.3
    study = made(tmp_path / "space", open_config(store), {"train.lr": SPACE["train.lr"]})
    assert first_trials(study, 1, monkeypatch) == [("the config", {"train.lr": 0.1})]


def test_many_entities_leave_full_scoring_out(store):
    def first(entities: int) -> list[str]:
        size = GraphSize(entities, 3, 1000)
        return default_search(
            open_config(store), SimpleNamespace(num_entities=entities, size=size)
        )[2]

    assert first(30_000) == list(PORTFOLIO)
    assert first(30_001) == ["softmax_n3", "rote", "softmax_weak_n3"]


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
        ("a different storage", {"storage": "sqlite:///other.db"}),
    ):
        with pytest.raises(ConfigError, match=words):
            kge_torchrec.tune(**{"config": config, "space": SPACE, "study": folder, **changes})
    with pytest.raises(ConfigError, match="halving must be one of"):
        kge_torchrec.tune(config, study=tmp_path / "new", halving="tail")
    assert not (tmp_path / "new").exists()
    for arguments, words in (
        (["--resume", str(folder), "--train.lr=1"], "train.lr: the trials of a study share"),
        (["--resume", str(folder), "--space", "x.yaml"], "reads the settings of the study"),
    ):
        assert main(["tune", *arguments]) == 1
        assert words in capsys.readouterr().err


def test_a_study_and_a_run_do_not_share_a_folder(study, capsys):
    folder, _ = study
    trial = folder / "trials" / "0000"
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


BEATING_FAST = """\
import sys
from kge_torchrec.tuning import study
study.HEARTBEAT, study.GRACE = 1, 4
from kge_torchrec.cli import main
sys.exit(main(sys.argv[1:]))
"""


def command(folder: Path, *more: str) -> subprocess.Popen:
    """A process of a study on the countries with trials of a second or so."""
    values = {**SMALL, "train.epochs": 45, "evaluation.every": 45}
    keys = [f"--{key}={str(value).lower()}" for key, value in values.items()]
    space = folder.parent / "space.yaml"
    space.write_text(yaml.safe_dump(SPACE))
    words = [sys.executable, "-c", BEATING_FAST, "tune", "demo", *keys, "--space", str(space),
             "--halving=none", "--study", str(folder), *more]  # fmt: skip
    return subprocess.Popen(words, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


def wait_for(condition, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_two_processes_share_a_study(tmp_path):
    """They start at once, draw different values, and one of them repeats what a third had begun."""
    folder = tmp_path / "study"
    killed = command(folder, "--trials=8")
    wait_for(lambda: (folder / "trials" / "0001" / "metrics.jsonl").exists())
    killed.kill()
    killed.wait()
    processes = [command(folder, "--trials=8"), command(folder, "--trials=8")]
    assert [process.wait() for process in processes] == [0, 0]
    study = Study(folder).load()
    results = _ended(study)
    assert len(results) in (8, 9) and {trial.state for trial in results} == {TrialState.COMPLETE}
    (again,) = (trial for trial in results if "retry_history" in trial.system_attrs)
    (number,) = again.system_attrs["retry_history"]
    assert number in (1, 2) and number < again.number
    assert study.trials[number].state is TrialState.FAIL
    assert study.trials[number].params == again.params
    spans = sorted((trial.datetime_start, trial.datetime_complete) for trial in results)
    assert any(one[1] > other[0] for one, other in pairwise(spans))
    assert len({str(trial.params) for trial in results}) == len(results)

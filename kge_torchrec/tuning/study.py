"""A study: trials in a folder, run by any number of processes, on Optuna's own storage.

STUDY/study.json has its name, storage and first trials; config.yaml the config whose keys the
trials change; space.yaml these keys; optuna.db the trials, unless the study has another storage;
trials/0007 the run of a trial, without checkpoints; best.yaml the config of the best trial.

A process that trains beats in the database. The values of a trial whose process has not beaten for
``GRACE`` seconds, or that a signal or a full disk ended, are tried again once. Trials are compared
after the same number of epochs; the first ones, with the settings that the study starts from, are
never dropped, since some rise slowly.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import yaml

from kge_torchrec import files
from kge_torchrec.config import Config, ConfigError
from kge_torchrec.config.checks import at_least
from kge_torchrec.config.keys import replace_keys
from kge_torchrec.config.parser import AnyConfig, as_config, read_run_config, values_of
from kge_torchrec.config.yaml_file import read_yaml
from kge_torchrec.data.report import notes
from kge_torchrec.errors import KGEError, first_line
from kge_torchrec.lines import say
from kge_torchrec.ranking.ranks import value_of
from kge_torchrec.training.run_data import check_start, open_store
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.stop_signal import TrainingStopped
from kge_torchrec.tuning.trials import PORTFOLIO, train_trial, with_values

try:
    import optuna
    from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
    from optuna.trial import FrozenTrial, Trial, TrialState
    from sqlalchemy.exc import SQLAlchemyError

    from kge_torchrec.tuning.space import default_search, parameters_of, suggested
except ModuleNotFoundError:
    raise ConfigError("tune needs Optuna: pip install -e '.[tune]'") from None

ETA = 3  # at each comparison, one in ETA of the trials so far continues
RUNGS = 3  # comparisons, including the one at the end
HEARTBEAT, GRACE = 5, 30  # seconds between beats, and without a beat until a trial counts as killed
FIRST_FAILURES = 5  # a study ends if its first trials, this many, all fail

log = logging.getLogger(__name__)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide Optuna's message per trial and its warnings about experimental features."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(verbosity)


with _quiet():
    _again = RetryHeartbeatStaleTrialCallback(max_retry=1)


def tune(
    config: AnyConfig = None,
    trials: int | None = None,
    study: str | Path | None = None,
    space: str | Path | dict[str, Any] | None = None,
    storage: str | None = None,
    resume: str | Path | None = None,
) -> dict[str, Any]:
    """Search for good settings by their results on valid, or resume a study.

    If ``config`` leaves training open and ``space`` is None, the first trials use the settings of
    the race of defaults; otherwise the first one uses ``config``.

    Args:
        config: The config whose keys the trials change, in a form that ``train`` takes.
        trials: The trials of the whole study, including those of other processes. None: 30, or as
            many as the study was started with.
        study: The folder of a new study. None: studies/SCORER-TIME.
        space: A YAML file or its content: keys with ranges or lists. None: a default for the scorer
            and the size of the graph.
        storage: The URL of Optuna's storage. None: a SQLite file in the folder.
        resume: The folder of a study that exists; the arguments but ``trials`` are its own.

    Returns:
        {"number", "value", "values" by key, "metric", "trials"} of the best trial; "trials" is the
        number of all that ended.

    Raises:
        ConfigError: A setting is invalid, or no trial was completed.
        DataError: The data cannot be used.
        TrainingStopped: A signal stopped a training.
    """
    if resume is not None:
        if any(value is not None for value in (config, study, space, storage)):
            raise ConfigError("tune(resume=...) reads the settings of the study; leave them out")
        return Study(resume).run(trials)
    return make_study(as_config(config), trials or 30, study, space, storage).run()


def make_study(
    config: Config,
    trials: int,
    folder: str | Path | None = None,
    space: str | Path | dict[str, Any] | None = None,
    storage: str | None = None,
) -> Study:
    """Make a new study: prepare the store, choose first trials, and write the folder."""
    named = config.model.scorer if config.decided_by else "default"
    path = Path(folder or f"studies/{named}-{time.strftime('%Y%m%d-%H%M%S')}")
    at_least("trials", trials, 1)
    check_start(config)
    if (config.train.epochs or 1) < 1:
        raise ConfigError("train.epochs must be at least 1 to tune, got 0")
    where, ranges, lines = "search space", cast(Any, space), dict[str, int]()
    if isinstance(space, str | Path):
        if not Path(space).is_file():
            raise ConfigError(f"space: there is no file {space}")
        where, (ranges, lines) = str(space), read_yaml(space)
    if space is not None:
        parameters_of(ranges, where, lines)
    if (path / "study.json").is_file():
        raise ConfigError(f"study: {path} is a study; resume it with `tune --resume {path}`")
    if any(path.glob("[!.]*")):
        raise ConfigError(f"study: {path} is no study and not empty; name another folder")
    if storage is not None:
        _storage(storage)  # a wrong URL leaves no folder
    path.mkdir(parents=True, exist_ok=True)
    config = replace(config, run=replace(config.run, dir=None, resume="never"))
    store = open_store(config, path)
    if not len(store.valid):
        raise ConfigError("data.path: tune compares trials on valid, which has no triples")
    for note in notes(store):
        log.warning(note)
    base, first = config.settled(store.size), list[str]()
    if ranges is None:
        ranges, base, first = default_search(config, store)
    if first:
        say(f"first trials: the settings of the race, {', '.join(first)}")
    if not config.evaluation.every:  # early enough to drop trials
        early = max(1, base.train.epochs // ETA ** (RUNGS - 1))
        early = min(early, base.evaluation.every or early)
        base = replace_keys(base, {"evaluation.every": early})
    base.save(path / "config.yaml")
    (path / "trials").mkdir(exist_ok=True)
    files.write_text(path / "space.yaml", yaml.safe_dump(ranges, sort_keys=False))
    # Several studies may share a storage.
    name = f"{path.resolve().name}-{uuid.uuid4().hex[:8]}"
    with _quiet():
        made = optuna.create_study(
            storage=_storage(storage or f"sqlite:///{path / 'optuna.db'}"),
            study_name=name,
            direction="minimize" if base.evaluation.metric == "mr" else "maximize",
        )
    for setting in first or ["the config"]:
        made.enqueue_trial({}, user_attrs={"from": setting})
    # The file is written last, since it marks a study.
    files.write_json(path / "study.json", {"name": name, "trials": trials, "storage": storage})
    return Study(path)


class Study:
    """The folder of a study and Optuna's study of its trials."""

    def __init__(self, path: str | Path):
        self.path = path = Path(path)
        if not (path / "study.json").is_file():
            raise ConfigError(f"{path} is no study: the folder has no study.json")
        given = json.loads((path / "study.json").read_text(encoding="utf-8"))
        self.name, self.trials = given["name"], given["trials"]
        self.storage = given["storage"] or f"sqlite:///{path / 'optuna.db'}"
        self.config = read_run_config(path / "config.yaml")
        self.metric = self.config.evaluation.metric
        ranges, lines = read_yaml(path / "space.yaml")
        self.space = parameters_of(ranges, str(path / "space.yaml"), lines)
        # The epochs before the first comparison: a multiple of the interval of validations.
        epochs, every = self.config.train.epochs, self.config.evaluation.every
        self.first_rung = max(1, epochs // ETA ** (RUNGS - 1) // every) * every
        self.store = open_store(self.config, path)

    def run(self, trials: int | None = None, **own: Any) -> dict[str, Any]:
        """Run trials until the study has so many, including those of other processes.

        ``own`` are ``threads`` and ``device`` of the runs of this process, if not those of the
        config. Returns what ``tune`` returns.
        """
        limit = trials or self.trials

        def after_trial(study: optuna.Study, trial: FrozenTrial) -> None:
            if trial.state is TrialState.COMPLETE:
                self.best(study)
            failed = [trial.state is TrialState.FAIL for trial in ended(study)]
            if (len(failed) >= FIRST_FAILURES and all(failed)) or len(failed) >= limit:
                study.stop()

        with _quiet():
            study = self.load()
            try:
                if len(ended(study)) < limit:
                    study.optimize(partial(self._objective, own), callbacks=[after_trial])
            except KeyboardInterrupt as error:
                raise KeyboardInterrupt(
                    f"interrupted; resume with `tune --resume {self.path}`."
                ) from error
            return self.best(study)

    def load(self) -> optuna.Study:
        """Return Optuna's study, which drops trials by asynchronous successive halving."""
        return optuna.load_study(
            study_name=self.name,
            storage=_storage(self.storage),
            pruner=optuna.pruners.SuccessiveHalvingPruner(self.first_rung, ETA),
        )

    def _objective(self, own: dict[str, Any], trial: Trial) -> float:
        """Train a trial; return its best result on valid, or NaN, which fails it, at an error."""
        name, began = trial.user_attrs.get("from"), time.perf_counter()
        if name is not None:
            values = values_of(name) if name in PORTFOLIO else {}
        else:
            # Seeded by trial: with one seed, two processes would draw the same values.
            trial.study.sampler = optuna.samplers.TPESampler(
                n_startup_trials=max(5, min(10, self.trials // 3)),
                multivariate=True,
                group=True,
                constant_liar=True,
                seed=(self.config.seed * 1_000_003 + trial.number) % 2**32,
            )
            values = suggested(self.space, self.config, trial)
        trial.set_user_attr("values", values)
        last = math.nan

        def watch(kind: str, line: dict[str, Any]) -> None:
            nonlocal last
            if kind != "valid":
                return
            last = value_of(line, self.metric)
            trial.report(last, line["epoch"])
            # After the last rung, little time is left to save.
            last_rung = min(self.first_rung * ETA ** (RUNGS - 2), self.config.train.epochs - 1)
            if line["epoch"] <= last_rung:
                is_poor = trial.should_prune()  # for all: the pruner compares with earlier calls
                if is_poor and name is None:
                    raise optuna.TrialPruned

        def report(what: str) -> None:
            shown = ", ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                for key, value in values.items()
            )
            say(f"trial {trial.number}: {what}; {shown}")

        folder = RunFolder(self.path / "trials" / f"{trial.number:04d}")
        try:
            config = replace(self.config_of(values), **own)
            no_steps = {"checkpoint.every.steps": 0}
            value = train_trial(config, folder, self.store, no_steps, [watch])
        except optuna.TrialPruned:
            seconds = time.perf_counter() - began
            report(f"valid {self.metric} {last:.4f}, dropped, {seconds:.1f} s")
            raise
        except (TrainingStopped, KeyboardInterrupt, OSError):
            _again(trial.study, trial.study.get_trials()[trial.number])
            raise
        except Exception as error:  # the next trial may still succeed
            kind = "" if isinstance(error, KGEError) else f"{type(error).__name__}: "
            trial.set_user_attr("error", f"{kind}{error}")
            report(f"failed: {kind}{error}")
            return math.nan
        finally:  # nobody reads the checkpoints of a trial
            shutil.rmtree(folder.checkpoints, ignore_errors=True)
        report(f"valid {self.metric} {value:.4f}, {time.perf_counter() - began:.1f} s")
        return value

    def config_of(self, values: dict[str, Any]) -> Config:
        """Return the config of a trial with these values, by dotted key."""
        return with_values(self.config, values).settled(self.store.size)

    def best(self, study: optuna.Study) -> dict[str, Any]:
        """Write best.yaml; return what ``tune`` returns."""
        trials = ended(study)
        if not any(trial.state is TrialState.COMPLETE for trial in trials):
            failures = [error for t in trials if (error := t.user_attrs.get("error"))]
            raise ConfigError(
                f"none of the first {len(trials)} trials was completed; error of the last one: "
                f"{failures[-1] if failures else 'its process ended'}"
            )
        best = study.best_trial
        values = best.user_attrs["values"]
        # With a value for each key, size has no effect, and train would refuse it.
        config = self.config_of(values).to_dict() | {"size": "base"}
        if os.path.exists(config["data"]["path"]):  # valid in any folder
            config["data"]["path"] = os.path.abspath(config["data"]["path"])
        head = (
            f"# Trial {best.number} of {self.path.name}: valid {self.metric} "
            f"{best.value:.4f}.\n# kge-torchrec train {self.path / 'best.yaml'}\n"
        )
        content = head + yaml.safe_dump(config, sort_keys=False)
        files.write_text(self.path / "best.yaml", content)
        return {
            "number": best.number,
            "value": best.value,
            "values": values,
            "metric": self.metric,
            "trials": len(trials),
        }


def _storage(url: str) -> RDBStorage:
    """Open a storage, and create its tables if it is new; one process does so at a time."""
    waits = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else None
    try:
        with _quiet():
            return RDBStorage(
                url,
                engine_kwargs=waits,
                heartbeat_interval=HEARTBEAT,
                grace_period=GRACE,
                heartbeat_stale_trial_callback=_again,
            )
    except SQLAlchemyError as error:
        raise ConfigError(f"storage: {url} cannot be opened: {first_line(error)}") from None
    except ImportError as error:
        raise ConfigError(
            f"storage: {url} needs a driver: {error.__cause__ or error}; for PostgreSQL "
            "`pip install 'psycopg[binary]'` and write postgresql+psycopg://HOST/DATABASE"
        ) from None


def ended(study: optuna.Study) -> list[FrozenTrial]:
    """Return the ended trials in order, without those that a later trial repeats."""
    trials = study.get_trials(deepcopy=False)
    repeated = {number for t in trials for number in t.system_attrs.get("retry_history", [])}
    return [t for t in trials if t.state.is_finished() and t.number not in repeated]

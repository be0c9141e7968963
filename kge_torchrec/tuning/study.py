"""A study: trials in a shared folder, run by any number of processes.

The folder holds:
    study.json    the number of trials, how poor ones are dropped, the metric
    config.yaml   the config whose keys the trials change
    space.yaml    the keys that the trials change
    journal.log   Optuna's journal of all trials so far
    store/        the prepared triples, unless the config names a store
    trials/0007   the run of a trial
    trials.json   all trials that have ended, and the best one
    best.yaml     the config of the best trial, for ``train``

Processes communicate only through the folder. A process holds a file lock while it runs a trial,
and the system releases the lock when the process ends for any reason. A trial whose state is
"running" while its lock is free was killed, and Optuna's retry callback enqueues it again.
(Optuna's heartbeat does the same after a delay, but needs a database.)
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

import optuna
import yaml
from filelock import BaseFileLock, FileLock, Timeout
from optuna.samplers import TPESampler
from optuna.storages import JournalStorage, RetryHeartbeatStaleTrialCallback
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.study import Study as OptunaStudy
from optuna.trial import FrozenTrial, Trial, TrialState

from kge_torchrec import files
from kge_torchrec.config import Config, ConfigError, GraphSize
from kge_torchrec.config.parser import read_run_config, values_of
from kge_torchrec.config.sizing import KEYS, filled
from kge_torchrec.data.report import notes
from kge_torchrec.data.store import META, TripleStore
from kge_torchrec.training.run_data import open_store
from kge_torchrec.tuning.race import PORTFOLIO
from kge_torchrec.tuning.space import FIXED, SMALL, SearchSpace, default_space, with_values

HALVING = ("epochs", "none")
ETA = 3  # at each comparison, one in ETA of the trials so far continues
RUNGS = 3  # comparisons, including the one at the end
RETRIES = 1  # how often the values of a killed trial are tried again before they count as failed
_LONGEST_LINE = 1 << 16  # bytes of a journal line

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """The settings that all processes of a study share."""

    trials: int
    halving: str
    metric: str  # on valid, both sides, realistic
    seed: int
    portfolio: Sequence[str] = ()  # the settings of the first trials; empty: those of the config


class Study:
    """The folder of a study and its trials.

    Raises:
        ConfigError: ``path`` is not a study.
    """

    def __init__(self, path: Path):
        self.path = path
        if not (path / "study.json").is_file():
            raise ConfigError(f"{path} is no study: the folder has no study.json")
        values = json.loads((path / "study.json").read_text(encoding="utf-8"))
        self.settings = Settings(**values)
        self.config = read_run_config(path / "config.yaml")
        self.space = SearchSpace.read(path / "space.yaml")
        journal = str(path / "journal.log")
        self.storage = JournalStorage(JournalFileBackend(journal, _JournalLock(journal)))
        self.optuna = self._load()

    @classmethod
    def open_or_make(
        cls, path: Path, config: Config, space: SearchSpace | None, settings: Settings
    ) -> Study:
        """Open the study in a folder, or create it if there is none.

        Args:
            path: The folder.
            config: The config whose keys the trials change.
            space: The keys to change; None: a default for the scorer and the graph.
            settings: The settings.

        Raises:
            ConfigError: The folder has other files, or the config cannot be tuned.
            DataError: The data cannot be used.
        """
        _check(path, config, settings)
        with _lock(path / ".lock"):
            store = _store(path, config)
            if not (path / "study.json").is_file():
                if not len(store.valid):
                    raise ConfigError(
                        "data.path: tune compares trials on valid, which has no triples"
                    )
                for note in notes(store):
                    log.warning(note)
                _make(path, config, space, settings, store)
        study = cls(path)
        study._check_same(config, space, settings)
        return study

    def _check_same(self, config: Config, space: SearchSpace | None, settings: Settings) -> None:
        """Check that the study in the folder has these settings.

        Raises:
            ConfigError: It has different ones.
        """
        differing = None
        config = _comparable(_shared(config, self.size, self.settings.portfolio), self.settings)
        if settings.halving != self.settings.halving:
            differing = "way of dropping trials"
        elif self.config.to_dict() != config.to_dict():
            differing = "config"
        elif space is not None and space.to_yaml() != self.space.to_yaml():
            differing = "search space"
        if differing is not None:
            raise ConfigError(
                f"study: the study in {self.path} has a different {differing}; resume that study "
                f"with `tune --resume {self.path}`, or name another folder"
            )

    @cached_property
    def size(self) -> GraphSize:
        """The size of the graph, from which the keys that a trial leaves null are resolved."""
        return self.store().size

    def config_of(self, values: Mapping[str, Any]) -> Config:
        """Return the config of a trial with these values, by dotted key."""
        return with_values(self.config, values).settled(self.size)

    def store(self) -> TripleStore:
        """Return the triples that all trials use."""
        return _store(self.path, self.config)

    def _load(self) -> OptunaStudy:
        """Return Optuna's study, with successive halving or no pruner."""
        with _quiet():
            return optuna.create_study(
                storage=self.storage,
                study_name="tune",
                direction="minimize" if self.settings.metric == "mr" else "maximize",
                pruner=self._pruner(),
                load_if_exists=True,
            )

    def _pruner(self) -> optuna.pruners.BasePruner:
        if self.settings.halving == "none":
            return optuna.pruners.NopPruner()
        first = first_rung(self.config)
        return optuna.pruners.SuccessiveHalvingPruner(min_resource=first, reduction_factor=ETA)

    @contextmanager
    def next_trial(self, limit: int) -> Iterator[tuple[Trial, dict[str, Any]] | None]:
        """Yield the next trial with its values, or None if there are ``limit`` trials.

        The trial can repeat one whose process was killed. Its lock is held while the block runs, so
        other processes can see that it is alive.
        """
        with ExitStack() as held:
            with self.locked():
                self._retry_killed()
                taken = None
                if self._count_trials() < limit:
                    number = len(self.optuna.get_trials(deepcopy=False))
                    self.optuna.sampler = self._sampler(number)
                    with _quiet():
                        trial = self.optuna.ask()
                        held.enter_context(self._lock_of(trial.number))
                        values = self._first_values(trial)
                        taken = trial, values or self.space.of_trial(self.config, trial)
            yield taken

    def _sampler(self, number: int) -> TPESampler:
        """Return a sampler seeded by seed and trial number: two processes draw differently."""
        with _quiet():
            return TPESampler(
                n_startup_trials=max(5, min(10, self.settings.trials // 3)),
                multivariate=True,
                group=True,
                constant_liar=True,
                seed=(self.settings.seed * 1_000_003 + number) % 2**32,
            )

    def enqueue_first(self) -> None:
        """Make the first trials use the settings that the study starts from.

        These are those of the portfolio, as they are, or the study's own config. A value of the
        config outside the space is left to the sampler.
        """
        with self.locked():
            if self.optuna.get_trials(deepcopy=False):
                return
            for name in self.settings.portfolio:
                self.optuna.enqueue_trial({}, user_attrs={"from": name})
            own = self.space.of_config(self.config_of({}))
            if own and not self.settings.portfolio:
                self.optuna.enqueue_trial(own, user_attrs={"from": "the config"})

    def _first_values(self, trial: Trial | FrozenTrial) -> dict[str, Any]:
        """Return the values of a trial with settings of the portfolio; otherwise nothing."""
        name = str(trial.user_attrs.get("from"))
        return values_of(name) if name in self.settings.portfolio else {}

    def _retry_killed(self) -> None:
        """End the trials whose process is gone, and enqueue their values again."""
        # Copy the trials, since Optuna's callback changes them.
        for trial in self.optuna.get_trials(deepcopy=True, states=(TrialState.RUNNING,)):
            with suppress(Timeout), self._lock_of(trial.number).acquire(blocking=False):
                with _quiet():
                    RetryHeartbeatStaleTrialCallback(max_retry=RETRIES)(self.optuna, trial)
                words = "the process was killed; the values are tried again"
                if trial.number not in self._retried():
                    words = f"the process was killed {RETRIES + 1} times with these values"
                self.storage.set_trial_user_attr(trial._trial_id, "error", words)
                self.optuna.tell(trial.number, state=TrialState.FAIL)
                log.warning("trial %d: %s", trial.number, words)

    def _retried(self) -> set[int]:
        """Return the numbers of killed trials whose values were enqueued again."""
        trials = self.optuna.get_trials(deepcopy=False)
        return {number for trial in trials for number in retries_of(trial)}

    def _count_trials(self) -> int:
        """Count the ended and running trials, except those that a later trial repeats."""
        retried = self._retried()
        return sum(
            trial.state is not TrialState.WAITING and trial.number not in retried
            for trial in self.optuna.get_trials(deepcopy=False)
        )

    def ended(self) -> list[FrozenTrial]:
        """Return the ended trials in order, without those that a later trial repeats."""
        retried = self._retried()
        return [
            trial
            for trial in self.optuna.get_trials(deepcopy=False)
            if trial.state.is_finished() and trial.number not in retried
        ]

    def best(self) -> FrozenTrial | None:
        """Return the completed trial with the best metric; None if none is completed."""
        done = [trial for trial in self.ended() if trial.state is TrialState.COMPLETE]
        sign = 1 if self.settings.metric == "mr" else -1
        return min(done, key=lambda trial: sign * (trial.value or 0.0), default=None)

    def values_of(self, trial: FrozenTrial) -> dict[str, Any]:
        """Return a trial's values by dotted key."""
        by_name = {parameter.name: parameter.key for parameter in self.space.parameters}
        drawn = {by_name[name]: value for name, value in trial.params.items()}
        return self._first_values(trial) or drawn

    def write_results(self) -> dict[str, Any]:
        """Write trials.json and best.yaml; return the content of trials.json."""
        with self.locked():  # before it reads the trials, so that no older file replaces a newer
            best = self.best()
            results = {
                "metric": self.settings.metric,
                "halving": self.settings.halving,
                "best": None if best is None else self._described(best),
                "trials": [self._described(trial) for trial in self.ended()],
            }
            if best is not None:
                files.write_text(self.path / "best.yaml", self._best_yaml(best))
            files.write_json(self.path / "trials.json", results)
        return results

    def _described(self, trial: FrozenTrial) -> dict[str, Any]:
        """Return the entry of an ended trial in trials.json."""
        values = list(trial.intermediate_values.values())
        return {
            "number": trial.number,
            "state": trial.state.name.lower(),
            "value": trial.value if trial.state is TrialState.COMPLETE else None,
            "last": values[-1] if values else None,
            "reached": trial.last_step,
            "seconds": trial.duration.total_seconds() if trial.duration else None,
            "values": self.values_of(trial),
            "from": trial.user_attrs.get("from"),
            **({"error": trial.user_attrs["error"]} if "error" in trial.user_attrs else {}),
            **({"again": retries_of(trial)[-1]} if retries_of(trial) else {}),
        }

    def _best_yaml(self, best: FrozenTrial) -> str:
        # With a value for each key, size has no effect, and train would refuse it.
        config = self.config_of(self.values_of(best)).to_dict() | {"size": "base"}
        path = config["data"]["path"]
        if Path(path).exists():  # a file, not the name of a dataset: make it valid in any folder
            config["data"]["path"] = os.path.abspath(path)
        head = (
            f"# Trial {best.number} of {self.path.name}: valid {self.settings.metric} "
            f"{best.value:.4f}.\n# kge-torchrec train {self.path / 'best.yaml'}\n"
        )
        return head + yaml.safe_dump(config, sort_keys=False)

    def folder_of(self, number: int) -> Path:
        """Return the run folder of a trial."""
        return self.path / "trials" / f"{number:04d}"

    def locked(self) -> BaseFileLock:
        """Return the lock of the study, which makes other processes wait."""
        return _lock(self.path / ".lock")

    def _lock_of(self, number: int) -> BaseFileLock:
        return _lock(self.path / "trials" / f".{number:04d}.lock")


def retries_of(trial: FrozenTrial) -> list[int]:
    """Return the numbers of the killed trials whose values this trial repeats."""
    return trial.system_attrs.get("retry_history", [])


def first_rung(config: Config) -> int:
    """Return the epochs before the first comparison.

    This is a multiple of the validation interval, at most a ninth of all epochs but at least one
    interval.
    """
    period = config.evaluation.every
    return max(1, _first_of(config) // period) * period


def _first_of(config: Config) -> int:
    return max(1, config.train.epochs // ETA ** (RUNGS - 1))


def _check(path: Path, config: Config, settings: Settings) -> None:
    """Check the folder and the settings before anything is written.

    Raises:
        ConfigError: A setting is invalid, or the folder has other files, such as a run.
    """
    own = ("store", "trials", "config.yaml", "space.yaml")  # what a killed start leaves
    present = () if (path / "study.json").is_file() else path.glob("[!.]*")
    if any(file.name not in own for file in present):
        raise ConfigError(f"study: {path} is no study and not empty; name another folder")
    if settings.halving not in HALVING:
        raise ConfigError(f"halving must be one of {', '.join(HALVING)}, got {settings.halving!r}")
    if settings.trials < 1:
        raise ConfigError(f"trials must be an integer >= 1, got {settings.trials}")
    if (config.train.epochs or 1) < 1:
        raise ConfigError("train.epochs must be at least 1 to tune, got 0")


def _comparable(config: Config, settings: Settings) -> Config:
    """Return the config with validations early enough to drop trials."""
    evaluation = config.evaluation
    period = evaluation.every or config.train.epochs
    if settings.halving == "epochs":
        period = min(period, _first_of(config))
    run = replace(config.run, dir=None, resume="never")
    return replace(config, evaluation=replace(evaluation, every=period), run=run)


def _make(
    path: Path, config: Config, space: SearchSpace | None, settings: Settings, store: TripleStore
) -> None:
    """Create the study in a folder, and print what the graph and the config have decided."""
    if space is None:
        if config.decided_by is None:
            portfolio = _fitting(config, store.num_entities)
            settings = replace(settings, portfolio=portfolio)
            _say(f"first trials: the settings of the race, {', '.join(portfolio)}")
        space = SearchSpace(default_space(config, store.num_entities))
    shared = _shared(config, store.size, settings.portfolio)
    _write(path, _comparable(shared, settings), space, settings)


def _fitting(config: Config, num_entities: int) -> list[str]:
    """Return the settings of the portfolio that score no more entities per query than ``SMALL``."""
    full = {name: with_values(config, values_of(name)).negatives.is_full for name in PORTFOLIO}
    return [name for name in PORTFOLIO if num_entities <= SMALL or not full[name]]


def _shared(config: Config, graph: GraphSize, portfolio: Sequence[str]) -> Config:
    """Return the config with values for the null keys that all trials share.

    These depend on the graph. With a portfolio, trials share those of training time and validation
    only; the others follow from the trial's settings.
    """
    settled = config.settled(graph)
    if not portfolio:
        return settled
    return filled(config, {key: attrgetter(key)(settled) for key in KEYS if key.startswith(FIXED)})


def _write(path: Path, config: Config, space: SearchSpace, settings: Settings) -> None:
    (path / "trials").mkdir(exist_ok=True)
    config.save(path / "config.yaml")
    (path / "space.yaml").write_text(space.to_yaml(), encoding="utf-8")
    files.write_json(path / "study.json", asdict(settings))  # last, since it marks a study


def _store(path: Path, config: Config) -> TripleStore:
    if (Path(config.data.path) / META).is_file():
        return TripleStore.open(config.data.path)
    return open_store(config, path)


def _lock(file: Path) -> BaseFileLock:
    """Return a lock that the system releases when its process ends."""
    file.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(file, poll_interval=0.01)


class _JournalLock(JournalFileOpenLock):
    """The lock of Optuna's journal, released when its process ends.

    Optuna's own locks remain for 30 s after their process is killed. A process that is killed
    while writing leaves an incomplete line, which the next process removes.
    """

    def __init__(self, journal: str):
        super().__init__(journal)
        self._journal, self._lock = Path(journal), _lock(Path(journal).with_suffix(".lock"))

    def acquire(self) -> bool:
        """Wait for the lock, and remove an incomplete last line."""
        self._lock.acquire()
        with self._journal.open("rb+") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - _LONGEST_LINE))
            file.truncate(end - len(file.read().rpartition(b"\n")[2]))
        return True

    def release(self) -> None:
        """Release the lock."""
        self._lock.release()


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide Optuna's warnings about experimental features and its message per trial."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def now() -> str:
    """Return the local time in a form for file names."""
    return time.strftime("%Y%m%d-%H%M%S")

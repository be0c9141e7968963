"""A study: trials that share a folder, whoever runs them and however often they are killed.

It holds:
    study.json    how many trials, how poor ones are dropped, by what they are compared
    config.yaml   the config that trials change keys of
    space.yaml    the keys that they change
    journal.log   Optuna's, of all trials so far
    store/        the prepared triples, unless the config names a store
    cores/        smaller graphs, where poor trials are dropped on them
    trials/0007   the run of a trial (0007-rung-0: before it, on a smaller graph)
    report.md, history.png, importance.png, trials.json, best.yaml    see ``report``

Processes meet in the folder alone.  Whoever runs a trial holds a lock on a file of it, which the
system lets go when the process ends, however it ends: a trial that says it is running while its
lock is free was killed, and is put in line again.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import optuna
import torch
from optuna.samplers import TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.study import Study as OptunaStudy
from optuna.trial import FrozenTrial, Trial, TrialState

from kge_torchrec import files
from kge_torchrec.config import Config, ConfigError
from kge_torchrec.config.parser import read_config
from kge_torchrec.data.store import META, TripleStore
from kge_torchrec.distributed.processes import Processes
from kge_torchrec.training.session import data_notes, open_store
from kge_torchrec.tuning.space import SearchSpace, default_space

HALVING = ("epochs", "subgraphs", "none")
ETA = 3  # of the trials that came so far one in so many goes on
RUNGS = 3  # at which they are compared, the last of them being the end
MOST_KILLS = 2  # of one choice of values, before it counts as failed
VERSION = 1
_LONGEST_LINE = 1 << 16  # of the journal

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """What all processes of a study agree on."""

    trials: int
    halving: str
    metric: str  # of valid, both sides, realistic
    seed: int
    version: int = VERSION


class Study:
    """The folder of a study and its trials.

    Raises ConfigError if ``path`` holds none.
    """

    def __init__(self, path: Path):
        self.path = path
        if not (path / "study.json").is_file():
            raise ConfigError(f"{path} is no study: it has no study.json")
        values = json.loads((path / "study.json").read_text(encoding="utf-8"))
        if values.get("version") != VERSION:
            raise ConfigError(f"{path} is a study of another version of this program")
        self.settings = Settings(**values)
        self.config = read_config(path / "config.yaml")
        self.space = SearchSpace.read(path / "space.yaml")
        journal = str(path / "journal.log")
        self.storage = JournalStorage(JournalFileBackend(journal, _JournalLock(journal)))
        self.optuna = self._load(None)

    @classmethod
    def open_or_make(
        cls, path: Path, config: Config, space: SearchSpace | None, settings: Settings
    ) -> Study:
        """The study of these settings in a folder, which is made if it holds none.

        ``space`` None takes a default one, by scorer and graph.  Raises ConfigError if another
        study is there, or a config that nothing can be selected by; DataError on bad data.
        """
        _check(config, settings)
        with _locked(path / ".lock"):
            store = _store(path, config)
            # Numbers that depend on graph and device are the same in all trials of a study.
            config = config.settled(store.size)
            config = _comparable(config, settings)
            if not (path / "study.json").is_file():
                if not len(store.valid):
                    raise ConfigError(
                        "data.path: tune compares trials by valid, and there are no valid triples"
                    )
                for note in data_notes(config.data, store):
                    log.warning(note)
                space = space or SearchSpace(default_space(config, store.num_entities))
                _write(path, config, space, settings)
        study = cls(path)
        study._check_same(config, space, settings)
        return study

    def _check_same(self, config: Config, space: SearchSpace | None, settings: Settings) -> None:
        """Raises ConfigError unless the folder's study is the one asked for."""
        differing = None
        if self.settings.halving != settings.halving:  # on which part of the config depends
            differing = "way of dropping trials"
        elif self.config.to_dict() != config.to_dict():
            differing = "config"
        elif space is not None and self.space.to_yaml() != space.to_yaml():
            differing = "search space"
        if differing is not None:
            raise ConfigError(
                f"study: {self.path} holds a study of another {differing}; go on with that by "
                f"`tune --resume {self.path}`, or name another folder"
            )

    def store(self) -> TripleStore:
        """The triples of all trials."""
        return _store(self.path, self.config)

    def _load(self, sampler: TPESampler | None) -> OptunaStudy:
        """Optuna's study; its pruner is successive halving, or none."""
        with _quiet():
            study = optuna.create_study(
                storage=self.storage,
                study_name="tune",
                direction="minimize" if self.settings.metric == "mr" else "maximize",
                sampler=sampler,
                pruner=self._pruner(),
                load_if_exists=True,
            )
            return study

    def _pruner(self) -> optuna.pruners.BasePruner:
        if self.settings.halving == "none":
            return optuna.pruners.NopPruner()
        first = 1
        if self.settings.halving == "epochs":
            first = first_rung(self.config)
        return optuna.pruners.SuccessiveHalvingPruner(min_resource=first, reduction_factor=ETA)

    @contextmanager
    def next_trial(self, limit: int) -> Iterator[tuple[Trial, dict[str, Any]] | None]:
        """A new trial with its values, or one of a killed process again; None if there are enough.

        While the block runs, the trial is known to be alive.
        """
        with ExitStack() as held:
            with _locked(self.path / ".lock"):
                self._put_killed_in_line()
                taken = None
                if self._counted() < limit:
                    number = len(self.optuna.get_trials(deepcopy=False))
                    self.optuna.sampler = self._sampler(number)
                    with _quiet():
                        trial = self.optuna.ask()
                        held.enter_context(_locked(self._lock_of(trial.number)))
                        taken = trial, self.space.of_trial(self.config, trial)
            yield taken

    def _sampler(self, number: int) -> TPESampler:
        """A function of the seed and the number of trials: two processes do not draw alike."""
        with _quiet():
            return TPESampler(
                n_startup_trials=max(5, min(10, self.settings.trials // 3)),
                multivariate=True,
                group=True,
                constant_liar=True,
                seed=(self.settings.seed * 1_000_003 + number) % 2**32,
            )

    def enqueue_config(self) -> None:
        """Lets the first trial be the config as it is, as far as it lies in the space."""
        with _locked(self.path / ".lock"):
            if not self.optuna.get_trials(deepcopy=False):
                own = self.space.of_config(self.config)
                if own:
                    self.optuna.enqueue_trial(own, user_attrs={"from": "the config"})

    def _put_killed_in_line(self) -> None:
        """Ends trials whose process is gone, and enqueues their values."""
        for trial in self.optuna.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            with suppress(BlockingIOError), _locked(self._lock_of(trial.number), wait=False):
                kills = trial.user_attrs.get("kills", 0) + 1
                self._end_killed(trial, kills)

    def _end_killed(self, trial: FrozenTrial, kills: int) -> None:
        words = "its process was killed"
        if trial.params and kills < MOST_KILLS:
            attributes = {"kills": kills, "again": trial.number}
            self.optuna.enqueue_trial(trial.params, user_attrs=attributes)
            words += "; its values were put in line again"
            self.storage.set_trial_user_attr(trial._trial_id, "replaced", True)
        elif trial.params:
            words += f" {kills} times with these values"
        else:
            self.storage.set_trial_user_attr(trial._trial_id, "replaced", True)
        self.storage.set_trial_user_attr(trial._trial_id, "error", words)
        self.optuna.tell(trial.number, state=TrialState.FAIL)
        log.warning("trial %d: %s", trial.number, words)

    def _counted(self) -> int:
        """Trials that ended or run; not those that wait, nor those that were put in line again."""
        return sum(
            trial.state is not TrialState.WAITING and not trial.user_attrs.get("replaced")
            for trial in self.optuna.get_trials(deepcopy=False)
        )

    def ended(self) -> list[FrozenTrial]:
        """Trials that are over, in order, without those that were put in line again."""
        return [
            trial
            for trial in self.optuna.get_trials(deepcopy=False)
            if trial.state.is_finished() and not trial.user_attrs.get("replaced")
        ]

    def best(self) -> FrozenTrial | None:
        """The completed trial of the best metric."""
        done = [trial for trial in self.ended() if trial.state is TrialState.COMPLETE]
        sign = 1 if self.settings.metric == "mr" else -1
        return min(done, key=lambda trial: sign * (trial.value or 0.0), default=None)

    def values_of(self, trial: FrozenTrial) -> dict[str, Any]:
        """A trial's values by dotted key."""
        by_name = {parameter.name: parameter.key for parameter in self.space.parameters}
        return {by_name[name]: value for name, value in trial.params.items()}

    def folder_of(self, number: int, rung: int | None = None) -> Path:
        """The run of a trial, or one of those before it on less of the graph."""
        return self.path / "trials" / (f"{number:04d}" + ("" if rung is None else f"-rung-{rung}"))

    def core_folder(self, core: int) -> Path:
        """The store of a core."""
        return self.path / "cores" / str(core)

    def locked(self) -> Any:
        """Keeps the other processes of the study waiting inside."""
        return _locked(self.path / ".lock")

    def _lock_of(self, number: int) -> Path:
        return self.path / "trials" / f".{number:04d}.lock"


def first_rung(config: Config) -> int:
    """Epochs after which trials are compared first: some validations, a ninth of all at most."""
    every = config.evaluation.every
    return max(1, _first_of(config) // every) * every


def _first_of(config: Config) -> int:
    return max(1, config.train.epochs // ETA ** (RUNGS - 1))


def _check(config: Config, settings: Settings) -> None:
    """Raises ConfigError for settings that make no sense, before anything is made."""
    if settings.halving not in HALVING:
        raise ConfigError(f"halving must be one of {', '.join(HALVING)}, got {settings.halving!r}")
    if settings.trials < 1:
        raise ConfigError(f"trials must be an integer >= 1, got {settings.trials}")
    if (config.train.epochs or 1) < 1:
        raise ConfigError("train.epochs: with 0 there is nothing to tune")


def _comparable(config: Config, settings: Settings) -> Config:
    """With validations often enough for trials to be dropped early."""
    evaluation = config.evaluation
    every = evaluation.every or config.train.epochs
    if settings.halving == "epochs":
        every = min(every, _first_of(config))
    run = replace(config.run, dir=None, resume="never", plan=None)
    return replace(config, evaluation=replace(evaluation, every=every), run=run)


def _write(path: Path, config: Config, space: SearchSpace, settings: Settings) -> None:
    (path / "trials").mkdir(exist_ok=True)
    config.save(path / "config.yaml")
    (path / "space.yaml").write_text(space.to_yaml(), encoding="utf-8")
    files.write_json(path / "study.json", asdict(settings))  # last: now it is a study


def _store(path: Path, config: Config) -> TripleStore:
    if (Path(config.data.path) / META).is_file():
        return TripleStore.open(config.data.path)
    alone = Processes(0, 1, 1, torch.device("cpu"))
    return open_store(config.data, config.seed, path / "store", alone, progress=False)


@contextmanager
def _locked(file: Path, wait: bool = True) -> Iterator[None]:
    """Holds a lock that ends with this process.  Raises BlockingIOError if it may not wait."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield


class _JournalLock(JournalFileOpenLock):
    """Of Optuna's journal: it ends with the process that holds it.

    Optuna's own are files, which stay when their process is killed.  Killed while it wrote, it left
    a line without an end, which is removed before the next is written.
    """

    def __init__(self, journal: str):
        super().__init__(journal)
        self._journal, self._held = Path(journal), ExitStack()

    def acquire(self) -> bool:
        """Waits for it."""
        self._held.enter_context(_locked(self._journal.with_suffix(".lock")))
        with self._journal.open("rb+") as file:
            end = file.seek(0, 2)
            tail = min(end, _LONGEST_LINE)
            file.seek(end - tail)
            written = file.read()
            if written and not written.endswith(b"\n"):
                file.truncate(end - tail + written.rfind(b"\n") + 1)
        return True

    def release(self) -> None:
        """Lets the next one write."""
        self._held.close()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Optuna's notices of what is experimental, and of every trial."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield


def seconds_of(trial: FrozenTrial) -> float:
    """How long a trial took; NaN while it runs."""
    return trial.duration.total_seconds() if trial.duration else math.nan


def now() -> str:
    """For file names."""
    return time.strftime("%Y%m%d-%H%M%S")

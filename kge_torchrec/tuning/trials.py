"""Runs trials: each is an ordinary run with a callback that can end it.

A trial is compared with other trials after the same number of epochs. The first trials, with the
settings that the study starts from, are compared but never dropped.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import Trial, TrialState

from kge_torchrec.config import Config, ConfigError
from kge_torchrec.errors import KGEError
from kge_torchrec.lines import say
from kge_torchrec.ranking.metrics import value_of
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.runs import Extras, train_run
from kge_torchrec.training.stop_signal import TrainingStopped
from kge_torchrec.tuning.study import ETA, RUNGS, Study, first_rung

FIRST_FAILURES = 5  # a study ends if its first trials, this many, all fail


class Worker:
    """A process that runs trials of a study.

    Args:
        study: The study.
        threads: Threads of the runs; None: those of the config.
        device: Device of the runs; None: that of the config.
    """

    def __init__(self, study: Study, threads: int | None = None, device: str | None = None):
        self.study = study
        own: dict[str, Any] = {"threads": threads, "device": device}
        self.own = {key: value for key, value in own.items() if value is not None}
        self.store = study.store()

    def work(self, limit: int) -> None:
        """Run trials until the study has ``limit`` of them, including those of other processes.

        If an error ends the current trial, the next process enqueues it again.

        Raises:
            ConfigError: The first five trials all failed.
            TrainingStopped: A signal stopped the training.
            OSError: A file cannot be written.
        """
        self.study.enqueue_first()
        while True:
            with self.study.next_trial(limit) as taken:
                if taken is None:
                    return
                self._run(*taken)
            self._check_failures()

    def _run(self, trial: Trial, values: dict[str, Any]) -> None:
        start = time.perf_counter()
        tell, number = self.study.optuna.tell, trial.number
        try:
            value = self._train(trial, values)
        except optuna.TrialPruned:
            value = None
            tell(number, state=TrialState.PRUNED)
        except (TrainingStopped, OSError):
            raise
        except Exception as error:  # the next trial may still succeed
            words = (
                str(error) if isinstance(error, KGEError) else f"{type(error).__name__}: {error}"
            )
            trial.set_user_attr("error", words)
            tell(number, state=TrialState.FAIL)
            _report(number, f"failed: {words}", values)
            return
        else:
            tell(number, value)
        seconds = time.perf_counter() - start
        (done,) = (t for t in self.study.ended() if t.number == number)
        shown = list(done.intermediate_values.values())[-1] if value is None else value
        how = "" if value is not None else ", dropped"
        _report(
            number, f"valid {self.study.settings.metric} {shown:.4f}{how}, {seconds:.1f} s", values
        )

    def _train(self, trial: Trial, values: dict[str, Any]) -> float:
        """Return the best metric on valid.

        Raises:
            TrialPruned: The trial is dropped.
        """
        config = replace(self.study.config_of(values), **self.own)
        callbacks = []
        if self.study.settings.halving == "epochs":
            last_rung = first_rung(config) * ETA ** (RUNGS - 2)
            callbacks.append(_Halving(trial, self.study.settings.metric, last_rung))
        folder = self.study.folder_of(trial.number)
        # Keys of the space may act in some trials only.
        extras = Extras(callbacks, rank_test=False, is_trial=True)
        try:
            run = train_run(self._config_in(folder, config), extras)
        finally:  # nobody reads the checkpoints of a trial
            shutil.rmtree(RunFolder(folder).checkpoints, ignore_errors=True)
        return run.load_results()["valid"]["best"]

    def _config_in(self, folder: Path, config: Config) -> Config:
        """Return the config of the trial's run in a folder."""
        saving = {**config.checkpoint.options, "copy_to": None}
        return replace(
            config,
            data=replace(config.data, path=str(self.store.path)),
            checkpoint=replace(config.checkpoint, keep=1, every={"epochs": 0}, options=saving),
            run=replace(
                config.run,
                dir=str(folder),
                progress=False,
                trackers={**config.run.trackers, "tensorboard": False},
            ),
        )

    def _check_failures(self) -> None:
        ended = self.study.ended()
        if len(ended) >= FIRST_FAILURES and all(t.state is TrialState.FAIL for t in ended):
            raise ConfigError(
                f"the first {len(ended)} trials all failed; error of the last one: "
                f"{ended[-1].user_attrs.get('error')}"
            )


class _Halving:
    """A callback that reports validations to the study and ends runs that are worse than others.

    The settings that the study starts from run to their end, since some of them rise slowly.

    Args:
        trial: The trial.
        metric: The metric to compare.
        last_rung: Epochs after which a run is never ended, since little time is left to save.
    """

    def __init__(self, trial: Trial, metric: str, last_rung: int):
        self.trial, self.metric, self.last_rung = trial, metric, last_rung

    def __call__(self, kind: str, values: dict[str, Any]) -> None:
        if kind != "valid":
            return
        self.trial.report(value_of(values, self.metric), values["epoch"])
        if values["epoch"] > self.last_rung:
            return
        is_poor = self.trial.should_prune()  # for all: the pruner compares with earlier calls only
        if is_poor and "from" not in self.trial.user_attrs:
            raise optuna.TrialPruned


def _report(number: int, what: str, values: dict[str, Any]) -> None:
    shown = ", ".join(f"{key} {_short(value)}" for key, value in values.items())
    say(f"trial {number}: {what}; {shown}", "trial", {"trial": number, "values": values})


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""One trial after another, each an ordinary run: ``api.train`` with a callback that may end it.

With ``epochs`` a trial is one run, whose validations are compared with those of others at the same
epoch.  With ``subgraphs`` it is up to three runs, on a small core of the graph for a few epochs, on
a larger one for more, and on the whole graph; what they may cost triples each time, and half of
that (its root) is saved by the graph, half by epochs (GraSH's combined fidelity).  Where no core is
small enough, epochs save it all.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import Trial, TrialState

from kge_torchrec import api
from kge_torchrec.config import Config, ConfigError
from kge_torchrec.data.store import META, TripleStore
from kge_torchrec.errors import KGEError
from kge_torchrec.training.stop_signal import TrainingStopped
from kge_torchrec.tuning.space import with_values
from kge_torchrec.tuning.study import ETA, RUNGS, Study, first_rung

FIRST_FAILURES = 5  # after so many, and nothing else, a study ends


@dataclass(frozen=True)
class Rung:
    """A graph and epochs on which trials are compared."""

    core: int  # 0: the whole graph
    epochs: int
    entities: float  # share of the graph's that it has


class Worker:
    """A process of a study.

    threads, device: of the runs here, in place of the config's.
    only_under: the process that started this one, without which it starts no further trial.
    """

    def __init__(
        self,
        study: Study,
        threads: int | None = None,
        device: str | None = None,
        only_under: int | None = None,
    ):
        self.study, self.only_under = study, only_under
        base = study.config
        base = base if threads is None else replace(base, threads=threads)
        self.base = base if device is None else replace(base, device=device)
        self.whole = study.store()
        self.rungs = _rungs(study, self.whole)

    def work(self, limit: int) -> None:
        """Runs trials until the study has ``limit`` of them, those of other processes included.

        Raises ConfigError if the first five all failed; TrainingStopped after a signal, OSError
        where nothing can be written: the trial under way is put in line again by the next process.
        """
        self.study.enqueue_config()
        while self.only_under in (None, os.getppid()):
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
        except Exception as error:  # whatever it is, the next trial may be better
            words = (
                str(error) if isinstance(error, KGEError) else f"{type(error).__name__}: {error}"
            )
            trial.set_user_attr("error", words)
            tell(number, state=TrialState.FAIL)
            _say(number, f"failed: {words}", values)
            return
        else:
            tell(number, value)
        seconds = time.perf_counter() - start
        (done,) = (t for t in self.study.ended() if t.number == number)
        shown = list(done.intermediate_values.values())[-1] if value is None else value
        how = "" if value is not None else ", dropped"
        if value is None and self.study.settings.halving == "subgraphs":
            how = " on a smaller graph, dropped"
        _say(
            number, f"valid {self.study.settings.metric} {shown:.4f}{how}, {seconds:.1f} s", values
        )

    def _train(self, trial: Trial, values: dict[str, Any]) -> float:
        """The best metric of valid on the whole graph.  Raises TrialPruned, or what failed."""
        config = with_values(self.base, values)
        halving, metric = self.study.settings.halving, self.study.settings.metric
        for place, rung in enumerate(self.rungs):
            last = place == len(self.rungs) - 1
            callbacks = []
            if last and halving == "epochs":
                last_rung = first_rung(config) * ETA ** (RUNGS - 2)
                callbacks.append(_Halving(trial, metric, last_rung))
            run = api.run_training(
                self._config_on(
                    rung, config, self.study.folder_of(trial.number, None if last else place)
                ),
                callbacks,
                rank_test=False,
                checks_effects=False,  # keys of the space may act in some trials only
            )
            value = run.results["valid"]["best"]
            if halving != "epochs":
                trial.report(value, ETA**place)
            if not last and trial.should_prune():
                raise optuna.TrialPruned
        return value

    def _config_on(self, rung: Rung, config: Config, folder: Path) -> Config:
        """The trial's run on one of the graphs."""
        study = self.study
        store = study.core_folder(rung.core) if rung.core else self.whole.path
        negatives = config.negatives
        if rung.core:  # as GraSH does: as large a share of the entities
            count = max(1, round(negatives.count * rung.entities))
            negatives = replace(negatives, count=count)
        return replace(
            config,
            data=replace(config.data, path=str(store)),
            negatives=negatives,
            train=replace(config.train, epochs=rung.epochs),
            checkpoint=replace(config.checkpoint, keep=0, every_epochs=0, every_steps=0),
            run=replace(
                config.run,
                dir=str(folder),
                progress=False,
                tensorboard=False,
            ),
        )

    def _check_failures(self) -> None:
        ended = self.study.ended()
        if len(ended) >= FIRST_FAILURES and all(t.state is TrialState.FAIL for t in ended):
            raise ConfigError(
                f"the first {len(ended)} trials all failed, the last of them like this: "
                f"{ended[-1].user_attrs.get('error')}"
            )


class _Halving:
    """Tells the study every validation of a run, and ends the run if others were better there.

    last_rung: epochs after which a run may go on to its end, as little is left to save.
    """

    def __init__(self, trial: Trial, metric: str, last_rung: int):
        self.trial, self.metric, self.last_rung = trial, metric, last_rung

    def __call__(self, kind: str, values: dict[str, Any]) -> None:
        if kind != "valid":
            return
        self.trial.report(values["both"]["realistic"][self.metric], values["epoch"])
        if values["epoch"] <= self.last_rung and self.trial.should_prune():
            raise optuna.TrialPruned


def _rungs(study: Study, store: TripleStore) -> list[Rung]:
    """The graphs of a study's trials, small ones first; those that are not there yet are made."""
    epochs = study.config.train.epochs
    whole = Rung(0, epochs, 1.0)
    if study.settings.halving != "subgraphs":
        return [whole]
    return [*_smaller(study, store, epochs), whole]


def _smaller(study: Study, store: TripleStore, epochs: int) -> Iterator[Rung]:
    from kge_torchrec.tuning.subgraphs import core_numbers, core_of_share, write_core

    cores = core_numbers(store)
    for rung in range(RUNGS - 1):
        cost = ETA ** -(RUNGS - 1.0 - rung)
        core, share = core_of_share(store, cores, math.sqrt(cost))
        path = study.core_folder(core)
        with study.locked():
            if core and not (path / META).is_file():
                write_core(store, cores, core, path, study.settings.seed)
        entities = float((cores >= core).mean())
        yield Rung(core, max(1, min(epochs, round(epochs * cost / share))), entities)


def _say(number: int, what: str, values: dict[str, Any]) -> None:
    shown = ", ".join(f"{key} {_short(value)}" for key, value in values.items())
    print(f"trial {number}: {what}; {shown}", file=sys.stderr, flush=True)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

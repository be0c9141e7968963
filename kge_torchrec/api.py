"""The Python interface: ``train(config) -> run``, ``run.evaluate()``, ``run.predict(...)``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from kge_torchrec.config import Config, ConfigError
from kge_torchrec.config_parser import Overrides, config_from_dict, load_config
from kge_torchrec.data.report import notes
from kge_torchrec.parallel.processes import on_first_rank, processes
from kge_torchrec.ranking.topk import top_k
from kge_torchrec.training.fit import Callback, Fit, peak_memory_bytes
from kge_torchrec.training.progress import Progress
from kge_torchrec.training.run_folder import MetricsLog, RunFolder
from kge_torchrec.training.session import FILTERS, Session
from kge_torchrec.training.sources import remove_prepared

# What the tensors of a checkpoint and the position in the data mean depends on these.
FIXED = (
    "model.scorer",
    "model.dim",
    "model.reciprocal",
    "train.optimizer",
    "train.batch_size",
    "seed",
)


@dataclass(frozen=True)
class Prediction:
    """One answer to a query."""

    rank: int  # from 1
    label: str
    score: float
    known: str | None  # the split that holds the completed triple, if any


class Run:
    """A trained run, opened from its folder.  Under torchrun every method is collective.

    Keeps the model loaded between calls; ``close`` (or a ``with`` block) lets it go.
    """

    def __init__(self, path: str | Path):
        self.folder = RunFolder(path)
        self.config = self.folder.load_config()
        self._open, self._session = ExitStack(), None

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self.folder.path

    @property
    def results(self) -> dict[str, Any]:
        """What results.json holds."""
        if not self.folder.results.is_file():
            raise ConfigError(f"{self.path} has no results yet: its training has not ended")
        return json.loads(self.folder.results.read_text(encoding="utf-8"))

    def evaluate(self, split: str = "test") -> dict[str, Any]:
        """Exact filtered ranking of a split with the best checkpoint (the last without one).

        Returns {"head" | "tail" | "both": {"optimistic" | "realistic" | "pessimistic":
        {"mrr", "mr", "hits@1", "hits@3", "hits@10"}}}.
        """
        if split not in FILTERS:
            raise ConfigError(f"split must be one of {', '.join(FILTERS)}, got {split!r}")
        if not len(self.session.store.split(split)):
            raise ConfigError(f"{self.session.store.path} has no {split} triples")
        return self.session.rank(split)

    def predict(
        self,
        head: str | None = None,
        relation: str | None = None,
        tail: str | None = None,
        k: int = 10,
        known: bool = True,
    ) -> list[Prediction]:
        """The k best tails of (head, relation, ?), or heads of (?, relation, tail).

        known: list answers that the data holds already, marked with their split; False leaves
        them out.  Raises UnknownLabelError, with close matches, for a label not in the data.
        """
        if relation is None or (head is None) == (tail is None):
            raise ConfigError("predict takes a relation and either a head or a tail")
        if k < 1:
            raise ConfigError(f"k must be an integer >= 1, got {k}")
        side, anchor = ("tail", head) if tail is None else ("head", tail)
        store, session = self.session.store, self.session
        anchors, relations = store.entities.ids([anchor]), store.relations.ids([relation])
        exclude = None if known else store.known().answers(side, anchors, relations)
        scores, ids = top_k(
            session.scorer,
            session.engine.shard(),
            torch.from_numpy(anchors),
            torch.from_numpy(relations),
            side,
            k,
            exclude=exclude,
        )
        found = [(s, i) for s, i in zip(scores[0].tolist(), ids[0].tolist(), strict=True) if i >= 0]
        labels = store.entities.labels([i for _, i in found])
        splits = _splits_of_answers(store, side, anchors, relations)
        return [
            Prediction(rank, label, score, splits.get(i))
            for rank, ((score, i), label) in enumerate(zip(found, labels, strict=True), 1)
        ]

    @property
    def session(self) -> Session:
        """The loaded model."""
        if self._session is None:
            ranks = self._open.enter_context(processes(self.config.device))
            self._session = Session(self.config, self.folder, ranks, trains=False)
            self._session.restore_parameters()
        return self._session

    def close(self) -> None:
        """Frees the model and the process group."""
        self._session = None
        self._open.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_run(path: str | Path) -> Run:
    """A run from its folder.  Raises ConfigError if it holds none."""
    return Run(path)


def train(
    config: Config | dict[str, Any] | str | Path | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Trains, ranks test with the best model, and returns the run.

    config: a Config, nested or dotted values, a YAML file or the name of one in ``configs/``.
    callbacks: called as callback(kind, values) after every interval ("step"), epoch ("epoch") and
        validation ("valid"), on every rank, with the values that metrics.jsonl gets.
    Under torchrun all ranks call it.  Raises ConfigError, DataError, NonFiniteLoss or
    CheckpointError.
    """
    config = _as_config(config)
    with processes(config.device) as ranks:
        folder = RunFolder(ranks.broadcast(str(RunFolder.new(config).path)))
        on_first_rank(ranks, lambda: folder.create(config))
        try:
            session = Session(config, folder, ranks)
        except Exception:
            if ranks.is_first:
                _undo(folder)
            raise
        _fit(session, Progress(data=session.store.fingerprint), callbacks, resumed_at=None)
    return Run(folder.path)


def resume(path: str | Path, overrides: Overrides = (), callbacks: Sequence[Callback] = ()) -> Run:
    """Goes on with a run as if it had never stopped, on any number of ranks.

    overrides: dotted keys to change from here on, such as {"train.epochs": 200}.  Raises
    ConfigError for a key that the checkpoint depends on, besides what ``train`` raises.
    """
    folder = RunFolder(path)
    config = folder.load_config(overrides)
    _check_overrides(folder.load_config(), config)
    with processes(config.device) as ranks:
        session = Session(config, folder, ranks)
        progress = session.restore()
        if overrides:
            on_first_rank(ranks, lambda: config.save(folder.path / "config.yaml"))
        _fit(session, progress, callbacks, resumed_at=progress.global_step)
    return Run(folder.path)


def _check_overrides(before: Config, after: Config) -> None:
    for key in FIXED:
        old, new = (attrgetter(key)(config) for config in (before, after))
        if old != new:
            raise ConfigError(
                f"{key} is {old!r} in this run and cannot change on resume; start a new run"
            )


def _fit(
    session: Session,
    progress: Progress,
    callbacks: Sequence[Callback],
    resumed_at: int | None,
) -> None:
    ranks, folder = session.processes, session.folder
    metrics = None
    if ranks.is_first:
        (folder.path / "plan.txt").write_text(session.engine.layout + "\n", encoding="utf-8")
        metrics = MetricsLog(folder, session.config.run.tensorboard, resumed_at)
    try:
        progress = Fit(session, progress, metrics, callbacks).run()
        results = _final_results(session, progress)
        if metrics is not None:
            metrics.write("test", progress.global_step, results)
            folder.write_results(results)
    finally:
        if metrics is not None:
            metrics.close()


def _final_results(session: Session, progress: Progress) -> dict[str, Any]:
    if progress.best_checkpoint in session.checkpoints.names():
        session.restore_parameters(progress.best_checkpoint)
    train = {
        "triples_per_second": progress.triples / max(progress.seconds, 1e-9),
        "seconds": progress.seconds,
        "peak_memory_bytes": peak_memory_bytes(),
        "epochs": progress.epoch,
        "world_size": session.processes.world_size,
    }
    test = session.rank("test") if len(session.store.test) else None
    valid = {"metric": session.config.evaluation.metric, "best": progress.best_metric}
    return {"test": test, "valid": valid, "train": train, "notes": notes(session.store.report)}


def _splits_of_answers(store, side: str, anchors, relations) -> dict[int, str]:
    found: dict[int, str] = {}
    for split in ("test", "valid", "train"):
        _, entities = store.known((split,)).answers(side, anchors, relations)
        found.update(dict.fromkeys(entities.tolist(), split))
    return found


def _as_config(config: Config | dict[str, Any] | str | Path | None) -> Config:
    if isinstance(config, Config):
        return config
    if isinstance(config, dict):
        return config_from_dict(config)
    return load_config(config)


def _undo(folder: RunFolder) -> None:
    """Removes what a run that never started has written."""
    remove_prepared(folder.store)
    (folder.path / "config.yaml").unlink(missing_ok=True)
    if not any(folder.path.iterdir()):
        folder.path.rmdir()

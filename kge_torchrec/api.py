"""The Python interface: ``train(config) -> run``, ``run.evaluate()``, ``run.predict(...)``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kge_torchrec.config import Config, ConfigError
from kge_torchrec.config_parser import Overrides, config_from_dict, load_config
from kge_torchrec.data.report import notes
from kge_torchrec.export.folder import ExportFolder
from kge_torchrec.export.plain_model import Prediction
from kge_torchrec.export.plain_model import load_model as load_model
from kge_torchrec.parallel.processes import Processes, on_first_rank, processes
from kge_torchrec.ranking.topk import top_k
from kge_torchrec.training.checkpoints import CheckpointError
from kge_torchrec.training.progress import Progress
from kge_torchrec.training.run_folder import MetricsLog, RunFolder
from kge_torchrec.training.session import FILTERS, Session
from kge_torchrec.training.sources import remove_prepared

if TYPE_CHECKING:
    from kge_torchrec.training.fit import Callback

# What the tensors of a checkpoint and the position in the data mean depends on these.
FIXED = (
    "model.scorer",
    "model.dim",
    "model.reciprocal",
    "model.normalization",
    "model.options",
    "negatives.regime",
    "train.optimizer",
    "train.batch_size",
    "seed",
)


BEST, NEWEST = "best", "newest"


class Run:
    """A trained run, opened from its folder.  Under torchrun every method is collective.

    Keeps the model loaded between calls; ``close`` (or a ``with`` block) lets it go.
    """

    def __init__(self, path: str | Path):
        self.folder = RunFolder(path)
        self.config = self.folder.load_config()
        self._open = ExitStack()
        self._ranks: Processes | None = None
        self._session: Session | None = None
        self._loaded: str | None = None  # the checkpoint asked for
        self._progress: Progress | None = None  # of the checkpoint in the session

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
        with session.whole_scorer() as scorer:
            scores, ids = top_k(
                scorer,
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

    def export(
        self,
        path: str | Path,
        format: str = "npy",
        checkpoint: str | None = None,
        overwrite: bool = False,
    ) -> Path:
        """Writes plain files that ``load_model`` and other programs read, whole or not at all.

        path: the folder to make; one that exists is refused, or with ``overwrite`` replaced if it
            is an export.
        format: of the entity table: npy, safetensors or word2vec (text).
        checkpoint: "best" (None, the newest without one), "newest", or a checkpoint's name.

        Takes the memory of the loaded model and one chunk of rows.  Returns the path.  Raises
        ConfigError, CheckpointError or ExportError.
        """
        from kge_torchrec.export.write import check_format, export_model

        check_format(format)
        folder = ExportFolder(path, overwrite)
        on_first_rank(self._processes, folder.check)  # before the model is loaded
        wanted = checkpoint or BEST
        session = self._load(wanted)
        export_model(session, folder, format, self._progress, with_results=wanted == BEST)
        return folder.path

    @property
    def session(self) -> Session:
        """The loaded model, of the best checkpoint."""
        return self._load(BEST)

    @property
    def _processes(self) -> Processes:
        if self._ranks is None:
            self._ranks = self._open.enter_context(processes(self.config.device))
        return self._ranks

    def _load(self, checkpoint: str) -> Session:
        """The session with the parameters of "best", "newest" or a checkpoint's name."""
        if self._session is None:
            self._session = Session(self.config, self.folder, self._processes, trains=False)
        if self._loaded != checkpoint:
            self._loaded = None  # unless all parameters arrive
            name = _name_of(checkpoint, self._session)
            self._progress = self._session.restore_parameters(name)
            self._loaded = checkpoint
        return self._session

    def close(self) -> None:
        """Frees the model and the process group."""
        self._session = self._loaded = self._ranks = None
        self._open.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _name_of(checkpoint: str, session: Session) -> str | None:
    """A checkpoint's name; None stands for the best one."""
    if checkpoint == BEST:
        return None
    if checkpoint == NEWEST:
        return session.checkpoints.newest()
    names = session.checkpoints.names()
    if checkpoint not in names:
        there = f"it has {', '.join(names)}" if names else "it has none yet: train it first"
        raise CheckpointError(f"{session.folder.path} has no checkpoint {checkpoint!r}; {there}")
    return checkpoint


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
    old, new = _fixed_values(before), _fixed_values(after)
    for key in old:
        if old[key] != new[key]:
            raise ConfigError(
                f"{key} is {old[key]!r} in this run and cannot change on resume; start a new run"
            )


def _fixed_values(config: Config) -> dict[str, Any]:
    values = {key: attrgetter(key)(config) for key in FIXED}
    options = config.entities.sparse_options(config.train.optimizer)
    return values | {"entities.bias_correction": options.bias_correction}  # states of its own


def _fit(
    session: Session,
    progress: Progress,
    callbacks: Sequence[Callback],
    resumed_at: int | None,
) -> None:
    from kge_torchrec.training.fit import Fit  # these load TorchRec, which a trained run can do
    from kge_torchrec.training.run_plan import write_run_plan  # without

    ranks, folder = session.processes, session.folder
    metrics = None
    if ranks.is_first:
        write_run_plan(session)
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
    from kge_torchrec.training.fit import peak_memory_bytes

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

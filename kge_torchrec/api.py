"""The Python interface: ``train(config) -> run``, ``run.evaluate()``, ``run.predict(...)``."""

from __future__ import annotations

import gc
import json
import logging
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kge_torchrec.config import Config, ConfigError, EvaluationConfig, all_keys
from kge_torchrec.config.parser import AnyConfig, Overrides, as_config
from kge_torchrec.config.sizing import KEYS as PICKED_KEYS
from kge_torchrec.data import Side
from kge_torchrec.data.report import notes
from kge_torchrec.data.store import TripleStore
from kge_torchrec.diagnosis.groups import GROUPINGS, check_names, grouped
from kge_torchrec.distributed.processes import (
    Processes,
    on_all_ranks,
    on_first_rank,
    processes,
)
from kge_torchrec.export.description import ExportFolder
from kge_torchrec.export.plain_model import Prediction
from kge_torchrec.export.plain_model import load_model as load_model
from kge_torchrec.ranking.metrics import Ranks, metrics
from kge_torchrec.ranking.topk import top_k
from kge_torchrec.training.checkpoints import Checkpoints, name_of, no_checkpoint
from kge_torchrec.training.run_folder import MetricsLog, RunFolder
from kge_torchrec.training.session import BEST, FILTERS, Session, remove_prepared, selection_of
from kge_torchrec.training.state import TrainState

if TYPE_CHECKING:
    from kge_torchrec.training.trainer import Callback

# What the tensors of a checkpoint and the position in the data mean depends on these.
FIXED = (
    "model.scorer",
    "model.dim",
    "model.reciprocal",
    "model.normalization",
    "model.biases",
    "model.options",
    "negatives.regime",
    "train.optimizer",
    "train.batch_size",
    "seed",
)
# How a run is shown and run, which may change when the same command is started again.
OF_THIS_START = ("run.resume", "run.progress", "run.tensorboard", "device", "threads")


class Run:
    """A trained run, opened from its folder.  Under torchrun every method is collective.

    Keeps the model loaded between calls; ``close`` (or a ``with`` block) lets it go.
    """

    def __init__(self, path: str | Path, config: Config | None = None):
        """config: what the folder has, if it was read already."""
        self.folder = RunFolder(path)
        self.config = config or self.folder.load_config()
        self._open = ExitStack()
        self._ranks: Processes | None = None
        self._session: Session | None = None
        self._loaded: str | None = None  # the checkpoint asked for
        self._progress: TrainState | None = None  # of the checkpoint in the session

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

    def evaluate(
        self,
        split: str = "test",
        by: Sequence[str] = (),
        candidates: str | None = None,
        types: str | Path | None = None,
    ) -> dict[str, Any]:
        """Exact filtered ranking of a split with the best checkpoint (the last without one).

        by: group the ranks as well: "relation", "category" (1-1, 1-N, N-1, N-N after Bordes et al.
            2013) or "frequency" (of the answer in train), any of them.  The groups are written into
            the run folder, as evaluation-SPLIT-by-NAME.json and .png.
        candidates: "all", "seen" or "types", with a file of types; in place of the run's
            evaluation.candidates.

        Returns {"head" | "tail" | "both": {"optimistic" | "realistic" | "pessimistic":
        {"mrr", "mr", "hits@1", "hits@3", "hits@10"}}}; with ``by`` also {"by": {name: {"about",
        "total", "groups"}}}; and where candidates were restricted "candidates", which says so.
        """
        if split not in FILTERS:
            raise ConfigError(f"split must be one of {', '.join(FILTERS)}, got {split!r}")
        check_names(by)
        evaluation = self._evaluation(candidates, types)
        triples = self.session.store.split(split)
        if not len(triples):
            raise ConfigError(f"{self.session.store.path} has no {split} triples")
        ranks = self.session.ranks_of(triples, split, evaluation)
        found = metrics(ranks)
        if by:
            # The ranks are the same on every rank, so one groups them for all.
            found["by"] = on_first_rank(
                self._processes, lambda: self._grouped(ranks, split, by, evaluation.candidates)
            )
        return found

    def _evaluation(self, candidates: str | None, types: str | Path | None) -> EvaluationConfig:
        own = self.config.evaluation
        if candidates is None and types is None:
            return own
        kind = candidates or "types"
        kept = own.types if kind == "types" else None
        return replace(own, candidates=kind, types=kept if types is None else str(types))

    def _grouped(
        self, ranks: Ranks, split: str, by: Sequence[str], candidates: str
    ) -> dict[str, Any]:
        from kge_torchrec.diagnosis.report import write  # loads matplotlib

        store = self.session.store
        triples = np.asarray(store.split(split), np.int64)
        found = {name: grouped(ranks, GROUPINGS[name](store, triples)) for name in by}
        try:
            write(self.path, split, candidates, found)
        except OSError as error:  # such as a folder of somebody else's
            logging.getLogger(__name__).warning("the groups are not written: %s", error)
        return found

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
        side: Side = "tail" if tail is None else "head"
        store, session = self.session.store, self.session
        given = [label for label in (head, tail) if label is not None]
        anchors, relations = store.entities.ids(given), store.relations.ids([relation])
        exclude = None if known else store.filter_index().answers(side, anchors, relations)
        with session.whole_scorer() as scorer:
            scores, ids = top_k(
                scorer,
                session.backend.shard(),
                torch.from_numpy(anchors),
                torch.from_numpy(relations),
                side,
                k,
                exclude=exclude,
            )
        found = ids[0] >= 0
        answers, their_scores = ids[0, found].numpy(force=True), scores[0, found].tolist()
        labels = store.entities.labels(answers)
        splits = _splits_of_answers(store, side, anchors, relations, answers)
        return [
            Prediction(rank, *answer)
            for rank, answer in enumerate(zip(labels, their_scores, splits, strict=True), 1)
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
        assert self._progress is not None  # _load has read it
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
            self._progress = self._session.restore_parameters(checkpoint)
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


def open_run(path: str | Path) -> Run:
    """A run from its folder.  Raises ConfigError if it holds none."""
    return Run(path)


def evaluate(
    path: str | Path,
    split: str = "test",
    by: Sequence[str] = (),
    candidates: str | None = None,
    types: str | Path | None = None,
) -> dict[str, Any]:
    """``Run.evaluate`` of the run in a folder, which is let go afterwards."""
    with open_run(path) as run:
        return run.evaluate(split, by, candidates, types)


def train(
    config: AnyConfig = None,
    callbacks: Sequence[Callback] = (),
    rank_test: bool = True,
) -> Run:
    """Trains, ranks test with the best model, and returns the run.

    config: a Config, nested or dotted values, a YAML file or the name of one in ``configs/``.
    callbacks: called as callback(kind, values) after every interval ("step"), epoch ("epoch") and
        validation ("valid"), on every rank, with the values that metrics.jsonl gets.
    rank_test: False leaves test alone, whose results are then None: for searches, which must not
        see it.
    Under torchrun all ranks call it.  With run.resume it goes on with the run in run.dir.  Raises
    ConfigError, DataError, NonFiniteLoss, NonFiniteParameters or CheckpointError; TrainingStopped
    after SIGTERM or SIGUSR1; RankLost where another rank died.
    """
    config = as_config(config)
    with processes(config.device) as ranks, ExitStack() as held:
        folder = RunFolder(ranks.broadcast(str(RunFolder.new(config).path)))
        _lock(folder, ranks, held)
        found = on_first_rank(ranks, lambda: _run_to_go_on_with(folder, config))
        if found is not None:
            _continue(folder, found, ranks, callbacks, rank_test=rank_test)
        else:
            _begin(folder, config, ranks, callbacks, rank_test)
        _give_memory_back()
    return Run(folder.path)


def resume(path: str | Path, overrides: Overrides = (), callbacks: Sequence[Callback] = ()) -> Run:
    """Goes on with a run as if it had never stopped, on any number of ranks.

    overrides: dotted keys to change from here on, such as {"train.epochs": 200}.  Raises
    ConfigError for a key that the checkpoint depends on, besides what ``train`` raises.
    """
    folder = RunFolder(path)
    before, config = folder.load_config(), folder.load_config(overrides)
    folder.check_loss(overrides)
    _check_overrides(before, config)
    with processes(config.device) as ranks, ExitStack() as held:
        _lock(folder, ranks, held)
        before, config = ranks.broadcast((before, config))  # a host may see an older file
        if not (before.checkpoint.keep or Checkpoints(folder.checkpoints, ranks).names()):
            raise no_checkpoint(folder.path, keep=0)
        _continue(folder, config, ranks, callbacks, before)
        _give_memory_back()
    return Run(folder.path)


def _lock(folder: RunFolder, ranks: Processes, held: ExitStack) -> None:
    """Keeps other runs out of the folder until ``held`` closes.  Collective."""

    def lock() -> None:
        held.enter_context(folder.locked())

    on_first_rank(ranks, lock)


def _run_to_go_on_with(folder: RunFolder, config: Config) -> Config | None:
    """The config of the run in the folder, as it is to go on, or None to start one.

    Raises ConfigError where run.resume says so.
    """
    wanted = config.run.resume
    if wanted == "require" and not folder.holds_run:
        raise ConfigError(f"run.resume require: {folder.path} holds no run to go on with")
    if wanted == "never" or not folder.holds_run:
        return None
    there = folder.load_config()
    config = config.filled_from(there)  # also on other ranks than it was settled for
    before, now = _flat(there), _flat(config)
    differing = [key for key in now if key not in OF_THIS_START and before[key] != now[key]]
    if differing:
        key = differing[0]
        raise ConfigError(
            f"run.resume {wanted}: {folder.path} holds a run of another config: {key} is "
            f"{before[key]!r} there and {now[key]!r} here; name another run.dir, or change the run "
            f"by `train --resume {folder.path} --{key} ...`"
        )
    folder.check_loss(())
    return config


def _begin(
    folder: RunFolder,
    config: Config,
    ranks: Processes,
    callbacks: Sequence[Callback],
    rank_test: bool,
) -> None:
    """Trains a new run from its start."""
    on_first_rank(ranks, lambda: folder.create(config))
    try:
        session = Session(config, folder, ranks)
    except Exception:
        if ranks.is_first:
            _undo(folder)
        raise
    if session.config != config:  # as it was settled
        on_first_rank(ranks, lambda: folder.save_config(session.config))
        if session.show:
            print(f"picked for this graph: {_picked(config, session.config)}", file=sys.stderr)
    start = TrainState(data=session.store.fingerprint)
    _fit(session, start, callbacks, resumed_at=None, rank_test=rank_test)


def _picked(config: Config, settled: Config) -> str:
    """What null stood for, in words."""
    keys = [key for key in PICKED_KEYS if attrgetter(key)(config) is None]
    return ", ".join(f"{key} {attrgetter(key)(settled)}" for key in keys)


def _continue(
    folder: RunFolder,
    config: Config,
    ranks: Processes,
    callbacks: Sequence[Callback],
    before: Config | None = None,
    rank_test: bool = True,
) -> None:
    """Trains on from the newest checkpoint.  before: the config so far, if it may be another."""
    before = before or config
    new_plan = config.run.plan != before.run.plan
    session = Session(config, folder, ranks, plan_may_differ=not new_plan)
    progress = session.restore()
    if progress.best_metric is not None and not progress.selection:  # by an older version
        progress.selection = selection_of(before, session.store)
    if session.config != before:
        on_first_rank(ranks, lambda: folder.save_config(session.config))
    _fit(session, progress, callbacks, progress.global_step, rank_test)


def _give_memory_back() -> None:
    """Of a session that nobody uses any more, before an evaluation loads the table again.

    TorchRec's pipeline makes a circle of itself and the model, which would wait for the collector.
    """
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _check_overrides(before: Config, after: Config) -> None:
    old, new = _fixed_values(before), _fixed_values(after)
    for key in old:
        if old[key] != new[key]:
            raise ConfigError(
                f"{key} is {old[key]!r} in this run and cannot change on resume; start a new run"
            )


def _fixed_values(config: Config) -> dict[str, Any]:
    values = {key: attrgetter(key)(config) for key in FIXED}
    if config.negatives.examples == "queries":  # which an epoch passes through
        values["negatives.sides"] = config.negatives.sides
    options = config.entities.sparse_options(config.train.optimizer)
    return values | {"entities.bias_correction": options.bias_correction}  # states of its own


def _flat(config: Config) -> dict[str, Any]:
    return {key: attrgetter(key)(config) for key in all_keys()}


def _fit(
    session: Session,
    progress: TrainState,
    callbacks: Sequence[Callback],
    resumed_at: int | None,
    rank_test: bool,
) -> None:
    from kge_torchrec.planning.run_plan import write_run_plan  # without
    from kge_torchrec.training.trainer import (
        Trainer,  # these load TorchRec, which a trained run can do
    )

    ranks, folder = session.processes, session.folder
    write_run_plan(session)
    log = on_all_ranks(ranks, lambda: _open_log(session, resumed_at))
    try:
        progress = Trainer(session, progress, log, callbacks).run()
        results = _final_results(session, progress, rank_test)

        def write() -> None:
            assert log is not None  # on the first rank
            log.write("test", progress.global_step, results)
            folder.write_results(results)

        on_first_rank(ranks, write)
    finally:
        if log is not None:
            log.close()


def _open_log(session: Session, resumed_at: int | None) -> MetricsLog | None:
    if not session.processes.is_first:
        return None
    return MetricsLog(session.folder, session.config.run.tensorboard, resumed_at)


def _final_results(session: Session, progress: TrainState, rank_test: bool) -> dict[str, Any]:
    from kge_torchrec.training.trainer import peak_memory_bytes

    ranked = progress  # the parameters at hand
    if rank_test and progress.best_checkpoint not in (None, name_of(progress)):
        ranked = session.restore_parameters()
    train = {
        "triples_per_second": progress.triples / max(progress.seconds, 1e-9),
        "seconds": progress.seconds,
        "peak_memory_bytes": peak_memory_bytes(),
        "epochs": progress.epoch,
        "world_size": session.processes.world_size,
    }
    return {
        "test": session.rank("test") if rank_test and len(session.store.test) else None,
        "valid": _selected(session, progress),
        "train": train,
        "checkpoint": {  # that was ranked
            "name": name_of(ranked) if session.config.checkpoint.keep else None,
            "epoch": ranked.epoch,
        },
        "notes": notes(session.store.report),
    }


def _selected(session: Session, progress: TrainState) -> dict[str, Any]:
    evaluation = session.config.evaluation
    found = {"metric": evaluation.metric, "best": progress.best_metric}
    if evaluation.candidates != "all":
        found["restricted_candidates"] = evaluation.candidates
    return found


def _splits_of_answers(
    store: TripleStore, side: Side, anchors: np.ndarray, relations: np.ndarray, ids: np.ndarray
) -> list[str | None]:
    """The split that holds each of the ids (K,) as an answer, the first of several."""
    splits: list[str | None] = [None] * len(ids)
    for split in ("test", "valid", "train"):
        (known,) = store.filter_index((split,)).contains(side, anchors, relations, ids)
        splits = [split if here else before for here, before in zip(known, splits, strict=True)]
    return splits


def _undo(folder: RunFolder) -> None:
    """Removes what a run that never started has written."""
    remove_prepared(folder.store)
    for name in ("config.yaml", ".lock"):
        (folder.path / name).unlink(missing_ok=True)
    if not any(folder.path.iterdir()):
        folder.path.rmdir()

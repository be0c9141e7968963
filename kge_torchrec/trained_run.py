"""A trained run, opened from its folder: evaluation, predictions and export."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from kge_torchrec.answers import Answering
from kge_torchrec.answers.calibration import Calibration, calibrate
from kge_torchrec.answers.queries import FEW
from kge_torchrec.answers.sources import read_triples
from kge_torchrec.config import Config, ConfigError, EvaluationConfig
from kge_torchrec.config.checks import check, one_of
from kge_torchrec.config.registry import import_modules
from kge_torchrec.data import SPLITS
from kge_torchrec.data.readers.tables import InMemory
from kge_torchrec.data.store import TripleStore, Vocabulary
from kge_torchrec.distributed.processes import Processes, on_first_rank, processes
from kge_torchrec.export.description import ExportFolder
from kge_torchrec.models.scorers.base import SIDES, Side
from kge_torchrec.ranking.groups import GROUPINGS, Grouping, grouped
from kge_torchrec.ranking.ranks import metrics
from kge_torchrec.ranking.recommendation import grouped_recommendations, recommendation_metrics
from kge_torchrec.trained_model import FILTERS, TrainedModel
from kge_torchrec.training.checkpoints import BEST
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import load_trained
from kge_torchrec.training.state import TrainState

log = logging.getLogger(__name__)


class Run(Answering):
    """A trained run, opened from its folder.  Under torchrun every method is collective.

    The model stays loaded between calls until ``close`` or the end of a ``with`` block.

    Args:
        path: The run's folder.
        config: Its config, if it was already read.
    """

    def __init__(self, path: str | Path, config: Config | None = None):
        self.folder = RunFolder(path)
        self.config = config or self.folder.load_config()
        self._open = ExitStack()
        self._ranks: Processes | None = None
        self._model: TrainedModel | None = None
        self._loaded: str | None = None  # the requested checkpoint
        self._progress: TrainState | None = None  # progress of the loaded checkpoint

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self.folder.path

    @property
    def results(self) -> dict[str, Any]:
        """The contents of results.json."""
        return self.folder.load_results()

    @property
    def history(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, {"kind": "step" | "epoch" | "valid" | "test", "step", ...}.

        ``pandas.json_normalize(run.history)`` turns them into a table.
        """
        return self.folder.load_metrics()

    @property
    def entity_labels(self) -> Vocabulary:
        """Labels and ids of the entities, read from the store without loading the model."""
        return self._store.entities

    @property
    def relation_labels(self) -> Vocabulary:
        """Labels and ids of the relations, read from the store without loading the model."""
        return self._store.relations

    @property
    def entities(self) -> np.ndarray:
        """The rows of all entities from the best checkpoint, (N, D) float32, on every rank."""
        return self.model.entities

    @cached_property
    def _store(self) -> TripleStore:
        return TripleStore.open(self.folder.store_of(self.config.data.path))

    def __repr__(self) -> str:
        model = f"{self.config.model.scorer}, dim {self.config.model.dim}"
        try:
            test = self.results["test"]
        except ConfigError:
            return f"<Run {self.path}: {model}, no results yet>"
        mrr = f", test MRR {test['both']['realistic']['mrr']:.4f}" if test else ""
        return f"<Run {self.path}: {model}{mrr}>"

    def evaluate(
        self,
        split: str = "test",
        by: Sequence[str] = (),
        candidates: str | None = None,
        triples: InMemory | str | Path | None = None,
        candidate_file: str | Path | None = None,
        recommend: Sequence[int] = (),
        side: Side = "tail",
        novelty: float = 0.0,
    ) -> dict[str, Any]:
        """Rank a split, with filtering, using the best (or newest) checkpoint.

        With ``recommend`` it ranks lists of recommendations instead of single triples: a user is a
        pair (head, relation), its answers are its tails in the split, and what it knows from train
        (and valid, for test) is left out.

        Args:
            split: "train", "valid" or "test".
            by: Groups to report as well: any of "relation", "category" (1-1, 1-N, N-1, N-N, Bordes
                et al. 2013) and "frequency" or "popularity" (of the answer in train).
            candidates: "all", "seen", "types" or "fixed"; replaces the run's
                evaluation.candidates.
            triples: Triples to rank instead of a split: in memory, in the form for ``prepare``, or
                a file of head, relation and tail with tabs between.  Answers in these triples or in
                any split are filtered.
            candidate_file: A .npz file of candidates, for candidates "fixed".
            recommend: The lengths k of lists of recommendations.
            side: With ``recommend``, the side to recommend; "head" takes (tail, relation) as user.
            novelty: With ``recommend``, the novelty of the lists; see ``Run.recommend``.

        Returns:
            {"head" | "tail" | "both": {"optimistic" | "realistic" | "pessimistic":
            {"mrr", "mr", "hits@1", "hits@3", "hits@10"}}}.  With ``by`` also {"by": {name:
            {"about", "total", "groups"}}}.  With restricted candidates also "candidates", which
            describes them.  With ``triples`` also {"triples": {"count", "train", "valid",
            "test"}}: their number, and how many of them are in each split.  With ``recommend``
            {"recommendation": {"users", "answers", "auc", "recall@k", ...}}, and "by".

        Raises:
            DataError: A triple cannot be ranked.  The message names its line or position.
            ConfigError: An argument is invalid or the split is empty.
        """
        if not isinstance(split, str) or split not in FILTERS:
            raise ConfigError(
                f"split must be one of {', '.join(FILTERS)}, got {split!r:.80}; triples of your "
                "own are evaluate(triples=...)"
            )
        for name in by:
            one_of("by", name, tuple(GROUPINGS))
        if recommend:
            fine = all(isinstance(k, int) and k >= 1 for k in recommend)
            check(fine, "recommend", "whole numbers >= 1, such as [10, 20]", recommend)
            one_of("side", side, SIDES)
            if triples is not None:
                raise ConfigError("recommend: it takes a split, not triples; leave triples out")
        elif side != "tail" or novelty:
            given = f"side {side}" if side != "tail" else f"novelty {novelty}"
            raise ConfigError(f"{given} has no effect without recommend: leave it out")
        evaluation = self._evaluation(candidates, candidate_file)
        model = self.model
        store = model.store
        own = None if triples is None else read_triples(triples, model)
        ids = store.split(split) if own is None else own
        if not len(ids):
            raise ConfigError(f"{store.path} has no {split} triples")
        group: Callable[[Grouping], dict[str, Any]]
        if recommend:
            lists = model.recommendations_of(ids, split, evaluation, max(recommend), side, novelty)
            results = recommendation_metrics(lists, recommend)
            beside = model.list_baselines_of(ids, split, evaluation, recommend, side)
            results["recommendation_baselines"] = beside
            ids = np.append(lists.triples, lists.listed(), 0)
            group = partial(grouped_recommendations, lists, recommend)
        else:
            filtered_for = split if own is None else None
            ranks = model.ranks_of(ids, filtered_for, evaluation)
            results, group = metrics(ranks), partial(grouped, ranks)
            results["baselines"] = model.baselines_of(ids, filtered_for, evaluation)
        if own is not None:
            results["triples"] = _where_known(store, own)
        if by:  # every process has the same ranks, so rank 0 groups them for all
            triples = np.asarray(ids, np.int64)
            results["by"] = on_first_rank(
                self._processes,
                lambda: {name: group(GROUPINGS[name](store, triples)) for name in by},
            )
        return results

    def _evaluation(self, candidates: str | None, file: str | Path | None) -> EvaluationConfig:
        """Return the run's evaluation with other candidates; a file implies fixed ones."""
        own = self.config.evaluation
        kind: Any = candidates or (own.candidates if file is None else "fixed")
        if file is not None and kind != "fixed":
            raise ConfigError(f"candidate_file has no effect with candidates {kind}: leave it out")
        chosen = own.candidate_file if file is None else str(file)
        return replace(own, candidates=kind, candidate_file=chosen if kind == "fixed" else None)

    def export(
        self,
        path: str | Path,
        format: str = "safetensors",
        checkpoint: str | None = None,
        overwrite: bool = False,
        relation: str | None = None,
    ) -> Path:
        """Export the model atomically, for ``load_model`` or other programs.

        Args:
            path: The folder to make.  An existing folder is refused.
            format: "safetensors" (a Hugging Face repository, which ``load_model`` reads), "parquet"
                (a table for data frames), "vectors" (Parquet files of queries and items for a
                search index) or "torch" (a torch.export program that computes the scores).
            checkpoint: "best", "newest" or a name.  None: the best, or the newest without a best.
            overwrite: Whether to replace an existing export at ``path``.
            relation: The relation of vectors, by its label; None: all relations.

        Raises:
            ConfigError: An argument is invalid.
            CheckpointError: The checkpoint cannot be read.
            ExportError: The export cannot be written, or the format does not support the model.
        """
        from kge_torchrec.export.write import check_format, export_run

        check_format(format, relation, self.config.model)
        folder = ExportFolder(path, overwrite)
        on_first_rank(self._processes, folder.check)  # fails before the model is loaded
        model = self._load(checkpoint or BEST)
        assert self._progress is not None  # set by _load
        export_run(model, self._progress, folder, format, relation)
        return folder.path

    def calibrate(self, top: int = FEW, limit: int = 10_000) -> Calibration:
        """Fit probabilities to the scores on valid, and save them in calibration.json.

        Later predictions have a probability: the share of true answers among the answers that
        ``predict`` lists with this score. A relation with many queries in valid has its own curve
        if that predicts better.

        Args:
            top: The number of answers that ``predict`` lists.
            limit: The most queries of valid and of test per missing part to use; more are sampled.

        Returns:
            The calibration.  Its ``about`` has the errors over the listed answers to the queries of
            test, which no curve was fitted to, in all and by relation.

        Raises:
            KGEError: scikit-learn is not installed, or all answers are of one kind.
            ConfigError: An argument is invalid.
            DataError: There are no valid triples.
        """
        model = self.model
        made = calibrate(model, self._step, top, limit)
        on_first_rank(self._processes, lambda: made.write(self.path))
        self._model = replace(model, calibration=made)
        return made

    @property
    def model(self) -> TrainedModel:
        """The model of the best checkpoint, with the data and the calibration."""
        return self._load(BEST)

    def _read_calibration(self) -> Calibration | None:
        saved = Calibration.read(self.path)
        if saved is None or saved.is_of(self._step, self._store.fingerprint):
            return saved
        log.warning(
            "%s was calibrated after %s steps, and is now at %s: no probabilities until "
            "`kge-torchrec calibrate` is run again", self.path, saved.step, self._step
        )  # fmt: skip
        return None

    @property
    def _step(self) -> int:
        """Number of training steps of the loaded parameters."""
        assert self._progress is not None  # set by _load
        return self._progress.global_step

    @property
    def _processes(self) -> Processes:
        if self._ranks is None:
            joined = processes(self.config.device, self.config.timeout)
            self._ranks = self._open.enter_context(joined)
        return self._ranks

    def _load(self, checkpoint: str) -> TrainedModel:
        """Return the model of "best", "newest" or a named checkpoint."""
        if self._model is None or self._loaded != checkpoint:
            self._model = self._loaded = None  # before another table is made
            model, self._progress = load_trained(
                self.config, self.folder, self._processes, checkpoint
            )
            # Read on rank 0 here, since later not every rank may need it.
            model.calibration = on_first_rank(self._processes, self._read_calibration)
            self._model, self._loaded = model, checkpoint
        return self._model

    def close(self) -> None:
        """Free the model and the process group."""
        self._model = self._loaded = self._ranks = None
        self._open.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_run(
    path: str | Path, allow_imports: Sequence[str] = (), data: str | Path | None = None
) -> Run:
    """Open a run from its folder.

    Args:
        path: The folder.
        allow_imports: Modules to import for parts that are not built in. A run of somebody else
            runs no code except theirs.
        data: The store of its triples, if it is no longer where the run trained.

    Raises:
        ConfigError: The folder has no run, or its config names a class of another module.
    """
    import_modules(allow_imports)
    if data is None:
        return Run(path)
    return Run(path, RunFolder(path).load_config({"data.path": data}))


def _where_known(store: TripleStore, triples: np.ndarray) -> dict[str, int]:
    """Return the number of triples (T, 3), and how many of them are in each split."""
    heads, relations, tails = triples.T
    known = {
        name: store.filter_index((name,)).contains("tail", heads, relations, tails[:, None])
        for name in SPLITS
    }
    return {"count": len(triples)} | {name: int(mask.sum()) for name, mask in known.items()}

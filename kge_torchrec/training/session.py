"""A run in memory: its store, backend and checkpoints, for training, ranking and prediction."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kge_torchrec.config import Config, DataConfig, EvaluationConfig
from kge_torchrec.config.parser import current_name
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.readers import make_reader
from kge_torchrec.data.report import notes
from kge_torchrec.data.store import META, TripleStore
from kge_torchrec.distributed.processes import Processes, on_all_ranks, on_first_rank
from kge_torchrec.embeddings.backend import EmbeddingBackend
from kge_torchrec.embeddings.trained import TrainedModel
from kge_torchrec.environment import (
    allow_tf32,
    announced,
    keep_large_blocks,
    quiet_dependencies,
    set_threads,
)
from kge_torchrec.errors import DataError
from kge_torchrec.models.loss_scaling import LossScale
from kge_torchrec.models.scorers.base import Scorer
from kge_torchrec.ranking.metrics import Ranks, metrics
from kge_torchrec.training.checkpoints import BEST, NEWEST, Checkpoints
from kge_torchrec.training.memory_check import check_memory
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.state import TrainState

if TYPE_CHECKING:
    from kge_torchrec.embeddings.backend import EntityShard
    from kge_torchrec.ranking.candidates import Candidates

log = logging.getLogger(__name__)

# The filter for valid excludes test triples, so that model selection does not see them.
FILTERS = {
    "train": ("train", "valid", "test"),
    "valid": ("train", "valid"),
    "test": ("train", "valid", "test"),
}


def _engine(
    config: Config, store: TripleStore, processes: Processes, plan_may_differ: bool
) -> EmbeddingBackend:
    loading = announced("loading TorchRec") if processes.is_first else nullcontext()
    with quiet_dependencies(), loading:
        from kge_torchrec.training.assembly import build_backend, with_usable_plan

    if plan_may_differ:
        config = with_usable_plan(config, store, processes)
    return build_backend(config, store, processes)


def _trained_model(config: Config, store: TripleStore, processes: Processes) -> TrainedModel:
    return TrainedModel(config.model, store.num_entities, store.num_relations, processes)


def selection_of(config: Config, store: TripleStore) -> str:
    """Describe the value by which validations are compared: metric, sample size and candidates."""
    evaluation = config.evaluation
    limit, metric = evaluation.max_triples, evaluation.metric
    is_sample = 0 < limit < len(store.valid)
    of = f"{metric} of {limit} triples" if is_sample else metric
    if evaluation.candidates == "all":
        return of
    return f"{of} among candidates {evaluation.candidates} {evaluation.types or ''}".rstrip()


class Session:
    """A run in memory.  Collective: every rank makes one with the same arguments.

    Args:
        config: The config; the attribute ``config`` has numbers in place of null where resolved.
        folder: Folder of the run.
        processes: The ranks of the run.
        trains: False loads only rows and scorer, for ranking, prediction and export.
        plan_may_differ: Whether to ignore run.plan, with a warning, if it is missing or for other
            ranks.

    Raises:
        ConfigError: The settings cannot be trained or run on this machine.
        DataError: The data lacks weights or types that the settings need.
    """

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        processes: Processes,
        trains: bool = True,
        plan_may_differ: bool = False,
    ):
        if trains:
            config.check_trainable()
        elif config.untrained_side is not None and processes.is_first:
            log.warning(
                "negatives.sides %s with model.reciprocal true: nothing that %s queries are asked "
                "of was trained in this run, their ranks and answers mean nothing",
                config.negatives.sides,
                config.untrained_side,
            )
        keep_large_blocks()
        set_threads(config.threads, processes.local_world_size)
        self.folder, self.processes = folder, processes
        self.show = config.run.progress and processes.is_first
        self.hide_bars = None if self.show else True  # None: tqdm shows bars only on terminals
        self.store: TripleStore = open_store(
            config.data, config.seed, folder.store, processes, self.show
        )
        if trains:
            on_first_rank(processes, self.store.check)
            self._check_weights(config.data.weights)
            self._check_types(config.evaluation)
        on_cuda = processes.device.type == "cuda"
        self.config = config = config.settled(self.store.size, on_cuda, processes.world_size)
        if trains:
            on_all_ranks(processes, lambda: check_memory(config, self.store.size, processes))
            allow_tf32(config.train.tf32)
            self.backend = _engine(config, self.store, processes, plan_may_differ)
        else:  # has only the reading methods of a backend
            self.backend = _trained_model(config, self.store, processes)  # type: ignore[assignment]
        self._kept_candidates: tuple[tuple[str, str | None], Candidates | None] | None = None
        self.checkpoints = Checkpoints(
            folder.checkpoints, processes, config.checkpoint.keep, self.store.fingerprint
        )

    def _check_weights(self, use: str) -> None:
        """Raise DataError if data.weights needs weights that the store does not have."""
        if use != "ignore" and self.store.weights("train") is None:
            raise DataError(
                f"data.weights {use}: the store has no weights; prepare it again from files with a "
                "fourth column (`prepare --weights`), or set data.weights to ignore"
            )

    def _check_types(self, evaluation: EvaluationConfig) -> None:
        """Check entity types before training rather than at the first validation."""
        if evaluation.candidates == "types" and evaluation.types is None:
            from kge_torchrec.data.store.entity_types import EntityTypes

            EntityTypes.find(None, self.store)

    @property
    def scorer(self) -> Scorer:
        """The scorer inside the model.  This rank may hold only parts of its parameters."""
        return self.backend.scorer

    @contextmanager
    def whole_scorer(self) -> Iterator[Scorer]:
        """Yield the scorer with whole parameters, for use outside training steps.  Collective."""
        with self.backend.dense.gathered():
            yield self.scorer

    @property
    def loss_scale(self) -> dict[str, float]:
        """The state of the fp16 loss scale; empty for other precisions."""
        scale = self.backend.unwrapped_model.scale
        return scale.state() if isinstance(scale, LossScale) else {}

    def restore(self) -> TrainState:
        """Load the whole state of the newest readable checkpoint, to resume training.

        Returns:
            The progress of the checkpoint, or that of a new run without checkpoints.

        Raises:
            CheckpointError: There are checkpoints, but none is readable.
        """
        if not self.checkpoints.names():
            return TrainState(data=self.store.fingerprint)
        state = self.backend.state()
        _, progress = self.checkpoints.load_first(state, self.checkpoints.order(NEWEST))
        self.backend.load_state(state)
        scale = self.backend.unwrapped_model.scale
        if isinstance(scale, LossScale):
            scale.load_state(progress.loss_scale)
        return progress

    def restore_parameters(self, which: str = BEST) -> TrainState:
        """Load only the parameters of a checkpoint; return its progress.

        Args:
            which: BEST (the newest if no best one is known), NEWEST, or a name.  If the best or the
                newest is not readable, the newest readable one is used, with a warning.

        Raises:
            CheckpointError: The run has no readable checkpoint, or none of that name.
        """
        state = {"model": self.backend.parameter_state()}
        _, progress = self.checkpoints.load_first(state, self.checkpoints.order(which))
        self.backend.load_parameter_state(state["model"])
        return progress

    def rank(self, split: str) -> dict[str, Any]:
        """Rank a split and return its filtered metrics.

        Returns:
            {"head" | "tail" | "both": {ties: {metric: value}}}.
        """
        return metrics(self.ranks_of(self.store.split(split), split))

    def validation_triples(self) -> np.ndarray:
        """Return the valid split, or a fixed sample of evaluation.max_triples of its triples."""
        triples, limit = self.store.valid, self.config.evaluation.max_triples
        if not limit or limit >= len(triples):
            return triples
        stream = np.random.default_rng(self.config.seed)
        return triples[np.sort(stream.choice(len(triples), limit, replace=False))]

    def validate(self) -> dict[str, Any]:
        """Return the metrics of ``validation_triples``, in the form of ``rank``."""
        return metrics(self.ranks_of(self.validation_triples(), "valid"))

    def ranks_of(
        self,
        triples: np.ndarray,
        split: str | None,
        evaluation: EvaluationConfig | None = None,
    ) -> Ranks:
        """Return the filtered ranks of triples.  Collective.

        Args:
            triples: (T, 3).
            split: Their split.  None: filter by all splits and by the triples themselves.
            evaluation: Replaces the ``evaluation`` section of the config.
        """
        from tqdm import tqdm

        from kge_torchrec.ranking.exact import rank_triples

        evaluation = evaluation or self.config.evaluation
        shard = self.backend.shard()
        candidates = self._restricted(evaluation, shard)
        total, triples = 2 * len(triples), np.asarray(triples, dtype=np.int64)
        known = self.store.filter_index(FILTERS[split or "test"], None if split else triples)
        with (
            self.whole_scorer() as scorer,
            tqdm(
                total=total,
                desc=f"rank {split or 'triples'}",
                unit="query",
                disable=self.hide_bars,
                leave=False,
            ) as bar,
        ):
            return rank_triples(
                scorer,
                shard,
                triples,
                known,
                candidates=candidates,
                batch_size=evaluation.batch_size,
                progress=bar.update,
            )

    def _restricted(self, evaluation: EvaluationConfig, shard: EntityShard) -> Candidates | None:
        """Return the restriction of a ranking's candidates, or None; cached.  Collective."""
        if evaluation.candidates == "all":
            return None
        key = evaluation.candidates, evaluation.types
        if self._kept_candidates is None or self._kept_candidates[0] != key:
            from kge_torchrec.ranking.candidates import make_candidates

            made = on_all_ranks(  # may read a file, and fail on one rank only
                self.processes, lambda: make_candidates(*key, self.store, shard.row_range)
            )
            self._kept_candidates = key, made
        return self._kept_candidates[1]


def open_store(
    config: DataConfig, seed: int, prepared: Path, processes: Processes, progress: bool
) -> TripleStore:
    """Open the store that data.path names, or prepare raw files into ``prepared`` first.

    Collective: rank 0 finds or prepares the store while the others wait; then all ranks map the
    same files.

    Args:
        config: The ``data`` section of the config.
        seed: Seed of random splits.
        prepared: Path of the store made from raw files.  An existing one is reused.
        processes: The ranks of the run.
        progress: Whether to show progress bars.

    Raises:
        DataError: The data is invalid.
        OtherRankFailed: Another rank cannot read the store.
    """

    def find_or_prepare() -> Path:
        # Only rank 0 looks: another rank might already find the store that rank 0 just prepared.
        if (Path(config.path) / META).is_file():
            return Path(config.path)
        if not (prepared / META).is_file():
            _prepare(config, seed, prepared, progress)
        return prepared

    path = on_first_rank(processes, find_or_prepare)
    return on_all_ranks(processes, lambda: TripleStore.open(path))


def _prepare(config: DataConfig, seed: int, prepared: Path, progress: bool) -> None:
    try:
        prepare(
            config.path,
            prepared,
            ratio=config.ratio,
            seed=seed,
            **asdict(config.file_options()),
            allow_unseen_relations=config.allow_unseen_relations,
            weights=None if config.weights == "ignore" else True,
            types_from=config.types_from,
            type_triples=config.type_triples,
            reader=make_reader(config.reader, config.reader_options, "data.reader_options"),
            progress=progress,
            log_notes=False,  # `data_notes` returns them
        )
    except DataError as error:
        error.spell(_as_key)
        raise


def data_notes(config: DataConfig, store: TripleStore) -> list[str]:
    """Return notes about the data, with the config keys that change how files are read."""
    return notes(store, None if (Path(config.path) / META).is_file() else _as_key)


def _as_key(name: str, value: Any) -> str:
    """Return an option of ``prepare`` in the form for ``train``."""
    if name == "weights":
        value = "loss"
    elif not isinstance(value, list):
        value = str(value).lower()
    key = current_name(f"data.{name}")
    return f'--{key} "{value}"' if isinstance(value, list) else f"--{key} {value}"


def remove_prepared(prepared: Path) -> None:
    """Remove a store that was prepared for a run that then did not start."""
    shutil.rmtree(prepared, ignore_errors=True)

"""A run in memory: a session that trains it, or the trained model of one of its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from kge_torchrec.config import Config, ConfigError, EvaluationConfig
from kge_torchrec.config.training import cutoff_of
from kge_torchrec.data.features import Features
from kge_torchrec.data.parts import PartLayout
from kge_torchrec.data.store import TripleStore
from kge_torchrec.distributed.processes import Processes, Rows, on_all_ranks, on_first_rank
from kge_torchrec.embeddings.backend import ENTITY_WEIGHT, EntityShard
from kge_torchrec.embeddings.feature_rows import entity_vectors
from kge_torchrec.embeddings.init import EntityInit, zeros_on_huge_pages
from kge_torchrec.environment import allow_tf32, quiet_dependencies, set_threads
from kge_torchrec.errors import DataError
from kge_torchrec.models.loss_scaling import LossScale
from kge_torchrec.models.scorers import build_scorer
from kge_torchrec.models.scorers.base import Scorer
from kge_torchrec.ranking.ranks import metrics
from kge_torchrec.trained_model import TrainedModel
from kge_torchrec.training.checkpoint_files import Checkpoint
from kge_torchrec.training.checkpoints import BEST, NEWEST, Checkpoints
from kge_torchrec.training.run_data import open_store
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.state import TrainState

TABLE = f"model.{ENTITY_WEIGHT}"  # names in a checkpoint
_SCORER = "model.objective.scorer."


def load_trained(
    config: Config, folder: RunFolder, processes: Processes, which: str = BEST
) -> tuple[TrainedModel, TrainState]:
    """Load the model of a checkpoint, of any backend and any number of ranks.  Collective.

    It does not load TorchRec, so it is ready about a second after the program starts.  Its rows are
    split evenly over the ranks; each rank has the whole scorer.  Everything is float32.  ``which``
    and errors are as for ``Checkpoints.order``; the model's config has numbers in place of null.
    """
    set_threads(config.threads, processes.local_world_size)
    store = open_store(config, folder.path, processes)
    config = config.settled(store.size, processes.device.type == "cuda", processes.world_size)
    features = Features.of(store)
    count, rank = store.num_rows, processes.rank
    start, stop = (count * r // processes.world_size for r in (rank, rank + 1))
    scorer = build_scorer(config.model, store.num_relations).to(processes.device)
    state = [Rows(_SCORER + name, tensor) for name, tensor in scorer.state_dict().items()]
    checkpoints = Checkpoints(folder.checkpoints, processes, data=store.fingerprint)
    on_disk = config.entities.placement != "memory"  # then the device may not hold the rows
    rows = (
        torch.empty(0)
        if on_disk
        else zeros_on_huge_pages(stop - start, config.model.dim, device=processes.device)
    )

    def rows_of(checkpoint: Checkpoint) -> list[Rows]:
        nonlocal rows
        if not on_disk:
            return [*state, Rows(TABLE, rows, start)]
        from kge_torchrec.training.disk_table import mapped_or_read

        rows = mapped_or_read(checkpoint, TABLE, range(start, stop), config.model.dim)
        return state

    progress = checkpoints.load(checkpoints.order(which), rows_of).progress
    shard = EntityShard(rows, start, count, scored_on=processes.device)
    shard = entity_vectors(shard, features)
    model = TrainedModel(scorer, shard, store, processes, path=folder.path, config=config)
    return model, progress


class Session:
    """A run in memory, ready to train, whose ``config`` has numbers in place of null.  Collective.

    Raises ConfigError or DataError for settings that this machine or data cannot train.
    """

    def __init__(self, config: Config, folder: RunFolder, processes: Processes):
        self.folder, self.processes = folder, processes
        self.show = config.run.progress and processes.is_first
        self.hide_bars = None if self.show else True  # None: tqdm shows bars only on terminals
        set_threads(config.threads, processes.local_world_size)
        self.store = open_store(config, folder.path, processes, self.show)
        on_first_rank(processes, self.store.check)
        self._check_weights(config.data.weights)
        on_all_ranks(processes, lambda: self._check_candidates(config.evaluation))
        on_cuda = processes.device.type == "cuda"
        self.config = config = config.settled(self.store.size, on_cuda, processes.world_size)
        allow_tf32(config.train.precision == "tf32")
        with quiet_dependencies():  # imported late: a trained run needs no engine
            from kge_torchrec.training.assembly import build_backend
            from kge_torchrec.training.averaging import Averaging
            from kge_torchrec.training.disk_table import DiskTable
        self.backend = build_backend(config, self.store, processes)
        layout = PartLayout.of_config(config, self.store.num_rows, processes.world_size)
        self.disk: DiskTable | None = None  # a table that does not lie in memory
        if layout is not None:
            init = EntityInit.of(config.model, self.scorer.zero_columns)
            place = folder.parts, config.seed, init, processes
            self.disk = DiskTable(self.backend, layout, *place)
        self.averaging = Averaging(config.train, self.backend)
        self.features = Features.of(self.store)
        rows = self.backend.shard()
        self._model = TrainedModel(
            self.scorer, rows, self.store, processes, hides_bars=not self.show
        )
        self.checkpoints = Checkpoints(
            folder.checkpoints, processes, config.checkpoint.keep, self.store.fingerprint
        )

    def _check_weights(self, use: str) -> None:
        """Raise DataError if data.weights needs weights that the store does not have."""
        if use != "ignore" and self.store.weights("train") is None:
            raise DataError(
                f"data.weights {use}: the store has no weights; prepare it again from files with a "
                "fourth column (`prepare --weights loss`), or set data.weights to ignore"
            )

    def _check_candidates(self, evaluation: EvaluationConfig) -> None:
        """Check the candidates of rankings before training rather than at the first one."""
        if evaluation.candidates == "types":
            from kge_torchrec.data.types import types_of

            types_of(self.store)
        if evaluation.candidates == "fixed":
            from kge_torchrec.ranking.fixed import read_lists

            for split in ("valid", "test") if evaluation.every != 0 else ("test",):
                triples = np.asarray(self.store.split(split), np.int64)
                if len(triples):
                    read_lists(evaluation.candidate_file, self.store, split).rows_of(triples)

    @property
    def scorer(self) -> Scorer:
        """The scorer inside the model.  This rank may hold only parts of its parameters."""
        return self.backend.scorer

    @contextmanager
    def trained_model(self) -> Iterator[TrainedModel]:
        """Yield the model, or its average, after the last finished step.  Collective.

        Its scorer has whole parameters only until the end of the ``with`` block.
        """
        with self.averaging.applied(), self.backend.dense.gathered():
            if self.disk is None:
                self._model.shard = entity_vectors(self.backend.shard(), self.features)
            else:
                self.disk.write_all()
                self._model.shard = self.disk.shard()
            try:
                yield self._model
            finally:  # lets go of sums of features, and of files
                self._model.shard = self.backend.shard()

    @property
    def loss_scale(self) -> dict[str, float]:
        """The state of the fp16 loss scale; empty for other precisions."""
        scale = self.backend.unwrapped_model.scale
        return scale.state() if isinstance(scale, LossScale) else {}

    def restore(self) -> TrainState:
        """Load the newest readable checkpoint, to resume training; return its progress.

        It is that of a new run without checkpoints.
        """
        if not self.checkpoints.names():
            return TrainState(data=self.store.fingerprint)

        def rows_of(checkpoint: Checkpoint) -> list[Rows]:
            self._check_layout(checkpoint.progress)
            if self.disk is not None:
                self.disk.forget()
            self.averaging.resume(checkpoint.progress.averaged)
            return self.averaging.with_average(self.rows())

        progress = self.checkpoints.load(self.checkpoints.order(NEWEST), rows_of).progress
        self.take_numbers(progress)
        return progress

    def take_numbers(self, progress: TrainState) -> None:
        """Set the numbers of a checkpoint's progress that steps depend on."""
        self.backend.table.steps = progress.table_step
        scale = self.backend.unwrapped_model.scale
        if isinstance(scale, LossScale):
            scale.load_state(progress.loss_scale)

    def state(self, progress: TrainState) -> list[Rows]:
        """Return this rank's rows of a checkpoint, and complete its progress.  Collective."""
        progress.loss_scale, progress.averaged = self.loss_scale, self.averaging.count
        # With preset dicee a rank without gradients does not count a step.
        progress.table_step = int(self.processes.largest([self.backend.table.steps])[0])
        progress.parts = self._layout
        return self.averaging.with_average(self.rows())

    def rows(self) -> list[Rows]:
        """Return this rank's rows; those of a table on disk lie in its files."""
        rows = self.backend.state()
        if self.disk is None:
            return rows
        self.disk.write_all()
        names = {own.name for own in self.disk.rows}
        return self.disk.rows + [own for own in rows if own.name not in names]

    @property
    def _layout(self) -> str:
        """How a table on disk is cut, in words that name all numbers of its ``PartLayout``."""
        if self.disk is None:
            return "no parts (entities.placement memory)"
        cut = self.disk.layout
        often = f", {cut.passes} passes" if cut.passes > 1 else ""
        return (
            f"{cut.parts} parts of {cut.part_rows:,} rows, {cut.places} of them in memory{often}, "
            f"on {cut.world_size} ranks"
        )

    def _check_layout(self, progress: TrainState) -> None:
        if progress.step and progress.parts != self._layout:
            raise ConfigError(
                f"the checkpoint was written within epoch {progress.epoch + 1}, whose triples "
                f"were sorted by {progress.parts}, and now there are "
                f"{self._layout}; resume with the former, or with the version that "
                "wrote the checkpoint, until the epoch ends"
            )

    def restore_parameters(self) -> TrainState:
        """Load the parameters alone of the best checkpoint, to rank with; return its progress."""
        self.averaging.clear()
        rows = [own for own in self.rows() if own.name.startswith("model.")]
        if self.disk is not None:
            self.disk.forget()
        names = self.checkpoints.order(BEST)
        return self.checkpoints.load(names, lambda checkpoint: rows).progress

    def rank(self, split: str) -> dict[str, Any]:
        """Return the filtered metrics of a split, and of recommendations if they are the metric."""
        triples = self.store.split(split)
        with self.trained_model() as model:
            evaluation = self.config.evaluation
            ranks = metrics(model.ranks_of(triples, split, evaluation))
            results = self._recommended(model, triples, split) | ranks
            results["baselines"] = model.baselines_of(triples, split, evaluation)
            k = cutoff_of(evaluation.metric)
            if k is not None:
                beside = model.list_baselines_of(triples, split, evaluation, [k])
                results["recommendation_baselines"] = beside
            return results

    def validate(self) -> dict[str, Any]:
        """Return the metrics of ``validation_triples`` that evaluation.metric is one of."""
        triples = validation_triples(self.config, self.store)
        with self.trained_model() as model:
            found = self._recommended(model, triples, "valid")
            return found or metrics(model.ranks_of(triples, "valid", self.config.evaluation))

    def _recommended(self, model: TrainedModel, triples: np.ndarray, split: str) -> dict[str, Any]:
        """Return the metrics of recommended tails; {} if evaluation.metric is one of ranks."""
        evaluation = self.config.evaluation
        k = cutoff_of(evaluation.metric)
        if k is None:
            return {}
        from kge_torchrec.ranking.recommendation import recommendation_metrics

        return recommendation_metrics(model.recommendations_of(triples, split, evaluation, k), [k])


def validation_triples(config: Config, store: TripleStore) -> np.ndarray:
    """Return the valid split, or a fixed sample of evaluation.max_triples of its triples.

    The sample is of whole users if evaluation.metric is one of recommendations.
    """
    triples, limit = store.valid, config.evaluation.max_triples
    if not limit or limit >= len(triples):
        return triples
    if cutoff_of(config.evaluation.metric) is not None:
        from kge_torchrec.ranking.recommendation import sample_users

        return sample_users(triples, limit, config.seed)
    stream = np.random.default_rng(config.seed)
    return triples[np.sort(stream.choice(len(triples), limit, replace=False))]

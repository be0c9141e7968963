"""Initial values from a file of vectors or from another run, by label: ``model.init_from``.

Rank 0 reads the vectors in chunks and broadcasts them, and each rank keeps the rows of its shard.
No rank holds the whole table, and only rank 0 needs access to the file.

Entities of a run may have features.  Where entities of the new run have features too, rows of
entities and of features start from those of the run; otherwise entities start from its sums.

``model.init_options.width`` selects a projection for vectors of a different width:

    random  a random matrix with orthonormal columns (rows, if the width grows), scaled so that
            vectors keep their length on average
    pca     the first principal components of the vectors of the graph's entities, after
            subtracting their mean

Elements of a row that are biases (``model.biases``) start at 0 in both cases.

Shapes: N entities, M vectors with W elements, D elements of an entity's vector, m rows at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from kge_torchrec.config import Config, ConfigError
from kge_torchrec.data.features import Features
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.vectors import ROWS, Vectors, check_finite, ids_of, open_vectors
from kge_torchrec.distributed.processes import Rows, on_all_ranks, on_first_rank
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.embeddings.feature_rows import FeatureBags
from kge_torchrec.errors import DataError
from kge_torchrec.training.checkpoint_files import Checkpoint
from kge_torchrec.training.checkpoints import BEST, Checkpoints
from kge_torchrec.training.remote_runs import folder_of
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import TABLE, Session
from kge_torchrec.training.start import take_rows
from kge_torchrec.training.state import TrainState

_STREAM = 0x1417  # separates the projection's random stream from others with the same seed


def begin(session: Session) -> TrainState:
    """Start a new run: apply model.init_from, if set.  Collective.

    Returns:
        The progress of a new run.

    Raises:
        DataError, ConfigError: The vectors are unusable: NaN, a different width, two vectors for
            one label, or no label in common.  Raised on every rank.
    """
    if session.config.model.init_from is not None:
        _start_from(session, session.config.model.init_from)
    return TrainState(data=session.store.fingerprint)


def _start_from(session: Session, source: str) -> None:
    """Replace random rows by vectors from ``source``, a file, or the folder or URL of a run."""
    ranks, reading = session.processes, _Reading(session)
    folder = on_all_ranks(ranks, lambda: folder_of(source))
    is_run = on_first_rank(ranks, lambda: folder.holds_run)
    checkpoint = None
    if is_run:
        checkpoints = Checkpoints(folder.checkpoints, ranks)
        checkpoint = checkpoints.open(checkpoints.order(BEST)[0])
    on_first_rank(ranks, lambda: reading.open(folder.path, checkpoint))
    shard = session.backend.shard()
    while True:
        part = on_first_rank(ranks, reading.next)
        if part is None:
            break
        ids, rows = map(torch.from_numpy, part)
        ids = ids.to(shard.rows.device)
        here = shard.holds(ids)
        own = rows.to(shard.rows)[here]
        shard.rows[ids[here] - shard.first_row, : own.shape[1]] = own
    if checkpoint is not None:
        reading.summary += _start_dense(session, folder, checkpoint)
    if session.config.model.vectors.frozen:
        on_first_rank(ranks, reading.save_frozen)
    if session.show:
        print(reading.summary, file=sys.stderr)


class _Reading:
    """Rank 0's part of model.init_from: reading, matching by label and projecting."""

    def __init__(self, session: Session):
        self.session, self.config = session, session.config
        self.store: TripleStore = session.store
        self.summary = ""

    def open(self, source: Path, checkpoint: Checkpoint | None) -> None:
        """Match vectors to entities and choose the projection."""
        self.vectors = (
            open_vectors(source) if checkpoint is None else self._of_run(source, checkpoint)
        )
        self.ids = ids_of(self.vectors, self.store.entities.array)
        if checkpoint is not None:
            self._match_features()
        scorer = self.session.scorer
        self.full, self.width = scorer.dim, scorer.dim - scorer.zero_columns
        self._project = self._projection()
        self._parts = self._read(self._project)
        count = len(self._given())
        drawn = self.store.num_entities - count
        self.summary = (
            f"model.init_from {source}: {count:,} of {self.store.num_entities:,} entities start "
            f"from it{self._how}" + (f", {drawn:,} are drawn" if drawn else "")
        )

    def next(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the ids (m,) and rows (m, D) of the next chunk, or None at the end."""
        return next(self._parts, None)

    def save_frozen(self) -> None:
        """Save which entities have a vector, to freeze them also after a resume."""
        frozen = np.zeros(self.store.num_entities, bool)
        frozen[self._given()] = True
        self.session.folder.save_frozen(frozen)

    def _of_run(self, source: Path, checkpoint: Checkpoint) -> Vectors:
        run = RunFolder(source)
        self.before: Config = run.load_config()
        data = self.before.data.path
        self.old_store = TripleStore.open(run.store_of(data))
        if checkpoint.progress.data != self.old_store.fingerprint:
            raise DataError(
                f"{source}: its store has different triples than the run was trained on"
            )

        def rows() -> Iterator[np.ndarray]:
            for part in self._rows_of_run(checkpoint):
                yield from (some.numpy() for some in part.split(ROWS))

        return Vectors(source, self.old_store.entities.array, self.before.model.dim, rows)

    def _rows_of_run(self, checkpoint: Checkpoint) -> Iterator[Tensor]:
        """Yield the vectors of a run's entities (m, D), as sums with its features.

        If entities have features here too, yield the rows of entities and of features instead.
        """
        old, features = self.old_store, Features.of(self.old_store)
        if features is None or self.store.has_features:
            yield from (part.float() for _, part in checkpoint.rows(TABLE, range(old.num_rows)))
            return
        count = old.num_entities
        of_features = torch.empty(old.num_rows - count, self.before.model.dim)
        checkpoint.fill([Rows(TABLE, of_features, count)])
        for first, part in checkpoint.rows(TABLE, range(count)):
            shard = EntityShard(part[: count - first].float(), first, count)
            yield FeatureBags(features, shard).sums(shard.rows, of_features)

    def _match_features(self) -> None:
        """Match the features of a run by name; their rows follow those of its entities."""
        old, new = self.old_store.features(), self.store.features()
        if old is None or new is None:
            return
        place = pc.add(pc.index_in(old.names, value_set=new.names), self.store.num_entities)
        self.ids = np.append(self.ids, pc.fill_null(place, -1).to_numpy(zero_copy_only=False))
        labels = pa.concat_arrays([self.vectors.labels, old.names])
        self.vectors = replace(self.vectors, labels=labels)

    def _given(self) -> np.ndarray:
        """Return the ids of the entities that have a vector."""
        return self.ids[(self.ids >= 0) & (self.ids < self.store.num_entities)]

    def _read(self, project: Callable[[np.ndarray], np.ndarray]) -> Iterator[tuple]:
        first = 0
        for rows in self.vectors.rows():
            ids = self.ids[first : first + len(rows)]
            is_known = ids >= 0
            check_finite(self.vectors, first, rows, is_known)
            first += len(rows)
            if is_known.any():
                yield ids[is_known], project(rows[is_known])
        if first != len(self.ids):
            raise DataError(
                f"{self.vectors.source} has {first:,} vectors for {len(self.ids):,} labels"
            )

    def _projection(self) -> Callable[[np.ndarray], np.ndarray]:
        """Return a function from vectors (m, W) to the first columns of rows."""
        have, want, self._how = self.vectors.width, self.width, ""
        if have in (self.full, want):
            return lambda rows: rows
        how = self.config.model.vectors.width
        if how == "refuse":
            raise ConfigError(
                f"model.init_from: the vectors of {self.vectors.source} have dim {have}, but "
                f"entities here have dim {want}; set model.dim to {have + self.full - want}, or "
                "project the vectors with --model.init_options.width random or pca"
            )
        self._how = f" (dim {have} projected to {want}, {how})"
        if how == "random":
            matrix = self._orthonormal(have, want)
            return lambda rows: rows @ matrix
        if have < want:
            raise ConfigError(
                f"model.init_options.width pca: vectors of dim {have} have no {want} principal "
                "components; use random"
            )
        mean, matrix = self._principal(want)
        return lambda rows: (rows - mean) @ matrix

    def _orthonormal(self, have: int, want: int) -> np.ndarray:
        """Return a random orthonormal matrix (W, D), a function of the seed."""
        stream = np.random.Generator(np.random.SFC64([self.config.seed, _STREAM]))
        longer, shorter = max(have, want), min(have, want)
        matrix, upper = np.linalg.qr(stream.standard_normal((longer, shorter)))
        matrix *= np.sign(np.diag(upper))  # makes the distribution uniform (Mezzadri 2007)
        matrix = matrix if have == longer else matrix.T
        return (matrix * max(1.0, have / want) ** 0.5).astype(np.float32)

    def _principal(self, want: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean (W,) of the vectors and their first principal components (W, D)."""
        width, count = self.vectors.width, 0
        total, squares = np.zeros(width), np.zeros((width, width))
        for _, rows in self._read(lambda rows: rows.astype(np.float64)):
            total, squares, count = total + rows.sum(0), squares + rows.T @ rows, count + len(rows)
        mean = total / count
        _, components = np.linalg.eigh(squares / count - np.outer(mean, mean))
        components = components[:, ::-1][:, :want]
        components *= np.sign(components[np.abs(components).argmax(0), np.arange(want)])
        return mean.astype(np.float32), components.astype(np.float32)


def _start_dense(session: Session, folder: RunFolder, checkpoint: Checkpoint) -> str:
    """Start a scorer from the same one: rows of relations by label; say so.  Collective."""
    ranks = session.processes
    before = on_first_rank(ranks, folder.load_config)
    model, same = session.config.model, ("scorer", "dim", "reciprocal", "normalization", "options")
    if any(getattr(model, key) != getattr(before.model, key) for key in same):
        return "; relations are drawn, since that run has a different scorer"
    old = on_all_ranks(ranks, lambda: TripleStore.open(folder.store_of(before.data.path)))
    take_rows(session, checkpoint, old, lambda rows: rows.name.startswith("model.objective."))
    labels = session.store.relations.array
    known = pc.sum(pc.is_in(labels, value_set=old.relations.array)).as_py()
    return f"; {known:,} of {len(labels):,} relations as well"

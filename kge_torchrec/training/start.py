"""The values that a new run starts with: rows of another run, or vectors of a file, by label.

    extend            rows of the old run and their optimizer state; also with ``--delete``
    model.init_from   a run: rows of entities, and of the scorer if it is the same one
                      a file: vectors of entities

Rows whose label is new keep the initial values that they have, and their optimizer state is zero.
Each rank reads the rows that it needs, and no rank holds a whole table.

Shapes: N entities, F features, R relations, m rows of the source at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
import pyarrow.compute as pc
import torch
from torch import Tensor

from kge_torchrec.config import ConfigError, ModelConfig
from kge_torchrec.config.sizing import GraphSize
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.vectors import Vectors, nothing_in_common
from kge_torchrec.distributed.dense import FrozenDense
from kge_torchrec.distributed.processes import OtherRankFailed, Rows, on_all_ranks, on_first_rank
from kge_torchrec.embeddings.backend import ENTITY_WEIGHT
from kge_torchrec.errors import StoreError
from kge_torchrec.lines import say
from kge_torchrec.models.scorers import build_scorer
from kge_torchrec.models.scorers.base import Scorer
from kge_torchrec.training.checkpoint_files import Checkpoint, Damaged
from kge_torchrec.training.checkpoints import (
    BEST,
    CheckpointError,
    Checkpoints,
    NonFiniteParameters,
)
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import TABLE, Session
from kge_torchrec.training.state import TrainState

Pieces = Iterable[tuple[int, Tensor]]  # first row, and rows (m, ...)


def begin(session: Session) -> TrainState:
    """Start a new run from what it extends or from model.init_from, if any.  Collective."""
    folder, source = session.folder, session.config.model.init_from
    progress = TrainState(data=session.store.fingerprint)
    if on_first_rank(session.processes, folder.extension.is_file):
        _extend(session, progress)
    elif source is not None:
        _start_from(session, source)
    return progress


@dataclass(frozen=True)
class RowMap:
    """For each row of a run, its number in the run that it starts from; -1: that run has none.

    Attributes:
        model: The ``model`` section of the config.
        entities: (N + F,), for rows of entities and of features.
        relations: (R,).
        old_relations: The number of relations of the other run.
    """

    model: ModelConfig
    entities: np.ndarray
    relations: np.ndarray
    old_relations: int

    @classmethod
    def by_label(cls, model: ModelConfig, old: TripleStore, new: TripleStore) -> RowMap:
        """Return the map from the graph of a run to the one that another run was trained on."""
        entities = _places(old.entities.array, new.entities.array)
        before, after = old.features(), new.features()
        if after is not None:
            missing = np.full(len(after.names), -1)
            ids = missing if before is None else _places(before.names, after.names)
            entities = np.append(entities, np.where(ids < 0, -1, ids + old.num_entities))
        relations = _places(old.relations.array, new.relations.array)
        return cls(model, entities, relations, old.num_relations)

    @classmethod
    def of_base(cls, model: ModelConfig, store: TripleStore, base: GraphSize) -> RowMap:
        """Return a map with -1 for the rows that an extended store has and its base has not."""
        rows, relations = np.arange(store.num_rows), np.arange(store.num_relations)
        rows[base.entities : store.num_entities] = rows[store.num_entities + base.features :] = -1
        relations[base.relations :] = -1
        return cls(model, rows, relations, base.relations)

    def of(self, name: str, first: int, count: int) -> np.ndarray:
        """Return the numbers (count,) of some rows of a tensor, or of optimizer state, by name."""
        name = name.partition(".")[2]
        if name.startswith(ENTITY_WEIGHT):
            return self.entities[first : first + count]
        blocks = self._blocks
        parameter = next((p for p in blocks if f"{name}.".startswith(f"objective.{p}.")), None)
        rows = None if parameter is None else blocks[parameter]
        if rows is not None:
            start = np.arange(rows)[:, None] * self.old_relations
            by_row = np.where(self.relations < 0, -1, self.relations + start).ravel()
            return by_row[first : first + count]
        same = np.arange(self.old_relations)
        if parameter is not None and not np.array_equal(self.relations, same):
            raise ConfigError(
                f"{parameter} of scorer {self.model.scorer} is not by relation: the scorer cannot "
                "take new relations; extend the run by triples of the old ones"
            )
        return np.arange(first, first + count)

    @cached_property
    def _blocks(self) -> dict[str, int | None]:
        """How many rows a relation has in each parameter of the objective that depends on them.

        The rows are those of all relations, then those of their inverses.  None: the parameter is
        not by row.
        """
        one, two = (
            dict(build_scorer(self.model, n).named_parameters(prefix="scorer")) for n in (1, 2)
        )
        return {
            name: len(one[name])
            if [*two[name].shape] == [2 * len(one[name]), *one[name].shape[1:]]
            else None
            for name in one
            if one[name].shape != two[name].shape
        }


def _places(old: Any, new: Any) -> np.ndarray:
    """Return the place of each new label among old ones, -1 where it is not among them."""
    ids = pc.fill_null(pc.index_in(new, value_set=old), -1)
    return ids.to_numpy(zero_copy_only=False).astype(np.int64)


PiecesOf = Callable[[str, np.ndarray], Pieces]  # from a tensor's name and sorted wanted rows


def _fill(session: Session, rows: list[Rows], numbers: RowMap, pieces_of: PiecesOf) -> None:
    """Write rows of a source, by their numbers in it, into those of a run.  Collective."""

    def read() -> None:
        for own in rows:
            target = torch.atleast_1d(own.local.detach())
            is_count = not own.local.dim()  # such as the steps of an optimizer
            wanted = np.zeros(1, int) if is_count else numbers.of(own.name, own.first, len(target))
            order = np.argsort(wanted, kind="stable")
            order = order[np.searchsorted(wanted[order], 0) :]  # without those that are -1
            ordered = wanted[order]
            left = len(order)
            for first, values in pieces_of(own.name, ordered) if left else ():
                if values.shape[1:] != target.shape[1:]:
                    has, expected = [*values.shape[1:]], [*target.shape[1:]]
                    raise Damaged(f"{own.name} has rows of the size {has} instead of {expected}")
                low, high = np.searchsorted(ordered, [first, first + len(values)])
                here = torch.from_numpy(order[low:high]).to(target.device)
                target[here] = values[torch.from_numpy(ordered[low:high] - first)].to(target)
                left -= int(high - low)
            if left:
                raise Damaged(f"the source lacks {left:,} rows of {own.name}")

    on_all_ranks(session.processes, read)


# Extended runs


def _extend(session: Session, progress: TrainState) -> None:
    """Fill an extended run with rows of the old one, and save its first checkpoint.  Collective."""
    ranks, folder = session.processes, session.folder
    origin = on_first_rank(ranks, folder.load_extension)
    source, name = RunFolder(origin["from"]), origin["checkpoint"]
    try:
        opened, numbers, _ = _opened(session, source, name)
        _fill(session, session.rows(), numbers, opened.rows)
    except (OSError, Damaged, OtherRankFailed) as error:
        raise CheckpointError(
            f"checkpoint {name} in {source.checkpoints} cannot be read: {error}; extend another "
            "one by --checkpoint NAME"
        ) from error
    if session.config.model.init_options.frozen:

        def save() -> None:
            ids = numbers.entities[: session.store.num_entities]
            folder.save_frozen((ids >= 0) & np.load(source.frozen)[ids])

        on_first_rank(ranks, save)
    session.take_numbers(opened.progress)
    if "new" in (changes := changes_of(session.store)):
        counts = changes["new"]
        say(", ".join(f"{n:,} new {what}" for what, n in counts.items()))
    try:
        session.checkpoints.save(session.state(progress), progress)
    except NonFiniteParameters as error:
        raise CheckpointError(
            f"{str(error).partition(' (rank')[0]}, from checkpoint {name} of {source.path} or as "
            "initial values; extend another one by --checkpoint NAME"
        ) from error


def changes_of(store: TripleStore) -> dict[str, dict[str, int]]:
    """Return how many entities and triples the store of an extended run has more, or lacks."""
    size, old = store.size, store.base
    if old is None:
        return {"deleted": store.report["deleted"]}
    counts = {
        "entities": size.entities - old.entities,
        "relations": size.relations - old.relations,
        "training triples": size.triples - old.triples,
    }
    return {"new": counts | ({"features": size.features - old.features} if size.features else {})}


def _opened(session: Session, run: RunFolder, name: str) -> tuple[Checkpoint, RowMap, TripleStore]:
    """Open a checkpoint of another run; return it, where rows are in it, and its store."""
    checkpoint = Checkpoints(run.checkpoints, session.processes).open(name)

    def read() -> tuple[RowMap, TripleStore]:
        old = TripleStore.open(run.store_of(run.load_config().data.path))
        if checkpoint.progress.data != old.fingerprint:
            raise StoreError(
                f"{checkpoint.folder} was trained on different triples than those of {old.path}"
            )
        return RowMap.by_label(session.config.model, old, session.store), old

    return checkpoint, *on_all_ranks(session.processes, read)


# model.init_from


def _start_from(session: Session, path: str) -> None:
    """Replace random rows by those of a file, or of the folder of a run.  Collective."""
    ranks, store, model = session.processes, session.store, session.config.model
    folder = RunFolder(path)
    names, relations = [TABLE], ""
    if on_first_rank(ranks, lambda: folder.holds_run):
        before = on_first_rank(ranks, folder.load_config).model
        best = Checkpoints(folder.checkpoints, ranks).order(BEST)[0]
        checkpoint, numbers, old = _opened(session, folder, best)
        on_all_ranks(ranks, lambda: _check_labels(folder, old, store, numbers))
        width, pieces_of = before.dim, cast(PiecesOf, checkpoint.rows)
        same = ("scorer", "dim", "reciprocal", "normalization", "options")
        if all(getattr(model, key) == getattr(before, key) for key in same):
            names.append("model.objective.")
            known = int((numbers.relations >= 0).sum())
            relations = f"; {known:,} of {len(numbers.relations):,} relations as well"
        else:
            relations = "; relations are drawn, since that run has a different scorer"
    else:
        vectors = on_all_ranks(ranks, lambda: Vectors(folder.path))
        numbers = on_all_ranks(ranks, lambda: _of_file(session, vectors))
        width, pieces_of = vectors.width, partial(_pieces, vectors)
    on_first_rank(ranks, lambda: _check_width(session.scorer, folder, width))
    rows = [
        own._replace(local=own.local[:, :width]) if own.name == TABLE else own
        for own in session.rows()
        if own.name.startswith(tuple(names))
    ]
    _fill(session, rows, numbers, pieces_of)
    starts = numbers.entities[: store.num_entities] >= 0
    if model.init_options.frozen:
        on_first_rank(ranks, lambda: session.folder.save_frozen(starts))
    count, drawn = int(starts.sum()), int((~starts).sum())
    say(
        f"model.init_from {folder.path}: {count:,} of {len(starts):,} entities start from it"
        + (f", {drawn:,} are drawn" if drawn else "")
        + relations
    )


def _check_width(scorer: Scorer, folder: RunFolder, width: int) -> None:
    dim = scorer.row_dim - scorer.zero_columns
    if width not in (dim, scorer.row_dim):
        raise ConfigError(
            f"model.init_from: the vectors of {folder.path} have dim {width}, but entities here "
            f"have dim {dim}; set model.dim to {width + scorer.zero_columns}, or project the "
            f"vectors to {dim} elements first"
        )


def _of_file(session: Session, vectors: Vectors) -> RowMap:
    store = session.store
    entities = np.full(store.num_rows, -1)
    entities[: store.num_entities] = vectors.numbers_of(store.entities.array)
    return RowMap(session.config.model, entities, np.full(store.num_relations, -1), 0)


def _pieces(vectors: Vectors, _: str, wanted: np.ndarray) -> Pieces:
    """Yield all vectors of a file, some thousand at a time, and check those that are wanted."""
    first = 0
    for rows in vectors.rows():
        low, high = np.searchsorted(wanted, [first, first + len(rows)])
        vectors.check_finite(first, rows, wanted[low:high] - first)
        yield first, torch.from_numpy(np.array(rows))
        first += len(rows)


def _check_labels(folder: RunFolder, old: TripleStore, new: TripleStore, numbers: RowMap) -> None:
    if old.has_features and not new.has_features:
        raise ConfigError(
            f"model.init_from: the entities of {folder.path} have features, and those of "
            f"{new.path} have none; start from an export of the run, which has the sums "
            f"(`export {folder.path} -o EXPORT`, then model.init_from EXPORT)"
        )
    if not (numbers.entities[: new.num_entities] >= 0).any():
        raise nothing_in_common(folder.path, old.entities.array, new.entities.array)


# Rows that no step changes


def freeze(session: Session) -> None:
    """Freeze rows by train.extension.freeze and model.init_options.frozen.  Collective."""
    config, store, backend = session.config, session.store, session.backend
    if not config.freezes:
        return
    start, stop = backend.shard().row_range
    rows = torch.zeros(stop - start, dtype=torch.bool)
    if config.model.init_options.frozen:
        own = on_all_ranks(
            session.processes, lambda: np.load(session.folder.frozen, mmap_mode="r")[start:stop]
        )
        rows[: len(own)] |= torch.from_numpy(np.array(own))  # features train
    if config.train.extension.freeze == "old":
        if store.base is None:
            raise ConfigError(
                f"train.extension.freeze old: {store.path} is no extended store and has no old "
                "rows; `kge-torchrec extend RUN NEW_TRIPLES --freeze` makes one"
            )
        old = RowMap.of_base(config.model, store, store.base)
        rows |= torch.from_numpy(old.entities[start:stop] >= 0)
        frozen = {
            name: torch.from_numpy(old.of(f"model.objective.{name}", 0, len(parameter)) >= 0)
            for name, parameter in backend.dense.objective.named_parameters()
        }
        backend.dense.frozen = FrozenDense(backend.dense, backend.dense_optimizer, frozen)
    assert backend.pending is not None  # as Config.freezes
    backend.pending.frozen = rows.to(backend.shard().rows.device)

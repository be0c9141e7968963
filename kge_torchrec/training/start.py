"""Start a run from another one: rows of entities, features and relations by label.

It serves a run on more triples (``extend``), on fewer (``extend --delete``) and on others
(``model.init_from``).  Rows whose label the other run lacks keep their initial values, and their
optimizer state is zero.  Each rank reads the rows that it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.compute as pc
import torch

from kge_torchrec.config import ConfigError, ModelConfig
from kge_torchrec.data.store import TripleStore
from kge_torchrec.distributed.processes import Rows, on_all_ranks
from kge_torchrec.embeddings.backend import ENTITY_WEIGHT
from kge_torchrec.models.scorers import build_scorer
from kge_torchrec.training.checkpoint_files import Checkpoint

if TYPE_CHECKING:
    from kge_torchrec.training.session import Session


def take_rows(
    session: Session,
    checkpoint: Checkpoint,
    old: TripleStore,
    wanted: Callable[[Rows], bool] = lambda rows: True,
) -> None:
    """Fill rows of a new run from a checkpoint of a run with the same scorer.  Collective.

    Args:
        session: The new run.
        checkpoint: The checkpoint.
        old: The triples that the checkpoint was trained on.
        wanted: Which rows to fill.

    Raises:
        ConfigError: The scorer has a parameter whose rows are not those of relations.
        Damaged: The checkpoint cannot be read.
    """
    new, model = session.store, session.config.model
    rows = [own for own in session.rows() if wanted(own)]
    relations = _ids_in(old.relations.array, new.relations.array)
    blocks = _relation_blocks(model)

    def ids_of(own: Rows, entities: np.ndarray) -> np.ndarray:
        count = len(torch.atleast_1d(own.local))
        name = own.name.partition(".")[2]
        if name.startswith(ENTITY_WEIGHT):
            return entities[own.first : own.first + count]
        parameter = next((p for p in blocks if f"{name}.".startswith(f"objective.{p}.")), None)
        if parameter is None or not own.local.dim():
            return np.arange(own.first, own.first + count)
        if blocks[parameter] is None and old.num_relations != new.num_relations:
            raise ConfigError(
                f"{parameter} of scorer {model.scorer} is not by relation: the scorer cannot take "
                "new relations; extend the run by triples of the old ones"
            )
        start = np.arange(blocks[parameter] or 1)[:, None] * old.num_relations
        by_row = np.where(relations < 0, -1, relations + start).ravel()
        return by_row[own.first : own.first + count]

    def read() -> None:
        entities = _old_rows(old, new)
        for own in rows:
            checkpoint.fill_by_id(own, ids_of(own, entities))

    on_all_ranks(session.processes, read)


def _old_rows(old: TripleStore, new: TripleStore) -> np.ndarray:
    """Return the row (N + F,) of each entity and feature in the table of the old run, or -1."""
    rows = _ids_in(old.entities.array, new.entities.array)
    before, after = old.features(), new.features()
    if after is None:
        return rows
    if before is None:
        return np.append(rows, np.full(len(after.names), -1))
    ids = _ids_in(before.names, after.names)
    return np.append(rows, np.where(ids < 0, -1, ids + old.num_entities))


def _ids_in(old: object, new: object) -> np.ndarray:
    """Return the place of each new label among old ones, -1 where it is not among them."""
    ids = pc.fill_null(pc.index_in(new, value_set=old), -1)
    return ids.to_numpy(zero_copy_only=False).astype(np.int64)


def _relation_blocks(model: ModelConfig) -> dict[str, int | None]:
    """Return how many rows each relation has in an objective's parameters that depend on them.

    The rows are those of all relations, then those of their inverses.  None: the parameter is not
    by row.
    """
    one, two = (dict(build_scorer(model, n).named_parameters(prefix="scorer")) for n in (1, 2))
    return {
        name: len(one[name])
        if [*two[name].shape] == [2 * len(one[name]), *one[name].shape[1:]]
        else None
        for name in one
        if one[name].shape != two[name].shape
    }

"""The rows that no step changes: vectors that were given, and old rows of an extended run.

Old rows are those of entities, features and relations that the run had before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.config import ConfigError, ModelConfig
from kge_torchrec.distributed.dense import FrozenDense
from kge_torchrec.distributed.processes import on_all_ranks
from kge_torchrec.models.scorers import build_scorer

if TYPE_CHECKING:
    from kge_torchrec.training.session import Session


def freeze(session: Session) -> None:
    """Freeze the rows that train.extension.freeze and model.init_options.frozen name.  Collective.

    Raises:
        ConfigError: train.extension.freeze is "old" and the run is not extended.
    """
    config, base, backend = session.config, session.store.base, session.backend
    if not config.freezes:
        return
    if config.train.extended.freeze == "old" and base is None:
        raise ConfigError(
            f"train.extension.freeze old: {session.store.path} is no extended store and has no old "
            "rows; `kge-torchrec extend RUN NEW_TRIPLES --freeze` makes one"
        )
    start, stop = backend.shard().row_range
    rows = torch.zeros(stop - start, dtype=torch.bool)
    if config.model.vectors.frozen:
        own = on_all_ranks(
            session.processes, lambda: np.load(session.folder.frozen, mmap_mode="r")[start:stop]
        )
        rows[: len(own)] |= torch.from_numpy(np.array(own))  # features train
    if config.train.extended.freeze == "old":
        assert base is not None
        count = session.store.num_entities
        for old in (range(base.entities), range(count, count + base.features)):
            rows[max(0, old.start - start) : max(0, old.stop - start)] = True
        dense = dict(backend.dense.objective.named_parameters())
        frozen = old_rows(dense, config.model, base.relations, session.store.num_relations)
        backend.dense.frozen = FrozenDense(backend.dense, backend.dense_optimizer, frozen)
    assert backend.pending is not None  # as Config.freezes
    backend.pending.frozen = rows.to(backend.shard().rows.device)


def relation_parameters(model: ModelConfig) -> set[str]:
    """Return the names of an objective's parameters whose rows are relations, then inverses."""
    first, second = (
        build_scorer(model, count).named_parameters(prefix="scorer") for count in (1, 2)
    )
    return {name for (name, a), (_, b) in zip(first, second, strict=True) if a.shape != b.shape}


def old_rows(
    parameters: Mapping[str, Tensor], model: ModelConfig, old: int, new: int
) -> dict[str, Tensor]:
    """Return which rows of an objective's parameters do not belong to new relations.

    Args:
        parameters: The parameters by name.
        model: The ``model`` section of the config.
        old: Number of relations before.
        new: Number of relations after.

    Returns:
        (rows,) bool by parameter name.
    """
    relation_tensors, are_old = relation_parameters(model), {}
    for name, parameter in parameters.items():
        rows = torch.ones(parameter.shape[0], dtype=torch.bool)
        if name in relation_tensors:  # relations, then inverses
            rows.view(-1, new)[:, old:] = False
        are_old[name] = rows
    return are_old

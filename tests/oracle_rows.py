"""The rows of entities as plain dense torch: a table per node type, and sums of features.

Shapes: N entities, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import torch
from oracle_table import DenseTable
from torch import Tensor

from kge_torchrec.config import Config
from kge_torchrec.data.store import TripleStore
from kge_torchrec.embeddings.optimizers import RowOptimizer, make_optimizer


def composition(store: TripleStore) -> Tensor | None:
    """The matrix (N, N + F) that makes vectors of entities from rows, also of features."""
    if store.features() is None:
        return None
    names, indptr, ids, weights = store.features()
    count, total = store.num_entities, store.num_entities + len(names)
    matrix = torch.zeros(count, total, dtype=torch.float64)
    trained = {*store.train[:, 0].tolist(), *store.train[:, 2].tolist()}
    for entity in range(count):
        own = range(indptr[entity], indptr[entity + 1])
        matrix[entity, entity] = float(entity in trained or not own)
        for pair in own:
            matrix[entity, count + ids[pair]] = float(weights[pair])
    return matrix


def with_features(composing: Tensor | None, touched: Tensor) -> Tensor:
    """The ids of entities (U,), and behind them the rows of their features."""
    if composing is None:
        return touched
    count = len(composing)
    features = composing[touched][:, count:].any(0).nonzero().squeeze(1)
    return torch.cat([touched, features + count])


def unfrozen(ids: Tensor, frozen: Sequence[int]) -> Tensor:
    """The ids without those of frozen rows."""
    return ids[~torch.isin(ids, torch.tensor(frozen, dtype=torch.int64))]


class DenseTables:
    """A dense table of each node type, in one."""

    def __init__(self, config: Config, store: TripleStore, values: Tensor) -> None:
        names, _, types, _ = store.types()
        of, kinds = np.array(types), names.to_pylist()
        more = len(values) - len(of)
        self.of, self._rate = torch.from_numpy(np.append(of, [len(kinds)] * more)), config.train.lr
        self.tables = []
        for place, name in enumerate([*kinds, "features"] if more else kinds):
            own = config.entities.tables.get(name, {})
            optimizer = table_optimizer(config)
            if "optimizer" in own:
                options = own.get("optimizer_options", {})
                optimizer = make_optimizer(own["optimizer"], own["lr"], **options)
            self.tables.append(DenseTable(values[self.of == place], optimizer))

    @property
    def weights(self) -> Tensor:
        whole = self.tables[0].weights.new_empty(len(self.of), self.tables[0].weights.shape[1])
        for place, table in enumerate(self.tables):
            whole[self.of == place] = table.weights
        return whole

    @property
    def lr(self) -> float:
        return self._rate

    @lr.setter
    def lr(self, rate: float) -> None:
        for table in self.tables:
            table.lr = table.optimizer.lr * rate / self._rate

    def step(self, ids: Tensor, grad: Tensor) -> None:
        for place, table in enumerate(self.tables):
            here = self.of[ids] == place
            rows = torch.cumsum(self.of == place, 0) - 1
            table.step(rows[ids[here]], grad[here])


def dense_table(config: Config, store: TripleStore, values: Tensor) -> DenseTable | DenseTables:
    """The dense table of all entities, or of each node type."""
    if config.entities.tables is not None:
        return DenseTables(config, store, values)
    return DenseTable(values, table_optimizer(config), config.entities.preset)


def table_optimizer(config: Config) -> RowOptimizer:
    """The settings of the entity table's optimizer."""
    train, options = config.train, asdict(config.train.options_in("optimizer_options"))
    return make_optimizer(train.optimizer, train.lr, **options)

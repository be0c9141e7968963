"""Entity tables: one of all entities, or one per node type with an optimizer of its own.

Ids are contiguous per type, so the tables follow each other in one range of ids, [0, N).  The ranks
split this range as they split a single table: each holds one block of consecutive rows, of one
table or of several.  Exchange, ranking and export see blocks only.  Tables matter where rows get
their first values and where the optimizers step.

Extending a run appends ids, so a type may have several runs of ids.  Each run is a table for the
engine; a checkpoint has the rows of a type in one tensor.

Shapes: N entities, n rows on this rank, D elements per row, M ids or gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from kge_torchrec.embeddings.backend import ENTITY, EntityShard
from kge_torchrec.embeddings.chunks import row_sharded
from kge_torchrec.embeddings.init import EntityInit, zeros_on_huge_pages
from kge_torchrec.embeddings.optimizers import TableOptimizer
from kge_torchrec.embeddings.row_gradients import (
    PendingGradients,
    RowGradients,
    recorded_lookup,
)


@dataclass(frozen=True)
class EntityTable:
    """Consecutive entities of one type.

    Args:
        ids: Their ids.
        optimizer: Optimizer of their rows.
        init: Distribution of their initial values.
        name: The name for TorchRec.
        type: Label of the node type, or ENTITY where types have no tables.
        before: Number of entities of the type with lower ids.
        total: Number of all entities of the type.
    """

    ids: range
    optimizer: TableOptimizer
    init: EntityInit
    name: str = ENTITY
    type: str = ENTITY
    before: int = 0
    total: int = 0

    @classmethod
    def of_all(cls, num_entities: int, optimizer: TableOptimizer, init: EntityInit) -> EntityTable:
        """Return the table of all entities, for a graph whose types have no tables."""
        return cls(range(num_entities), optimizer, init, total=num_entities)

    def within(self, start: int, stop: int) -> range:
        """Return which rows of the block [start, stop) of ids are of this table, from 0."""
        low = min(max(self.ids.start, start), stop)
        return range(low - start, max(low, min(self.ids.stop, stop)) - start)


class TableBlock:
    """This rank's rows of all tables, one table after the other, and their gradients.

    Args:
        rows: (n, D), the memory of the tables.
        first_row: Id of ``rows[0]``.
        parts: Rows of each table by its name, in order.

    Attributes:
        pending: The gradients of looked-up rows until the step.
        read: Returns rows (M,) -> (M, D).
    """

    def __init__(self, rows: Tensor, first_row: int, parts: dict[str, range]):
        self.rows, self.first_row, self.parts = rows, first_row, parts
        self.pending = PendingGradients()
        self.read: Callable[[Tensor], Tensor] = partial(rows.index_select, 0)
        self._taken: dict[str, RowGradients] = {}

    @classmethod
    def of_one(cls, num_rows: int, dim: int) -> TableBlock:
        """Return the block of the single table ENTITY, with rows of zeros."""
        return cls(zeros_on_huge_pages(num_rows, dim), 0, {ENTITY: range(num_rows)})

    @classmethod
    def of(cls, tables: Sequence[EntityTable], rows: Tensor, first_row: int) -> TableBlock:
        """Return the block that starts with the id ``first_row``."""
        stop = first_row + len(rows)
        return cls(rows, first_row, {t.name: t.within(first_row, stop) for t in tables})

    def __deepcopy__(self, memo: Any) -> TableBlock:
        return self  # TorchRec copies the settings of tables, and a block is one of them

    def rows_of(self, name: str) -> Tensor:
        """Return the rows of a table on this rank, a view."""
        part = self.parts[name]
        return self.rows[part.start : part.stop]

    def lookup(self, ids: Tensor) -> Tensor:
        """Look up rows of the block (M,) -> (M, D), as ``recorded_lookup``."""
        return recorded_lookup(self.read, ids, self.pending)

    def split(self, gradients: RowGradients) -> Iterator[tuple[str, RowGradients]]:
        """Yield the name of each table and the gradients of its rows, numbered from its first."""
        parts = [*self.parts.values()]
        yield from zip(self.parts, gradients.split(parts), strict=True)

    def take(self, name: str) -> RowGradients | None:
        """Return and forget the gradients of a table; None without a backward since its last."""
        if self.pending:
            self._taken = dict(self.split(self.pending.take()))
        return self._taken.pop(name, None)

    def clear(self) -> None:
        """Drop all gradients."""
        self.pending.clear()
        self._taken.clear()


def states_by_type(
    tables: Sequence[EntityTable],
    states: Sequence[dict[str, Tensor]],
    shard: EntityShard,
    ranks: Any,
) -> dict[str, DTensor]:
    """Describe optimizer states for a checkpoint: "type.state" -> (rows of the type, ...).

    Args:
        tables: All tables.
        states: States of each table's rows on this rank, by name.
        shard: The rows on this rank.
        ranks: The ranks, as for ``row_sharded``.
    """
    pieces: dict[str, list[tuple[Tensor, int]]] = {}
    totals = {}
    for table, own in zip(tables, states, strict=True):
        first = table.before + max(0, shard.first_row - table.ids.start)
        for name, state in own.items():
            key = f"{table.type}.{name}"
            pieces.setdefault(key, []).append((state, first))
            totals[key] = table.total
    return {key: row_sharded(own, totals[key], ranks) for key, own in pieces.items()}

"""Entity tables: one of all entities, or one per node type with an optimizer of its own.

Ids are contiguous per type, so the tables follow each other in one range of ids, [0, N).  The ranks
split this range as they split a single table: each holds one block of consecutive rows, of one
table or of several.  Exchange, ranking and export see blocks only.  Tables matter where rows get
their first values and where the optimizers step.

Extending a run appends ids, so a type may have several runs of ids.  Each run is a table for the
engine.  In a checkpoint the states of a type are one tensor, whose rows are numbered by entity.

Shapes: N entities, n rows on this rank, D elements per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kge_torchrec.distributed.processes import Rows
from kge_torchrec.embeddings.backend import ENTITY, ENTITY_WEIGHT, EntityShard
from kge_torchrec.embeddings.init import EntityInit, zeros_on_huge_pages
from kge_torchrec.embeddings.optimizers import TableOptimizer
from kge_torchrec.embeddings.row_gradients import TableBlock


@dataclass(frozen=True)
class EntityTable:
    """Consecutive entities of one type.

    Args:
        ids: Their ids.
        optimizer: Optimizer of their rows.
        init: Distribution of their initial values.
        name: The name for TorchRec.
        type: Label of the node type, or ENTITY where types have no tables.
    """

    ids: range
    optimizer: TableOptimizer
    init: EntityInit
    name: str = ENTITY
    type: str = ENTITY

    @classmethod
    def of_all(cls, num_entities: int, optimizer: TableOptimizer, init: EntityInit) -> EntityTable:
        """Return the table of all entities, for a graph whose types have no tables."""
        return cls(range(num_entities), optimizer, init)

    def within(self, start: int, stop: int) -> range:
        """Return which rows of the block [start, stop) of ids are of this table, from 0."""
        low = min(max(self.ids.start, start), stop)
        return range(low - start, max(low, min(self.ids.stop, stop)) - start)


def block_of_one(num_rows: int, dim: int) -> TableBlock:
    """Return the block of the single table ENTITY, with rows of zeros."""
    return TableBlock(zeros_on_huge_pages(num_rows, dim), 0, {ENTITY: range(num_rows)})


def block_of(tables: Sequence[EntityTable], rows: Tensor, first_row: int) -> TableBlock:
    """Return the block of the tables' rows on this rank, which starts with the id ``first_row``."""
    stop = first_row + len(rows)
    return TableBlock(rows, first_row, {t.name: t.within(first_row, stop) for t in tables})


def rows_of_tables(
    tables: Sequence[EntityTable], states: Sequence[dict[str, Tensor]], shard: EntityShard
) -> list[Rows]:
    """Return this rank's rows of the table and of its optimizer's states, for a checkpoint.

    Args:
        tables: All tables.
        states: States of each table's rows on this rank, by name.
        shard: The rows on this rank.
    """
    rows = [Rows(f"model.{ENTITY_WEIGHT}", shard.rows, shard.first_row)]
    for table, own in zip(tables, states, strict=True):
        first = max(table.ids.start, shard.first_row)
        rows += [
            Rows(f"optimizer.{ENTITY_WEIGHT}.{table.type}.{name}", state, first)
            for name, state in own.items()
        ]
    return rows

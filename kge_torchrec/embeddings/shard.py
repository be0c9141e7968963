"""A rank's rows of the entity table: values, optimizer states, pending gradients and steps.

Both engines keep rows in a ``TableShard``.  It does not step inside backward: all backward passes
before a step form one sum, so accumulation, clipping and unscaling are exact.

The entities have one table, or one per node type with an optimizer of its own.  Ids are contiguous
per type, so tables follow each other in one range of ids, [0, N), which is split over the ranks.
Extending a run appends ids, so a type may have several runs of ids, each a table here.  In a
checkpoint the states of a type are one tensor, whose rows are numbered by entity.

Shapes: N entities, n rows on this rank, D elements per row, M gradients, U distinct rows among
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from kge_torchrec.data import ENTITY
from kge_torchrec.distributed.processes import Rows, rows_by_rank
from kge_torchrec.embeddings.entity_shard import ENTITY_WEIGHT, EntityShard
from kge_torchrec.embeddings.init import EntityInit, zeros_on_huge_pages
from kge_torchrec.embeddings.optimizers import RowOptimizer
from kge_torchrec.embeddings.row_gradients import RowGradients, TableRows
from kge_torchrec.tables import amount


@dataclass(frozen=True)
class EntityTable:
    """Consecutive entities of one type.

    Args:
        ids: Their ids.
        optimizer: Optimizer of their rows.
        init: Distribution of their initial values.
        type: Label of the node type, or ENTITY where types have no tables.
    """

    ids: range
    optimizer: RowOptimizer
    init: EntityInit
    type: str = ENTITY

    @classmethod
    def of_all(cls, num_entities: int, optimizer: RowOptimizer, init: EntityInit) -> EntityTable:
        """Return the table of all entities, for a graph whose types have no tables."""
        return cls(range(num_entities), optimizer, init)

    def within(self, start: int, stop: int) -> range:
        """Return which rows of the block [start, stop) of ids are of this table, from 0."""
        low = min(max(self.ids.start, start), stop)
        return range(low - start, max(low, min(self.ids.stop, stop)) - start)


def describe_rows(tables: Sequence[EntityTable], ranks: int, dim: int, kind: str) -> str:
    """Describe the rows of D elements of each table on each rank, and their bytes with states.

    Args:
        tables: All tables.
        ranks: Number of ranks.
        dim: D.
        kind: What keeps the rows, in words.
    """
    blocks, lines = rows_by_rank(tables[-1].ids.stop, ranks), []
    for table in tables:
        row_bytes = 4 * dim + sum(
            getattr(torch, state.dtype).itemsize * (1 if state.by_row else dim)
            for state in table.optimizer.states
        )
        where = "one rank" if ranks == 1 else f"{ranks} ranks"
        lines.append(f"entities.{table.type}: by rows on {where}, {kind}")
        counts = (len(table.within(block.start, block.stop)) for block in blocks)
        for count, same in groupby(enumerate(counts), lambda rank: rank[1]):
            first, *others = [rank for rank, _ in same]
            name = f"ranks {first}-{others[-1]}" if others else f"rank {first}"
            lines.append(f"  {name}: {count:,} rows x {dim}, {amount(count * row_bytes)} each")
    return "\n".join(lines)


class TableShard:
    """This rank's rows of the tables, and everything that a step changes.

    Args:
        tables: All tables, in order of ids.
        rows: (n, D), the memory of the rows.
        first_row: Id of ``rows[0]``.
        optimizers: Optimizer of each table's rows on this rank, with their states.

    Attributes:
        param_groups: Of each table, as an optimizer's; the next step uses their "lr".
        gradients: Those of each backward pass since the last step.
        frozen: (n,) bool or None.  Gradients of frozen rows are dropped, so no step changes these
            rows or their state.
        read: Returns rows (M,) -> (M, D), a copy.
    """

    def __init__(
        self,
        tables: Sequence[EntityTable],
        rows: Tensor,
        first_row: int,
        optimizers: Sequence[Any],
    ):
        self.tables, self.rows, self.first_row = tables, rows, first_row
        self.optimizers = optimizers
        self.parts = [table.within(first_row, first_row + len(rows)) for table in tables]
        self.param_groups: list[dict[str, Any]] = [{"lr": t.optimizer.lr} for t in tables]
        self.gradients: list[RowGradients] = []
        self.frozen: Tensor | None = None
        self.read: Callable[[Tensor], Tensor] = partial(rows.index_select, 0)
        self.in_main_memory = False
        # A thread that takes the steps, if they have one; and the step under way.
        in_background = any(table.optimizer.in_background for table in tables)
        self._thread = ThreadPoolExecutor(1, "table-step") if in_background else None
        self._under_way: Future[None] | None = None
        # Autograd calls our backward only if an input requires a gradient.
        self.anchor = torch.empty(0, device=rows.device, requires_grad=True)

    @classmethod
    def of(
        cls,
        tables: Sequence[EntityTable],
        dim: int,
        ids: range,
        device: torch.device | str = "cpu",
    ) -> TableShard:
        """Return the rows of some ids, (n, D) of zeros, with their optimizers."""
        rows = zeros_on_huge_pages(len(ids), dim, device=device)
        parts = [table.within(ids.start, ids.stop) for table in tables]
        optimizers = [
            TableRows(table.optimizer, rows[part.start : part.stop])
            for table, part in zip(tables, parts, strict=True)
        ]
        return cls(tables, rows, ids.start, optimizers)

    def shard(self) -> EntityShard:
        """Return a view of the rows after the last finished step."""
        self.join()
        num_entities = self.tables[-1].ids.stop
        return EntityShard(
            self.rows, self.first_row, num_entities, in_main_memory=self.in_main_memory
        )

    def state(self) -> list[Rows]:
        """Return the rows and their states for a checkpoint; loading writes into them."""
        shard = self.shard()
        rows = [Rows(f"model.{ENTITY_WEIGHT}", shard.rows, shard.first_row)]
        for table, optimizer in zip(self.tables, self.optimizers, strict=True):
            first = max(table.ids.start, shard.first_row)
            rows += [
                Rows(f"optimizer.{ENTITY_WEIGHT}.{table.type}.{name}", state, first)
                for name, state in optimizer.states.items()
            ]
        return rows

    def lookup(self, ids: Tensor) -> Tensor:
        """Look up rows (M,) -> (M, D), a copy; backward adds their gradients, if they are enabled.

        Raises:
            IndexError: An id is outside [0, n).  On CUDA this is a device-side assertion instead.
        """
        self.join()
        rows: Tensor = _RecordedLookup.apply(self.anchor, self, ids)
        return rows

    def add(self, gradients: RowGradients) -> None:
        """Keep the gradients of one backward pass.  M may be 0."""
        if self.frozen is not None:
            gradients = gradients.without(self.frozen)
        self.gradients.append(gradients)

    def take(self) -> RowGradients | None:
        """Return and forget the gradients; None without a backward since the last ones."""
        parts, self.gradients = self.gradients, []
        if len(parts) > 1:
            ids, grad, places, _ = zip(*parts, strict=True)
            every_place = None if places[0] is None else torch.cat(places)
            return RowGradients(torch.cat(ids), torch.cat(grad), every_place, False)
        return parts[0] if parts else None

    @torch.no_grad()
    def sums(self) -> Tensor:
        """Sum the gradients of each row and return the sums, (U, D).

        The sums are divided by the row's occurrences if these are counted.  The next step uses the
        returned tensor, so changes to it (such as clipping) take effect.
        """
        gradients = self.take()
        if gradients is None:
            return torch.zeros(0, 0)
        sums = gradients.summed()
        if sums.grad is gradients.grad:
            sums = sums._replace(grad=sums.grad.clone())  # autograd may share this memory
        self.gradients = [sums]
        return sums.grad

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients since the last step."""
        self.gradients.clear()

    def step(self) -> None:
        """Step with the sum of all gradients since the last step, if there was a backward."""
        gradients, rates = self.take(), [group["lr"] for group in self.param_groups]
        if gradients is None:
            return
        if self._thread is None:
            self.update(gradients, rates)
        else:
            self.join()
            self._under_way = self._thread.submit(self.update, gradients, rates)

    def step_rows(self, gradients: Iterable[RowGradients]) -> None:
        """Take one step with gradients of rows, without a lookup.

        The whole call counts as one step, also on ranks without rows.  Call
        ``optimizer.zero_grad()`` before it, so that FBGEMM's table gets its current learning rate.

        Args:
            gradients: Parts that together hold each row at most once, already summed over all
                ranks.  A part is used before the next one is requested, so a generator keeps only
                one part in memory.  The call is collective if iterating over ``gradients`` is.
        """
        self.join()
        for optimizer, group in zip(self.optimizers, self.param_groups, strict=True):
            optimizer.lr = group["lr"]
            optimizer.count(bool(len(optimizer.rows)))
        for part in gradients:
            kept = part if self.frozen is None else part.without(self.frozen)
            for optimizer, own in zip(self.optimizers, kept.split(self.parts), strict=True):
                optimizer.step_part(own)

    @torch.no_grad()
    def update(self, gradients: RowGradients, rates: Sequence[float]) -> None:
        """Run each table's optimizer with its learning rate."""
        parts = gradients.split(self.parts)
        for optimizer, own, rate in zip(self.optimizers, parts, rates, strict=True):
            optimizer.lr = rate
            optimizer.count(bool(len(own.ids)))
            optimizer.step_part(own)

    @property
    def steps(self) -> int:
        """The number of steps on this rank; with preset dicee, only those that had gradients."""
        return max(optimizer.steps for optimizer in self.optimizers)

    @steps.setter
    def steps(self, steps: int) -> None:
        for optimizer in self.optimizers:
            optimizer.steps = steps

    def join(self) -> None:
        """Wait for the step in the thread and raise its exception, if any."""
        step, self._under_way = self._under_way, None
        if step is not None:
            step.result()


class _RecordedLookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, shard: TableShard, ids: Tensor) -> Tensor:
        ctx.shard = shard
        ctx.save_for_backward(ids)
        return shard.read(ids)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        (ids,) = ctx.saved_tensors
        ctx.shard.add(RowGradients(ids, grad))
        return None, None, None

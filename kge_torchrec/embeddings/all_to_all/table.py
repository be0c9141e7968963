"""The hand-rolled entity table: all_to_all moves rows from their owners and gradients to them.

    route     on the host: group the ids of a batch by owner and exchange their counts
    forward   send ids to the owners, receive rows
    backward  send gradients to the owners, which keep them until ``step``
    step      run the sparse optimizer on the rows that got a gradient, optionally in a thread

Every rank takes part in every exchange, with or without ids and rows.  The scheme is that of
TorchFSDPTrainer in dice-embeddings, which sends every duplicate; here batches are de-duplicated.

Shapes: N rows of the table, n of them on this rank, D elements per row, M ids of this rank's batch,
R ids requested from this rank, W ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kge_torchrec.data.batches import Pipelineable, SampledBatch
from kge_torchrec.distributed.processes import Processes
from kge_torchrec.embeddings.all_to_all.sparse_optimizer import SparseOptimizer
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.embeddings.exchange import exchanged
from kge_torchrec.embeddings.init import zeros_on_huge_pages
from kge_torchrec.embeddings.row_gradients import RowGradients
from kge_torchrec.embeddings.tables import EntityTable, block_of


class _Lookup(torch.autograd.Function):
    """Fetches rows in forward; sends their gradients to the owners in backward."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, table: HandrolledTable, route: Route) -> Tensor:
        rows, ctx.requests = table.fetch(route)
        ctx.table, ctx.route = table, route
        return rows

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        ctx.table.return_gradients(grad, ctx.route, ctx.requests)
        return None, None, None


class HandrolledTable(nn.Module):
    """This rank's rows of an (N, D) table, and their optimizer.

    ``table(route)`` is (M, D), in the order of the ids.  Gradients are divided by W, as in
    TorchRec: each rank's loss is W times its share of the global mean.

    Args:
        tables: The entity tables; a rank's rows of all of them are one block.
        dim: D.
        preset: The system whose optimizer they imitate, see ``sparse_optimizer``.
        processes: The ranks of the run.
        exchange_dtype: What rows and gradients travel as between ranks.
    """

    def __init__(
        self,
        tables: Sequence[EntityTable],
        dim: int,
        preset: str,
        processes: Processes,
        exchange_dtype: str = "fp32",
    ) -> None:
        super().__init__()
        self._exchange_dtype = exchange_dtype
        num_entities = tables[-1].ids.stop
        self.ranges = RowRanges(num_entities, processes.world_size)
        start, stop = self.ranges.range_of(processes.rank)
        self.group = processes.group
        rows = zeros_on_huge_pages(stop - start, dim, device=processes.device)
        self._shard = EntityShard(rows, start, num_entities)
        self.block = block_of(tables, rows, start)
        self.optimizers = {
            table.name: SparseOptimizer(table.optimizer, preset, self.block.rows_of(table.name))
            for table in tables
        }
        self.rate = 1.0  # times all learning rates; a step that runs in the thread keeps its own
        self.counts_places = preset == "dgl"
        self._updates = Background() if preset == "dicee" else None
        # Autograd calls our backward only if an input requires a gradient.
        self._anchor = torch.empty(0, device=processes.device, requires_grad=True)

    def shard(self) -> EntityShard:
        """Wait for the running step, then return the rows."""
        self.join()
        return self._shard

    def route(self, batch: SampledBatch) -> Route:
        """Return the route of the ids of a batch that is still on the CPU.  Collective."""
        ids: Tensor = batch.ids
        places = None
        if self.counts_places:
            places = torch.ones_like(ids)
            if batch.deduplicated:
                places = torch.bincount(batch.entities, minlength=ids.numel())
                if batch.bags is not None:  # a feature occurs where its entities do
                    places.index_add_(0, batch.bags.row, places[batch.bags.place])
        ways = self.ranges, self.group
        return make_route(ids, *ways, distinct=batch.deduplicated, occurrences=places)

    def forward(self, route: Route) -> Tensor:
        """Look up the rows of a route, (M, D)."""
        rows: Tensor = _Lookup.apply(self._anchor, self, route)
        return rows

    def fetch(self, route: Route) -> tuple[Tensor, Tensor]:
        """Fetch the rows of the ids from their owners.  Collective.

        Returns:
            The rows (M, D), and the requests to this rank: (R, 1), rows of this shard, or (R, 2),
            rows and their occurrences.
        """
        columns = [route.ids, route.occurrences] if self.counts_places else [route.ids]
        requests = self._exchange(torch.stack(columns, dim=1), route.send, route.receive)
        requests[:, 0] -= self._shard.first_row
        self.join()  # waiting only here overlaps the exchange of ids with the previous step
        rows = self._shard.rows.index_select(0, requests[:, 0])
        rows = self._exchange(rows, route.receive, route.send, self._exchange_dtype)
        return rows, requests

    def return_gradients(self, grad: Tensor, route: Route, requests: Tensor) -> None:
        """Send the gradients (M, D) of fetched rows to their owners for the next step.

        Collective.
        """
        dtype = self._exchange_dtype
        arrived = self._exchange(grad.contiguous(), route.send, route.receive, dtype, True)
        if self.ranges.world_size > 1:
            arrived.div_(self.ranges.world_size)
        places = requests[:, 1] if self.counts_places else None
        distinct = route.distinct and self.ranges.world_size == 1
        self.block.add(RowGradients(requests[:, 0], arrived, places, distinct))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that no step has used."""
        self.block.gradients.clear()

    def step(self) -> None:
        """Step with the sum of all gradients since the last step, if there was a backward."""
        gradients, rate = self.block.take(), self.rate
        if gradients is None:
            return
        if self._updates is None:
            self.update(gradients, rate)
        else:
            self._updates.start(lambda: self.update(gradients, rate))

    def step_rows(self, gradients: Iterable[RowGradients]) -> None:
        """Take one step with gradients of this rank's rows, each row once, without a lookup."""
        self.join()
        self._set_rates(self.rate)
        for optimizer in self.optimizers.values():
            optimizer.count(bool(len(optimizer.rows)))
        for part in gradients:
            for name, own in part.without(self.block.frozen).split(self.block.parts):
                self.optimizers[name].step_part(own)

    @torch.no_grad()
    def update(self, gradients: RowGradients, rate: float) -> None:
        """Run the sparse optimizers with a factor of their learning rates."""
        self._set_rates(rate)
        for name, own in gradients.split(self.block.parts):
            self.optimizers[name].step(*own)

    def _set_rates(self, rate: float) -> None:
        for optimizer in self.optimizers.values():
            optimizer.lr = optimizer.optimizer.lr * rate

    def join(self) -> None:
        """Wait for the step in the thread and raise its exception, if any."""
        if self._updates is not None:
            self._updates.join()

    def _exchange(
        self,
        rows: Tensor,
        send: list[int],
        receive: list[int],
        dtype: str = "fp32",
        gradients: bool = False,
    ) -> Tensor:
        """Return ``exchanged`` rows, or those of a single rank as they are."""
        if self.ranges.world_size == 1:
            return rows
        return exchanged(rows, send, receive, self.group, dtype, gradients)


@dataclass(frozen=True)
class RowRanges:
    """A split of N rows into W contiguous ranges whose lengths differ by at most one.

    With N < W some ranges are empty.
    """

    num_rows: int
    world_size: int

    def range_of(self, rank: int) -> tuple[int, int]:
        """Return the rows [start, stop) of a rank."""
        start, stop = (self.num_rows * r // self.world_size for r in (rank, rank + 1))
        return start, stop

    def starts(self) -> Tensor:
        """Return (W,) the first row of each rank.  An empty rank starts where the next one does."""
        return torch.tensor([self.range_of(rank)[0] for rank in range(self.world_size)])


@dataclass
class Route(Pipelineable):
    """The ids of a batch, which are grouped by owner, with the counts of the exchange.

    The host makes the route before the batch moves to its device.  Exchanges therefore need no
    counts from the device, which would force a synchronization.
    """

    ids: Tensor  # (M,) ascending
    occurrences: Tensor  # (M,) batch positions that each id stands for; empty: not needed
    send: list[int]  # (W,) number of ids to each rank
    receive: list[int]  # (W,) number of ids from each rank; they sum to R
    distinct: bool  # whether every id occurs only once in ``ids``


_NOTHING = torch.empty(0, dtype=torch.int64)


def make_route(
    ids: Tensor,
    ranges: RowRanges,
    group: dist.ProcessGroup | None,
    *,
    distinct: bool,
    occurrences: Tensor | None = None,
) -> Route:
    """Make the route of ids.  Collective if there are several ranks.

    Args:
        ids: (M,) ascending, on the CPU; M may be 0.
        ranges: The rows of each rank.
        group: The ranks; None only for a single rank.
        distinct: Whether every id occurs only once.
        occurrences: (M,) batch positions that each id stands for, if they are counted.
    """
    places = _NOTHING if occurrences is None else occurrences
    if ranges.world_size == 1:
        count = [ids.numel()]
        return Route(ids, places, count, count, distinct)
    below = torch.searchsorted(ids, ranges.starts())
    counts = torch.diff(below, append=torch.tensor([ids.numel()]))
    requested = torch.empty_like(counts)
    dist.all_to_all_single(requested, counts, group=group)
    return Route(ids, places, counts.tolist(), requested.tolist(), distinct)


class Background:
    """A thread that runs one task at a time.  ``join`` raises the exception of the task."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="table-step")
        self._work: Future[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Wait for the previous task (and raise its exception), then run ``work`` in the thread."""
        self.join()
        self._work = self._threads.submit(work)

    def join(self) -> None:
        """Wait for the running task and raise its exception, if any."""
        work, self._work = self._work, None
        if work is not None:
            work.result()

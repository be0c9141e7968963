"""The entity table by hand: rows fetched from their owners and gradients sent home by all_to_all.

    forward   counts, ids to their owners, rows back
    backward  gradients to the owners, kept until ``step``
    step      the sparse optimizer on the rows that got a gradient

Every rank takes part in every exchange, with or without ids and rows.  The scheme is that of
dice-embeddings' TorchFSDPTrainer, which sends every duplicate; here batches are de-duplicated
unless entities.deduplicate is false.

Shapes: n rows on this rank, D numbers a row, M ids of this rank's batch, R ids asked of this rank,
W ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedJaggedTensor

from kge_torchrec.data.batches import Batch
from kge_torchrec.entities.contract import ENTITY, EntityShard
from kge_torchrec.entities.handrolled.background import Background
from kge_torchrec.entities.handrolled.options import SparseOptions
from kge_torchrec.entities.handrolled.routing import Route, RowRanges, make_route
from kge_torchrec.entities.handrolled.sparse_optimizer import SparseOptimizer
from kge_torchrec.entities.huge_pages import zeros_on_huge_pages
from kge_torchrec.entities.row_gradients import PendingGradients, RowGradients
from kge_torchrec.entities.table_optimizer import TableOptimizer
from kge_torchrec.parallel.processes import Processes


class _Lookup(torch.autograd.Function):
    """Rows in forward; in backward their gradients travel to the owners."""

    @staticmethod
    def forward(ctx, anchor: Tensor, table: HandrolledTable, route: Route) -> Tensor:
        rows, ctx.asked = table.fetch(route)
        ctx.table, ctx.route = table, route
        return rows

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        ctx.table.send_home(grad, ctx.route, ctx.asked)
        return None, None, None


class HandrolledTable(nn.Module):
    """This rank's rows of an (N, D) table and the optimizer that steps them.

    Called like an EmbeddingCollection: ``table(ids)[ENTITY].values()`` is (M, D), in the order of
    the ids.  Gradients are divided by W, as TorchRec does, so that a loss of W times a rank's
    share of the global mean gives the global gradient.
    """

    def __init__(
        self,
        num_entities: int,
        dim: int,
        optimizer: TableOptimizer,
        options: SparseOptions,
        processes: Processes,
    ) -> None:
        super().__init__()
        self.ranges = RowRanges(num_entities, processes.world_size)
        start, stop = self.ranges.range_of(processes.rank)
        self.group = processes.group
        rows = zeros_on_huge_pages(stop - start, dim, device=processes.device)
        self._shard = EntityShard(rows, start, num_entities)
        self.optimizer = SparseOptimizer(optimizer, options, rows, start)
        self.lr = optimizer.lr  # of the next step; one under way in the thread keeps its own
        self.counts_places = options.duplicates == "mean"
        self._updates = Background() if options.async_step else None
        self.pending = PendingGradients()
        # makes autograd call our backward
        self._anchor = torch.empty(0, device=processes.device, requires_grad=True)

    def shard(self) -> EntityShard:
        """The rows, once the step under way is done."""
        self.join()
        return self._shard

    def route(self, batch: Batch) -> Route:
        """Where the ids of a batch, still on the CPU, go.  Collective."""
        ids, places = batch.ids.values(), None
        if self.counts_places:
            places = torch.ones_like(ids)
            if batch.deduplicated:
                places = torch.bincount(batch.entities, minlength=ids.numel())
        return self._route(ids, batch.deduplicated, places)

    def forward(self, ids: KeyedJaggedTensor | Route) -> dict[str, JaggedTensor]:
        """Rows of the ids, given as a route or (any ids, any order) as the feature ENTITY."""
        if isinstance(ids, KeyedJaggedTensor):
            values = ids.values().cpu()
            places = torch.ones_like(values) if self.counts_places else None
            ids = self._route(values, False, places).to(self._shard.rows.device)
        if torch.is_grad_enabled():
            rows = _Lookup.apply(self._anchor, self, ids)
        else:
            rows, _ = self.fetch(ids)
        return {ENTITY: JaggedTensor(rows, lengths=ids.ids.new_tensor([rows.shape[0]]))}

    def fetch(self, route: Route) -> tuple[Tensor, Tensor]:
        """(M, D) rows of the ids; and what was asked of this rank.

        That is (R, 1), rows of this shard, or (R, 2), with the places each of them stands for.
        """
        wanted = [route.ids, route.occurrences] if self.counts_places else [route.ids]
        asked = self._exchange(torch.stack(wanted, dim=1), route.send, route.receive)
        asked[:, 0] -= self._shard.first_row
        self.join()  # the ids travel while the last step ends; rows are read after it
        rows = self._shard.rows.index_select(0, asked[:, 0])
        rows = self._exchange(rows, route.receive, route.send)
        if route.order.numel():
            rows = torch.empty_like(rows).index_copy_(0, route.order, rows)
        return rows, asked

    def send_home(self, grad: Tensor, route: Route, asked: Tensor) -> None:
        """Sends the gradients (M, D) of fetched rows to their owners, for the next step."""
        if route.order.numel():
            grad = grad.index_select(0, route.order)
        arrived = self._exchange(grad.contiguous(), route.send, route.receive)
        if self.ranges.world_size > 1:
            arrived.div_(self.ranges.world_size)
        places = asked[:, 1] if self.counts_places else None
        distinct = route.distinct and self.ranges.world_size == 1
        self.pending.add(RowGradients(asked[:, 0], arrived, places, distinct))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets gradients that no step has used."""
        self.pending.clear()

    def step(self) -> None:
        """Steps the rows that got gradients since the last step, all of them as one sum."""
        if not self.pending:
            return
        gradients, lr = self.pending.take(), self.lr
        if self._updates is None:
            self.update(gradients, lr)
        else:
            self._updates.start(lambda: self.update(gradients, lr))

    def step_rows(self, gradients: Iterable[RowGradients]) -> None:
        """One step with gradients of this rank's rows, each row once, that no lookup brought."""
        self.join()
        self.optimizer.lr = self.lr
        self.optimizer.step_parts(gradients)

    @torch.no_grad()
    def update(self, gradients: RowGradients, lr: float) -> None:
        """The sparse optimizer's step."""
        self.optimizer.lr = lr
        self.optimizer.step(*gradients)

    def join(self) -> None:
        """Waits for the step that runs in the thread; raises what it raised."""
        if self._updates is not None:
            self._updates.join()

    def _route(self, ids: Tensor, ascending: bool, places: Tensor | None) -> Route:
        return make_route(ids, self.ranges, self.group, ascending=ascending, occurrences=places)

    def _exchange(self, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Rows in runs of ``send`` by rank -> rows in runs of ``receive`` by rank."""
        if self.ranges.world_size == 1:
            return rows
        arrived = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows, receive, send, group=self.group)
        return arrived

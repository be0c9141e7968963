"""The hand-rolled backend: all_to_all moves rows from their owners and gradients to them.

    route     on the host: group the ids of a batch by owner and exchange their counts
    forward   send ids to the owners, receive rows
    backward  send gradients to the owners, which keep them until ``step``

The scheme is that of TorchFSDPTrainer in dice-embeddings, with de-duplicated batches.

Shapes: N rows of the table, n of them on this rank, D elements per row, M ids of this rank's batch,
R ids requested from this rank, W ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kge_torchrec.config import Config
from kge_torchrec.data.batches import Pipelineable, SampledBatch
from kge_torchrec.distributed.dense import dense_wrapper
from kge_torchrec.distributed.processes import Processes, rows_by_rank
from kge_torchrec.embeddings.backend import EmbeddingBackend, StepBoth
from kge_torchrec.embeddings.exchange import exchanged
from kge_torchrec.embeddings.row_gradients import RowGradients
from kge_torchrec.embeddings.shard import EntityTable, TableShard, describe_rows
from kge_torchrec.models.model import KGEModel, Objective

DenseOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class HandrolledBackend(EmbeddingBackend):
    """A backend whose lookups are a ``HandrolledLookup``."""

    def __init__(
        self,
        config: Config,
        tables: Sequence[EntityTable],
        objective: Objective,
        dense_optimizer: DenseOptimizer,
        processes: Processes,
    ):
        entities, num_rows = config.entities, tables[-1].ids.stop
        self.dense = dense_wrapper(config.dense, processes)
        ranges = rows_by_rank(num_rows, processes.world_size)
        own = ranges[processes.rank]
        self.table = TableShard.of(tables, objective.scorer.row_dim, own, processes.device)
        self.pending = self.table
        self.fill_rows(config.seed)
        objective = objective.to(processes.device)
        self.lookup = HandrolledLookup(
            self.table, ranges, processes.group, entities.exchange.dtype, entities.preset == "dgl"
        )
        self.unwrapped_model = KGEModel(self.lookup, objective, config.train.precision == "fp16")
        self.scorer = objective.scorer
        self.model = self.dense.wrap(self.unwrapped_model)
        self.dense_optimizer = dense_optimizer(list(self.unwrapped_model.parameters()))
        self.optimizer = StepBoth(self.table, self.dense_optimizer)
        table = describe_rows(tables, processes.world_size, objective.scorer.row_dim, "hand-rolled")
        self.layout = f"{table}\ndense parameters: {self.dense.title}"

    def prepare(self, batch: SampledBatch) -> SampledBatch:
        """Replace the ids by their route while they are on the host.  Collective."""
        return replace(batch, ids=self.lookup.route(batch))


class HandrolledLookup(nn.Module):
    """Looks up rows on their ranks: ``lookup(route)`` is (M, D), in the order of the ids.

    Gradients are divided by W, as in TorchRec: each rank's loss is W times its share of the global
    mean.

    Args:
        table: This rank's rows.
        ranges: Rows of each rank.
        group: The ranks.
        exchange_dtype: What rows and gradients travel as between ranks.
        counts_places: Whether requests say how many batch positions each id stands for.
    """

    def __init__(
        self,
        table: TableShard,
        ranges: Sequence[range],
        group: dist.ProcessGroup,
        exchange_dtype: str = "fp32",
        counts_places: bool = False,
    ) -> None:
        super().__init__()
        self.table, self.ranges, self.group = table, ranges, group
        self.exchange_dtype, self.counts_places = exchange_dtype, counts_places

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
        rows: Tensor = _Lookup.apply(self.table.anchor, self, route)
        return rows


class _Lookup(torch.autograd.Function):
    """Fetches rows (M, D) from their owners; sends their gradients back for the next step.

    The requests to this rank are (R, 1), rows of this shard, or (R, 2), rows and their occurrences.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, lookup: HandrolledLookup, route: Route) -> Tensor:
        table, group = lookup.table, lookup.group
        columns = [route.ids, route.occurrences] if lookup.counts_places else [route.ids]
        requests = exchanged(torch.stack(columns, dim=1), route.send, route.receive, group)
        requests[:, 0] -= table.first_row
        table.join()  # waiting only here overlaps the exchange of ids with the previous step
        rows = table.read(requests[:, 0])
        ctx.lookup, ctx.route, ctx.requests = lookup, route, requests
        return exchanged(rows, route.receive, route.send, group, lookup.exchange_dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        lookup, route, requests = ctx.lookup, ctx.route, ctx.requests
        ways = route.send, route.receive, lookup.group
        arrived = exchanged(grad.contiguous(), *ways, lookup.exchange_dtype, gradients=True)
        ranks = len(lookup.ranges)
        if ranks > 1:
            arrived.div_(ranks)
        places = requests[:, 1] if lookup.counts_places else None
        distinct = route.distinct and ranks == 1
        lookup.table.add(RowGradients(requests[:, 0], arrived, places, distinct))
        return None, None, None


@dataclass
class Route(Pipelineable):
    """The ids of a batch, grouped by owner, and the counts of the exchange, from the host.

    Counts from the device would force a synchronization.
    """

    ids: Tensor  # (M,) ascending
    occurrences: Tensor  # (M,) batch positions that each id stands for; empty: not needed
    send: list[int]  # (W,) number of ids to each rank
    receive: list[int]  # (W,) number of ids from each rank; they sum to R
    distinct: bool  # whether every id occurs only once in ``ids``


_NOTHING = torch.empty(0, dtype=torch.int64)


def make_route(
    ids: Tensor,
    ranges: Sequence[range],
    group: dist.ProcessGroup | None,
    *,
    distinct: bool,
    occurrences: Tensor | None = None,
) -> Route:
    """Make the route of ids (M,), ascending and on the CPU.  Collective if there are several ranks.

    ``ranges`` are the rows of each rank.  A single rank needs no group.
    """
    places = _NOTHING if occurrences is None else occurrences
    if len(ranges) == 1:
        count = [ids.numel()]
        return Route(ids, places, count, count, distinct)
    below = torch.searchsorted(ids, torch.tensor([rows.start for rows in ranges]))
    counts = torch.diff(below, append=torch.tensor([ids.numel()]))
    requested = torch.empty_like(counts)
    dist.all_to_all_single(requested, counts, group=group)
    return Route(ids, places, counts.tolist(), requested.tolist(), distinct)

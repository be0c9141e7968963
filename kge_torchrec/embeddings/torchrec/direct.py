"""A direct exchange of ids and rows between ranks on CPU, for one feature with ascending ids.

TorchRec supports any number of features: it sorts ids into buckets, sends the counts per bucket and
per bag, and permutes the results by feature and rank.  Ascending ids of one feature are already
grouped by owner.  The direct exchange needs one collective each for counts, ids, rows and
gradients.  TorchRec's objects, logging and permutations took a twelfth of a 20 ms step.

Shapes: N rows of the table, W ranks, M ids of this rank's batch, R ids requested from this rank, D
elements per row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.dist_data import KJTAllToAllTensorsAwaitable
from torchrec.distributed.embedding_sharding import BaseSparseFeaturesDist
from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingDist
from torchrec.distributed.sharding.sequence_sharding import SequenceShardingContext
from torchrec.distributed.types import Awaitable, NoWait

from kge_torchrec.embeddings.backend import ENTITY


class DirectInputDist(BaseSparseFeaturesDist[KeyedJaggedTensor]):
    """Sends ids (M,), ascending and in one bag, to their owners as local row numbers.

    Args:
        group: The ranks.
        num_rows: N.  Every rank has ceil(N / W) rows, except the last ones, as in TorchRec.
    """

    def __init__(self, group: dist.ProcessGroup, num_rows: int):
        super().__init__()
        self._group, size = group, -(-num_rows // group.size())
        self._starts = torch.arange(1, group.size()) * size
        self._first_row = group.rank() * size

    def forward(self, sparse_features: KeyedJaggedTensor) -> Awaitable[Awaitable[Any]]:
        ids = sparse_features.values()
        ends = torch.searchsorted(ids, self._starts)
        none, count = ends.new_zeros(1), ends.new_full((1,), len(ids))
        return _Counts(ids, torch.diff(ends, prepend=none, append=count), self)


class _Counts(Awaitable[Awaitable[KeyedJaggedTensor]]):
    """The running exchange of the number of ids for each rank."""

    def __init__(self, ids: Tensor, counts: Tensor, way: DirectInputDist):
        super().__init__()
        self._ids, self._counts, self._way = ids, counts, way
        self._requested = torch.empty_like(counts)
        self._work = dist.all_to_all_single(
            self._requested, counts, group=way._group, async_op=True
        )

    def _wait_impl(self) -> _Ids:
        self._work.wait()
        return _Ids(self._ids, self._counts.tolist(), self._requested.tolist(), self._way)


class _Ids(KJTAllToAllTensorsAwaitable):
    """The running exchange of ids.

    TorchRec reads the split sizes of its base class, so this class sets them.
    """

    def __init__(self, ids: Tensor, send: list[int], receive: list[int], way: DirectInputDist):
        Awaitable.__init__(self)  # skips the base class's __init__, which would send lengths
        self._input_splits, self._output_splits = {"values": send}, {"values": receive}
        self._recat, self._stride_per_rank = None, None
        self._first_row, self._group, self._sent = way._first_row, way._group, ids
        self._requested = ids.new_empty(sum(receive))
        self._work = dist.all_to_all_single(
            self._requested, ids, receive, send, group=way._group, async_op=True
        )

    def _wait_impl(self) -> KeyedJaggedTensor:
        self._work.wait()
        rows = self._requested.sub_(self._first_row)
        count = len(rows)
        return KeyedJaggedTensor(
            [ENTITY], rows, lengths=torch.tensor([count]), stride=1,
            length_per_key=[count], offset_per_key=[0, count],
        )  # fmt: skip

    def exchange_rows(self, rows: Tensor) -> Tensor:
        """Send the requested rows (R, D) and return the rows (M, D) of this rank's ids."""
        send, receive = self._output_splits["values"], self._input_splits["values"]
        return _ExchangeRows.apply(rows, self._group, send, receive)


class DirectOutputDist(RwSequenceEmbeddingDist):
    """Sends rows to the ranks that requested them, and gradients back, on CPU for ascending ids.

    TorchRec also permutes both by feature and rank, which for a single feature is a plain copy.
    """

    def forward(
        self, local_embs: Tensor, sharding_ctx: SequenceShardingContext | None = None
    ) -> Awaitable[Tensor]:
        assert sharding_ctx is not None  # TorchRec always passes one here
        sizes = sharding_ctx.output_splits, sharding_ctx.input_splits
        return NoWait(_ExchangeRows.apply(local_embs, self._dist._pg, *sizes))


class _ExchangeRows(torch.autograd.Function):
    """Exchanges rows: (R, D) grouped by ``send`` sizes -> (M, D) grouped by ``receive`` sizes."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, group: dist.ProcessGroup, send: list[int], receive: list[int]
    ) -> Tensor:
        ctx.group, ctx.send, ctx.receive = group, send, receive
        arrived = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(arrived, rows, receive, send, group=group)
        return arrived

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        arrived = grad.new_empty(sum(ctx.send), grad.shape[1])
        dist.all_to_all_single(arrived, grad.contiguous(), ctx.send, ctx.receive, group=ctx.group)
        if get_gradient_division():
            arrived.div_(dist.get_world_size(ctx.group))
        return arrived, None, None, None

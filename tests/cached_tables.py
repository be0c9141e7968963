"""FBGEMM's table with a cache of rows on a GPU, imitated on a CPU by a cache of all rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torch.distributed import _remote_device
from torchrec.distributed import batched_embedding_kernel
from torchrec.distributed.planner.utils import placement
from torchrec.distributed.types import ShardingPlan
from training_runs import kernels_of_cuda

from kge_torchrec.config import Config
from kge_torchrec.data import ENTITY
from kge_torchrec.embeddings import torchrec
from kge_torchrec.embeddings.torchrec.planner import MODULE, Ranks, plan_rows

CACHED = {
    "entities__placement": "managed_caching",
    "entities__placement_options": {"cache_ratio": 0.25},
}


class CachedTable(SplitTableBatchedEmbeddingBagsCodegen):
    """A table whose main memory has what steps changed only after a flush, if it has a cache.

    Attributes:
        settings: What TorchRec made it with.
        calls: Counts of flushes and lookups.
    """

    tables: list[CachedTable] = []  # noqa: RUF012  # all that were made

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.settings, self.calls = settings, Counter()
        self._main = self.weights_host.detach().clone()
        self._caches = "cache_load_factor" in settings
        self._is_empty, self._in_flight = self._caches, False
        self.tables.append(self)

    def split_embedding_weights(self) -> list[Tensor]:
        if not self._caches:
            return super().split_embedding_weights()
        (rows, dim, *_), *_ = self.embedding_specs
        return [self._main.view(rows, dim)]

    def forward(self, *arguments: Any, **others: Any) -> Tensor:
        if self._is_empty:
            self.weights_host.data.copy_(self._main)
        self._is_empty = False
        self.calls["lookups"] += 1
        rows = super().forward(*arguments, **others)
        if rows.requires_grad:
            assert not self._in_flight, "a lookup may evict the rows of another before its backward"
            self._in_flight = True
            rows.register_hook(self._lands)
        return rows

    def _lands(self, _: Tensor) -> None:
        self._in_flight = False

    def flush(self) -> None:
        self.calls["flushes"] += 1
        if not self._is_empty:
            self._main.copy_(self.weights_host.data)

    def reset_cache_states(self) -> None:
        assert not self._in_flight, "backward would update places of the cache that are dropped"
        self._is_empty = self._caches


@contextmanager
def tables_with_a_cache() -> Iterator[list[CachedTable]]:
    """Within the block, runs of ``CACHED`` train on a CPU; yield their tables."""
    name = "SplitTableBatchedEmbeddingBagsCodegen"
    CachedTable.tables.clear()
    with ExitStack() as held:
        held.enter_context(kernels_of_cuda(True))
        held.enter_context(patch.object(batched_embedding_kernel, name, CachedTable))
        held.enter_context(patch.object(Config, "check_device", lambda self, on_cuda: None))
        held.enter_context(patch.object(torchrec, "plan_rows", _plan_of_gpus))
        yield CachedTable.tables


def _plan_of_gpus(
    collection: nn.Module, sharder: Any, tables: list, ranks: Ranks, **options: Any
) -> ShardingPlan:
    """Plan cached rows for GPUs; then place the shards on CPUs."""
    if "kernel" not in options:
        return plan_rows(collection, sharder, tables, ranks, **options)
    gpus = replace(ranks, device="cuda", device_bytes=1 << 60)
    plan = plan_rows(collection, sharder, tables, gpus, **options)
    table = plan.plan[MODULE][ENTITY]
    for rank, shard in zip(table.ranks, table.sharding_spec.shards, strict=True):
        shard.placement = _remote_device(placement("cpu", rank, ranks.per_host))
    return plan

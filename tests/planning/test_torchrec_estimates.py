"""Where TorchRec's own estimate of storage is wrong for this table, as docs/how-to/plan.md says.

A failure here means that TorchRec has changed and that the page, perhaps the planner, should.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec import optim as torchrec_optim
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import CacheParams
from torchrec.types import DataType

from kge_torchrec.embeddings.optimizers import TableOptimizer
from kge_torchrec.embeddings.torchrec.planner import (
    UNLIMITED,
    Bytes,
    TableForm,
    _topology,
    table_memory,
)
from kge_torchrec.embeddings.torchrec.settings import fused_params

ROWS, DIM, WORLD = 1_000_000, 128, 8
SHARD = ROWS // WORLD


def estimate(
    optimizer: str,
    kernel: str = "fused",
    *,
    stands_on_parameter: bool = True,
    data_type: DataType = DataType.FP32,
    sharding: str = "row_wise",
):
    """TorchRec's (hbm, ddr) bytes of rank 0, without ids and rows of a step."""
    model = nn.Module()
    table = EmbeddingConfig(
        name="entity",
        feature_names=["entity"],
        num_embeddings=ROWS,
        embedding_dim=DIM,
        data_type=data_type,
    )
    model.entities = EmbeddingCollection(tables=[table], device=torch.device("meta"))
    if stands_on_parameter:
        kind = {
            "adam": torchrec_optim.Adam,
            "rowwise_adagrad": torchrec_optim.RowWiseAdagrad,
        }[optimizer]
        model.entities.embeddings["entity"].weight._optimizer_classes = [kind]
    caching = CacheParams(load_factor=0.25) if kernel == "fused_uvm_caching" else None
    constraints = {
        "entity": ParameterConstraints(
            sharding_types=[sharding],
            compute_kernels=[kernel],
            pooling_factors=[0.0],
            cache_params=caching,
            min_partition=16,
        )
    }
    topology = _topology(WORLD, WORLD, "cuda", Bytes(UNLIMITED, UNLIMITED))
    sharder = EmbeddingCollectionSharder(fused_params=fused_params(TableOptimizer(optimizer)))
    options = EmbeddingEnumerator(topology, 1, constraints).enumerate(model, [sharder])
    storage = options[0].shards[0].storage
    return storage.hbm, storage.ddr


def ours(optimizer: str, kernel: str = "fused", value_bytes: int = 4, columns: int = DIM):
    rows = SHARD if columns == DIM else ROWS
    parts = table_memory(rows, columns, TableForm(optimizer, kernel, 0.25, value_bytes), True)
    return sum(p.device for p in parts.values()), sum(p.main for p in parts.values())


def test_estimates_agree_where_torchrec_is_right():
    assert estimate("adam") == ours("adam")


def test_state_is_counted_only_of_an_optimizer_on_the_parameter():
    assert estimate("adam", stands_on_parameter=False) == (SHARD * DIM * 4, 0)
    assert ours("adam") == (SHARD * DIM * 12, 0)


def test_state_of_16_bit_tables_is_counted_with_16_bits():
    assert estimate("adam", data_type=DataType.FP16) == (SHARD * DIM * 2 * 3, 0)
    assert ours("adam", value_bytes=2) == (SHARD * DIM * (2 + 8), 0)


def test_state_is_counted_in_the_cache():
    """TorchRec: values and state of a quarter of the rows; FBGEMM caches values."""
    hbm, ddr = estimate("adam", "fused_uvm_caching")
    assert hbm == pytest.approx(SHARD / 4 * DIM * 12 + SHARD * (4 + 0.25 * 16), rel=1e-3)
    device, main = ours("adam", "fused_uvm_caching")
    assert device == pytest.approx(SHARD / 4 * (DIM * 4 + 16) + SHARD * 4, rel=1e-3)
    assert ddr == main


def test_state_by_row_is_on_the_gpu_even_if_rows_are_not():
    hbm, ddr = estimate("rowwise_adagrad", "fused_uvm")
    assert (hbm, ddr) == (0, SHARD * (DIM * 4 + 4))
    assert ours("rowwise_adagrad", "fused_uvm") == (SHARD * 4, SHARD * DIM * 4)


def test_state_by_row_is_whole_in_every_split_of_the_columns():
    hbm, _ = estimate("rowwise_adagrad", sharding="column_wise")
    assert hbm == ROWS * 16 * 4 + ROWS * 16 * 4 // DIM
    assert ours("rowwise_adagrad", columns=16)[0] == ROWS * 16 * 4 + ROWS * 4


def test_gradients_of_a_replicated_table_are_not_counted():
    hbm, _ = estimate("adam", "dense", sharding="data_parallel")
    assert hbm == ROWS * DIM * 12

"""Bytes of shards: against the real CPU table, FBGEMM's layout and arithmetic."""

from __future__ import annotations

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import ComputeDevice, EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import construct_split_state

from kge_torchrec.config import OPTIMIZER_NAMES
from kge_torchrec.embeddings.init import EntityInit
from kge_torchrec.embeddings.optimizers import make_optimizer
from kge_torchrec.embeddings.shard import EntityTable, TableShard
from kge_torchrec.embeddings.torchrec.planner import (
    DENSE,
    UVM_CACHING,
    Bytes,
    TableForm,
    table_memory,
)
from kge_torchrec.embeddings.torchrec.sharder import fused_params


def table_of(optimizer: str, rows: int) -> EntityTable:
    return EntityTable.of_all(rows, make_optimizer(optimizer), EntityInit())


@pytest.mark.parametrize("optimizer", OPTIMIZER_NAMES)
@pytest.mark.parametrize("rows", [0, 1, 37])
def test_cpu_shard_estimate_matches_the_real_table(optimizer, rows):
    table = TableShard.of([table_of(optimizer, rows)], 12, range(rows))
    parts = table_memory(rows, 12, TableForm(optimizer), is_cuda=False)
    state = table.optimizers[0].states.values()
    assert parts["weights"] == Bytes(main=table.rows.numel() * 4)
    assert parts["optimizer state"] == Bytes(main=sum(s.numel() * 4 for s in state))
    assert parts.get("cache", Bytes()) == Bytes()


@pytest.mark.parametrize("kernel", ["fused", UVM_CACHING])
@pytest.mark.parametrize("optimizer", OPTIMIZER_NAMES)
def test_gpu_state_lies_where_fbgemm_puts_it(optimizer, kernel):
    """FBGEMM's own function says for each state how much is on the GPU and in main memory."""
    rows, dim = 1000, 20
    location = {
        "fused": EmbeddingLocation.DEVICE,
        UVM_CACHING: EmbeddingLocation.MANAGED_CACHING,
    }[kernel]
    specs = [(rows, dim, location, ComputeDevice.CUDA)]
    kind = fused_params([table_of(optimizer, rows)])["optimizer"]
    states = {
        EmbOptimType.ADAM: [False, False],
        EmbOptimType.PARTIAL_ROWWISE_ADAM: [False, True],
        EmbOptimType.EXACT_ADAGRAD: [False],
        EmbOptimType.EXACT_ROWWISE_ADAGRAD: [True],
        EmbOptimType.EXACT_SGD: [],
    }[kind]
    split = [construct_split_state(specs, rowwise=r, cacheable=False) for r in states]
    parts = table_memory(rows, dim, TableForm(optimizer, kernel, 0.25), is_cuda=True)
    assert parts["optimizer state"] == Bytes(
        device=4 * sum(s.dev_size for s in split), main=4 * sum(s.uvm_size for s in split)
    )
    weights = construct_split_state(specs, rowwise=False, cacheable=True)
    assert parts["weights"] == Bytes(device=4 * weights.dev_size, main=4 * weights.uvm_size)


def test_a_cache_holds_whole_sets_of_values_and_no_state():
    parts = table_memory(1000, 20, TableForm("adam", UVM_CACHING, 0.25), is_cuda=True)
    slots = 8 * 32  # 250 rows are 7.8 sets
    assert parts["cache"] == Bytes(device=slots * (20 * 4 + 16) + 4 * 1000)
    empty = table_memory(0, 20, TableForm("adam", UVM_CACHING, 0.25), is_cuda=True)
    assert empty["cache"] == Bytes()


def test_states_of_the_hand_rolled_engine():
    form = TableForm("adam", state_bytes=2, counts_rows=True, state_in_main=True)
    parts = table_memory(10, 8, form, is_cuda=True)
    assert parts["optimizer state"] == Bytes(main=10 * (2 * 8 * 2 + 4))
    assert parts["weights"] == Bytes(device=10 * 8 * 4)


@pytest.mark.parametrize("is_cuda", [True, False])
def test_averages_are_copies_of_the_weights(is_cuda):
    plain = table_memory(10, 8, TableForm("adam"), is_cuda)
    parts = table_memory(10, 8, TableForm("adam", averages=2), is_cuda)
    assert parts.pop("average") == plain["weights"] + plain["weights"]
    assert parts == plain


@pytest.mark.parametrize("optimizer", OPTIMIZER_NAMES)
def test_a_replicated_table_has_whole_gradients_and_dense_state(optimizer):
    weight = torch.nn.Parameter(torch.zeros(10, 8))
    weight.grad = torch.ones_like(weight)
    dense = {
        "adam": torch.optim.AdamW,
        "rowwise_adam": torch.optim.AdamW,
        "adagrad": torch.optim.Adagrad,
        "rowwise_adagrad": torch.optim.Adagrad,
        "sgd": torch.optim.SGD,
    }[optimizer]([weight], lr=0.1)
    dense.step()
    state = [t for s in dense.state.values() for t in s.values() if t.shape == weight.shape]
    parts = table_memory(10, 8, TableForm(optimizer, DENSE), is_cuda=True)
    assert parts["optimizer state"].device == sum(4 * t.numel() for t in state)
    assert parts["gradients"].device == parts["weights"].device == 320

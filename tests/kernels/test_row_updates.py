"""The CPU optimizer kernels against the dense formulas and against FBGEMM's own CPU ops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_table import NAMES, DenseTable
from oracle_table import settings as optimizer_settings

from kge_torchrec.embeddings.init import EntityInit
from kge_torchrec.embeddings.optimizers import RowOptimizer, make_optimizer
from kge_torchrec.embeddings.shard import EntityTable, TableShard
from kge_torchrec.embeddings.torchrec.collection import FbgemmRows
from kge_torchrec.embeddings.torchrec.sharder import fused_params
from kge_torchrec.kernels import parallel
from kge_torchrec.kernels.rows import update_rows


def cpu_table(values: torch.Tensor, optimizer: RowOptimizer) -> TableShard:
    tables = [EntityTable.of_all(len(values), optimizer, EntityInit())]
    table = TableShard.of(tables, values.shape[1], range(len(values)))
    table.rows.copy_(values)
    return table


def train(table, batches) -> None:
    for ids, grad in batches:
        if isinstance(table, TableShard):
            table.lookup(ids).backward(grad)
            table.step()
        else:  # FBGEMM's own steps in backward
            table(ids, torch.arange(len(ids) + 1)).backward(grad)


def random_batches(rows: int, dim: int, count: int, steps: int, seed: int = 0):
    random = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randint(0, rows, (count,), generator=random),
            torch.randn(count, dim, generator=random),
        )
        for _ in range(steps)
    ]


def assert_equals_oracle(table: TableShard, oracle: DenseTable) -> None:
    close = {"rtol": 1e-5, "atol": 1e-4 * oracle.lr}
    torch.testing.assert_close(table.rows.double(), oracle.weights, **close)
    states = [*table.optimizers[0].states.values()]
    expected = list(oracle.states().values())
    assert len(states) == len(expected)
    for state, wanted in zip(states, expected, strict=True):
        torch.testing.assert_close(state.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_twenty_steps_with_duplicates_equal_the_formula(name):
    optimizer = make_optimizer(**optimizer_settings(name))
    values = torch.randn(40, 12, generator=torch.Generator().manual_seed(1))
    table, oracle = cpu_table(values, optimizer), DenseTable(values, optimizer)
    for ids, grad in random_batches(40, 12, 30, steps=20):
        train(table, [(ids, grad)])
        oracle.step(ids, grad)
    assert_equals_oracle(table, oracle)


@given(
    name=st.sampled_from(NAMES),
    dim=st.sampled_from([1, 3, 8, 17]),
    batches=st.lists(st.lists(st.integers(0, 6), max_size=12), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
@settings(max_examples=30)
def test_any_ids_equal_the_formula(name, dim, batches, seed):
    random = torch.Generator().manual_seed(seed)
    optimizer = make_optimizer(**optimizer_settings(name))
    values = torch.randn(7, dim, generator=random)
    table, oracle = cpu_table(values, optimizer), DenseTable(values, optimizer)
    for ids in batches:
        ids = torch.tensor(ids, dtype=torch.int64)
        grad = torch.randn(len(ids), dim, generator=random)
        train(table, [(ids, grad)])
        oracle.step(ids, grad)
    assert_equals_oracle(table, oracle)


@pytest.mark.parametrize("name", ["adagrad", "rowwise_adagrad", "sgd"])
def test_update_equals_the_cpu_operator_of_fbgemm(name):
    changes = {"weight_decay": 0.1} if name == "rowwise_adagrad" else {}
    optimizer = make_optimizer(**optimizer_settings(name, **changes))
    values = torch.randn(50, 8, generator=torch.Generator().manual_seed(1))
    ours = cpu_table(values, optimizer)
    tables = [EntityTable.of_all(50, optimizer, EntityInit())]
    fused = {k: v for k, v in fused_params(tables).items() if k != "kge_torchrec"}
    theirs = SplitTableBatchedEmbeddingBagsCodegen(
        [(50, 8, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        pooling_mode=PoolingMode.NONE,
        **fused,
    )
    theirs.split_embedding_weights()[0].copy_(values)
    batches = random_batches(50, 8, 60, steps=10)
    train(ours, batches)
    train(theirs, batches)
    close = {"rtol": 1e-6, "atol": 2e-6}
    torch.testing.assert_close(ours.rows, theirs.split_embedding_weights()[0], **close)
    states = zip(
        ours.optimizers[0].states.values(), FbgemmRows(theirs).states.values(), strict=True
    )
    for our_state, their_state in states:
        torch.testing.assert_close(our_state, their_state, **close)


@pytest.mark.parametrize("name", NAMES)
def test_rows_without_a_gradient_keep_every_bit(name):
    values = torch.randn(20, 8)
    table = cpu_table(values, make_optimizer(**optimizer_settings(name)))
    train(table, random_batches(10, 8, 30, steps=5))
    assert torch.equal(table.rows[10:], values[10:])
    for state in table.optimizers[0].states.values():
        assert torch.equal(state[10:], torch.zeros_like(state[10:]))


@pytest.mark.parametrize("sorted_ids", [True, False])
def test_number_of_threads_changes_no_bit(sorted_ids):
    ids = torch.arange(4000) if sorted_ids else torch.randint(0, 3000, (4000,))
    grad = torch.randn(4000, 64)  # enough numbers for two threads
    values = torch.randn(4000, 64)
    tables = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            tables.append(cpu_table(values, make_optimizer("adam")))
            train(tables[-1], [(ids, grad)] * 3)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(tables[0].rows, tables[1].rows)
    assert torch.equal(tables[1].rows, tables[2].rows)


def test_sorted_distinct_ids_step_like_shuffled_ones():
    ids = torch.arange(0, 60, 2)
    grad, values = torch.randn(30, 8), torch.randn(60, 8)
    order = torch.from_numpy(np.random.default_rng(0).permutation(30))
    straight, shuffled = (cpu_table(values, make_optimizer("adam")) for _ in range(2))
    train(straight, [(ids, grad)])
    train(shuffled, [(ids[order], grad[order])])
    assert torch.equal(straight.rows, shuffled.rows)


def test_adam_late_in_training_needs_no_bias_correction():
    optimizer = make_optimizer("adam", lr=0.1)
    table = cpu_table(torch.zeros(1, 4), optimizer)
    table.steps = 5_000_000
    train(table, [(torch.tensor([0]), torch.ones(1, 4))])
    # m = 0.1, v = 0.001, both corrections 1
    expected = torch.full((1, 4), -0.1 * 0.1 / 0.001**0.5)
    torch.testing.assert_close(table.rows, expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    "threads, work, blocks, started",
    [(2, 1, 9, []), (2, 1 << 20, 1, []), (2, 1 << 20, 9, [2]), (1, 1 << 30, 9, [])],
)
def test_only_large_blocks_start_threads(monkeypatch, threads, work, blocks, started):
    kernel = parallel.BlockKernel.__new__(parallel.BlockKernel)
    results, before = [], torch.get_num_threads()
    kernel._block, kernel._run = 1, lambda share, *_: results.append(share)
    monkeypatch.setattr(parallel, "_address_of_share", lambda: 7)
    monkeypatch.setattr(parallel.numba, "set_num_threads", results.append)
    try:
        torch.set_num_threads(threads)
        kernel(blocks, work)
    finally:
        torch.set_num_threads(before)
    assert results == [*started, 7 if started else 0]


@pytest.mark.parametrize("rows", [[0, 5], [-1, 2], [4, 0, 5], [3, -1, 3]])
def test_rows_outside_the_table_are_rejected(rows):
    weights, rows = torch.zeros(5, 4), torch.tensor(rows)
    with pytest.raises(IndexError, match="of a table of 5"):
        update_rows("sgd", {}, 0.1, 1, rows, torch.ones(len(rows), 4), weights)
    assert not weights.any()

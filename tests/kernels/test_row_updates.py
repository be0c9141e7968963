"""The CPU optimizer kernels by themselves; embeddings/test_table_rows.py has their formulas."""

from __future__ import annotations

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from oracle_table import settings

from kge_torchrec.embeddings.init import EntityInit
from kge_torchrec.embeddings.optimizers import make_optimizer
from kge_torchrec.embeddings.row_gradients import RowGradients, TableRows
from kge_torchrec.embeddings.shard import EntityTable
from kge_torchrec.embeddings.torchrec.collection import FbgemmRows
from kge_torchrec.embeddings.torchrec.sharder import fused_params
from kge_torchrec.kernels import parallel
from kge_torchrec.kernels.rows import update_rows


@pytest.mark.parametrize("name", ["adagrad", "rowwise_adagrad", "sgd"])
def test_update_equals_the_cpu_operator_of_fbgemm(name):
    changes = {"weight_decay": 0.1} if name == "rowwise_adagrad" else {}
    optimizer = make_optimizer(**settings(name, **changes))
    random = torch.Generator().manual_seed(1)
    values = torch.randn(50, 8, generator=random)
    ours = TableRows(optimizer, values.clone())
    params = fused_params([EntityTable.of_all(50, optimizer, EntityInit())])
    theirs = SplitTableBatchedEmbeddingBagsCodegen(
        [(50, 8, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        pooling_mode=PoolingMode.NONE,
        **{key: value for key, value in params.items() if key != "kge_torchrec"},
    )
    theirs.split_embedding_weights()[0].copy_(values)
    for _ in range(10):
        ids, grad = torch.randint(0, 50, (60,), generator=random), torch.randn(60, 8)
        ours.count(True)
        ours.step_part(RowGradients(ids, grad))
        theirs(ids, torch.arange(61)).backward(grad)  # FBGEMM steps in backward
    close = {"rtol": 1e-6, "atol": 2e-6}
    torch.testing.assert_close(ours.rows, theirs.split_embedding_weights()[0], **close)
    states = zip(ours.states.values(), FbgemmRows(theirs).states.values(), strict=True)
    for our_state, their_state in states:
        torch.testing.assert_close(our_state, their_state, **close)


def test_adam_late_in_training_needs_no_bias_correction():
    rows, first, second = torch.zeros(3, 1, 4).unbind(0)
    options = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    where = torch.tensor([0]), torch.ones(1, 4), rows, first, second
    update_rows("adam", options, 0.1, 5_000_000, *where)
    # m = 0.1, v = 0.001, both corrections 1
    expected = torch.full((1, 4), -0.1 * 0.1 / 0.001**0.5)
    torch.testing.assert_close(rows, expected, rtol=1e-4, atol=0)


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

"""Steps on rows whose gradients come in parts, without a lookup."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from oracle_sparse import take_step
from oracle_table import NAMES, DenseTable
from oracle_table import settings as optimizer_settings
from training_runs import config_of, largest_difference, tiny_store

from kge_torchrec.config import OPTIMIZER_NAMES
from kge_torchrec.distributed.processes import processes
from kge_torchrec.embeddings.init import EntityInit
from kge_torchrec.embeddings.optimizers import make_optimizer
from kge_torchrec.embeddings.row_gradients import RowGradients, TableRows
from kge_torchrec.embeddings.shard import EntityTable, TableShard
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session
from kge_torchrec.training.trainer import Trainer

ROWS, DIM = 13, 4


def start_and_gradients(steps=3):
    seed = torch.Generator().manual_seed(2)
    start = torch.randn(ROWS, DIM, generator=seed)
    return start, [torch.randn(ROWS, DIM, generator=seed) for _ in range(steps)]


def in_parts(grad):
    """All rows in three parts, one of them empty."""
    odd, even = torch.arange(1, ROWS, 2), torch.arange(0, ROWS, 2)
    for ids in (odd, odd[:0], even):
        yield RowGradients(ids, grad[ids], None, True)


def step_parts(optimizer, parts) -> None:
    optimizer.count(bool(len(optimizer.rows)))
    for part in parts:
        optimizer.step_part(part)


def stepped(name, step_rows, start, gradients) -> DenseTable:
    """The dense table after the same steps."""
    dense = DenseTable(start, make_optimizer(**optimizer_settings(name)))
    for grad in gradients:
        step_rows(in_parts(grad))
        dense.step(torch.arange(ROWS), grad)
    return dense


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_a_shard_make_one_step(name):
    start, gradients = start_and_gradients()
    optimizer = make_optimizer(**optimizer_settings(name))
    tables = [EntityTable.of_all(ROWS, optimizer, EntityInit())]
    table = TableShard.of(tables, DIM, range(ROWS))
    table.rows.copy_(start)
    dense = stepped(name, table.step_rows, start, gradients)
    assert table.steps == len(gradients)
    assert (table.rows - dense.weights).abs().max() < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_table_rows_make_one_step(name):
    start, gradients = start_and_gradients()
    optimizer = TableRows(make_optimizer(**optimizer_settings(name)), start.clone())
    dense = stepped(name, partial(step_parts, optimizer), start, gradients)
    assert optimizer.steps == len(gradients)
    assert (optimizer.rows - dense.weights).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["fbgemm", "dicee", "dgl"])
def test_presets_step_parts_like_the_whole(name):
    start, gradients = start_and_gradients()
    optimizers = [TableRows(make_optimizer("adam", 0.1, name), start.clone()) for _ in range(2)]
    for grad in gradients:
        take_step(optimizers[0], torch.arange(ROWS), grad, distinct=True)
        step_parts(optimizers[1], in_parts(grad))
    assert torch.equal(optimizers[0].rows, optimizers[1].rows)
    assert optimizers[0].steps == optimizers[1].steps


def test_empty_shard_counts_steps():
    nothing = torch.empty(0, DIM)
    for preset, steps in (("fbgemm", 2), ("dicee", 0)):
        optimizer = TableRows(make_optimizer("adam", preset=preset), nothing)
        for _ in range(2):
            step_parts(optimizer, [])
        assert optimizer.steps == steps


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", OPTIMIZER_NAMES)
@pytest.mark.parametrize("blocks", ["whole", "small"])
def test_fbgemm_table_steps_like_the_cpu_table(tmp_path, optimizer, blocks):
    store = tiny_store(tmp_path / "store").path
    ends = []
    for device in ("cpu", "cuda"):
        config = config_of(store, tmp_path / device, negatives__regime="1vsall", device=device,
                           train__optimizer=optimizer, train__epochs=2)  # fmt: skip
        with processes(device) as ranks:
            session = Session(config, RunFolder(config.run.dir), ranks)
            loop = Trainer(session, session.restore(), None)
            loop._save = lambda ends=False: None
            if blocks == "small":
                loop.pipeline.kept_bytes, loop.pipeline.block_bytes = 0, 1000
            loop.run()
            dense = {k: p.detach().cpu() for k, p in session.scorer.named_parameters()}
            ends.append({"entities": session.backend.shard().rows.cpu().clone(), **dense})
    assert largest_difference(*ends) < 1e-4

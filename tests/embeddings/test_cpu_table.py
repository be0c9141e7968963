"""A rank's rows by themselves: lookups, counting, empty tables, settings."""

from __future__ import annotations

import pytest
import torch
from oracle_table import NAMES
from oracle_table import settings as optimizer_settings

from kge_torchrec.embeddings.init import EntityInit
from kge_torchrec.embeddings.optimizers import RowOptimizer, make_optimizer
from kge_torchrec.embeddings.shard import EntityTable, TableShard
from kge_torchrec.embeddings.torchrec.sharder import TableSettings, fused_params


def shard_of(rows: int, optimizer: RowOptimizer) -> TableShard:
    return TableShard.of([EntityTable.of_all(rows, optimizer, EntityInit())], 4, range(rows))


@pytest.fixture
def table() -> TableShard:
    table = shard_of(6, make_optimizer("sgd", lr=1.0))
    table.rows.copy_(torch.arange(24.0).view(6, 4))
    return table


def test_lookup_returns_rows_in_order_of_ids(table):
    assert torch.equal(
        table.lookup(torch.tensor([5, 0, 5]))[:, 0].detach(), torch.tensor([20.0, 0, 20])
    )


def test_int32_ids_work(table):
    table.lookup(torch.tensor([5, 0, 5], dtype=torch.int32)).sum().backward()
    table.step()
    assert table.rows[:, 0].tolist() == [-1, 4, 8, 12, 16, 18]


def test_lookup_is_a_copy_that_steps_do_not_change(table):
    out = table.lookup(torch.tensor([1]))
    before = out.detach().clone()
    out.sum().backward()
    table.step()
    assert torch.equal(out.detach(), before)
    assert torch.equal(table.rows[1], before[0] - 1)


def test_only_steps_after_backward_count(table):
    with torch.no_grad():
        table.lookup(torch.tensor([1]))
    table.lookup(torch.tensor([1]))
    table.step()
    assert table.steps == 0
    table.lookup(torch.tensor([1])).sum().backward()
    table.lookup(torch.tensor([], dtype=torch.int64)).sum().backward()
    table.step()
    table.step()
    assert table.steps == 1


def test_backward_passes_accumulate_and_zero_grad_clears(table):
    for ids in ([5, 0], [5], [2]):
        table.lookup(torch.tensor(ids)).sum().backward()
    assert table.rows[:, 0].tolist() == [0, 4, 8, 12, 16, 20]
    table.step()
    assert table.rows[:, 0].tolist() == [-1, 4, 7, 12, 16, 18]
    table.lookup(torch.tensor([3])).sum().backward()
    table.gradients.clear()
    table.step()
    assert table.rows[3, 0] == 12


@pytest.mark.parametrize("bad", [6, -1])
def test_id_outside_the_table_raises(table, bad):
    with pytest.raises((IndexError, RuntimeError)):
        table.lookup(torch.tensor([bad]))


def test_noncontiguous_and_expanded_gradients_work(table):
    out = table.lookup(torch.tensor([0, 1]))
    out.backward(torch.tensor([[1.0], [2.0]]).expand(2, 4))
    table.step()
    assert table.rows[:2].tolist() == [[-1, 0, 1, 2], [2, 3, 4, 5]]


@pytest.mark.parametrize("name", NAMES)
def test_empty_table_and_empty_lookup_work(name):
    table = shard_of(0, make_optimizer(**optimizer_settings(name)))
    out = table.lookup(torch.tensor([], dtype=torch.int64))
    assert out.shape == (0, 4)
    out.sum().backward()
    table.step()
    assert all(len(state) == 0 for state in table.optimizers[0].states.values())


@pytest.mark.parametrize("name", NAMES)
def test_settings_of_a_table_go_through_torchrec(name):
    optimizer = make_optimizer(**optimizer_settings(name))
    tables = [EntityTable.of_all(6, optimizer, EntityInit())]
    params = fused_params(tables, deferred=True)
    assert params["kge_torchrec"] == TableSettings(tuple(tables), deferred=True)
    assert hash(tuple(sorted(params.items())))  # TorchRec groups tables by it

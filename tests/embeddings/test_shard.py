"""A rank's rows by themselves: lookups, gradients between backward and step, settings."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle_table import NAMES
from oracle_table import settings as optimizer_settings

from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.embeddings.init import EntityInit
from kge_torchrec.embeddings.optimizers import make_optimizer
from kge_torchrec.embeddings.row_gradients import RowGradients
from kge_torchrec.embeddings.shard import EntityTable, TableShard
from kge_torchrec.embeddings.torchrec.sharder import TableSettings, fused_params


def shard_of(rows: int) -> TableShard:
    """A shard whose step subtracts gradients from rows 0, 1, 2, ... (D = 3)."""
    tables = [EntityTable.of_all(rows, make_optimizer("sgd", lr=1.0), EntityInit())]
    shard = TableShard.of(tables, 3, range(rows))
    shard.rows.copy_(torch.arange(rows)[:, None])
    return shard


def pending(*parts: list[int], counted: bool = False) -> tuple[TableShard, torch.Tensor]:
    """Random gradients of the rows in each part, and their dense sum over 8 rows."""
    results, dense = shard_of(8), torch.zeros(8, 3)
    random = torch.Generator().manual_seed(0)
    for ids in parts:
        rows = torch.tensor(ids, dtype=torch.int64)
        grad = torch.randn(len(ids), 3, generator=random)
        occurrences = torch.full((len(ids),), 2) if counted else None
        results.add(RowGradients(rows, grad, occurrences))
        dense.index_add_(0, rows, grad)
    return results, dense


@given(st.lists(st.lists(st.integers(0, 7), max_size=6), min_size=1, max_size=3))
def test_sums_match_a_dense_gradient(parts):
    gradients, dense = pending(*parts)
    gradients.sums().mul_(2)
    ids, grad, occurrences, distinct = gradients.take()
    assert sorted({*chain(*parts)}) == ids.tolist()
    assert occurrences is None and distinct and gradients.take() is None
    torch.testing.assert_close(torch.zeros(8, 3).index_add_(0, ids, grad), 2 * dense)


def test_counted_occurrences_make_a_mean():
    gradients, dense = pending([1, 3, 1], [3, 1], counted=True)
    torch.testing.assert_close(gradients.sums(), dense[[1, 3]] / torch.tensor([[6.0], [4]]))


def test_sum_does_not_write_into_autograd_memory():
    grad, gradients = torch.ones(2, 3), shard_of(8)
    gradients.add(RowGradients(torch.tensor([0, 1]), grad, None, True))
    gradients.sums().zero_()
    assert torch.equal(grad, torch.ones(2, 3)) and not gradients.take().grad.any()
    assert gradients.sums().numel() == 0


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=6),
    st.lists(st.integers(0, 23), max_size=12),
    st.booleans(),
)
def test_parts_of_tables_have_the_gradients_of_their_rows(sizes, ids, counted):
    stops = torch.tensor(sizes).cumsum(0).tolist()
    parts = [range(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
    ids = torch.tensor([i for i in ids if i < stops[-1]], dtype=torch.int64)
    grad = torch.arange(2.0 * len(ids)).view(-1, 2)
    counts = torch.arange(len(ids)) + 1 if counted else None
    for part, own in zip(parts, RowGradients(ids, grad, counts).split(parts), strict=True):
        here = (ids >= part.start) & (ids < part.stop)
        assert torch.equal(own.ids + part.start, ids[here]) and torch.equal(own.grad, grad[here])
        assert (own.occurrences is None) == (counts is None)
        assert counts is None or torch.equal(own.occurrences, counts[here])


def test_ids_of_32_bits_and_expanded_gradients_work():
    shard = shard_of(6)
    out = shard.lookup(torch.tensor([5, 0, 5], dtype=torch.int32))
    assert out[:, 0].tolist() == [5, 0, 5]
    out.backward(torch.tensor([[1.0], [2.0], [3.0]]).expand(3, 3))
    assert shard.rows[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    shard.step()
    assert shard.rows[:, 2].tolist() == [-2, 1, 2, 3, 4, 1]


@pytest.mark.parametrize("bad", [6, -1])
def test_id_outside_the_table_raises(bad):
    with pytest.raises((IndexError, RuntimeError)):
        shard_of(6).lookup(torch.tensor([bad]))


@pytest.mark.parametrize("name", NAMES)
def test_settings_of_a_table_go_through_torchrec(name):
    optimizer = make_optimizer(**optimizer_settings(name))
    tables = [EntityTable.of_all(6, optimizer, EntityInit())]
    params = fused_params(tables, deferred=True)
    assert params["kge_torchrec"] == TableSettings(tuple(tables), deferred=True)
    assert hash(tuple(sorted(params.items())))  # TorchRec groups tables by it


def test_rows_are_scored_elsewhere():
    """A table on disk is mapped into main memory, and scored on a GPU."""
    rows, elsewhere = torch.arange(12.0).view(6, 2), torch.device("meta")
    shard = EntityShard(rows, 0, 6, scored_on=elsewhere)
    for places in (slice(1, 3), torch.tensor([4, 0])):
        assert shard.own(places).device == elsewhere
        assert torch.equal(EntityShard(rows, 0, 6).own(places), rows[places])
    assert shard.device == elsewhere and EntityShard(rows, 0, 6).device == rows.device

"""Gradients between backward and step: sums over rows, and what is written into them."""

from __future__ import annotations

from itertools import chain

import torch
from hypothesis import given
from hypothesis import strategies as st

from kge_torchrec.embeddings.init import EntityInit
from kge_torchrec.embeddings.optimizers import make_optimizer
from kge_torchrec.embeddings.row_gradients import RowGradients
from kge_torchrec.embeddings.shard import EntityTable, TableShard


def empty_shard() -> TableShard:
    return TableShard.of([EntityTable.of_all(8, make_optimizer("adam"), EntityInit())], 3, range(8))


def pending(*parts: list[int], counted: bool = False) -> tuple[TableShard, torch.Tensor]:
    """Random gradients (D = 3) of the rows in each part, and their dense sum over 8 rows."""
    results, dense = empty_shard(), torch.zeros(8, 3)
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
    grad = torch.ones(2, 3)
    gradients = empty_shard()
    gradients.add(RowGradients(torch.tensor([0, 1]), grad, None, True))
    gradients.sums().zero_()
    assert torch.equal(grad, torch.ones(2, 3))
    assert not gradients.take().grad.any()


def test_single_part_is_returned_unchanged():
    gradients, _ = pending([2, 2, 0])
    assert gradients.take().ids.tolist() == [2, 2, 0] and gradients.take() is None
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
    split = RowGradients(ids, grad, counts).split(parts)
    for part, own in zip(parts, split, strict=True):
        here = (ids >= part.start) & (ids < part.stop)
        assert torch.equal(own.ids + part.start, ids[here]) and torch.equal(own.grad, grad[here])
        assert (
            (own.occurrences is None)
            if counts is None
            else torch.equal(own.occurrences, counts[here])
        )

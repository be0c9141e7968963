"""Who owns which row, and the route of a batch's ids."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from worlds import run_world

from kge_torchrec.embeddings.all_to_all.table import RowRanges, make_route

SIZES = st.integers(1, 300), st.integers(1, 70)


@given(*SIZES)
def test_rows_are_split_evenly_over_ranks(num_rows, world_size):
    ranges = RowRanges(num_rows, world_size)
    runs = [ranges.range_of(rank) for rank in range(world_size)]
    assert [row for start, stop in runs for row in range(start, stop)] == list(range(num_rows))
    sizes = [stop - start for start, stop in runs]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("num_rows, world_size", [(5, 4), (135, 64), (1, 8), (10**10, 7)])
def test_row_ranges_handle_small_tables(num_rows, world_size):
    ranges = RowRanges(num_rows, world_size)
    sizes = [stop - start for start, stop in map(ranges.range_of, range(world_size))]
    assert min(sizes) >= 0 and sum(sizes) == num_rows


@given(*SIZES, st.data())
def test_owners_hold_their_ids(num_rows, world_size, data):
    ranges = RowRanges(num_rows, world_size)
    ids = data.draw(st.lists(st.integers(0, num_rows - 1), max_size=30))
    for i, owner in zip(ids, ranges.owners(torch.tensor(ids, dtype=torch.int64)), strict=True):
        start, stop = ranges.range_of(int(owner))
        assert start <= i < stop


@given(st.integers(1, 50), st.data())
def test_route_of_one_rank_is_the_ids(num_rows, data):
    ids = torch.tensor(data.draw(st.lists(st.integers(0, num_rows - 1))), dtype=torch.int64)
    route = make_route(ids, RowRanges(num_rows, 1), None, ascending=False)
    assert torch.equal(route.ids, ids)
    assert route.send == route.receive == [len(ids)]
    assert route.order.numel() == 0


def routes(num_rows: int, wanted: list[list[int]], ascending: bool) -> tuple:
    """This rank's route, for the ids that each rank wants."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    ids = torch.tensor(wanted[rank], dtype=torch.int64)
    group = torch.distributed.group.WORLD
    places = torch.arange(len(ids)) + 1
    route = make_route(
        ids, RowRanges(num_rows, world_size), group, ascending=ascending, occurrences=places
    )
    return route.ids, route.occurrences, route.order, route.send, route.receive


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("num_rows", [3, 8, 29])
@pytest.mark.first_tier("8-2")
def test_counts_match_and_ids_are_grouped(world_size, num_rows):
    for seed, ascending in [(0, False), (1, True)]:
        stream = torch.Generator().manual_seed(seed)
        wanted = [
            torch.randint(num_rows, (7 * rank,), generator=stream).tolist()  # rank 0: nothing
            for rank in range(world_size)
        ]
        if ascending:
            wanted = [sorted(set(ids)) for ids in wanted]
        results = run_world(world_size, routes, num_rows, wanted, ascending)
        ranges = RowRanges(num_rows, world_size)
        for rank, (ids, places, order, send, receive) in enumerate(results):
            original = torch.tensor(wanted[rank], dtype=torch.int64)
            order = order if order.numel() else torch.arange(len(original))
            assert torch.equal(ids, original[order])
            assert torch.equal(places, order + 1)
            owners = ranges.owners(ids)
            assert torch.equal(owners, owners.sort(stable=True).values)
            assert send == torch.bincount(owners, minlength=world_size).tolist()
            assert receive == [other[3][rank] for other in results]

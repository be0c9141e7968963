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


@given(st.integers(1, 50), st.data())
def test_route_of_one_rank_is_the_ids(num_rows, data):
    ids = sorted(data.draw(st.lists(st.integers(0, num_rows - 1))))
    ids = torch.tensor(ids, dtype=torch.int64)
    route = make_route(ids, RowRanges(num_rows, 1), None, distinct=False)
    assert torch.equal(route.ids, ids)
    assert route.send == route.receive == [len(ids)]


def routes(num_rows: int, wanted: list[list[int]]) -> tuple[list[int], list[int]]:
    """This rank's route, for the ids that each rank wants."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    ids = torch.tensor(wanted[rank], dtype=torch.int64)
    group = torch.distributed.group.WORLD
    route = make_route(ids, RowRanges(num_rows, world_size), group, distinct=False)
    return route.send, route.receive


@pytest.mark.parametrize(("world_size", "num_rows"), [(2, 8), (4, 3)])
def test_every_rank_is_sent_the_ids_of_its_rows(world_size, num_rows):
    stream = torch.Generator().manual_seed(0)
    wanted = [
        sorted(torch.randint(num_rows, (7 * rank,), generator=stream).tolist())  # rank 0: nothing
        for rank in range(world_size)
    ]
    results = run_world(world_size, routes, num_rows, wanted)
    ranges = [range(*RowRanges(num_rows, world_size).range_of(rank)) for rank in range(world_size)]
    for rank, (send, receive) in enumerate(results):
        assert send == [sum(row in rows for row in wanted[rank]) for rows in ranges]
        assert receive == [other[0][rank] for other in results]

"""The route of a batch's ids."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from worlds import run_world

from kge_torchrec.distributed.processes import rows_by_rank
from kge_torchrec.embeddings.handrolled import make_route


@given(st.integers(1, 50), st.data())
def test_route_of_one_rank_is_the_ids(num_rows, data):
    ids = sorted(data.draw(st.lists(st.integers(0, num_rows - 1))))
    ids = torch.tensor(ids, dtype=torch.int64)
    route = make_route(ids, rows_by_rank(num_rows, 1), None, distinct=False)
    assert torch.equal(route.ids, ids)
    assert route.send == route.receive == [len(ids)]


def routes(num_rows: int, wanted: list[list[int]]) -> tuple[list[int], list[int]]:
    """This rank's route, for the ids that each rank wants."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    ids = torch.tensor(wanted[rank], dtype=torch.int64)
    group = torch.distributed.group.WORLD
    route = make_route(ids, rows_by_rank(num_rows, world_size), group, distinct=False)
    return route.send, route.receive


@pytest.mark.parametrize(("world_size", "num_rows"), [(2, 8), (4, 3)])
def test_every_rank_is_sent_the_ids_of_its_rows(world_size, num_rows):
    stream = torch.Generator().manual_seed(0)
    wanted = [
        sorted(torch.randint(num_rows, (7 * rank,), generator=stream).tolist())  # rank 0: nothing
        for rank in range(world_size)
    ]
    results = run_world(world_size, routes, num_rows, wanted)
    ranges = rows_by_rank(num_rows, world_size)
    for rank, (send, receive) in enumerate(results):
        assert send == [sum(row in rows for row in wanted[rank]) for rows in ranges]
        assert receive == [other[0][rank] for other in results]

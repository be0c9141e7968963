"""The hand-rolled table on 1, 2 and 4 ranks against an index into a dense table.

Shapes: N rows, D elements per row, W ranks, M ids of a rank.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from worlds import run_world

from kge_torchrec.distributed.processes import rows_by_rank
from kge_torchrec.embeddings.handrolled import HandrolledLookup, make_route
from kge_torchrec.embeddings.init import EntityInit
from kge_torchrec.embeddings.optimizers import make_optimizer
from kge_torchrec.embeddings.shard import EntityTable, TableShard

DIM, LR = 3, 0.5


def values(num_rows: int) -> Tensor:
    return torch.randn(num_rows, DIM, generator=torch.Generator().manual_seed(num_rows))


def gradient(count: int, seed: int) -> Tensor:
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed))


def build(num_rows: int, name: str = "sgd", preset: str = "fbgemm", counted: bool = False):
    """The table with ``values``."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tables = [EntityTable.of_all(num_rows, make_optimizer(name, LR, preset), EntityInit())]
    ranges = rows_by_rank(num_rows, world_size)
    table = TableShard.of(tables, DIM, ranges[rank])
    table.rows.copy_(values(num_rows)[ranges[rank].start : ranges[rank].stop])
    return HandrolledLookup(table, ranges, dist.group.WORLD, counts_places=counted)


def look_up(table: HandrolledLookup, ids: list[int]) -> Tensor:
    """Look up ids, which ascend and may repeat."""
    wanted = torch.tensor(ids, dtype=torch.int64)
    places = torch.ones_like(wanted) if table.counts_places else None
    ways = table.ranges, table.group
    return table(make_route(wanted, *ways, distinct=False, occurrences=places))


def whole(table: HandrolledLookup) -> Tensor:
    return table.table.shard().fetch(torch.arange(table.table.shard().num_entities))


Case = tuple[int, list[list[int]]]  # N, the ids that each rank wants


def steps(cases: list[Case]) -> list[tuple[Tensor, Tensor, int]]:
    return [one_step(*case) for case in cases]


def one_step(num_rows: int, wanted: list[list[int]]) -> tuple[Tensor, Tensor, int]:
    """Rows of this rank's ids; the whole table after a step of sgd; how many rows lie here."""
    table = build(num_rows)
    rank = dist.get_rank()
    rows = look_up(table, wanted[rank])
    rows.backward(gradient(len(wanted[rank]), rank))
    table.table.step()
    return rows.detach(), whole(table), table.table.shard().rows.shape[0]


def check(world_size: int, *cases: Case) -> None:
    ranks = run_world(world_size, steps, list(cases))
    for number, (num_rows, wanted) in enumerate(cases):
        check_case(num_rows, wanted, [results[number] for results in ranks])


def check_case(num_rows: int, wanted: list[list[int]], results: list) -> None:
    before = values(num_rows)
    expected = before.double().clone()
    for rank, ids in enumerate(wanted):
        grad = gradient(len(ids), rank).double() / len(wanted)
        expected.index_add_(0, torch.tensor(ids, dtype=torch.int64), -LR * grad)
    for (rows, after, _), ids in zip(results, wanted, strict=True):
        assert torch.equal(rows, before[torch.tensor(ids, dtype=torch.int64)])
        assert float((after.double() - expected).abs().max()) < 1e-6
        assert torch.equal(after, results[0][1])
    assert sum(count for *_, count in results) == num_rows


def cases(world_size: int) -> st.SearchStrategy[Case]:
    def wanted(num_rows: int) -> st.SearchStrategy[Case]:
        ids = st.lists(st.integers(0, num_rows - 1), max_size=25).map(sorted)
        every = st.lists(ids, min_size=world_size, max_size=world_size)
        return st.tuples(st.just(num_rows), every)

    return st.integers(1, 40).flatmap(wanted)


@settings(max_examples=3)
@given(data=st.data())
def test_rows_and_gradients_are_exchanged(data):
    check(2, *data.draw(st.lists(cases(2), min_size=10, max_size=20)))


def test_empty_requests_work():
    check(2, (6, [[], []]))


def test_fewer_rows_than_ranks():
    check(4, *((rows, [[0], [], [0, 0, rows - 1], [rows - 1]]) for rows in (1, 3)))


def test_one_sided_requests_work():
    check(2, (10, [[7, 8, 9], []]))


def gradients_of_two_batches() -> tuple[Tensor, Tensor]:
    """Two backwards before one step, and the same in one batch."""
    rank = dist.get_rank()
    apart, together = build(9, "adagrad"), build(9, "adagrad")
    first, second = [rank, 3, 3], [3, 8 - rank]
    for ids in (first, second):
        look_up(apart, ids).backward(gradient(5, rank)[: len(ids)])
    grads = torch.cat([gradient(5, rank)[: len(ids)] for ids in (first, second)])
    order = torch.tensor(first + second).argsort(stable=True)
    look_up(together, sorted(first + second)).backward(grads[order])
    apart.table.step()
    together.table.step()
    return whole(apart), whole(together)


def test_backward_passes_make_one_step():
    for apart, together in run_world(2, gradients_of_two_batches):
        assert (apart - values(9)).abs().max() > 0.1
        assert torch.allclose(apart, together, atol=1e-6)


def what_does_not_step() -> tuple[int, Tensor]:
    table = build(5, "adam")
    with torch.no_grad():
        look_up(table, [1, 2])
    table.table.step()
    look_up(table, [1]).sum().backward()
    table.table.gradients.clear()
    table.table.step()
    return table.table.optimizers[0].steps, whole(table)


def test_lookups_without_gradients_do_not_step():
    ((steps, table),) = run_world(1, what_does_not_step)
    assert steps == 0 and torch.equal(table, values(5))


def in_a_thread(asynchronous: bool) -> Tensor:
    table = build(20, "adam", "dicee")
    if not asynchronous:
        table.table._updates = None
    for step in range(10):
        table.table.param_groups[0]["lr"] = 0.1 * (
            step + 1
        )  # a step under way keeps the rate it started with
        look_up(table, sorted([step, 3, dist.get_rank()])).backward(gradient(3, step))
        table.table.step()
    return whole(table)


def test_asynchronous_step_matches_synchronous_step():
    waited, ahead = (run_world(2, in_a_thread, flag) for flag in (False, True))
    for one, other in zip(waited, ahead, strict=True):
        assert torch.equal(one, other)


class Broken(RuntimeError):
    pass


def failing_step(how: str) -> str:
    table = build(4, "adam", "dicee")

    def fail(*_):
        raise Broken("no room")

    table.table.optimizers[0].step_part = fail
    look_up(table, [1]).sum().backward()
    table.table.step()  # does not raise: the thread has it
    try:
        {"lookup": lambda: look_up(table, [0]), "shard": table.table.shard}[how]()
    except Broken as error:
        return str(error)
    return "swallowed"


@pytest.mark.parametrize("how", ["lookup", "shard"])
def test_thread_exception_is_raised_at_next_join(how):
    assert run_world(1, failing_step, how) == ["no room"]


def mean_of_places() -> Tensor:
    table = build(4, counted=True)
    rank = dist.get_rank()
    look_up(table, [2] * (rank + 1)).backward(torch.ones(rank + 1, DIM))
    table.table.step()
    return whole(table)


def test_mean_covers_occurrences_on_all_ranks():
    for table in run_world(2, mean_of_places):
        moved = (values(4) - table)[2]
        assert torch.allclose(moved, torch.full((DIM,), LR / 2))

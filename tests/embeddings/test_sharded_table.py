"""The sharded table of both engines against the dense table; test_exact trains with it."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_table import NAMES, DenseTable
from oracle_table import settings as optimizer_settings
from torch import Tensor, nn
from torchrec.distributed.batched_embedding_kernel import BatchedFusedEmbedding
from worlds import run_world
from worlds_table import own_rows, sharded_table

from kge_torchrec.distributed.processes import Rows, processes, rows_by_rank
from kge_torchrec.embeddings.backend import ENTITY
from kge_torchrec.embeddings.handrolled import HandrolledLookup, make_route
from kge_torchrec.embeddings.init import EntityInit
from kge_torchrec.embeddings.optimizers import RowOptimizer, make_optimizer
from kge_torchrec.embeddings.shard import EntityTable, TableShard
from kge_torchrec.embeddings.torchrec import sharder
from kge_torchrec.embeddings.torchrec.collection import DeferredEmbedding, kernel_of
from kge_torchrec.training.checkpoints import Checkpoints
from kge_torchrec.training.state import TrainState

DIM = 8
WEIGHT = f"entities.embeddings.{ENTITY}.weight"
every_engine = pytest.mark.parametrize("engine", ["torchrec", "handrolled"])


def start_values(num_entities: int) -> Tensor:
    return torch.randn(num_entities, DIM, generator=torch.Generator().manual_seed(1))


class Torchrec:
    """TorchRec's table with ``start_values``."""

    def __init__(self, size: int, optimizer: RowOptimizer):
        self.model = sharded_table(size, DIM, optimizer, start_values(size))
        self.rows, self.step = own_rows(self.model), self.model.fused_optimizer.step

    def __call__(self, ids: Tensor) -> Tensor:
        return self.model(ids)


class Handrolled:
    """The same on the hand-rolled exchange, whose routes take ids that ascend."""

    def __init__(self, size: int, optimizer: RowOptimizer):
        rank, ranges = dist.get_rank(), rows_by_rank(size, dist.get_world_size())
        tables = [EntityTable.of_all(size, optimizer, EntityInit())]
        self.rows = TableShard.of(tables, DIM, ranges[rank])
        self.rows.rows.copy_(start_values(size)[ranges[rank].start : ranges[rank].stop])
        self.lookup = HandrolledLookup(self.rows, ranges, dist.group.WORLD)
        self.step = self.rows.step

    def __call__(self, ids: Tensor) -> Tensor:
        order = ids.argsort(stable=True)
        route = make_route(ids[order], self.lookup.ranges, self.lookup.group, distinct=False)
        return self.lookup(route)[order.argsort()]


ENGINES = {"torchrec": Torchrec, "handrolled": Handrolled}


def whole(table: Torchrec | Handrolled) -> Tensor:
    shard = table.rows.shard()
    return shard.fetch(torch.arange(shard.num_entities))


# Steps


def parameters_and_states(table: TableShard) -> dict[str, Tensor]:
    table.shard()  # waits for a step under way
    (states,) = (optimizer.states for optimizer in table.optimizers)
    return {
        "rows": table.rows.clone(),
        **{name: state.clone() for name, state in states.items()},
    }


def assert_equals_dense(per_rank: list[dict[str, Tensor]], dense: DenseTable) -> None:
    whole = {key: torch.cat([part[key] for part in per_rank]) for key in per_rank[0]}
    assert set(whole) == {"rows", *dense.states()}
    close = {"rtol": 1e-5, "atol": 1e-4 * dense.optimizer.lr}
    torch.testing.assert_close(whole["rows"].double(), dense.weights, **close)
    for name, state in dense.states().items():
        torch.testing.assert_close(whole[name].double(), state, rtol=1e-5, atol=1e-6)


Case = tuple[str, int, list[list[int]]]  # optimizer, N, ids that each rank looks up
# Every optimizer; nobody asks; fewer rows than ranks; one rank asks, for rows of others.
EDGES = [
    *((name, 7, [[0, 3], [6, 3, 3], [], [5, 3, 0]]) for name in NAMES),
    ("sgd", 6, [[], [], [], []]),
    *(("adam", rows, [[0], [], [0, 0, rows - 1], [rows - 1]]) for rows in (1, 3)),
    ("adagrad", 10, [[9, 7, 8, 9], [], [], []]),
]


def rank_trains_cases(engine: str, cases: list[Case]) -> list[tuple[Tensor, dict]]:
    """Rows of the first lookup, and what is there after a step repeated twice."""
    results = []
    for name, size, ids_per_rank in cases:
        table = ENGINES[engine](size, make_optimizer(**optimizer_settings(name)))
        ids, found = torch.tensor(ids_per_rank[dist.get_rank()], dtype=torch.int64) % size, []
        for _ in range(2):
            found.append(table(ids))
            before = found[-1].detach().clone()
            found[-1].square().sum().backward()
            table.step()
            assert torch.equal(found[-1], before)  # a copy, which steps do not change
        results.append((found[0].detach(), parameters_and_states(table.rows)))
    return results


@every_engine
@given(
    cases=st.lists(
        st.tuples(
            st.sampled_from(NAMES),
            st.integers(1, 40),
            st.lists(st.lists(st.integers(0, 39), max_size=12), min_size=4, max_size=4),
        ),
        min_size=6,
        max_size=12,
    )
)
@settings(max_examples=2)
def test_random_sizes_and_ids_on_four_ranks(engine, cases):
    """Shards uneven or empty, ranks without ids, ids unsorted and repeated within a rank."""
    cases = [*EDGES, *cases]
    results = run_world(4, rank_trains_cases, engine, cases)
    for number, (name, size, ids_per_rank) in enumerate(cases):
        dense = DenseTable(start_values(size), make_optimizer(**optimizer_settings(name)))
        for own, ids in zip(results, ids_per_rank, strict=True):
            ids = torch.tensor(ids, dtype=torch.int64) % size
            assert torch.equal(own[number][0], start_values(size)[ids])
        ids = torch.tensor([*chain(*ids_per_rank)], dtype=torch.int64) % size
        for _ in range(2):
            dense.step(ids, 2 * dense.weights[ids] / 4)
        assert_equals_dense([part[number][1] for part in results], dense)


def rank_looks_around(engine: str) -> dict:
    table = ENGINES[engine](101, make_optimizer("sgd", lr=1.0))
    stats = {"keys": list(table.model.state_dict()) if engine == "torchrec" else [WEIGHT]}
    stats["steps"] = [table.rows.steps]
    table(torch.tensor([1, 2])).sum().mul(0).backward()
    table.step()
    with torch.no_grad():
        table(torch.tensor([1, 2]))
    table.step()
    stats["steps"].append(table.rows.steps)
    empty = table(torch.tensor([], dtype=torch.int64))
    empty.sum().backward()
    table.step()
    stats["empty"] = empty.shape
    stats["steps"].append(table.rows.steps)
    table.rows.steps = 7
    stats["steps"].append(table.rows.steps)

    table(torch.tensor([1, 2])).sum().backward()
    table.rows.gradients.clear()
    table.step()
    shard = table.rows.shard()
    stats["range"] = shard.row_range
    stats["fetched"] = shard.fetch(torch.tensor([100, 0, 51, 1]))
    shard.rows[:] = 0.0
    with torch.no_grad():
        stats["after write"] = table(torch.tensor([0, 60, 100]))
    return stats


@every_engine
@pytest.mark.parametrize("world_size", [1, 4])
def test_keys_views_and_empty_batches_work(engine, world_size):
    for rank, stats in enumerate(run_world(world_size, rank_looks_around, engine)):
        assert stats["keys"] == [WEIGHT]
        assert stats["steps"] == [0, 1, 2, 7]  # lookups without gradients do not step
        assert stats["empty"] == (0, DIM)
        block = -(-101 // world_size)
        assert stats["range"] == (rank * block, min(101, (rank + 1) * block))
        assert torch.equal(stats["fetched"], start_values(101)[[100, 0, 51, 1]])
        assert not stats["after write"].any()


# FBGEMM's kernels, which a GPU has


def state_of(model: nn.Module) -> list[Rows]:
    """The rows of a checkpoint; loading it fills the model."""
    return own_rows(model).state()


def states_on_cuda(table: SplitTableBatchedEmbeddingBagsCodegen) -> list[dict[str, Tensor]]:
    """The state of FBGEMM's table for rowwise_adam, which its CPU build does not support."""
    ((first,),) = table.split_optimizer_states()
    second = table.__dict__.setdefault("second", torch.zeros(len(first)))
    return [{"exp_avg": first, "exp_avg_sq": second}]


def rank_saves_fbgemms_table(folder: str) -> None:
    """By both kernels that a GPU may have."""
    for kernel in (BatchedFusedEmbedding, DeferredEmbedding):
        deferred = kernel is DeferredEmbedding
        with (
            patch.object(sharder, "uses_own_table", lambda *_: False),
            patch.object(
                SplitTableBatchedEmbeddingBagsCodegen, "get_optimizer_state", states_on_cuda
            ),
        ):
            model = sharded_table(3, DIM, make_optimizer("adagrad"), start_values(3), deferred)
            assert type(kernel_of(model)) is kernel
            first, stop = own_rows(model).shard().row_range
            (states,) = kernel_of(model).emb_module.get_optimizer_state()
            states["exp_avg"].copy_(start_values(3)[first:stop] + 1)
            states["exp_avg_sq"].copy_(torch.arange(first, stop))
            with processes("cpu") as ranks:
                checkpoints = Checkpoints(Path(folder) / kernel.__name__, ranks)
                checkpoints.save(state_of(model), TrainState())


def rank_loads_on_a_cpu(folder: str, kernel: str) -> dict[str, Tensor]:
    model = sharded_table(3, DIM, make_optimizer("rowwise_adam"))
    with processes("cpu") as ranks:
        checkpoints = Checkpoints(Path(folder) / kernel, ranks)
        checkpoints.load(checkpoints.names(), lambda checkpoint: state_of(model))
    return parameters_and_states(own_rows(model))


def test_fbgemm_table_with_one_row_is_saved(tmp_path):
    run_world(3, rank_saves_fbgemms_table, str(tmp_path))
    for kernel in ("BatchedFusedEmbedding", "DeferredEmbedding"):
        (results,) = run_world(1, rank_loads_on_a_cpu, str(tmp_path), kernel)
        assert torch.equal(results["rows"], start_values(3))
        assert torch.equal(results["momentum1"], start_values(3) + 1)
        assert torch.equal(results["exp_avg_sq"], torch.arange(3.0))


# The hand-rolled engine steps in a thread


def in_a_thread(asynchronous: bool) -> Tensor:
    table = Handrolled(20, make_optimizer("adam", 0.5, "dicee"))
    if not asynchronous:
        table.rows._thread = None
    for step in range(10):
        # A step under way keeps the rate that it started with.
        table.rows.param_groups[0]["lr"] = 0.1 * (step + 1)
        gradients = torch.randn(3, DIM, generator=torch.Generator().manual_seed(step))
        table(torch.tensor([step, 3, dist.get_rank()])).backward(gradients)
        table.step()
    return whole(table)


def test_asynchronous_step_matches_synchronous_step():
    waited, ahead = (run_world(2, in_a_thread, flag) for flag in (False, True))
    for one, other in zip(waited, ahead, strict=True):
        assert torch.equal(one, other)


class Broken(RuntimeError):
    pass


def failing_step(how: str) -> str:
    table = Handrolled(4, make_optimizer("adam", 0.5, "dicee"))

    def fail(*_):
        raise Broken("no room")

    table.rows.optimizers[0].step_part = fail
    table(torch.tensor([1])).sum().backward()
    table.step()  # does not raise: the thread has it
    try:
        {"lookup": lambda: table(torch.tensor([0])), "shard": table.rows.shard}[how]()
    except Broken as error:
        return str(error)
    return "swallowed"


@pytest.mark.parametrize("how", ["lookup", "shard"])
def test_thread_exception_is_raised_at_next_join(how):
    assert run_world(1, failing_step, how) == ["no room"]

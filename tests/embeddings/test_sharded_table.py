"""The sharded table at 1, 2 and 4 ranks against the dense table in one process."""

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
from worlds import WorldError, run_world
from worlds_table import own_rows, sharded_table

from kge_torchrec.distributed.processes import Rows, processes
from kge_torchrec.embeddings.backend import ENTITY
from kge_torchrec.embeddings.optimizers import make_optimizer
from kge_torchrec.embeddings.torchrec import sharder
from kge_torchrec.embeddings.torchrec.collection import DeferredEmbedding, kernel_of
from kge_torchrec.training.checkpoints import Checkpoints
from kge_torchrec.training.state import TrainState

DIM, BATCH, STEPS = 8, 24, 6
# Numbers of rows by that of ranks.  5 rows on 4 ranks: 2, 2, 1, 0; 3 rows: 1, 1, 1, 0.
SIZES = {1: (101,), 2: (5,), 4: (101, 5, 3)}
WEIGHT = f"entities.embeddings.{ENTITY}.weight"


def start_values(num_entities: int) -> Tensor:
    return torch.randn(num_entities, DIM, generator=torch.Generator().manual_seed(1))


def global_batch(num_entities: int, step: int) -> tuple[Tensor, Tensor]:
    """Ids (B,), hot ones often, and targets (B, D) of all ranks together."""
    random = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(0, num_entities, (BATCH,), generator=random)
    hot = torch.rand(BATCH, generator=random) < 0.3
    return ids.where(~hot, ids % 3), torch.randn(BATCH, DIM, generator=random)


def loss_of(rows: Tensor, targets: Tensor) -> Tensor:
    return (torch.sin(rows) * targets).sum(1).mean()


def train_sharded(model: nn.Module, num_entities: int, steps: range) -> None:
    """Each rank takes its share of the global batch, ids made distinct as collation does."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in steps:
        ids, targets = (part.chunk(world_size)[rank] for part in global_batch(num_entities, step))
        distinct, inverse = torch.unique(ids, return_inverse=True)
        loss_of(model(distinct)[inverse], targets).backward()
        model.fused_optimizer.step()


def train_dense(table: DenseTable, steps: range) -> None:
    for step in steps:
        ids, targets = global_batch(len(table.weights), step)
        rows = table.weights[ids].requires_grad_()
        (grad,) = torch.autograd.grad(loss_of(rows, targets.double()), rows)
        table.step(ids, grad)


def parameters_and_states(model: nn.Module) -> dict[str, Tensor]:
    table = own_rows(model)
    (states,) = (optimizer.states for optimizer in table.optimizers)
    return {
        "rows": table.rows.clone(),
        **{f"{ENTITY}.{name}": state.clone() for name, state in states.items()},
    }


def assert_equals_dense(per_rank: list[dict[str, Tensor]], dense: DenseTable) -> None:
    whole = {key: torch.cat([part[key] for part in per_rank]) for key in per_rank[0]}
    assert set(whole) == {"rows", *dense.states()}
    close = {"rtol": 1e-5, "atol": 1e-4 * dense.optimizer.lr}
    torch.testing.assert_close(whole["rows"].double(), dense.weights, **close)
    for name, state in dense.states().items():
        torch.testing.assert_close(whole[name].double(), state, rtol=1e-5, atol=1e-6)


def rank_trains_every_table() -> dict:
    results = {}
    for name in NAMES:
        for size in SIZES[dist.get_world_size()]:
            optimizer = make_optimizer(**optimizer_settings(name))
            model = sharded_table(size, DIM, optimizer, start_values(size))
            train_sharded(model, size, range(STEPS))
            results[name, size] = parameters_and_states(model)
    return results


@pytest.mark.parametrize("world_size", SIZES)
def test_steps_match_the_dense_table(world_size):
    ranks = run_world(world_size, rank_trains_every_table)
    for name, size in ranks[0]:
        dense = DenseTable(start_values(size), make_optimizer(**optimizer_settings(name)))
        train_dense(dense, range(STEPS))
        assert_equals_dense([rank[name, size] for rank in ranks], dense)


def rank_looks_around() -> dict:
    model = sharded_table(101, DIM, make_optimizer("sgd", lr=1.0), start_values(101))
    stats = {"keys": list(model.state_dict()), "steps": [own_rows(model).steps]}
    model(torch.tensor([1, 2])).sum().mul(0).backward()
    model.fused_optimizer.step()
    with torch.no_grad():
        model(torch.tensor([1, 2]))
    stats["steps"].append(own_rows(model).steps)
    empty = model(torch.tensor([], dtype=torch.int64))
    empty.sum().backward()
    model.fused_optimizer.step()
    stats["empty"] = empty.shape
    stats["steps"].append(own_rows(model).steps)
    own_rows(model).steps = 7
    stats["steps"].append(own_rows(model).steps)

    shard = own_rows(model).shard()
    stats["range"] = shard.row_range
    stats["fetched"] = shard.fetch(torch.tensor([100, 0, 51]))
    shard.rows[:] = 0.0
    with torch.no_grad():
        stats["after write"] = model(torch.tensor([0, 60, 100]))
    return stats


def rank_trains_cases(cases: list[tuple[str, int, list[list[int]]]]) -> list[dict]:
    """Each case: optimizer, N, and the ids that each rank looks up, in one step repeated twice."""
    results = []
    for name, size, ids_per_rank in cases:
        optimizer = make_optimizer(**optimizer_settings(name))
        model = sharded_table(size, DIM, optimizer, start_values(size))
        ids = torch.tensor(ids_per_rank[dist.get_rank()], dtype=torch.int64) % size
        for _ in range(2):
            model(ids).square().sum().backward()
            model.fused_optimizer.step()
        results.append(parameters_and_states(model))
    return results


@given(
    st.lists(
        st.tuples(
            st.sampled_from(NAMES),
            st.integers(1, 13),
            st.lists(st.lists(st.integers(0, 12), max_size=6), min_size=4, max_size=4),
        ),
        min_size=4,
        max_size=8,
    )
)
@settings(max_examples=2)
def test_random_sizes_and_ids_on_four_ranks(cases):
    """Shards uneven or empty, ranks without ids, ids unsorted and repeated within a rank."""
    results = run_world(4, rank_trains_cases, cases)
    for number, (name, size, ids_per_rank) in enumerate(cases):
        dense = DenseTable(start_values(size), make_optimizer(**optimizer_settings(name)))
        ids = torch.tensor([*chain(*ids_per_rank)], dtype=torch.int64) % size
        for _ in range(2):
            dense.step(ids, 2 * dense.weights[ids] / 4)
        assert_equals_dense([part[number] for part in results], dense)


def rank_asks_out_of_order() -> tuple[Tensor, Tensor]:
    model = sharded_table(10, DIM, make_optimizer("sgd", lr=1.0), start_values(10))
    ids = torch.tensor([9, 0, 5, 9, 3])
    looked_up = model(ids)
    copy = looked_up.detach().clone()
    looked_up.backward(torch.arange(5.0)[:, None].expand(5, DIM))
    model.fused_optimizer.step()
    return copy, own_rows(model).rows.clone()


def test_unsorted_and_repeated_ids_work():
    results = run_world(2, rank_asks_out_of_order)
    expected = start_values(10)
    for looked_up, _ in results:
        assert torch.equal(looked_up, expected[[9, 0, 5, 9, 3]])
    # The ranks' gradients are averaged; each has 0 + 3 for row 9.
    expected[[9, 0, 5, 3]] -= torch.tensor([3.0, 1, 2, 4])[:, None]
    torch.testing.assert_close(torch.cat([rows for _, rows in results]), expected)


@pytest.mark.parametrize("world_size", [1, 4])
def test_keys_views_and_empty_batches_work(world_size):
    for rank, stats in enumerate(run_world(world_size, rank_looks_around)):
        assert stats["keys"] == [WEIGHT]
        assert stats["steps"] == [0, 1, 2, 7]
        assert stats["empty"] == (0, DIM)
        block = -(-101 // world_size)
        assert stats["range"] == (rank * block, min(101, (rank + 1) * block))
        assert torch.equal(stats["fetched"], start_values(101)[[100, 0, 51]])
        assert not stats["after write"].any()


def rank_changes_learning_rate() -> Tensor:
    model = sharded_table(4, DIM, make_optimizer("sgd", lr=1.0), torch.zeros(4, DIM))
    model.fused_optimizer.param_groups[0]["lr"] = 0.25
    model(torch.arange(4)).sum().backward()
    model.fused_optimizer.step()
    return own_rows(model).rows.clone()


def test_new_learning_rate_reaches_the_kernel():
    (rows,) = run_world(1, rank_changes_learning_rate)
    assert torch.equal(rows, torch.full((4, DIM), -0.25))


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
    return parameters_and_states(model)


def test_fbgemm_table_with_one_row_is_saved(tmp_path):
    run_world(3, rank_saves_fbgemms_table, str(tmp_path))
    for kernel in ("BatchedFusedEmbedding", "DeferredEmbedding"):
        (results,) = run_world(1, rank_loads_on_a_cpu, str(tmp_path), kernel)
        assert torch.equal(results["rows"], start_values(3))
        assert torch.equal(results["entity.momentum1"], start_values(3) + 1)
        assert torch.equal(results["entity.exp_avg_sq"], torch.arange(3.0))


def rank_asks_for_a_missing_entity() -> None:
    sharded_table(5, DIM, make_optimizer("adam"))(torch.tensor([5]))


def test_id_outside_the_table_raises():
    with pytest.raises(WorldError, match=r"rank 0 of 1 raised"):
        run_world(1, rank_asks_for_a_missing_entity)

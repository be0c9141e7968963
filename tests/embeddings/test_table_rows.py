"""Steps of table rows, by kernels and by torch, against the dense oracle.

Shapes: N rows, D elements per row, M gradients.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_table import PRESETS, DenseTable
from oracle_table import settings as optimizer_settings
from training_runs import config_of, largest_difference, tiny_store

from kge_torchrec.config import OPTIMIZER_NAMES
from kge_torchrec.distributed.processes import processes
from kge_torchrec.embeddings.init import EntityInit
from kge_torchrec.embeddings.optimizers import make_optimizer
from kge_torchrec.embeddings.row_gradients import RowGradients, TableRows
from kge_torchrec.embeddings.shard import EntityTable
from kge_torchrec.embeddings.torchrec.collection import FbgemmRows
from kge_torchrec.embeddings.torchrec.sharder import fused_params
from kge_torchrec.kernels.rows import update_rows
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session
from kge_torchrec.training.trainer import Trainer

every_preset = pytest.mark.parametrize(("preset", "name"), PRESETS)


def stream(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def values_of(rows=12, dim=5) -> torch.Tensor:
    return torch.randn(rows, dim, generator=stream(1))


def table_of(preset, name, values=None, exact=False, options=None, **changes) -> TableRows:
    """A table that starts with ``values``; exact: its states are float32, also those of dicee."""
    values = values_of() if values is None else values
    options = optimizer_settings(name) if options is None else options
    made = TableRows(make_optimizer(preset=preset, **options), values.clone())
    if exact:
        states = made.states.items()
        made.states = {k: x.float() if x.is_floating_point() else x for k, x in states}
    for key, value in changes.items():
        setattr(made, key, value)
    return made


def batches(preset, rows=12, dim=5, count=15, steps=20):
    """Gradients of random rows, most of them several times; dgl counts the places of each."""
    random = stream(0)
    for _ in range(steps):
        ids = torch.randint(0, rows, (count,), generator=random)
        grad = torch.randn(count, dim, generator=random)
        places = torch.randint(1, 5, (count,), generator=random)
        yield (ids, grad, places) if preset == "dgl" else (ids, grad)


def take_step(table, ids, grad, occurrences=None, distinct=False) -> None:
    """Take one step with all gradients, as ``TableShard`` does."""
    table.count(bool(len(ids)))
    table.step_part(RowGradients(ids, grad, occurrences, distinct))


def train(table, steps):
    for arguments in steps:
        take_step(table, *arguments)
    return table


def assert_equals(table, dense, rtol=1e-6, atol=1e-6) -> None:
    close = {"rtol": rtol, "atol": atol, "check_dtype": False}
    torch.testing.assert_close(table.rows, dense.weights, **close)
    expected = dense.states()
    assert list(table.states) == list(expected)
    for name, state in table.states.items():
        torch.testing.assert_close(state, expected[name], **close)
    assert table.steps == dense.steps


def assert_same_bits(left, right) -> None:
    assert torch.equal(left.rows, right.rows)
    assert list(left.states) == list(right.states)
    for name in left.states:
        assert torch.equal(left.states[name], right.states[name]), name


# The formulas


@pytest.mark.parametrize("has_kernel", [True, False])
@every_preset
def test_twenty_steps_equal_the_formula(preset, name, has_kernel):
    """With usual betas, too: 1 - 0.999 differs in the fifth digit between float32 and float64."""
    usual = {"name": name, "lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    for options, atol in ((optimizer_settings(name), 1e-6), (usual, 1e-7)):
        if options is usual and not name.endswith("adam"):
            continue
        table = table_of(preset, name, exact=True, options=options)
        assert table.kernel == (name if preset == "fbgemm" else None)
        table.kernel = table.kernel if has_kernel else None
        dense = DenseTable(values_of(), make_optimizer(**options), preset)
        for ids, grad, *places in batches(preset):
            grad = grad.abs() + 0.1 if options is usual else grad
            take_step(table, ids, grad, *places)
            dense.step(ids, grad, *places)
        assert_equals(table, dense, atol=atol)


@given(
    case=st.sampled_from(PRESETS),
    rows=st.sampled_from([1, 2, 7]),
    dim=st.sampled_from([1, 3, 8, 17]),
    lists=st.lists(st.lists(st.integers(0, 6), max_size=12), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60)
def test_random_ids_match_the_formula(case, rows, dim, lists, seed):
    (preset, name), random = case, stream(seed)
    values = torch.randn(rows, dim, generator=random)
    table = table_of(preset, name, values, exact=True)
    dense = DenseTable(values, make_optimizer(**optimizer_settings(name)), preset)
    for ids in lists:
        ids = torch.tensor([row % rows for row in ids], dtype=torch.int64)
        grad = torch.randn(len(ids), dim, generator=random)
        take_step(table, ids, grad, torch.ones_like(ids) if preset == "dgl" else None)
        dense.step(ids, grad)
    # Sums that nearly cancel lose digits, and the Adams do not care how small a gradient is.
    assert_equals(table, dense, rtol=1e-5, atol=1e-5)


def test_dicee_preset_matches_torch_sparse_adam():
    weights = torch.nn.Parameter(values_of(40, 8))
    options = {"name": "adam", "lr": 0.05, "beta1": 0.8, "beta2": 0.95}
    table = table_of("dicee", "adam", weights.detach(), exact=True, options=options)
    theirs = torch.optim.SparseAdam([weights], lr=0.05, betas=(0.8, 0.95), eps=1e-8)
    for ids, grad in batches("dicee", 40, 8, count=60):
        weights.grad = torch.sparse_coo_tensor(
            ids.unsqueeze(0), grad, weights.shape, check_invariants=True
        )
        theirs.step()
        take_step(table, ids, grad)
    torch.testing.assert_close(table.rows, weights.detach(), rtol=1e-6, atol=1e-6)


def nearest_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 numbers that bfloat16 has; ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def test_dicee_bfloat16_moments_match_bitwise():
    table = table_of("dicee", "adam", options={"name": "adam", "lr": 0.05})
    weights = values_of().double().numpy()
    m, v = np.zeros((2, *weights.shape), np.float32)
    beta1, rest1, beta2, rest2 = map(np.float32, (0.9, 1 - 0.9, 0.999, 1 - 0.999))
    for t, (ids, grad) in enumerate(batches("dicee"), 1):
        take_step(table, ids, grad)
        step_size = 0.05 * math.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        for row in set(ids.tolist()):
            g = np.zeros(5, np.float32)
            for place in (ids == row).nonzero():
                g = g + grad[place[0]].numpy()
            m_row = beta1 * m[row] + rest1 * g
            v_row = beta2 * v[row] + rest2 * (g * g)
            # The step is of the moments before they are rounded.
            weights[row] -= step_size * m_row / (np.sqrt(v_row.astype(np.float64)) + 1e-8)
            m[row], v[row] = nearest_bfloat16(m_row), nearest_bfloat16(v_row)
    assert table.states["momentum1"].dtype == table.states["exp_avg_sq"].dtype == torch.bfloat16
    assert torch.equal(table.states["momentum1"].float(), torch.from_numpy(m))
    assert torch.equal(table.states["exp_avg_sq"].float(), torch.from_numpy(v))
    torch.testing.assert_close(table.rows.double(), torch.from_numpy(weights), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["adagrad", "rowwise_adagrad", "sgd"])
def test_update_equals_the_cpu_operator_of_fbgemm(name):
    changes = {"weight_decay": 0.1} if name == "rowwise_adagrad" else {}
    optimizer = make_optimizer(**optimizer_settings(name, **changes))
    random = stream(1)
    values = torch.randn(50, 8, generator=random)
    ours = TableRows(optimizer, values.clone())
    params = fused_params([EntityTable.of_all(50, optimizer, EntityInit())])
    theirs = SplitTableBatchedEmbeddingBagsCodegen(
        [(50, 8, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        pooling_mode=PoolingMode.NONE,
        **{key: value for key, value in params.items() if key != "kge_torchrec"},
    )
    theirs.split_embedding_weights()[0].copy_(values)
    for _ in range(10):
        ids, grad = torch.randint(0, 50, (60,), generator=random), torch.randn(60, 8)
        ours.count(True)
        ours.step_part(RowGradients(ids, grad))
        theirs(ids, torch.arange(61)).backward(grad)  # FBGEMM steps in backward
    close = {"rtol": 1e-6, "atol": 2e-6}
    torch.testing.assert_close(ours.rows, theirs.split_embedding_weights()[0], **close)
    states = zip(ours.states.values(), FbgemmRows(theirs).states.values(), strict=True)
    for our_state, their_state in states:
        torch.testing.assert_close(our_state, their_state, **close)


def test_adam_late_in_training_needs_no_bias_correction():
    rows, first, second = torch.zeros(3, 1, 4).unbind(0)
    options = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    where = torch.tensor([0]), torch.ones(1, 4), rows, first, second
    update_rows("adam", options, 0.1, 5_000_000, *where)
    # m = 0.1, v = 0.001, both corrections 1
    expected = torch.full((1, 4), -0.1 * 0.1 / 0.001**0.5)
    torch.testing.assert_close(rows, expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("rows", [[0, 5], [-1, 2], [4, 0, 5], [3, -1, 3]])
def test_rows_outside_the_table_are_rejected(rows):
    weights, rows = torch.zeros(5, 4), torch.tensor(rows)
    with pytest.raises(IndexError, match="of a table of 5"):
        update_rows("sgd", {}, 0.1, 1, rows, torch.ones(len(rows), 4), weights)
    assert not weights.any()


# What must not matter


@given(
    case=st.sampled_from(PRESETS),
    dim=st.sampled_from([1, 5, 16, 40]),
    chunk_rows=st.integers(1, 40),
    distinct=st.booleans(),
)
@settings(max_examples=30)
def test_results_do_not_depend_on_chunks(case, dim, chunk_rows, distinct):
    tables = [
        table_of(*case, values_of(50, dim), kernel=None, **changes)
        for changes in ({}, {"chunk_rows": chunk_rows})
    ]
    for ids, grad, *places in batches(case[0], 50, dim, count=40, steps=4):
        ids = torch.randperm(50, generator=stream(3))[:40] if distinct else ids
        for table in tables:
            take_step(table, ids, grad, *places, distinct=distinct)
    assert_same_bits(*tables)


@every_preset
def test_order_parts_and_distinct_flag_do_not_change_results(preset, name):
    """Distinct rows at once, said to be distinct or not, ascending, or in three parts."""
    tables = [table_of(preset, name, values_of(50)) for _ in range(4)]
    ids = torch.randperm(50, generator=stream(0))[:15]
    order = ids.argsort()
    for _, grad, *places in batches(preset):
        before = grad.clone()
        gradients = RowGradients(ids, grad, *places, distinct=True)
        take_step(tables[0], *gradients)
        take_step(tables[1], *gradients._replace(distinct=False))
        ascending = [x if x is None or x is True else x[order] for x in gradients]
        take_step(tables[2], *ascending)
        tables[3].count(True)
        for part in (slice(0, 7), slice(7, 7), slice(7, 15)):
            tables[3].step_part(RowGradients(*(x if x is None or x is True else x[part]
                                               for x in gradients)))  # fmt: skip
        assert torch.equal(grad, before)
    for table in tables[1:]:
        assert_same_bits(tables[0], table)


@every_preset
def test_results_do_not_depend_on_threads(preset, name):
    steps = [*batches(preset, 3000, 64, count=9000, steps=2)]
    tables, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            tables.append(train(table_of(preset, name, values_of(3000, 64)), steps))
    finally:
        torch.set_num_threads(before)
    assert_same_bits(tables[0], tables[1])
    assert_same_bits(tables[1], tables[2])


# On a GPU


@pytest.mark.gpu
@every_preset
def test_gpu_matches_cpu(preset, name):
    ours, theirs = table_of(preset, name, kernel=None), table_of(preset, name, values_of().cuda())
    for batch in batches(preset):
        take_step(ours, *batch)
        take_step(theirs, *(part.cuda() for part in batch))
    # A last bit of a sum may move a bfloat16 state to its other neighbour.
    close = {"rtol": 1e-2, "atol": 1e-3} if preset == "dicee" else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(theirs.rows.cpu(), ours.rows, **close)
    for key, state in ours.states.items():
        assert theirs.states[key].device.type == ("cpu" if preset == "dicee" else "cuda")
        torch.testing.assert_close(theirs.states[key].cpu(), state, **close)


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

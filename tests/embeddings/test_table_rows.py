"""Steps of table rows against formulas written out row by row.

Shapes: N rows, D elements per row, M gradients.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_sparse import (
    ADAMS,
    PRESETS,
    Formulas,
    assert_equal_formulas,
    assert_same_bits,
    batches,
    compare_with_formulas,
    exact,
    new_values,
    sparse,
    take_step,
    train,
)
from oracle_table import NAMES
from oracle_table import settings as optimizer_settings

from kge_torchrec.embeddings.optimizers import make_optimizer
from kge_torchrec.embeddings.row_gradients import TableRows

# The formulas


def steps_of(preset, *args, **keys):
    """``batches``, of which only dgl counts the places of each gradient."""
    return [batch if preset == "dgl" else batch[:2] for batch in batches(*args, **keys)]


@pytest.mark.parametrize(("preset", "name"), PRESETS)
def test_twenty_steps_of_a_preset_match_its_formula(preset, name):
    optimizer = make_optimizer(**optimizer_settings(name))
    compare_with_formulas(optimizer, preset, steps_of(preset))


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize(("preset", "name"), [entry for entry in PRESETS if entry[1] in ADAMS])
def test_presets_match_with_usual_betas(preset, name, kernel):
    """1 - 0.999 differs in the fifth digit between float32 and float64; seen in small moments."""
    optimizer = make_optimizer(name, lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8)
    changes = {} if kernel else {"kernel": None}
    steps = [(ids, grad.abs() + 0.1, *places) for ids, grad, *places in steps_of(preset)]
    compare_with_formulas(optimizer, preset, steps, atol=1e-7, **changes)


@pytest.mark.parametrize("name", NAMES)
def test_torch_operations_match_the_kernel_formula(name):
    optimizer = make_optimizer(**optimizer_settings(name))
    compare_with_formulas(optimizer, "fbgemm", steps_of("fbgemm"), kernel=None)


@pytest.mark.parametrize("name", NAMES)
def test_torch_operations_match_the_kernel(name):
    optimizer = make_optimizer(**optimizer_settings(name))
    kernel = sparse(new_values(), optimizer, "fbgemm")
    operations = sparse(new_values(), optimizer, "fbgemm", kernel=None)
    assert kernel.kernel == name and operations.kernel is None
    train(kernel, steps_of("fbgemm"))
    train(operations, steps_of("fbgemm"))
    torch.testing.assert_close(operations.rows, kernel.rows, rtol=1e-6, atol=1e-6)
    for key, state in kernel.states.items():
        torch.testing.assert_close(operations.states[key], state, rtol=1e-6, atol=1e-6)


@given(
    case=st.sampled_from(PRESETS),
    rows=st.sampled_from([1, 2, 7]),
    dim=st.sampled_from([1, 3, 8, 17]),
    lists=st.lists(st.lists(st.integers(0, 6), max_size=12), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
@settings(max_examples=30)
def test_random_ids_match_the_formula(case, rows, dim, lists, seed):
    preset, name = case
    random = torch.Generator().manual_seed(seed)
    optimizer = make_optimizer(**optimizer_settings(name))
    values = torch.randn(rows, dim, generator=random)
    made = exact(sparse(values, optimizer, preset))
    formulas = Formulas(values, optimizer, preset)
    for ids in lists:
        ids = torch.tensor([row % rows for row in ids], dtype=torch.int64)
        grad = torch.randn(len(ids), dim, generator=random)
        take_step(made, ids, grad, torch.ones_like(ids) if preset == "dgl" else None)
        formulas.step(ids, grad)
    # Sums that nearly cancel lose digits, and the Adams do not care how small a gradient is.
    assert_equal_formulas(made, formulas, rtol=1e-5, atol=1e-5)


def test_dicee_preset_matches_torch_sparse_adam():
    weights = torch.nn.Parameter(new_values(40, 8))
    optimizer = make_optimizer("adam", lr=0.05, beta1=0.8, beta2=0.95)
    made = exact(sparse(weights.detach(), optimizer, "dicee"))
    theirs = torch.optim.SparseAdam([weights], lr=0.05, betas=(0.8, 0.95), eps=1e-8)
    for ids, grad, _ in batches(40, 8, count=60):
        weights.grad = torch.sparse_coo_tensor(
            ids.unsqueeze(0), grad, weights.shape, check_invariants=True
        )
        theirs.step()
        take_step(made, ids, grad)
    torch.testing.assert_close(made.rows, weights.detach(), rtol=1e-6, atol=1e-6)
    state = theirs.state[weights]
    torch.testing.assert_close(made.states["momentum1"], state["exp_avg"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(made.states["exp_avg_sq"], state["exp_avg_sq"], rtol=1e-6, atol=1e-6)


def nearest_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 numbers that bfloat16 has; ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def test_dicee_bfloat16_moments_match_bitwise():
    optimizer = make_optimizer("adam", lr=0.05)
    made = sparse(new_values(), optimizer, "dicee")
    weights = new_values().double().numpy()
    m, v = np.zeros((2, *weights.shape), np.float32)
    beta1, rest1, beta2, rest2 = map(np.float32, (0.9, 1 - 0.9, 0.999, 1 - 0.999))
    for t, (ids, grad, _) in enumerate(batches(), 1):
        take_step(made, ids, grad)
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
    assert made.states["momentum1"].dtype == made.states["exp_avg_sq"].dtype == torch.bfloat16
    assert torch.equal(made.states["momentum1"].float(), torch.from_numpy(m))
    assert torch.equal(made.states["exp_avg_sq"].float(), torch.from_numpy(v))
    torch.testing.assert_close(made.rows.double(), torch.from_numpy(weights), rtol=1e-6, atol=1e-6)


# What must not matter


@given(
    case=st.sampled_from(PRESETS),
    dim=st.sampled_from([1, 5, 16, 40]),
    chunk_rows=st.integers(1, 40),
    distinct=st.booleans(),
)
@settings(max_examples=30)
def test_results_do_not_depend_on_chunks(case, dim, chunk_rows, distinct):
    preset, name = case
    optimizer = make_optimizer(**optimizer_settings(name))
    tables = [
        sparse(new_values(50, dim), optimizer, preset, kernel=None, **changes)
        for changes in ({}, {"chunk_rows": chunk_rows})
    ]
    for ids, grad, *places in steps_of(preset, 50, dim, count=40, steps=4):
        ids = (
            torch.randperm(50, generator=torch.Generator().manual_seed(3))[:40] if distinct else ids
        )
        for table in tables:
            take_step(table, ids, grad, *places, distinct=distinct)
    assert_same_bits(*tables)


def test_row_corrections_do_not_depend_on_chunks():
    tables = [
        sparse(torch.zeros(3000, 1), make_optimizer("adam"), "dgl", **changes)
        for changes in ({}, {"chunk_rows": 3})
    ]
    for table in tables:
        table.states["row_step"].copy_(torch.arange(3000))
        take_step(table, torch.arange(3000), torch.ones(3000, 1), distinct=True)
    assert_same_bits(*tables)


@pytest.mark.parametrize(("preset", "name"), PRESETS)
def test_distinct_flag_does_not_change_results(preset, name):
    optimizer = make_optimizer(**optimizer_settings(name))
    tables = [sparse(new_values(50), optimizer, preset) for _ in range(2)]
    ids = torch.randperm(50, generator=torch.Generator().manual_seed(0))[:15]
    for _, grad, *places in steps_of(preset):
        before = grad.clone()
        take_step(tables[0], ids, grad, *places, distinct=True)
        take_step(tables[1], ids, grad, *places, distinct=False)
        assert torch.equal(grad, before)
    assert_same_bits(*tables)


@pytest.mark.parametrize(("preset", "name"), PRESETS)
def test_results_do_not_depend_on_threads(preset, name):
    steps = steps_of(preset, 3000, 64, count=9000, steps=2)
    tables, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            optimizer = make_optimizer(**optimizer_settings(name))
            tables.append(train(sparse(new_values(3000, 64), optimizer, preset), steps))
    finally:
        torch.set_num_threads(before)
    assert_same_bits(tables[0], tables[1])
    assert_same_bits(tables[1], tables[2])


@pytest.mark.parametrize(("preset", "name"), PRESETS)
def test_steps_and_states_suffice_to_resume(preset, name):
    optimizer, steps = make_optimizer(**optimizer_settings(name)), steps_of(preset)
    straight = train(sparse(new_values(), optimizer, preset), steps)
    first = train(sparse(new_values(), optimizer, preset), steps[:9])
    resumed = sparse(first.rows, optimizer, preset, steps=first.steps)
    for key, state in first.states.items():
        resumed.states[key].copy_(state)
    assert_same_bits(train(resumed, steps[9:]), straight)


# What stays


@pytest.mark.parametrize(("preset", "name"), PRESETS)
def test_rows_without_gradient_do_not_change(preset, name):
    made = sparse(new_values(20), make_optimizer(**optimizer_settings(name)), preset)
    for state in made.states.values():
        state.copy_(torch.arange(state.numel()).view_as(state) / 7)
    states = {key: state.clone() for key, state in made.states.items()}
    train(made, steps_of(preset, 10))
    assert torch.equal(made.rows[10:], new_values(20)[10:])
    assert not torch.equal(made.rows[:10], new_values(20)[:10])
    for key, state in made.states.items():
        assert torch.equal(state[10:], states[key][10:])


@pytest.mark.parametrize(("preset", "name"), PRESETS)
@pytest.mark.parametrize("rows", [0, 3])
def test_step_without_gradients_is_only_counted(preset, name, rows):
    made = sparse(new_values(rows), make_optimizer(**optimizer_settings(name)), preset)
    nothing = torch.empty(0, dtype=torch.int64), torch.empty(0, 5), torch.empty(0).long()
    train(made, [nothing, nothing[:2], (*nothing, True)])
    assert made.steps == (0 if preset == "dicee" else 3)
    assert torch.equal(made.rows, new_values(rows))
    assert not any(state.count_nonzero() for state in made.states.values())


def test_table_views_are_updated_in_place():
    table = torch.nn.Parameter(new_values(9))
    made = TableRows(make_optimizer("sgd", lr=1.0), table.data[3:6])
    take_step(made, torch.tensor([1]), torch.ones(1, 5))
    assert torch.equal(table[4], new_values(9)[4] - 1)
    parameter = TableRows(make_optimizer("adam", preset="dgl"), table)
    take_step(parameter, torch.tensor([8]), torch.ones(1, 5))
    assert torch.allclose(table[8], new_values(9)[8] - 0.01, atol=1e-6)


@pytest.mark.parametrize(("preset", "name"), PRESETS)
def test_current_learning_rate_is_used(preset, name):
    made = sparse(new_values(), make_optimizer(name, lr=0.05), preset, lr=0.0)
    train(made, steps_of(preset, steps=2))
    assert torch.equal(made.rows, new_values())
    made.lr = 0.5
    train(made, steps_of(preset, steps=1))
    assert not torch.equal(made.rows, new_values())


@pytest.mark.parametrize(
    ("preset", "steps", "expected"), [("dgl", 5000, 1.0), ("fbgemm", 5000, 3.16), ("dgl", 0, 1.0)]
)
def test_first_step_of_a_late_row(preset, steps, expected):
    """In units of the learning rate; counting by rows gives a late row the step of an early one."""
    made = sparse(torch.zeros(2, 4), make_optimizer("adam", lr=0.01), preset)
    first = torch.tensor([0]), torch.ones(1, 4)
    train(made, [first] * min(steps, 50))
    made.steps = steps
    take_step(made, torch.tensor([1]), torch.full((1, 4), 1e-3))
    assert -made.rows[1] / 0.01 == pytest.approx(expected, rel=0.01)


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(("preset", "name"), PRESETS)
def test_gpu_matches_cpu(preset, name):
    optimizer = make_optimizer(**optimizer_settings(name))
    ours = sparse(new_values(), optimizer, preset, kernel=None)
    theirs = sparse(new_values().cuda(), optimizer, preset)
    for batch in steps_of(preset):
        take_step(ours, *batch)
        take_step(theirs, *(part.cuda() for part in batch))
    # A last bit of a sum may move a bfloat16 state to its other neighbour.
    close = {"rtol": 1e-2, "atol": 1e-3} if preset == "dicee" else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(theirs.rows.cpu(), ours.rows, **close)
    for key, state in ours.states.items():
        assert theirs.states[key].device.type == ("cpu" if preset == "dicee" else "cuda")
        torch.testing.assert_close(theirs.states[key].cpu(), state, **close)

"""The hand-rolled sparse optimizer against formulas written out row by row.

Shapes: N rows, D elements per row, M gradients.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_sparse import (
    ADAMS,
    PRESETS,
    SINGLE_OPTIONS,
    Formulas,
    assert_equal_formulas,
    assert_same_bits,
    batches,
    compare_with_formulas,
    new_values,
    sparse,
    train,
)
from oracle_table import NAMES
from oracle_table import settings as optimizer_settings

from kge_torchrec.config.sparse_options import SparseOptions, choose, preset
from kge_torchrec.embeddings.all_to_all.sparse_optimizer import (
    SparseOptimizer,
    round_stochastically,
)
from kge_torchrec.embeddings.optimizers import TableOptimizer

# The formulas


@pytest.mark.parametrize("with_occurrences", [False, True])
@pytest.mark.parametrize(("of", "name"), PRESETS)
@pytest.mark.covering
def test_twenty_steps_of_a_preset_match_its_formula(of, name, with_occurrences):
    changes = {} if of == "fbgemm" else {"weight_decay": 0.0}  # the others have none
    optimizer = TableOptimizer(**optimizer_settings(name, **changes))
    options = choose(of, name, state_dtype="fp32" if of == "dicee" else None)
    steps = [batch if with_occurrences else batch[:2] for batch in batches()]
    compare_with_formulas(optimizer, options, steps)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("of", "name"), [entry for entry in PRESETS if entry[1] in ADAMS])
def test_presets_match_with_usual_betas(of, name, fused):
    """1 - 0.999 differs in the fifth digit between float32 and float64; seen in small moments."""
    optimizer = TableOptimizer(name, lr=0.01, betas=(0.9, 0.999), eps=1e-8)
    options = choose(of, name, state_dtype="fp32" if of == "dicee" else None)
    changes = {"fused": fused} if of == "fbgemm" else {}
    steps = [(ids, grad.abs() + 0.1, occurrences) for ids, grad, occurrences in batches()]
    compare_with_formulas(optimizer, options, steps, atol=1e-7, **changes)


@pytest.mark.parametrize(("name", "option"), SINGLE_OPTIONS)
def test_every_option_matches_its_formula(name, option):
    optimizer = TableOptimizer(**optimizer_settings(name))
    compare_with_formulas(optimizer, choose("fbgemm", name, **option), batches())


@pytest.mark.parametrize("name", NAMES)
def test_torch_operations_match_the_kernel_formula(name):
    optimizer = TableOptimizer(**optimizer_settings(name))
    compare_with_formulas(optimizer, preset("fbgemm", name), batches(), fused=False)


@pytest.mark.parametrize("name", NAMES)
def test_torch_operations_match_the_kernel(name):
    optimizer = TableOptimizer(**optimizer_settings(name))
    kernel = sparse(new_values(), optimizer, preset("fbgemm", name))
    operations = sparse(new_values(), optimizer, preset("fbgemm", name), fused=False)
    assert kernel.fused
    train(kernel, batches())
    train(operations, batches())
    torch.testing.assert_close(operations.rows, kernel.rows, rtol=1e-6, atol=1e-6)
    for key, state in kernel.states.items():
        torch.testing.assert_close(operations.states[key], state, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "option",
    [
        {"duplicates": "mean"},
        {"bias_correction": "row"},
        {"bias_correction": "shard"},
        {"epsilon": "inside"},
        {"state_dtype": "bf16"},
    ],
)
def test_only_fbgemm_options_use_the_kernel(option):
    assert not sparse(new_values(), TableOptimizer(), choose("fbgemm", "adam", **option)).fused
    elsewhere = choose("fbgemm", "adam", state_device="cpu", async_step=True)
    assert sparse(new_values(), TableOptimizer(), elsewhere).fused


@given(
    case=st.sampled_from(PRESETS),
    rows=st.sampled_from([1, 2, 7]),
    dim=st.sampled_from([1, 3, 8, 17]),
    lists=st.lists(st.lists(st.integers(0, 6), max_size=12), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
@settings(max_examples=30, deadline=None)
def test_random_ids_match_the_formula(case, rows, dim, lists, seed):
    of, name = case
    random = torch.Generator().manual_seed(seed)
    optimizer = TableOptimizer(**optimizer_settings(name))
    options = choose(of, name, state_dtype="fp32" if of == "dicee" else None)
    values = torch.randn(rows, dim, generator=random)
    made, formulas = sparse(values, optimizer, options), Formulas(values, optimizer, options)
    for ids in lists:
        ids = torch.tensor([row % rows for row in ids], dtype=torch.int64)
        grad = torch.randn(len(ids), dim, generator=random)
        made.step(ids, grad)
        formulas.step(ids, grad)
    # Sums that nearly cancel lose digits, and the Adams do not care how small a gradient is.
    assert_equal_formulas(made, formulas, rtol=1e-5, atol=1e-5)


def test_dicee_preset_matches_torch_sparse_adam():
    weights = torch.nn.Parameter(new_values(40, 8))
    options = choose("dicee", "adam", state_dtype="fp32")
    made = sparse(weights.detach(), TableOptimizer("adam", lr=0.05, betas=(0.8, 0.95)), options)
    theirs = torch.optim.SparseAdam([weights], lr=0.05, betas=(0.8, 0.95), eps=1e-8)
    for ids, grad, _ in batches(40, 8, count=60):
        weights.grad = torch.sparse_coo_tensor(
            ids.unsqueeze(0), grad, weights.shape, check_invariants=True
        )
        theirs.step()
        made.step(ids, grad)
    torch.testing.assert_close(made.rows, weights.detach(), rtol=1e-6, atol=1e-6)
    state = theirs.state[weights]
    torch.testing.assert_close(made.states["momentum1"], state["exp_avg"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(made.states["exp_avg_sq"], state["exp_avg_sq"], rtol=1e-6, atol=1e-6)


def nearest_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 numbers that bfloat16 has; ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def test_dicee_bfloat16_moments_match_bitwise():
    optimizer = TableOptimizer("adam", lr=0.05)
    made = sparse(new_values(), optimizer, preset("dicee", "adam"))
    weights = new_values().double().numpy()
    m, v = np.zeros((2, *weights.shape), np.float32)
    beta1, rest1, beta2, rest2 = map(np.float32, (0.9, 1 - 0.9, 0.999, 1 - 0.999))
    for t, (ids, grad, _) in enumerate(batches(), 1):
        made.step(ids, grad)
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
    case=st.sampled_from([*PRESETS, *SINGLE_OPTIONS]),
    state=st.sampled_from([("fp32", None), ("bf16", "nearest"), ("bf16", "stochastic")]),
    dim=st.sampled_from([1, 5, 16, 40]),
    chunk_rows=st.integers(1, 40),
    distinct=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_results_do_not_depend_on_chunks(case, state, dim, chunk_rows, distinct):
    of, name, option = (*case, {}) if isinstance(case[1], str) else ("fbgemm", *case)
    if name != "sgd":
        option = option | {"state_dtype": state[0], "state_rounding": state[1]}
    optimizer = TableOptimizer(**optimizer_settings(name))
    tables = [
        sparse(new_values(50, dim), optimizer, choose(of, name, **option), fused=False, **changes)
        for changes in ({}, {"chunk_rows": chunk_rows})
    ]
    for ids, grad, occurrences in batches(50, dim, count=40, steps=4):
        ids = (
            torch.randperm(50, generator=torch.Generator().manual_seed(3))[:40] if distinct else ids
        )
        for table in tables:
            table.step(ids, grad, occurrences, distinct)
    assert_same_bits(*tables)


def test_row_corrections_do_not_depend_on_chunks():
    tables = [
        sparse(torch.zeros(3000, 1), TableOptimizer("adam"), preset("dgl", "adam"), **changes)
        for changes in ({}, {"chunk_rows": 3})
    ]
    for table in tables:
        table.states["row_step"].copy_(torch.arange(3000))
        table.step(torch.arange(3000), torch.ones(3000, 1), distinct=True)
    assert_same_bits(*tables)


@pytest.mark.parametrize("with_occurrences", [False, True])
@pytest.mark.parametrize(("of", "name"), [*PRESETS, *(("mean", name) for name in NAMES)])
def test_distinct_flag_does_not_change_results(of, name, with_occurrences):
    optimizer = TableOptimizer(**optimizer_settings(name))
    options = SparseOptions(duplicates="mean") if of == "mean" else preset(of, name)
    tables = [sparse(new_values(50), optimizer, options) for _ in range(2)]
    ids = torch.randperm(50, generator=torch.Generator().manual_seed(0))[:15]
    for _, grad, occurrences in batches():
        before = grad.clone()
        occurrences = occurrences if with_occurrences else None
        tables[0].step(ids, grad, occurrences, distinct=True)
        tables[1].step(ids, grad, occurrences, distinct=False)
        assert torch.equal(grad, before)
    assert_same_bits(*tables)


@pytest.mark.parametrize(("of", "name"), PRESETS)
@pytest.mark.covering
def test_results_do_not_depend_on_threads(of, name):
    steps = batches(3000, 64, count=9000, steps=2)
    tables, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            optimizer = TableOptimizer(**optimizer_settings(name))
            tables.append(train(sparse(new_values(3000, 64), optimizer, preset(of, name)), steps))
    finally:
        torch.set_num_threads(before)
    assert_same_bits(tables[0], tables[1])
    assert_same_bits(tables[1], tables[2])


@pytest.mark.parametrize("name", NAMES[:4])
@pytest.mark.parametrize("cuts", [(0, 20), (0, 7, 20), (0, 0, 5, 13, 20)])
@pytest.mark.covering
def test_shards_round_like_the_whole_table(name, cuts):
    """Also with a shard without rows, and with steps in which a shard has no gradient."""
    optimizer = TableOptimizer(**optimizer_settings(name))
    options = SparseOptions(state_dtype="bf16")
    whole = train(sparse(new_values(20), optimizer, options), batches(20, count=4))
    shards = [
        sparse(new_values(20)[start:stop], optimizer, options, first_row=start)
        for start, stop in pairwise(cuts)
    ]
    for ids, grad, _ in batches(20, count=4):
        for shard in shards:
            here = (ids >= shard.first_row) & (ids < shard.first_row + len(shard.rows))
            shard.step(ids[here] - shard.first_row, grad[here])
    assert torch.equal(torch.cat([shard.rows for shard in shards]), whole.rows)
    for key, state in whole.states.items():
        assert torch.equal(torch.cat([shard.states[key] for shard in shards]), state)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        *((preset(of, name), name) for of, name in PRESETS),
        (SparseOptions(state_dtype="bf16"), "rowwise_adam"),
    ],
)
def test_steps_and_states_suffice_to_resume(options, name):
    optimizer = TableOptimizer(**optimizer_settings(name))
    straight = train(sparse(new_values(), optimizer, options), batches())
    first = train(sparse(new_values(), optimizer, options), batches()[:9])
    resumed = sparse(first.rows, optimizer, options, steps=first.steps)
    for key, state in first.states.items():
        resumed.states[key].copy_(state)
    assert_same_bits(train(resumed, batches()[9:]), straight)


def test_rounding_depends_on_step_row_and_state():
    made = sparse(new_values(), TableOptimizer("adam"), SparseOptions(state_dtype="bf16"))
    made.steps, made.first_row = 41, 1000
    ids, grad = torch.tensor([7, 2, 9]), torch.randn(3, 5)
    made.step(ids, grad)
    beta1, beta2 = (torch.tensor(beta).item() for beta in (0.9, 0.999))
    moments = {"momentum1": (1 - beta1) * grad, "exp_avg_sq": (1 - beta2) * grad.square()}
    for number, (key, values) in enumerate(moments.items()):
        expected = round_stochastically(values, ids + 1000, 42, number)
        assert torch.equal(made.states[key][ids], expected), key


# What stays


@pytest.mark.parametrize(("of", "name"), [*PRESETS, ("bf16", "adam")])
def test_rows_without_gradient_do_not_change(of, name):
    options = SparseOptions(state_dtype="bf16") if of == "bf16" else preset(of, name)
    made = sparse(new_values(20), TableOptimizer(**optimizer_settings(name)), options)
    for state in made.states.values():
        state.copy_(torch.arange(state.numel()).view_as(state) / 7)
    states = {key: state.clone() for key, state in made.states.items()}
    train(made, batches(10))
    assert torch.equal(made.rows[10:], new_values(20)[10:])
    assert not torch.equal(made.rows[:10], new_values(20)[:10])
    for key, state in made.states.items():
        assert torch.equal(state[10:], states[key][10:])


@pytest.mark.parametrize(("of", "name"), PRESETS)
@pytest.mark.parametrize("rows", [0, 3])
def test_step_without_gradients_is_only_counted(of, name, rows):
    options = preset(of, name)
    made = sparse(new_values(rows), TableOptimizer(**optimizer_settings(name)), options)
    nothing = torch.empty(0, dtype=torch.int64), torch.empty(0, 5), torch.empty(0).long()
    train(made, [nothing, nothing[:2], (*nothing, True)])
    assert made.steps == (0 if of == "dicee" else 3)
    assert torch.equal(made.rows, new_values(rows))
    assert not any(state.count_nonzero() for state in made.states.values())


def test_table_views_are_updated_in_place():
    table = torch.nn.Parameter(new_values(9))
    made = SparseOptimizer(TableOptimizer("sgd", lr=1.0), preset("fbgemm", "sgd"), table.data[3:6])
    made.step(torch.tensor([1]), torch.ones(1, 5))
    assert torch.equal(table[4], new_values(9)[4] - 1)
    parameter = SparseOptimizer(TableOptimizer(), preset("dgl", "adam"), table)
    parameter.step(torch.tensor([8]), torch.ones(1, 5))
    assert torch.allclose(table[8], new_values(9)[8] - 0.01, atol=1e-6)


@pytest.mark.parametrize(("of", "name"), PRESETS)
def test_current_learning_rate_is_used(of, name):
    optimizer = TableOptimizer(name, lr=0.05)
    made = sparse(new_values(), optimizer, preset(of, name), lr=0.0)
    train(made, batches(steps=2))
    assert torch.equal(made.rows, new_values())
    made.lr = 0.5
    train(made, batches(steps=1))
    assert not torch.equal(made.rows, new_values())


def test_mean_divides_by_occurrences():
    optimizer = TableOptimizer("sgd", lr=1.0)
    ids, grad = torch.tensor([0, 0]), torch.tensor([[1.0], [0.5]])
    for options, expected in ((SparseOptions(), 1.5), (SparseOptions(duplicates="mean"), 0.3)):
        made = sparse(torch.zeros(1, 1), optimizer, options)
        made.step(ids, grad, torch.tensor([3, 2]))
        assert made.rows.item() == pytest.approx(-expected)


# What the options are there for


def moments_after(steps, options):
    """Second moments of 4096 numbers under a constant gradient of 1, with a beta of 0.999."""
    made = sparse(torch.zeros(64, 64), TableOptimizer("adam"), options)
    ids, grad = torch.arange(64), torch.ones(64, 64)
    for _ in range(steps):
        made.step(ids, grad, distinct=True)
    return made.states["exp_avg_sq"].float()


@pytest.mark.slow
def test_nearest_bfloat16_moments_stall_and_stochastic_ones_do_not():
    steps = 2500
    nearest = moments_after(steps, SparseOptions(state_dtype="bf16", state_rounding="nearest"))
    stochastic = moments_after(steps, SparseOptions(state_dtype="bf16"))
    single = moments_after(steps, SparseOptions())
    torch.testing.assert_close(single, torch.full_like(single, 1 - 0.999**steps), rtol=1e-3, atol=0)
    assert (nearest == 0.25).all()  # steps twice as large as they should be
    assert stochastic.mean().item() == pytest.approx(single.mean().item(), rel=0.03)
    assert stochastic.unique().numel() > 1


@pytest.mark.parametrize(
    ("count", "steps", "expected"), [("row", 5000, 1.0), ("table", 5000, 3.16), ("row", 0, 1.0)]
)
def test_first_step_of_a_late_row(count, steps, expected):
    """In units of the learning rate; counting by rows gives a late row the step of an early one."""
    options = choose("fbgemm", "adam", bias_correction=count)
    made = sparse(torch.zeros(2, 4), TableOptimizer("adam", lr=0.01), options)
    first = torch.tensor([0]), torch.ones(1, 4)
    train(made, [first] * min(steps, 50))
    made.steps = steps
    made.step(torch.tensor([1]), torch.full((1, 4), 1e-3))
    assert -made.rows[1] / 0.01 == pytest.approx(expected, rel=0.01)


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("state_device", ["same", "cpu"])
@pytest.mark.parametrize(
    ("options", "name"),
    [
        *((choose(of, name, state_dtype=None), name) for of, name in PRESETS),
        *((choose("fbgemm", name, **option), name) for name, option in SINGLE_OPTIONS),
        *((SparseOptions(state_dtype="bf16"), name) for name in NAMES[:4]),
    ],
)
def test_gpu_matches_cpu(options, name, state_device):
    options = replace(options, state_device=state_device)
    optimizer = TableOptimizer(**optimizer_settings(name))
    ours = sparse(new_values(), optimizer, options, fused=False)
    theirs = sparse(new_values().cuda(), optimizer, options)
    for batch in batches():
        ours.step(*batch)
        theirs.step(*(part.cuda() for part in batch))
    # A last bit of a sum may move a bfloat16 state to its other neighbour.
    close = {"rtol": 1e-5, "atol": 1e-5}
    if options.state_dtype == "bf16":
        close = {"rtol": 1e-2, "atol": 1e-3}
    torch.testing.assert_close(theirs.rows.cpu(), ours.rows, **close)
    for key, state in ours.states.items():
        assert theirs.states[key].device.type == ("cpu" if state_device == "cpu" else "cuda")
        torch.testing.assert_close(theirs.states[key].cpu(), state, **close)

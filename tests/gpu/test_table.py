"""FBGEMM's table behind TorchRec's lookup: optimizers, bags, sizes beyond 2^31.

Shapes: N rows, D elements per row, M ids per lookup.
"""

from __future__ import annotations

import pytest
import torch
from gpu_runs import seconds
from oracle_table import NAMES, DenseTable
from oracle_table import settings as optimizer_settings
from torch import Tensor
from torchrec import KeyedJaggedTensor
from worlds_table import own_rows, sharded_table

from kge_torchrec.distributed.processes import processes
from kge_torchrec.embeddings.backend import ENTITY
from kge_torchrec.embeddings.optimizers import make_optimizer
from kge_torchrec.embeddings.torchrec.collection import LOOKUP_BAGS
from kge_torchrec.kernels import comparisons, operators

STEPS, ROWS, DIM = 8, 300, 16


def feature(ids: Tensor, bags: int) -> KeyedJaggedTensor:
    """Ids (M,) split evenly into bags."""
    count = ids.numel()
    lengths = torch.full((bags,), count // bags, dtype=torch.int64)
    lengths[: count % bags] += 1
    return KeyedJaggedTensor(
        keys=[ENTITY], values=ids, lengths=lengths.to(ids.device), stride=bags,
        length_per_key=[count], offset_per_key=[0, count],
    )  # fmt: skip


@pytest.mark.parametrize("bags", [1, 64])
@pytest.mark.parametrize("name", NAMES)
def test_optimizers_equal_the_dense_oracle(device, name, bags):
    """With repeated ids and a changing learning rate."""
    stream = torch.Generator().manual_seed(3)
    values = torch.randn(ROWS, DIM, generator=stream)
    optimizer = make_optimizer(**optimizer_settings(name))
    dense = DenseTable(values, optimizer)
    with processes(device.type):
        model = sharded_table(ROWS, DIM, optimizer, device=device.type)
        table = own_rows(model)
        table.shard().rows.copy_(values)
        for step in range(STEPS):
            if step == STEPS // 2:
                dense.lr = model.fused_optimizer.param_groups[0]["lr"] = optimizer.lr / 3
            ids = torch.randint(ROWS, (200,), generator=stream).sort().values
            # Away from zero, where the sign of a last bit decides Adam's step.
            grad = torch.randn(200, DIM, generator=stream)
            grad = grad + grad.sign() * 0.1
            model.fused_optimizer.zero_grad()
            model(feature(ids.to(device), bags)).backward(grad.to(device))
            model.fused_optimizer.step()
            dense.step(ids, grad)
        assert float((table.shard().rows.cpu() - dense.weights).abs().max()) < 2e-5
        states = table.optimizers[0].states
        for key, state in dense.states().items():
            kept = states[key.split(".")[-1]].double().cpu().view_as(state)
            assert float(((kept - state).abs() / (1 + state.abs())).max()) < 2e-5
        if name not in ("adagrad", "sgd"):  # FBGEMM counts steps where the formula needs them
            assert table.steps == STEPS


def test_bags_change_neither_rows_nor_steps_and_many_are_fast(device, note):
    """A single bag, whose ids one warp fetches one after another, would take 100 ms or more."""
    on_card = device.type == "cuda"
    rows, dim, count = (4_000_000, 100, 131_072) if on_card else (20_000, 16, 2048)
    assert LOOKUP_BAGS["cuda"] >= 1024
    with processes(device.type):
        optimizer = make_optimizer("rowwise_adagrad", lr=0.1)
        model = sharded_table(rows, dim, optimizer, device=device.type)
        table = own_rows(model)
        before = table.shard().rows.normal_().clone()
        ids = torch.randperm(rows, device=device)[:count].sort().values
        grad, ends, times = torch.ones(count, dim, device=device), {}, {}

        def step() -> None:
            model(batch).backward(grad)
            model.fused_optimizer.step()

        for bags in (LOOKUP_BAGS["cuda"] if on_card else 256, count, 1):  # the slow case last
            batch = feature(ids, bags)
            times[bags] = seconds(step, device, 3 if bags == 1 else 20)
            note(f"{bags} bags, forward, backward and step", 1e3 * times[bags], "ms")
            table.shard().rows.copy_(before)
            table.steps = 0
            for state in table.optimizers[0].states.values():
                state.zero_()
            assert torch.equal(model(batch).detach(), before[ids])
            step()
            ends[bags] = table.shard().rows[ids].clone()
    first, *others = ends.values()
    assert all(float((other - first).abs().max()) < 1e-6 for other in others)
    if on_card:
        assert 1e3 * times[LOOKUP_BAGS["cuda"]] < 8


def test_rows_beyond_element_two_to_the_31_are_read_and_stepped(device):
    """By amounts that float32 holds exactly."""
    dim, middle = (128, (1 << 31) // 128) if device.type == "cuda" else (8, 1000)
    rows = middle + 1000
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < 1.2 * 4 * rows * dim:
        pytest.skip("not enough free memory")
    places = [0, 1, middle - 1, middle, middle + 1, rows - 2, rows - 1]
    ids = torch.tensor(places, device=device)
    with processes(device.type):
        model = sharded_table(rows, dim, make_optimizer("sgd", lr=0.5), device=device.type)
        table = own_rows(model).shard().rows.zero_()
        values = torch.arange(len(ids) * dim, device=device).view(-1, dim).float()
        for place, row in zip(places, values, strict=True):
            table[place].copy_(row)
        looked_up = model(feature(ids, 4))
        assert torch.equal(looked_up.detach(), values)
        looked_up.backward(torch.full_like(looked_up, 2.0))
        model.fused_optimizer.step()
        table = own_rows(model).shard().rows
        assert torch.equal(torch.stack([table[place] for place in places]), values - 1)
        assert table.count_nonzero() == (values - 1).count_nonzero()


@torch.no_grad()
def test_scores_beyond_element_two_to_the_31_are_right(device):
    queries, last = 64, 500
    rows = (1 << 31) // queries + 1000 if device.type == "cuda" else 1000
    query, table = (torch.randn(1, n, 4, device=device) for n in (queries, rows))
    scores = comparisons.distance("manhattan", query, table)[0]
    few = comparisons.distance("manhattan", query, table[:, -last:])[0]
    assert torch.equal(scores[:, -last:], few)
    normalizer = torch.empty(queries, dtype=torch.float64, device=device)
    operators.normalizers(scores.neg_(), normalizer, True)
    assert float((normalizer[-1] - scores[-1].double().logsumexp(0)).abs()) < 1e-5
    operators.gradients(scores, normalizer, torch.ones_like(scores[:, 0]), 0 * normalizer, True)
    assert float((scores[-1].sum(dtype=torch.float64) - 1).abs()) < 1e-4

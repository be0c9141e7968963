"""Check FBGEMM's table behind TorchRec's lookup: optimizers, bags, sizes beyond 2^31.

Shapes: N rows, D elements per row, M ids per lookup.
"""

from __future__ import annotations

import torch
from oracle_table import NAMES, DenseTable
from oracle_table import settings as optimizer_settings
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv

from gpu_checks.report import Report
from gpu_checks.timing import seconds
from kge_torchrec.distributed.processes import Processes, processes
from kge_torchrec.embeddings.backend import ENTITY
from kge_torchrec.embeddings.init import EntityInit
from kge_torchrec.embeddings.optimizers import RowOptimizer, make_optimizer
from kge_torchrec.embeddings.shard import EntityTable
from kge_torchrec.embeddings.torchrec.collection import entity_collection, table_of
from kge_torchrec.embeddings.torchrec.planner import Ranks, plan_rows
from kge_torchrec.embeddings.torchrec.sharder import EntitySharder, fused_params
from kge_torchrec.kernels import comparisons, operators

STEPS, ROWS, DIM = 8, 300, 16
UNCOUNTED = ("adagrad", "sgd")  # their formulas need no step count, so FBGEMM keeps none
# For 131k rows of dim 100, forward, backward and step: launches, and 0.3 GB to move. A
# single bag, whose ids one warp fetches one after another, would take 100 or more.
ENOUGH_MS = 8.0


class _TableModel(nn.Module):
    """A model with only the entity table."""

    def __init__(self, rows: int, dim: int):
        super().__init__()
        self.entities = entity_collection(rows, dim)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        return self.entities(ids)[ENTITY].values()


def sharded(rows: int, dim: int, optimizer: RowOptimizer, ranks: Processes) -> nn.Module:
    """Return the table as training builds it, on one rank."""
    tables, model = [EntityTable.of_all(rows, optimizer, EntityInit())], _TableModel(rows, dim)
    sharder, place = EntitySharder(fused_params(tables)), Ranks(1, 1, ranks.device.type)
    made = DistributedModelParallel(
        model,
        env=ShardingEnv(1, 0, ranks.group, output_dtensor=True),
        device=ranks.device,
        plan=plan_rows(model.entities, sharder, tables, place),
        sharders=[sharder],
    )
    made.rows = table_of(made, tables)
    return made


def feature(ids: Tensor, bags: int) -> KeyedJaggedTensor:
    """Return ids (M,) split evenly into bags."""
    count = ids.numel()
    lengths = torch.full((bags,), count // bags, dtype=torch.int64)
    lengths[: count % bags] += 1
    return KeyedJaggedTensor(
        keys=[ENTITY], values=ids, lengths=lengths.to(ids.device), stride=bags,
        length_per_key=[count], offset_per_key=[0, count],
    )  # fmt: skip


def optimizers(report: Report) -> None:
    """Check optimizers with repeated ids and a changing learning rate."""
    with processes(report.device.type) as ranks:
        for name in NAMES:
            for bags in (1, 64):
                with report.check(f"{name}, {bags} bags"):
                    _against_oracle(report, f"{name}, {bags} bags", name, bags, ranks)


def _against_oracle(report, what: str, name: str, bags: int, ranks: Processes) -> None:
    stream = torch.Generator().manual_seed(3)
    values = torch.randn(ROWS, DIM, generator=stream)
    optimizer = make_optimizer(**optimizer_settings(name))
    model, dense = sharded(ROWS, DIM, optimizer, ranks), DenseTable(values, optimizer)
    model.rows.shard().rows.copy_(values)
    for step in range(STEPS):
        if step == STEPS // 2:
            dense.lr = optimizer.lr / 3
            model.fused_optimizer.param_groups[0]["lr"] = dense.lr
        ids = torch.randint(ROWS, (200,), generator=stream).sort().values
        # Away from zero, where the sign of a last bit decides Adam's step.
        grad = torch.randn(200, DIM, generator=stream)
        grad = grad + grad.sign() * 0.1
        model.fused_optimizer.zero_grad()
        rows = model(feature(ids.to(ranks.device), bags))
        rows.backward(grad.to(ranks.device))
        model.fused_optimizer.step()
        dense.step(ids, grad)
    rows = model.rows.shard().rows.double().cpu()
    report.at_most(f"{what}, rows", float((rows - dense.weights).abs().max()), 2e-5)
    states = model.rows.optimizers[0].states
    for key, state in dense.states().items():
        kept = states[key.split(".")[-1]].double().cpu().view_as(state)
        off = (kept - state).abs() / (1 + state.abs())
        report.at_most(f"{what}, {key.split('.')[-1]}", float(off.max()), 2e-5)
    if name not in UNCOUNTED:
        steps = model.rows.steps
        report.passes(f"{what}, steps", steps == STEPS, f"{steps} of {STEPS}")
    model.rows.steps = 7
    report.passes(f"{what}, steps set", model.rows.steps == 7, "7")


def bags(report: Report) -> None:
    """Check that rows and steps do not depend on the number of bags, and time each."""
    rows, dim, count = (20_000, 16, 2048) if report.small else (4_000_000, 100, 131_072)
    many, device = min(4096, count // 2), report.device
    with processes(device.type) as ranks:
        _bags_of_training(report)
        model = sharded(rows, dim, make_optimizer("rowwise_adagrad", lr=0.1), ranks)
        model.rows.shard().rows.normal_()
        before = model.rows.shard().rows.clone()
        ids = torch.randperm(rows, device=device)[:count].sort().values
        grad = torch.ones(count, dim, device=device)
        times, ends = {}, {}
        for number in (many, count, 1):  # the slow case last
            with report.check(f"{number} bags"):
                model.rows.shard().rows.copy_(before)
                batch_of_ids = feature(ids, number)
                looked_up = model(batch_of_ids)
                good = torch.equal(looked_up.detach(), before[ids])
                report.passes(f"{number:,} bags, rows", good, "bit for bit" if good else "differ")
                _time_bags(report, model, batch_of_ids, grad, number, times)
                model.rows.shard().rows.copy_(before)
                model.rows.steps = 0
                _forget(model)
                model(batch_of_ids).backward(grad)
                model.fused_optimizer.step()
                ends[number] = model.rows.shard().rows[ids].clone()
        for number in ends.keys() - {many}:
            off = float((ends[number] - ends[many]).abs().max())
            report.at_most(f"{number:,} bags, a step against {many:,} bags", off, 1e-6)
        if {1, many} <= times.keys():
            report.note(f"1 bag over {many:,} bags", times[1] / times[many], "times as long")
        if many in times and not report.small:
            milliseconds = 1e3 * times[many]
            report.at_most(f"{many:,} bags, fast enough", milliseconds, ENOUGH_MS, "ms")


def _bags_of_training(report: Report) -> None:
    """Report the number of bags in training's batches."""
    from kge_torchrec.embeddings.torchrec.collection import LOOKUP_BAGS

    number = LOOKUP_BAGS[report.device.type]
    report.passes("bags of training", report.small or number >= 1024, f"{number:,}")


def _forget(model: nn.Module) -> None:
    """Set the optimizer's state to zero, in the kernel itself."""
    for state in model.rows.optimizers[0].states.values():
        state.zero_()


def _time_bags(report, model, batch_of_ids, grad, number: int, times: dict[int, float]) -> None:
    device, dim = report.device, grad.shape[1]

    def step() -> None:
        model(batch_of_ids).backward(grad)
        model.fused_optimizer.step()

    repeats = 3 if number == 1 else 20
    with torch.no_grad():
        forward = seconds(lambda: model(batch_of_ids), device, repeats)
    times[number] = seconds(step, device, repeats)
    # read and written: the row, its gradient, and the row again
    rate = 4 * dim * len(grad) * 5 / times[number] / 1e9
    report.note(f"{number:,} bags, forward", 1e3 * forward, "ms")
    report.note(f"{number:,} bags, forward, backward and step", 1e3 * times[number], "ms")
    report.note(f"{number:,} bags, rows and gradients", rate, "GB/s")


def large(report: Report) -> None:
    """Check tables and scores of more than 2^31 elements."""
    _large_table(report)
    _large_scores(report)


def _large_scores(report: Report) -> None:
    """Check distances and losses whose last scores lie beyond element 2^31."""
    queries, last = 64, 500
    rows = 1000 if report.small else (1 << 31) // queries + 1000
    with torch.no_grad(), report.check("scores beyond element 2^31"):
        query, table = (torch.randn(1, n, 4, device=report.device) for n in (queries, rows))
        scores = comparisons.distance("manhattan", query, table)[0]
        few = comparisons.distance("manhattan", query, table[:, -last:])[0]
        same = torch.equal(scores[:, -last:], few)
        report.passes("distances", same, "bit for bit" if same else "differ")
        normalizer = torch.empty(queries, dtype=torch.float64, device=report.device)
        operators.normalizers(scores.neg_(), normalizer, True)
        off = normalizer[-1] - scores[-1].double().logsumexp(0)
        report.at_most("normalizer of the last query", float(off.abs()), 1e-5)
        operators.gradients(scores, normalizer, torch.ones_like(scores[:, 0]), 0 * normalizer, True)
        off = scores[-1].sum(dtype=torch.float64) - 1
        report.at_most("gradients of the last query, sum less 1", float(off.abs()), 1e-4)


def _large_table(report: Report) -> None:
    """Read and update rows around element 2^31, by amounts that float32 holds exactly."""
    dim = 8 if report.small else 128
    middle = 1000 if report.small else (1 << 31) // dim
    rows = middle + 1000
    if not report.small and torch.cuda.mem_get_info(report.device)[0] < 1.2 * 4 * rows * dim:
        report.skip("more than 2^31 elements", "not enough free memory")
        return
    places = [0, 1, middle - 1, middle, middle + 1, rows - 2, rows - 1]
    ids = torch.tensor(places, device=report.device)
    with processes(report.device.type) as ranks, report.check("rows around element 2^31"):
        model = sharded(rows, dim, make_optimizer("sgd", lr=0.5), ranks)
        shard = model.rows.shard()
        report.note("elements in the table", float(shard.rows.numel()), "")
        shard.rows.zero_()
        values = torch.arange(len(ids) * dim, device=report.device).view(-1, dim).float()
        for place, row in zip(places, values, strict=True):
            shard.rows[place].copy_(row)
        looked_up = model(feature(ids, 4))
        report.passes("read", torch.equal(looked_up.detach(), values), "bit for bit")
        looked_up.backward(torch.full_like(looked_up, 2.0))
        model.fused_optimizer.step()
        stepped = torch.stack([model.rows.shard().rows[place] for place in places])
        report.passes("stepped", torch.equal(stepped, values - 1), "bit for bit")
        others = model.rows.shard().rows.count_nonzero()
        wanted = (values - 1).count_nonzero()
        report.passes("no other row touched", bool(others == wanted), f"{int(others):,} elements")

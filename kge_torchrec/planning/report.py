"""What a dry run says, as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kge_torchrec.embeddings.torchrec.planner import amount, runs
from kge_torchrec.planning.advice import (
    Advice,
    Faster,
    batch_of_rank,
    examples_per_second,
    fill,
    fixed_share,
)
from kge_torchrec.planning.communication import KINDS
from kge_torchrec.planning.memory import PARTS, TABLE_PARTS
from kge_torchrec.planning.plan import TrainingPlan

Rows = list[list[str]]


def report(plan: TrainingPlan, advice: Sequence[Advice] = (), quicker: Faster | None = None) -> str:
    """The whole answer: layout, memory, traffic, time; what makes it faster, what makes it fit."""
    blocks = [
        _head(plan),
        _table(_memory(plan)),
        "\n".join(_limits(plan)),
        _table(_traffic(plan)) if plan.cluster.world_size > 1 else "one device sends nothing",
        "\n".join(_duplicates(plan)),
        "\n".join(_times(plan)),
    ]
    if quicker is not None:
        blocks.append("\n".join(_faster(quicker)))
    if not plan.fits:
        blocks.append("\n".join(_overruns(plan)))
        blocks.append("\n".join(["What would make it fit:", *_advice(advice)]))
    blocks += ["\n".join(f"note: {note}" for note in plan.notes)] if plan.notes else []
    return "\n\n".join(blocks)


def comparison(plans: Sequence[TrainingPlan]) -> str:
    """One line a layout, in the order given."""
    is_cuda = plans[0].cluster.device.is_cuda
    rows = [["layout", "fits", "device, fullest rank" if is_cuda else "", "main, fullest host",
             "modelled step", "largest part"]]  # fmt: skip
    for plan in plans:
        host = max((x for x in plan.limits if x.place.startswith("main")), key=lambda x: x.need)
        rows.append(
            [
                str(plan.choice),
                "yes" if plan.fits else f"no, {amount(plan.overruns[0].over)} over",
                amount(plan.total(plan.fullest).device) if is_cuda else "",
                amount(host.need),
                seconds(plan.step_seconds),
                plan.largest_time,
            ]
        )
    used = [column for column in zip(*rows, strict=True) if any(column)]
    return _table([list(row) for row in zip(*used, strict=True)])


def _head(plan: TrainingPlan) -> str:
    workload, model = plan.workload, plan.workload.config.model
    what = workload.config.negatives.examples
    of_queries = "" if what == "triples" else f" {what}"
    return (
        f"{workload.num_entities:,} entities x {workload.dim} ({plan.choice.dtype}, "
        f"{workload.optimizer}), {model.scorer} with {workload.num_relations:,} relations, "
        f"{workload.num_triples:,} triples in batches of {workload.batch_size:,}{of_queries}\n"
        f"{plan.cluster}: {plan.choice}\n"
        f"{'It fits.' if plan.fits else 'It does NOT fit.'}"
    )


def rank_groups(plan: TrainingPlan) -> list[tuple[int, int, int]]:
    """(first, last, fullest) of neighbouring ranks whose shards have the same size."""
    sizes: list[tuple[tuple[int, int], ...]] = [()] * plan.cluster.world_size
    for shard in plan.shards:
        sizes[shard.rank] += ((shard.rows, shard.columns),)
    is_cuda = plan.cluster.device.is_cuda

    def need(rank: int) -> int:
        total = plan.total(rank)
        return total.device if is_cuda else total.main

    return [(first, last, max(range(first, last + 1), key=need)) for first, last, _ in runs(sizes)]


def ranks_text(first: int, last: int) -> str:
    """ "rank 3" or "ranks 0-6"."""
    return f"rank {first}" if first == last else f"ranks {first}-{last}"


def _memory(plan: TrainingPlan) -> Rows:
    groups = rank_groups(plan)
    shown = groups if len(groups) <= 8 else [*groups[:4], *groups[-3:]]
    ranks = [fullest for _, _, fullest in shown]
    of_rank = [[s for s in plan.shards if s.rank == rank] for rank in ranks]
    rows = [["", *(ranks_text(first, last) for first, last, _ in shown)]]
    rows.append(["rows", *(f"{sum(s.rows for s in shards):,}" for shards in of_rank)])
    columns = [", ".join(str(c) for c in sorted({s.columns for s in x})) for x in of_rank]
    rows.append(["columns", *columns])
    for place in ("device", "main") if plan.cluster.device.is_cuda else ("main",):
        rows.append([f"{place} memory", *[""] * len(ranks)])
        for part in PARTS:
            sizes = [getattr(plan.memory[rank][part], place) for rank in ranks]
            if any(sizes):
                rows.append([f"  {part}", *(amount(size) for size in sizes)])
        totals = [getattr(plan.total(rank), place) for rank in ranks]
        rows.append(["  total", *(amount(total) for total in totals)])
    return rows


def _limits(plan: TrainingPlan) -> Iterator[str]:
    """The fullest memory of each kind against its capacity."""
    for kind in ("device", "main"):
        limits = [limit for limit in plan.limits if limit.place.startswith(kind)]
        if not limits:
            continue
        fullest = max(limits, key=lambda limit: limit.need)
        share = fullest.need / fullest.usable if fullest.usable else float("inf")
        yield (
            f"{fullest.place}: {amount(fullest.need)} of {amount(fullest.usable)} usable "
            f"({share:.0%}; {amount(fullest.capacity)} less {plan.choice.reserve:.0%} left free)"
        )


def _traffic(plan: TrainingPlan) -> Rows:
    steps = plan.workload.steps_per_epoch
    rows = [["sent by all ranks", "in a step", "to other hosts", "in an epoch", "to other hosts"]]
    for kind in (*KINDS, None):
        within, between = plan.traffic.total(kind)
        if within + between or kind is None:
            sums = [within + between, between]
            sums += [size * steps for size in sums]
            rows.append([kind or "all", *(amount(size) for size in sums)])
    return rows


def _duplicates(plan: TrainingPlan) -> Iterator[str]:
    asked, distinct = plan.lookups, plan.distinct
    if not asked:
        yield "every rank scores its own rows for all queries of a step: nothing is looked up"
        return
    yield (
        f"a step looks {asked:,} entities up, {distinct:,.0f} different ones on their ranks: "
        f"de-duplication saves {1 - distinct / asked:.0%} of them"
    )
    table = ("ids", "rows", "gradients")
    without = sum(sum(plan.with_duplicates.total(kind)) for kind in table)
    sent = sum(sum(plan.traffic.total(kind)) for kind in table)
    if without:
        yield (
            f"of ids, rows and gradients {amount(sent)} are sent in a step; with duplicates it "
            f"would be {amount(without)}"
        )


def _times(plan: TrainingPlan) -> Iterator[str]:
    total, what = plan.step_seconds, plan.workload.config.negatives.examples
    epoch = total * plan.workload.steps_per_epoch
    yield (
        f"a step would take {seconds(total)}, an epoch {seconds(epoch)} "
        f"({examples_per_second(plan):,.0f} {what}/s): a model, not a measurement"
    )
    for part, time in sorted(plan.times.items(), key=lambda item: -item[1]):
        if time >= 0.005 * total:
            yield f"  {part:<22} {seconds(time):>9}  {time / total:4.0%}"


def _faster(found: Faster) -> Iterator[str]:
    """The settings, with what the model says now and then."""
    now, then, what = found.now, found.then, found.now.workload.config.negatives.examples
    yield "What would make it faster (by the same model; nothing of it is measured):"
    yield (
        f"  {fixed_share(now):.0%} of a step are the same for any batch: starting operations and "
        "collectives, sending dense parameters"
    )
    if found.settings:
        yield "  + " + " ".join(f"--{key} {value}" for key, value in found.settings.items())
        rates = examples_per_second(then), examples_per_second(now)
        yield (
            f"    {rates[0]:,.0f} {what}/s instead of {rates[1]:,.0f}: steps of "
            f"{seconds(then.step_seconds)} instead of {seconds(now.step_seconds)}, "
            f"{fixed_share(then):.0%} of them the same for any batch; {fill(then)}"
        )
    if "train.batch_size" in found.settings:
        yield (
            f"    a batch of {batch_of_rank(then):,.0f} a rank instead of "
            f"{batch_of_rank(now):,.4g}, {then.workload.steps_per_epoch:,.0f} steps an epoch "
            f"instead of {now.workload.steps_per_epoch:,.0f}"
        )
        yield (
            "    train.lr and train.epochs may have to be set anew; how fast batches are made is "
            "not modelled"
        )
    if found.limit:
        yield f"  - {found.limit}"


def _overruns(plan: TrainingPlan) -> Iterator[str]:
    """Each kind of limit that is exceeded, by how much and where."""
    for kind in ("device", "main"):
        over = [limit for limit in plan.overruns if limit.place.startswith(kind)]
        if over:
            worst = over[0]
            more = "" if len(over) == 1 else f"; {len(over)} such memories are too small"
            yield (
                f"{worst.place} needs {amount(worst.need)}, usable are {amount(worst.usable)}: "
                f"{amount(worst.over)} too much{more}"
            )
    yield from _beside_the_table(plan)


def _beside_the_table(plan: TrainingPlan) -> Iterator[str]:
    """Where there is no room for a single row."""
    place = "device" if plan.cluster.device.is_cuda else "main"
    usable = next(limit.usable for limit in plan.limits if limit.place.startswith(place))
    if place == "main":
        usable //= plan.cluster.local_world_size
    parts = {
        part: getattr(size, place)
        for part, size in plan.memory[plan.fullest].items()
        if part not in TABLE_PARTS
    }
    if sum(parts.values()) > usable:
        largest = sorted(parts, key=lambda part: -parts[part])[:3]
        listed = ", ".join(f"{part} {amount(parts[part])}" for part in largest if parts[part])
        yield (
            f"rank {plan.fullest} needs {amount(sum(parts.values()))} before it holds a row of the "
            f"table ({listed}): no layout of the table helps"
        )


def _advice(advice: Sequence[Advice]) -> Iterator[str]:
    for item in advice:
        yield f"  {'+' if item.fits else '-'} {item.change} {item.result}"


def seconds(value: float) -> str:
    """Seconds for people."""
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms")):
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value * 1e6:.3g} us"


def _table(rows: Rows) -> str:
    """Columns of equal width: the first to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)

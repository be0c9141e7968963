"""The report of a plan: layout, memory, traffic, time and advice, as text or as plain values.

``plan --format json`` prints the plain values. Bytes are integers, times seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from kge_torchrec.embeddings.torchrec.planner import amount, ranks_text, runs
from kge_torchrec.planning.advice import Advice
from kge_torchrec.planning.memory import PARTS, TABLE_PARTS
from kge_torchrec.planning.plan import TrainingPlan, disk_use, table_sizes
from kge_torchrec.planning.step import KINDS, Traffic

Rows = list[list[str]]


def report(plan: TrainingPlan, advice: Sequence[Advice] = ()) -> str:
    """Return the plan as text: layout, memory, traffic, time, and what makes it fit."""
    sends = plan.cluster.world_size > 1
    blocks = [
        _head(plan),
        table(_memory(plan)),
        *([table(_tables(plan))] if plan.workload.types else []),
        "\n".join([*_limits(plan), *_disk(plan)]),
        table(_traffic(plan)) if sends else "one device sends nothing",
        "\n".join(_duplicates(plan)),
        "\n".join(_times(plan)),
    ]
    if not plan.fits:
        blocks += _beside_the_table(plan)
        lines = [f"  {'+' if item.fits else '-'} {item.change} {item.result}" for item in advice]
        blocks.append("\n".join(["What would make it fit:", *lines]))
    if plan.notes:
        blocks.append("\n".join(f"note: {note}" for note in plan.notes))
    return "\n\n".join(blocks)


def comparison(plans: Sequence[TrainingPlan]) -> str:
    """Return a table of layouts, one line each, in the order given."""
    is_cuda = plans[0].is_cuda
    rows = [["layout", "fits", "device, fullest rank", "main, fullest host", "modelled step",
             "largest part"]]  # fmt: skip
    for plan in plans:
        host = max(plan.limits_of("main"), key=lambda x: x.need)
        rows.append(
            [
                plan.layout_in_words,
                "yes" if plan.fits else f"no, {amount(plan.overruns[0].over)} over",
                amount(plan.total(plan.fullest).device),
                amount(host.need),
                seconds(plan.step_seconds),
                plan.largest_time,
            ]
        )
    return table(rows if is_cuda else [[*row[:2], *row[3:]] for row in rows])


def _head(plan: TrainingPlan) -> str:
    workload, model = plan.workload, plan.workload.config.model
    examples = workload.config.negatives.examples
    unit = "" if examples == "triples" else f" {examples}"
    optimizers = ", ".join(dict.fromkeys(form.optimizer for *_, form in plan.forms))
    return (
        f"{workload.rows_in_words} x {workload.dim} ("
        f"{optimizers}), {model.scorer} with {workload.num_relations:,} relations, "
        f"{workload.num_triples:,} triples in batches of {workload.batch_size:,}{unit}\n"
        f"{plan.cluster}: {plan.layout_in_words}\n"
        f"{'It fits.' if plan.fits else 'It does NOT fit.'}"
    )


def _memory(plan: TrainingPlan) -> Rows:
    held: list[tuple[tuple[int, int], ...]] = [()] * plan.cluster.world_size
    for shard in plan.shards:
        held[shard.rank] += ((shard.rows, shard.columns),)
    groups = [  # (first, last, fullest) of neighboring ranks whose shards have the same size
        (first, last, max(range(first, last + 1), key=plan.need)) for first, last, _ in runs(held)
    ]
    shown = groups if len(groups) <= 8 else [*groups[:4], *groups[-3:]]
    ranks = [fullest for _, _, fullest in shown]
    shards_by_rank = [[s for s in plan.shards if s.rank == rank] for rank in ranks]
    rows = [["", *(ranks_text(first, last) for first, last, _ in shown)]]
    rows.append(["rows", *(f"{sum(s.rows for s in shards):,}" for shards in shards_by_rank)])
    columns = [", ".join(str(c) for c in sorted({s.columns for s in x})) for x in shards_by_rank]
    rows.append(["columns", *columns])
    for place in ("device", "main") if plan.is_cuda else ("main",):
        rows.append([f"{place} memory", *[""] * len(ranks)])
        for part in PARTS:
            sizes = [getattr(plan.memory[rank][part], place) for rank in ranks]
            if any(sizes):
                rows.append([f"  {part}", *(amount(size) for size in sizes)])
        totals = [getattr(plan.total(rank), place) for rank in ranks]
        rows.append(["  total", *(amount(total) for total in totals)])
    return rows


def _tables(plan: TrainingPlan) -> Rows:
    rows = [["table", "rows", "optimizer", "all ranks", "fullest rank", "lookups per step",
             "different", "sent", "time"]]  # fmt: skip
    for own in table_sizes(plan):
        sizes, numbers = own["bytes"], [f"{number:,.0f}" for number in own["rows"].values()]
        rows.append(
            [own["type"], f"{own['entities']:,}", own["optimizer"], amount(sum(sizes)),
             amount(max(sizes)), *numbers, seconds(own["seconds"])]
        )  # fmt: skip
    return rows


def _limits(plan: TrainingPlan) -> Iterator[str]:
    """Yield the fullest memory of each kind against its capacity, and by how much it is over."""
    for limits in (plan.limits_of("device"), plan.limits_of("main")):
        if not limits:
            continue
        fullest = max(limits, key=lambda limit: limit.need)
        share = fullest.need / fullest.usable if fullest.usable else float("inf")
        over = sum(limit.over > 0 for limit in limits)
        excess = f": {amount(fullest.over)} too much" if over else ""
        others = f"; {over} such memories are too small" if over > 1 else ""
        yield (
            f"{fullest.place}: {amount(fullest.need)} of {amount(fullest.usable)} usable "
            f"({share:.0%}; {amount(fullest.capacity)} less {plan.layout.reserve:.0%} left free)"
            f"{excess}{others}"
        )


def _disk(plan: TrainingPlan) -> Iterator[str]:
    """Yield what lies on disk, and how fast a disk keeps up with training."""
    use = disk_use(plan)
    if use is None:
        return
    yield (
        f"disk of each rank: {amount(use['table_bytes'])} in {use['parts']} parts of "
        f"{amount(use['part_bytes'])}, {use['buffer']} of them in memory; each checkpoint that is "
        "kept adds the parts that changed after it, at most as much again"
    )
    yield (
        f"an epoch exchanges a part {use['exchanges']:,} times (at least "
        f"{use['least_exchanges']:,} are needed): each rank reads {amount(use['epoch_bytes'])} and "
        "writes as much"
    )
    if use["exchanges"]:
        speed = use["part_bytes"] / max(use["stage_seconds"], 1e-9)
        yield (
            f"a stage trains {seconds(use['stage_seconds'])}; training waits for a disk that reads "
            f"and writes fewer than {amount(round(speed))}/s at the same time"
        )


def _traffic(plan: TrainingPlan) -> Rows:
    steps = plan.workload.steps_per_epoch
    rows = [["sent by all ranks", "per step", "to other hosts", "per epoch", "to other hosts"]]
    for kind in (*KINDS, None):
        within, between = plan.traffic.total(kind)
        if within + between or kind is None:
            sums = [within + between, between]
            sums += [size * steps for size in sums]
            rows.append([kind or "all", *(amount(size) for size in sums)])
    return rows


def _duplicates(plan: TrainingPlan) -> Iterator[str]:
    lookups, distinct = plan.lookups, plan.distinct
    if not lookups:
        yield "every rank scores its own rows for all queries of a step: nothing is looked up"
        return
    rows = "entities and features" if plan.workload.num_features else "entities"
    yield (
        f"a step looks up {lookups:,} {rows}, {distinct:,.0f} different ones on their ranks: "
        f"de-duplication saves {1 - distinct / lookups:.0%} of them"
    )
    rank, times = plan.busiest
    if times >= 1.05:
        yield f"rank {rank} reads most rows: {times:.2f} times the mean of all ranks"
    sent, without = (
        sum(sum(traffic.total(kind)) for kind in ("ids", "rows", "gradients"))
        for traffic in (plan.traffic, plan.with_duplicates)
    )
    if without:
        yield (
            f"a step sends {amount(sent)} of ids, rows and gradients; with duplicates it would "
            f"send {amount(without)}"
        )


# What a plan says about the resource that decides how long a step takes.
_BOUNDS = {
    "host": "launch-bound: starting operations takes longest; a larger train.batch_size or "
    "dense.compile starts fewer per triple",
    "loader": "loader-bound: making batches takes longest; train.batches device makes them on a "
    "GPU, and --threads adds makers",
    "device": "memory-bound: the work on rows and scores takes longest; a smaller model.dim or "
    "negatives.count moves fewer bytes, as does train.precision bf16",
    "links": "link-bound: sending between ranks takes longest; a larger train.batch_size sends a "
    "row for more triples, and fewer hosts send less",
}


def _times(plan: TrainingPlan) -> Iterator[str]:
    total, examples = plan.step_seconds, plan.workload.config.negatives.examples
    epoch = total * plan.workload.steps_per_epoch
    yield (
        f"a step would take {seconds(total)}, an epoch {seconds(epoch)} "
        f"({plan.examples_per_second:,.0f} {examples}/s): a model, not a measurement"
    )
    yield f"  {_BOUNDS[plan.bound]}"
    for part, time in sorted(plan.times.items(), key=lambda item: -item[1]):
        if time >= 0.005 * total:
            yield f"  {part:<22} {seconds(time):>9}  {time / total:4.0%}"


def _beside_the_table(plan: TrainingPlan) -> Iterator[str]:
    """Yield what fills a rank on which there is no room for a single row."""
    usable = plan.limits_of(plan.place)[0].usable
    usable //= 1 if plan.is_cuda else plan.cluster.local_world_size
    parts = {
        part: getattr(size, plan.place)
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


def seconds(value: float) -> str:
    """Return seconds in a unit that suits them: "31 ms"."""
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms")):
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value * 1e6:.3g} us"


def table(rows: Rows) -> str:
    """Return columns of equal width: the first to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def plan_content(plan: TrainingPlan, advice: Sequence[Advice] = ()) -> dict[str, Any]:
    """Return everything that a plan says, as plain values."""
    workload, cluster, layout = plan.workload, plan.cluster, plan.layout
    return {
        "table": {
            "entities": workload.num_entities - workload.num_features,
            "features": workload.num_features,
            "dim": workload.dim,
            "optimizer": workload.optimizer,
        },
        "tables": table_sizes(plan),
        "disk": disk_use(plan),
        "world": {
            "size": cluster.world_size,
            "hosts": cluster.hosts,
            "device": asdict(cluster.device),
            "reserve": layout.reserve,
        },
        "sharding": {
            "type": layout.sharding,
            "kernel": plan.form.kernel,
            "cache_ratio": plan.form.cache_ratio,
            "shards": [asdict(shard) for shard in plan.shards],
        },
        "run": {
            "relations": workload.num_relations,
            "triples": workload.num_triples,
            "batch_size": workload.batch_size,
            "scorer": workload.config.model.scorer,
            "dense_parameters": workload.dense_parameters,
            "config": workload.config.to_dict(),
        },
        "fits": plan.fits,
        "memory": [
            {
                "rank": rank,
                "host": cluster.host_of(rank),
                "device": {part: size.device for part, size in parts.items() if size.device},
                "main": {part: size.main for part, size in parts.items() if size.main},
                "total": asdict(plan.total(rank)),
            }
            for rank, parts in enumerate(plan.memory)
        ],
        "limits": [{**asdict(limit), "over": max(0, limit.over)} for limit in plan.limits],
        "traffic": {
            "unit": "bytes sent in a step by all ranks",
            "steps_per_epoch": workload.steps_per_epoch,
            "lookups": {"deduplicated": plan.distinct, "with_duplicates": plan.lookups},
            "sent": _sent(plan.traffic),
            "with_duplicates": _sent(plan.with_duplicates),
        },
        "step": {
            "what": "a model from bytes, operations and the device's speeds, not a measurement",
            "seconds": plan.step_seconds,
            "parts": plan.times,
            "largest": plan.largest_time,
            "busy": plan.busy,
            "bound": plan.bound,
        },
        "advice": [asdict(item) for item in advice],
        "notes": plan.notes,
    }


def _sent(traffic: Traffic) -> dict[str, dict[str, float]]:
    names = ("within_hosts", "between_hosts")
    sums = {kind: traffic.total(kind) for kind in KINDS} | {"all": traffic.total()}
    return {kind: dict(zip(names, both, strict=True)) for kind, both in sums.items()}

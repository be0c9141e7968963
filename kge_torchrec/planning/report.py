"""A plan as text, and as plain values for ``plan --format json``: bytes and seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from kge_torchrec.config import Config
from kge_torchrec.config.parser import AnyConfig, as_config
from kge_torchrec.embeddings.torchrec.planner import SHARDINGS, amount
from kge_torchrec.planning.advice import Advice, advise
from kge_torchrec.planning.devices import GB, parse_devices
from kge_torchrec.planning.plan import RESERVE, Plan
from kge_torchrec.planning.sizes import find_sizes
from kge_torchrec.planning.step import Step
from kge_torchrec.tables import aligned, seconds
from kge_torchrec.training.run_data import check_start

WHY_ROWS = (
    "Training takes row_wise: every rank holds and updates an equal part of the rows, whatever the "
    "dim and the number of tables; table_wise and column_wise load few ranks with all lookups, and "
    "data_parallel needs the whole table and its gradient on every rank."
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


def plan(config: AnyConfig = None, *, devices: str, **options: Any) -> dict[str, Any]:
    """Plan a run without GPUs, processes or data; return what ``plan --format json`` prints.

    Args:
        config: As for ``train``.
        devices: All devices, such as "8xH100-80GB".
        options: Other arguments of ``make_plan``, such as ``hosts=2, entities=86_000_000,
            relations=14_824, triples="339M"``. Sizes that are left out come from the config's data.

    Raises:
        ConfigError: The run and the devices do not go together, or a key or an option has no
            effect.
        TypeError: There is no such option.
        DataError: The data is bad.
        OSError: The data cannot be read.
    """
    config = as_config(config)
    check_start(config)
    made = make_plan(config, devices, **options)
    return content_of(made, [] if made.fits else advise(made))


def make_plan(
    config: Config,
    devices: str,
    hosts: int = 1,
    host_memory: float | None = None,
    between_hosts: float | None = None,
    entities: int | str | None = None,
    relations: int | str | None = None,
    triples: int | str | None = None,
    skew: float | None = None,
) -> Plan:
    """Return the plan that the options of the verb ``plan`` mean; all of them are checked."""
    cluster = parse_devices(devices, hosts, host_memory, between_hosts)
    return Plan.of(config, find_sizes(config, entities, relations, triples, skew), cluster)


def all_layouts(plan: Plan) -> list[Plan]:
    """Return a plan for every layout that the run allows: first what fits, then by step time."""
    entities = plan.config.entities
    by_rows_only = plan.is_full or entities.on_disk or entities.tables is not None
    layouts = SHARDINGS[: 1 if by_rows_only else 3 if entities.cache_ratio else 4]
    plans = [plan.changed({"layout": layout}) for layout in layouts]
    return sorted(plans, key=lambda plan: (not plan.fits, Step(plan).seconds))


def report(plan: Plan, advice: Sequence[Advice] = ()) -> str:
    """Return the plan as text: memory, traffic, time, and what makes it fit."""
    step = Step(plan)
    blocks = [_head(plan), _memory(plan), _limits(plan), _traffic(step), _times(step)]
    if not plan.fits:
        tried = (f"  {'+' if item.fits else '-'} {item.change} {item.result}" for item in advice)
        blocks.append(["What would make it fit:", *tried])
    return "\n\n".join("\n".join(lines) for lines in map(list, blocks) if lines)


def _head(plan: Plan) -> Iterator[str]:
    config, sizes = plan.config, plan.sizes
    unit = "" if config.negatives.examples == "triples" else f" {config.negatives.examples}"
    features = f" and {sizes.num_features:,} features" if sizes.num_features else ""
    optimizers = ", ".join(dict.fromkeys(form.optimizer for form in plan.forms))
    yield (
        f"{sizes.entities:,} entities{features} x {plan.dim} ({optimizers}), "
        f"{config.model.scorer} with {sizes.relations:,} relations, {sizes.triples:,} triples in "
        f"batches of {plan.batch_size:,}{unit}"
    )
    yield f"{plan.cluster}: {_layout(plan)}"
    yield f"It {'fits' if plan.fits else 'does NOT fit'}."


def _layout(plan: Plan) -> str:
    """Return layout, kernel and cached share of the rows, such as "row_wise, fused"."""
    form = next(iter(plan.forms))
    cached = f", cache {form.cache_ratio:.3g}" if form.cache_ratio else ""
    return f"{plan.layout}, {form.kernel}{cached}"


def _memory(plan: Plan) -> list[str]:
    places = ("device", "main") if plan.is_cuda else ("main",)
    rows = [["a rank", *(f"{place} memory" for place in places)]]
    rows.append([f"{plan.rows:,} rows x {plan.columns}", *[""] * len(places)])
    for part, size in [*plan.memory.items(), ("total", plan.total)]:
        sizes = [getattr(size, place) for place in places]
        if any(sizes):
            rows.append([f"  {part}", *(amount(x) if x else "" for x in sizes)])
    return aligned(rows)


def _limits(plan: Plan) -> Iterator[str]:
    for limit in plan.limits:
        share = limit.need / limit.usable if limit.usable else float("inf")
        excess = f": {amount(limit.over)} too much" if limit.over > 0 else ""
        yield (
            f"{limit.place}: {amount(limit.need)} of {amount(limit.usable)} usable ({share:.0%}; "
            f"{amount(limit.capacity)} less {RESERVE:.0%} left free){excess}"
        )
    yield f"a checkpoint: {amount(plan.checkpoint_bytes)} on disk{_copied(plan)}"
    if plan.parts is not None:
        yield (
            f"disk of each rank: {amount(plan.disk_bytes)} in {plan.parts.parts} parts, "
            f"{plan.parts.places} of them in memory; a checkpoint adds the parts that changed"
        )


def _copied(plan: Plan) -> str:
    options, table = plan.config.checkpoint.options, plan.table
    if plan.parts is not None or not options.background:
        return ""
    rows = sum(table[x].device + table[x].main for x in table if x != "cache")
    return f"; while it is written, up to {amount(plan.cluster.per_host * rows)} of a host's memory"


def _traffic(step: Step) -> Iterator[str]:
    plan = step.plan
    rows = [["sent by a rank", "per step", "to other hosts"]]
    for kind, (within, between) in step.sent.items():
        rows.append([kind, amount(within + between), amount(between)])
    yield from aligned(rows) if plan.cluster.world_size > 1 else ["one device sends nothing"]
    if plan.is_full:
        yield "every rank scores its own rows for all queries of a step"
        return
    count, batch = plan.cluster.world_size * plan.micro_batches, plan.batch
    yield (
        f"a step looks up {count * batch.lookups:,.0f} rows, {count * batch.distinct:,.0f} "
        "different ones on their ranks: de-duplication saves "
        f"{1 - batch.distinct / batch.lookups:.0%} of them"
    )


def _times(step: Step) -> Iterator[str]:
    plan, cluster, device = step.plan, step.plan.cluster, step.plan.cluster.device
    epochs = plan.config.train.epochs
    yield (
        f"a step would take {seconds(step.seconds)} "
        f"({plan.batch_size / step.seconds:,.0f} {plan.config.negatives.examples}/s), an "
        f"epoch {seconds(step.epoch_seconds)}, all {epochs:,} "
        f"{seconds(epochs * step.epoch_seconds)} without evaluation: a model, not a measurement"
    )
    yield f"  {_BOUNDS[step.bound]}"
    decisive = {part: x for parts in step.decisive.values() for part, x in parts.items()}
    shares = percentages(decisive)
    times = sorted(decisive.items(), key=lambda item: -item[1])
    yield from aligned([[f"  {part}", seconds(time), f"{shares[part]}%"] for part, time in times])
    hidden = [f"{part} {seconds(x)}" for part, x in step.parts.items() if part not in decisive]
    if hidden:
        yield f"  at the same time: {', '.join(hidden)}"
    links = {
        "to ranks of the host": device.within_host if cluster.per_host > 1 else 0,
        "to other hosts": device.between_hosts if cluster.hosts > 1 else 0,
        "to main memory": device.host_link if plan.is_cuda else 0,
    }
    if listed := ", ".join(f"{speed / GB:g} GB/s {to}" for to, speed in links.items() if speed):
        yield f"  links are assumed to have {listed}"


def percentages(values: dict[str, float]) -> dict[str, int]:
    """Return the shares of values in whole percents that add up to 100."""
    whole = sum(values.values())
    exact = {name: 100 * value / whole for name, value in values.items()}
    shares = {name: int(share) for name, share in exact.items()}
    largest = sorted(exact, key=lambda name: shares[name] - exact[name])
    for name in largest[: 100 - sum(shares.values())]:
        shares[name] += 1
    return shares


def side_by_side(plans: Sequence[Plan]) -> str:
    """Return a table of layouts, one line each, and why training takes rows."""
    rows = [["layout", "fits", "device, fullest rank", "main, fullest host", "sent, busiest rank",
             "modelled step"]]  # fmt: skip
    for step in map(Step, plans):
        plan, sent = step.plan, 0.0
        for kind, sizes in step.sent.items():
            sent += sum(sizes) * (1 if kind == "dense" else step.load)
        fits = "yes" if plan.fits else f"no, {amount(plan.worst.over)} over"
        needs = map(amount, (plan.total.device, plan.limits[-1].need, sent))
        rows.append([_layout(plan), fits, *needs, seconds(step.seconds)])
    if not plans[0].is_cuda:
        rows = [[*row[:2], *row[3:]] for row in rows]
    return "\n".join([*aligned(rows), "", WHY_ROWS])


def content_of(plan: Plan, advice: Sequence[Advice] = ()) -> dict[str, Any]:
    """Return everything that a plan says, as plain values: bytes, of a rank, and seconds."""
    config, sizes, step = plan.config, plan.sizes, Step(plan)
    batch = None if plan.is_full else asdict(plan.batch)
    memory = {
        place: {part: x for part, y in plan.memory.items() if (x := getattr(y, place))}
        for place in ("device", "main")
    }
    return {
        "config": config.to_dict(),
        "entities": sizes.entities,
        "features": sizes.num_features,
        "relations": sizes.relations,
        "triples": sizes.triples,
        "dense_parameters": plan.costs.dense_numbers,
        "cluster": asdict(plan.cluster),
        "layout": plan.layout,
        "rows": plan.rows,
        "columns": plan.columns,
        "fits": plan.fits,
        "memory": {**memory, "total": asdict(plan.total)},
        "limits": [{**asdict(limit), "over": max(0, limit.over)} for limit in plan.limits],
        "checkpoint_bytes": plan.checkpoint_bytes,
        "disk_bytes": plan.disk_bytes,
        "batch_size": plan.batch_size,
        "micro_batch": batch,
        "sent": {kind: dict(zip(("within_host", "to_others"), x, strict=True))
                 for kind, x in step.sent.items()},
        "step": {
            "what": "a model from bytes, operations and the device's speeds, not a measurement",
            "seconds": step.seconds,
            "parts": step.parts,
            "decisive": [part for parts in step.decisive.values() for part in parts],
            "bound": step.bound,
        },
        "epoch_seconds": step.epoch_seconds,
        "training_seconds": config.train.epochs * step.epoch_seconds,
        "advice": [asdict(item) for item in advice],
    }  # fmt: skip

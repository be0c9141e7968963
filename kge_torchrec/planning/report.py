"""A plan as text, and as plain values for ``plan --format json``: bytes and seconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np

from kge_torchrec.config import Config, ConfigError
from kge_torchrec.config.keys import Facts
from kge_torchrec.config.parser import AnyConfig, as_config
from kge_torchrec.embeddings.torchrec.planner import SHARDINGS, amount
from kge_torchrec.planning.advice import Advice, advise
from kge_torchrec.planning.devices import GB, parse_devices
from kge_torchrec.planning.memory import TABLE_PARTS
from kge_torchrec.planning.plan import Plan
from kge_torchrec.planning.sizes import find_sizes
from kge_torchrec.planning.step import seconds_of_types
from kge_torchrec.tables import aligned
from kge_torchrec.training.run_data import check_start

Rows = list[list[str]]
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
        ConfigError: The run, the devices and the layout do not go together, or a key or an option
            has no effect.
        TypeError: There is no such option.
        DataError: The data is bad.
        OSError: The data cannot be read.
    """
    config = as_config(config)
    check_start(config, Facts())
    made = make_plan(config, devices, **options)
    return plan_content(made, [] if made.fits else advise(made))


def make_plan(
    config: Config,
    devices: str,
    hosts: int = 1,
    host_memory: float | None = None,
    within_host: float | None = None,
    between_hosts: float | None = None,
    entities: int | str | None = None,
    relations: int | str | None = None,
    triples: int | str | None = None,
    skew: float | None = None,
    sharding: str = "row_wise",
    reserve: float = 0.05,
) -> Plan:
    """Return the plan that the options of the verb ``plan`` mean; all of them are checked."""
    cluster = parse_devices(devices, hosts, host_memory, within_host, between_hosts)
    sizes = find_sizes(config, entities, relations, triples, skew)
    return Plan.of(config, sizes, cluster, layout=sharding, reserve=reserve)


def report(plan: Plan, advice: Sequence[Advice] = ()) -> str:
    """Return the plan as text: memory, traffic, time, and what makes it fit."""
    blocks: list[Iterable[str]] = [
        _head(plan),
        aligned(_memory(plan)),
        aligned(_types(plan)) if len(plan.types) > 1 else [],
        [*_limits(plan), *_disk(plan)],
        aligned(_traffic(plan)) if plan.cluster.world_size > 1 else ["one device sends nothing"],
        _lookups(plan),
        _times(plan),
    ]
    if not plan.fits:
        tried = (f"  {'+' if item.fits else '-'} {item.change} {item.result}" for item in advice)
        blocks += [_beside_the_table(plan), ["What would make it fit:", *tried]]
    blocks.append(f"note: {note}" for note in notes(plan))
    return "\n\n".join(filter(None, map("\n".join, blocks)))


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
    yield f"{plan.cluster}: {plan.in_words}"
    yield "It fits." if plan.fits else "It does NOT fit."


def _memory(plan: Plan) -> Rows:
    places = ("device", "main") if plan.is_cuda else ("main",)
    rows = [["a rank", *(f"{place} memory" for place in places)]]
    rows.append([f"{len(plan.block):,} rows x {plan.columns}", *[""] * len(places)])
    for part, size in [*plan.memory.items(), ("total", plan.total)]:
        sizes = [getattr(size, place) for place in places]
        if any(sizes):
            rows.append([f"  {part}", *(amount(x) if x else "" for x in sizes)])
    return rows


def type_sizes(plan: Plan) -> list[dict[str, Any]]:
    """Return what each node type's rows take; [] without types.

    "bytes" and "seconds" (lookups and optimizer) are of a rank, "rows" of a step on all ranks.
    """
    if len(plan.types) == 1:
        return []
    ranks, number = plan.cluster.world_size, 0 if plan.is_full else plan.cluster.world_size
    totals, own = map(plan.rows_of_types, (range(plan.sizes.rows), plan.block))
    times = map(sum, zip(*seconds_of_types(plan), strict=True))
    rows = {
        "with_duplicates": number * plan.micro_batches * plan.batch.lookups,
        "deduplicated": number * plan.micro_batches * plan.batch.distinct,
        "sent": number * plan.wanted * (1 - 1 / ranks),
    }
    return [
        {
            "type": kind,
            "entities": int(totals[i]),
            "optimizer": plan.forms[i].optimizer,
            "bytes": plan.table_bytes(own * (np.arange(len(own)) == i)),
            "rows": {name: float(of_types[i]) for name, of_types in rows.items()},
            "seconds": time,
        }
        for i, (kind, time) in enumerate(zip(plan.types, times, strict=True))
    ]


def _types(plan: Plan) -> Rows:
    rows = [["table", "rows", "optimizer", "on a rank", "lookups per step", "different", "sent",
             "time"]]  # fmt: skip
    for own in type_sizes(plan):
        numbers = [f"{number:,.0f}" for number in own["rows"].values()]
        rows.append([own["type"], f"{own['entities']:,}", own["optimizer"], amount(own["bytes"]),
                     *numbers, seconds(own["seconds"])])  # fmt: skip
    return rows


def _limits(plan: Plan) -> Iterator[str]:
    """Yield each memory against its capacity, and by how much it is over."""
    for limit in plan.limits:
        share = limit.need / limit.usable if limit.usable else float("inf")
        excess = f": {amount(limit.over)} too much" if limit.over > 0 else ""
        yield (
            f"{limit.place}: {amount(limit.need)} of {amount(limit.usable)} usable ({share:.0%}; "
            f"{amount(limit.capacity)} less {plan.reserve:.0%} left free){excess}"
        )
    yield f"a checkpoint: {amount(plan.checkpoint_bytes)} on disk"


def _disk(plan: Plan) -> Iterator[str]:
    """Yield what lies on disk, and how fast a disk keeps up with training."""
    use = plan.disk
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


def _traffic(plan: Plan) -> Rows:
    rows = [["sent by a rank", "per step", "to other hosts", "per epoch", "to other hosts"]]
    whole = tuple(map(sum, zip(*plan.sent.values(), strict=True)))
    for kind, (within, between) in [*plan.sent.items(), ("all", whole)]:
        sizes = [within + between, between]
        sizes += [plan.steps_per_epoch * size for size in sizes]
        rows.append([kind, *map(amount, sizes)])
    return rows


def _lookups(plan: Plan) -> Iterator[str]:
    if plan.is_full:
        yield "every rank scores its own rows for all queries of a step: nothing is looked up"
        return
    rows = "entities and features" if plan.sizes.num_features else "entities"
    count = plan.cluster.world_size * plan.micro_batches
    lookups, distinct = (count * float(x.sum()) for x in (plan.batch.lookups, plan.batch.distinct))
    yield (
        f"a step looks up {lookups:,.0f} {rows}, {distinct:,.0f} different ones on their ranks: "
        f"de-duplication saves {1 - distinct / lookups:.0%} of them"
    )
    rank, _, times = plan.busiest
    if times >= 1.05:
        yield f"rank {rank} reads most rows: {times:.2f} times the mean of all ranks"
    sent, without = (
        sum(sum(sizes) for kind, sizes in by_kind.items() if kind != "dense")
        for by_kind in (plan.sent, plan.sent_with_duplicates)
    )
    if without:
        yield (
            f"a rank sends {amount(sent)} of ids, rows and gradients in a step; with duplicates it "
            f"would send {amount(without)}"
        )


def _times(plan: Plan) -> Iterator[str]:
    epochs, cluster, device = plan.config.train.epochs, plan.cluster, plan.cluster.device
    yield (
        f"a step would take {seconds(plan.step_seconds)} ({plan.examples_per_second:,.0f} "
        f"{plan.config.negatives.examples}/s), an epoch {seconds(plan.epoch_seconds)}, all "
        f"{epochs:,} {seconds(epochs * plan.epoch_seconds)} without evaluation: a model, not a "
        "measurement"
    )
    yield f"  {_BOUNDS[plan.bound]}"
    shares = percentages(plan.decisive)
    times = sorted(plan.decisive.items(), key=lambda item: -item[1])
    yield from aligned([[f"  {part}", seconds(time), f"{shares[part]}%"] for part, time in times])
    hidden = [f"{part} {seconds(time)}" for part, time in plan.seconds.items()
              if part not in plan.decisive]  # fmt: skip
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


def _beside_the_table(plan: Plan) -> Iterator[str]:
    """Yield what fills a rank on which there is no room for a single row."""
    usable = plan.limits[0].usable // (1 if plan.is_cuda else plan.cluster.per_host)
    parts = {part: getattr(x, plan.place) for part, x in plan.memory.items()
             if part not in TABLE_PARTS}  # fmt: skip
    if sum(parts.values()) > usable:
        largest = sorted(parts, key=lambda part: -parts[part])[:3]
        listed = ", ".join(f"{part} {amount(parts[part])}" for part in largest if parts[part])
        yield (
            f"a rank needs {amount(sum(parts.values()))} before it holds a row of the table "
            f"({listed}): no layout of the table helps"
        )


def notes(plan: Plan) -> Iterator[str]:
    """Yield what the plan leaves open."""
    config, regime = plan.config, plan.config.negatives.regime
    if plan.layout != "row_wise":
        yield f"{plan.layout} is planned only: training splits the table by rows"
    if config.entities.cache_ratio and plan.layout != "data_parallel":
        yield f"no GPU has run {plan.forms[0].kernel} yet: its times are of the model only"
    if regime == "kvssample":
        most = config.negatives.max_answers
        limit = f"up to {most:,} (negatives.max_answers)" if most else "any number"
        yield (
            "negatives.regime kvssample: activations, traffic and time assume one answer per "
            f"query; a query may have {limit}, of {4 * plan.dim:,} bytes per row"
        )
    if regime in ("kvsall", "kvssample"):
        yield (
            f"negatives.regime {regime}: an epoch has at most {plan.examples:,} queries; queries "
            "that several triples share occur once"
        )
    if len(plan.types) > 1 and not plan.is_full and plan.sizes.run is None:
        yield (
            "rows of a table are looked up in proportion to their number, since only data say how "
            "often a type occurs: plan with data.path and without --entities and --skew"
        )
    if config.train.computes_in_16_bits:
        yield f"activations are counted in float32; {config.train.precision} needs less"
    saved = [plan.memory[part] for part in ("weights", "optimizer state", "average")
             if part in plan.memory]  # fmt: skip
    copied = plan.cluster.per_host * sum(size.device + size.main for size in saved)
    by_rows = plan.layout == "row_wise" and plan.parts is None
    if by_rows and copied >= 1 << 30 and config.checkpoint.options.background:
        yield (
            f"a checkpoint takes up to {copied / 2**30:,.1f} GiB more main memory per host while "
            "training continues; where that is not free, training waits "
            "(checkpoint.options.background)"
        )


def all_layouts(plan: Plan) -> list[Plan]:
    """Return a plan for every layout that the run and the devices allow.

    Those that fit come first, the fastest of them first.
    """
    plans = []
    for layout in SHARDINGS:
        with suppress(ConfigError):  # such as columns against all entities
            plans.append(plan.changed({}, layout=layout))
    return sorted(plans, key=lambda plan: (not plan.fits, plan.step_seconds))


def side_by_side(plans: Sequence[Plan]) -> str:
    """Return a table of layouts, one line each, and why training takes rows."""
    rows = [["layout", "fits", "device, fullest rank", "main, fullest host", "sent, busiest rank",
             "modelled step", "largest part"]]  # fmt: skip
    for plan in plans:
        limits, busiest = plan.limits, plan.busiest[2]
        sent = sum(sum(x) * (busiest if kind != "dense" else 1) for kind, x in plan.sent.items())
        rows.append(
            [
                plan.in_words,
                "yes" if plan.fits else f"no, {amount(plan.overruns[0].over)} over",
                amount(plan.total.device),
                amount(limits[-1].need),
                amount(sent),
                seconds(plan.step_seconds),
                max(plan.decisive, key=lambda part: plan.decisive[part]),
            ]
        )
    if not plans[0].is_cuda:
        rows = [[*row[:2], *row[3:]] for row in rows]
    return "\n".join([*aligned(rows), "", WHY_ROWS])


def seconds(value: float) -> str:
    """Return seconds in a unit that suits them: "31 ms"."""
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms")):
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value * 1e6:.3g} us"


def plan_content(plan: Plan, advice: Sequence[Advice] = ()) -> dict[str, Any]:
    """Return everything that a plan says, as plain values."""
    config, sizes, cluster, full = plan.config, plan.sizes, plan.cluster, plan.is_full
    rows = {} if full else {"deduplicated": plan.batch.distinct,
                            "with_duplicates": plan.batch.lookups}  # fmt: skip
    sent, duplicated = (
        {
            kind: dict(zip(("within_hosts", "between_hosts"), x, strict=True))
            for kind, x in y.items()
        }
        for y in (plan.sent, {} if full else plan.sent_with_duplicates)
    )
    return {
        "table": {
            "entities": sizes.entities,
            "features": sizes.num_features,
            "dim": plan.dim,
            "optimizer": config.train.optimizer,
        },
        "tables": type_sizes(plan),
        "disk": plan.disk,
        "world": {
            "size": cluster.world_size,
            "hosts": cluster.hosts,
            "device": asdict(cluster.device),
            "reserve": plan.reserve,
        },
        "sharding": {
            "type": plan.layout,
            "kernel": plan.forms[0].kernel,
            "cache_ratio": plan.forms[0].cache_ratio,
            "rows": len(plan.block),
            "columns": plan.columns,
        },
        "run": {
            "relations": sizes.relations,
            "triples": sizes.triples,
            "batch_size": plan.batch_size,
            "scorer": config.model.scorer,
            "dense_parameters": plan.costs.dense_numbers,
            "config": config.to_dict(),
        },
        "fits": plan.fits,
        "memory": {
            "what": "bytes of the rank with the most rows",
            **{
                place: {part: x for part, y in plan.memory.items() if (x := getattr(y, place))}
                for place in ("device", "main")
            },
            "total": asdict(plan.total),
        },
        "limits": [{**asdict(limit), "over": max(0, limit.over)} for limit in plan.limits],
        "checkpoint_bytes": plan.checkpoint_bytes,
        "traffic": {
            "unit": "bytes sent in a step by a rank",
            "steps_per_epoch": plan.steps_per_epoch,
            "lookups": {k: float(plan.micro_batches * x.sum()) for k, x in rows.items()},
            "sent": sent,
            "with_duplicates": duplicated,
        },
        "step": {
            "what": "a model from bytes, operations and the device's speeds, not a measurement",
            "seconds": plan.step_seconds,
            "parts": plan.seconds,
            "decisive": list(plan.decisive),
            "bound": plan.bound,
        },
        "epoch_seconds": plan.epoch_seconds,
        "training_seconds": config.train.epochs * plan.epoch_seconds,
        "advice": [asdict(item) for item in advice],
        "notes": [*notes(plan)],
    }

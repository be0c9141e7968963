"""Advice: changes that make a run fit, each of which was planned.

Sizes are searched, so that the advised one fits and the next smaller number of devices (or larger
cache or buffer) does not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from kge_torchrec.config import ConfigError
from kge_torchrec.config.entities import MANAGED, PlacementOptions
from kge_torchrec.embeddings.optimizers import optimizer_class
from kge_torchrec.embeddings.torchrec.planner import amount
from kge_torchrec.planning.plan import Plan

PARTS = (8, 16, 32, 64, 128, 256)
_DISK_SPEED = 1e9  # bytes per second that a disk reads; assumed
Size = TypeVar("Size")


@dataclass(frozen=True)
class Advice:
    """One change and its result."""

    change: str
    fits: bool
    result: str


def advise(plan: Plan) -> list[Advice]:
    """Return what makes the run fit, then what does not."""
    results: list[Advice] = []
    for words, keys in _single(plan):
        with suppress(ConfigError):  # another setting does not allow it
            results.append(_judged(words, plan.changed(keys)))
    for search in (_on_disk, _cached, _devices):
        with suppress(ConfigError):
            results += [_judged(*found) for found in search(plan)]
    return sorted(results, key=lambda advice: not advice.fits)


def _judged(change: str, plan: Plan) -> Advice:
    if plan.fits:
        limit = max(plan.limits, key=lambda x: x.need / x.usable if x.usable else 0.0)
        result = f"holds {amount(limit.need)} of {amount(limit.usable)}, modelled step"
        step = f"{plan.step_seconds * 1e3:.3g} ms"
        return Advice(change, True, f"fits: {limit.place} {result} {step}")
    worst = plan.overruns[0]
    need = f"needs {amount(worst.need)} of {amount(worst.usable)} usable"
    too_much = f"{amount(worst.over)} too much"
    return Advice(change, False, f"is not enough: {worst.place} {need}, {too_much}")


def _single(plan: Plan) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield changes without a size to search for, in words and as keys of the config."""
    entities, usable = plan.config.entities, plan.limits[0].usable
    by_row = optimizer_class(plan.config.train.optimizer).by_row
    if by_row and entities.preset == "fbgemm":
        yield f"train.optimizer {by_row}", {"train.optimizer": by_row}
    if entities.cache_ratio:
        keys = {"entities.placement_options": PlacementOptions(), "entities.placement": "memory"}
        yield "entities.placement memory", keys
    dense = getattr(plan.memory["dense parameters"], plan.place)
    if plan.dense_splits < plan.cluster.world_size and dense >= usable / 20:  # else it saves little
        yield "dense.wrapper fsdp", {"dense.wrapper": "fsdp"}


def _devices(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Yield the smallest number of these devices that fits, or the largest that was tried."""
    larger = plan.cluster.larger
    first = _first(larger, lambda cluster: plan.changed({}, cluster=cluster), plan)
    smallest = plan.changed({}, cluster=first or larger[-1])
    yield f"{smallest.cluster}{', the smallest number,' if first else ''}", smallest


def _cached(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Yield rows in main memory, with the largest cache on the GPU that fits."""
    if not plan.is_cuda:
        return

    def planned(percent: int) -> Plan:
        options = PlacementOptions(cache_ratio=percent / 100)
        return plan.changed({"entities.placement": MANAGED, "entities.placement_options": options})

    found = _first(range(99, 0, -1), planned, plan)
    words = f"up to {found / 100:.2f}" if found else "of 0.01"
    yield f"entities.placement {MANAGED} with a cache_ratio {words}", planned(found or 1)


def _on_disk(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Yield the table on disk, with the parts and the buffer that add the least time to an epoch.

    For each number of parts, the buffer is the largest that fits.
    """
    entities = plan.config.entities
    if plan.sizes.num_features:  # their rows may be in parts that are not in memory
        return
    others = entities.placement_options if entities.on_disk else PlacementOptions()

    def planned(parts: int, buffer: int) -> Plan:
        options = replace(others, parts=parts, buffer=buffer)
        return plan.changed({"entities.placement_options": options, "entities.placement": "disk"})

    best = planned(PARTS[-1], 2)
    if best.fits:
        fitting = []
        for parts in PARTS:
            buffer = _first(range(parts, 1, -1), partial(planned, parts), plan)
            fitting += [planned(parts, buffer)] if buffer else []
        best = min(fitting, key=_added_seconds)
    cut = best.config.entities.placement_options
    yield (
        f"entities.placement disk, entities.placement_options.parts {cut.parts} and "
        f"entities.placement_options.buffer {cut.buffer}",
        best,
    )


def _added_seconds(plan: Plan) -> float:
    """Return the seconds that a disk adds to an epoch: for reading, and for more steps.

    A stage ends with a smaller step, which takes as long for what does not grow with the batch.
    """
    use, decisive = plan.disk, plan.decisive
    assert use is not None
    fixed = sum(decisive.get("host", {}).values())
    fixed += decisive.get("links", {}).get("dense gradients", 0.0)
    return float(use["epoch_bytes"] / _DISK_SPEED + use["exchanges"] * fixed)


def _first(sizes: Sequence[Size], planned: Callable[[Size], Plan], plan: Plan) -> Size | None:
    """Return the first size whose plan fits, if those after it do too; None if none does.

    It looks in growing steps, then halves, since far sizes are slow to plan. Some scorers are slow
    to count, so a size is counted only if it would fit without activations, and would not with
    those of ``plan``, which has the largest micro-batch.
    """

    def fits(size: Size) -> bool:
        with suppress(ConfigError):  # such as replicas that these devices cannot be split into
            other = planned(size)
            # Against all entities, fewer rows may keep their scores and need more memory.
            surely = not plan.is_full and other.fits_with(plan.cost.peak_bytes)
            return surely or (other.fits_with(0) and other.fits)
        return False

    end = 1
    while end < len(sizes) and not fits(sizes[end - 1]):
        end *= 2
    place = bisect_left(sizes, True, end // 2, min(end, len(sizes)), key=fits)
    return sizes[place] if place < len(sizes) and fits(sizes[place]) else None

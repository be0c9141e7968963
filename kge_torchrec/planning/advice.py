"""Advice: changes that make a run fit, each of which was planned."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kge_torchrec.config import ConfigError
from kge_torchrec.config.entities import MANAGED, PlacementOptions
from kge_torchrec.embeddings.optimizers import optimizer_class
from kge_torchrec.planning.plan import Plan
from kge_torchrec.planning.step import Step
from kge_torchrec.tables import amount

CACHES = (0.5, 0.2, 0.1, 0.05, 0.01)  # shares of the rows in a cache on the GPU
CUTS = ((16, 4), (32, 4), (64, 4), (128, 4), (256, 2))  # parts on disk, and those in memory


@dataclass(frozen=True)
class Advice:
    """One change and its result."""

    change: str
    fits: bool
    result: str


def advise(plan: Plan) -> list[Advice]:
    """Return what makes the run fit, then what does not.

    Of changes with a size, each of which needs less than the one before, the first that fits is
    advised; if none does, the last one is said to be not enough.
    """
    results = []
    for family in _changes(plan):
        plans: list[tuple[str, Plan]] = []
        for words, keys in family:
            with suppress(ConfigError):  # another setting does not allow it
                plans.append((words, plan.changed(keys)))
        if plans:
            first = bisect_left(plans, True, key=lambda pair: pair[1].fits)
            results.append(_judged(*plans[min(first, len(plans) - 1)]))
    return sorted(results, key=lambda advice: not advice.fits)


def _judged(change: str, plan: Plan) -> Advice:
    limit = plan.worst
    need = f"{amount(limit.need)} of {amount(limit.usable)}"
    if plan.fits:
        step = f"{Step(plan).seconds * 1e3:.3g} ms"
        return Advice(change, True, f"fits: {limit.place} holds {need}, modelled step {step}")
    too_much = f"needs {need} usable, {amount(limit.over)} too much"
    return Advice(change, False, f"is not enough: {limit.place} {too_much}")


def _changes(plan: Plan) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Yield lists of changes, in words and for ``Plan.changed``; of a list the first is best."""
    yield [(f"{cluster},", {"cluster": cluster}) for cluster in plan.cluster.larger]
    entities, options = plan.config.entities, plan.config.entities.placement_options
    by_row = optimizer_class(plan.config.train.optimizer).by_row
    if by_row and entities.preset == "fbgemm":
        yield [(f"train.optimizer {by_row}", {"train.optimizer": by_row})]
    if entities.cache_ratio:
        yield [_placed("memory")]
    dense = getattr(plan.memory["dense parameters"], plan.place)
    fsdp = plan.dense_splits < plan.cluster.world_size
    if fsdp and dense >= plan.limits[0].usable / 20:  # else it saves little
        yield [("dense.wrapper fsdp", {"dense.wrapper": "fsdp"})]
    if not plan.sizes.num_features:  # whose rows may be in parts that are not in memory
        passes = {"passes": options.passes} if options.passes > 1 else {}
        yield [_placed("disk", parts=x, buffer=y, **passes) for x, y in CUTS]
    if plan.is_cuda:
        yield [_placed(MANAGED, cache_ratio=share) for share in CACHES]


def _placed(where: str, **options: Any) -> tuple[str, dict[str, Any]]:
    words = [f"entities.placement {where}"]
    words += [f"entities.placement_options.{name} {value}" for name, value in options.items()]
    keys = {"entities.placement_options": PlacementOptions(**options), "entities.placement": where}
    return ", ".join(words), keys

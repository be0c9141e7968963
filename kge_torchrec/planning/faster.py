"""What would make a run's steps faster: the batch from which on its fixed part is a small one.

Some of a step takes the same time however few triples it has: starting operations and collectives,
and sending what does not grow with the batch.  Where that is more than ``MOST_FIXED`` of the
modelled step, batches are doubled, and planned each time, until it no longer is.  Every figure is
``step_time``'s model; nothing is measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kge_torchrec.config import ConfigError
from kge_torchrec.planning.dry_run import plan_training
from kge_torchrec.planning.step_time import FIXED
from kge_torchrec.planning.training_plan import TrainingPlan
from kge_torchrec.planning.workload import Workload

MOST_FIXED = 0.25  # share of a step, above which a larger batch pays
# Larger batches than one of so many an epoch are not advised: of a graph that small, steps matter
# more than their speed.
FEWEST_STEPS = 32
TOO_FEW_STEPS = f"larger batches would leave fewer than {FEWEST_STEPS} steps an epoch"
TOO_LARGE = "larger batches do not fit"
_WORTH = 0.05  # share of a step that another wrapper has to save


@dataclass(frozen=True)
class Faster:
    """Other settings of the same run, and its plan with them.

    settings: keys of the config and their values; none where nothing helps.
    limit: what keeps the batch from growing further, while the fixed part is still a large one.
    """

    now: TrainingPlan
    then: TrainingPlan
    settings: dict[str, Any]
    limit: str = ""

    def figures(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {
            "what": "a model, not a measurement",
            "settings": self.settings,
            "limit": self.limit,
            "now": _figures(self.now),
            "then": _figures(self.then),
        }


def faster(plan: TrainingPlan) -> Faster | None:
    """For a plan that fits; None where its steps are bound by their work and no wrapper helps."""
    found = _with_other_wrapper(Faster(plan, plan, {}))
    if fixed_share(plan) >= MOST_FIXED:
        found = _with_larger_batch(_with_whole_batches(found))
    return found if found.settings or found.limit else None


def fixed_share(plan: TrainingPlan) -> float:
    """Share of a step that takes as long with the smallest batch."""
    return sum(plan.times.get(part, 0.0) for part in FIXED) / plan.step_seconds


def examples_per_second(plan: TrainingPlan) -> float:
    """Over all ranks; triples, or queries where an epoch passes through those."""
    return plan.workload.batch_size / plan.step_seconds


def batch_of_rank(plan: TrainingPlan) -> float:
    """Examples of a rank's step."""
    return plan.workload.batch_size / plan.cluster.world_size


def _with_other_wrapper(found: Faster) -> Faster:
    """The dense parameters laid out otherwise, where sending them is worth it.

    First of all, since what it saves does not grow with the batch and so decides how large one is.
    """
    plan, best = found.then, found
    if not plan.times.get("dense gradients") or plan.workload.config.negatives.is_full:
        return found  # against all entities parameters cannot be sharded
    for name in ("ddp", "hybrid", "fsdp"):
        other = _changed(found, plan.workload.with_dense_wrapper(name), {"dense.wrapper": name})
        if other and other.then.step_seconds < (1 - _WORTH) * best.then.step_seconds:
            best = other
    return best


def _with_whole_batches(found: Faster) -> Faster:
    """Without micro-batches, each of which starts everything again."""
    if found.then.workload.config.train.accumulation == 1:
        return found
    workload = found.then.workload.with_accumulation(1)
    return _changed(found, workload, {"train.accumulation": 1}) or found


def _with_larger_batch(found: Faster) -> Faster:
    """The smallest power of two a rank at which the fixed part is a small one, or the largest."""
    ranks, most = found.now.cluster.world_size, found.now.workload.examples // FEWEST_STEPS
    of_rank = 1 << (found.now.workload.batch_size // ranks).bit_length()  # the next power
    while fixed_share(found.then) >= MOST_FIXED:
        size = of_rank * ranks
        if size > most:
            return replace(found, limit=TOO_FEW_STEPS)
        workload = found.then.workload.with_batch_size(size)
        larger = _changed(found, workload, {"train.batch_size": size})
        if larger is None:
            return replace(found, limit=TOO_LARGE)
        found, of_rank = larger, 2 * of_rank
    return found


def _changed(found: Faster, workload: Workload, settings: dict[str, Any]) -> Faster | None:
    """With further settings; None where they do not fit or the ranks do not allow them."""
    try:
        plan = plan_training(workload, found.now.cluster, found.now.choice)
    except ConfigError:
        return None
    return replace(found, then=plan, settings=found.settings | settings) if plan.fits else None


def _figures(plan: TrainingPlan) -> dict[str, float]:
    return {
        "examples_per_second": examples_per_second(plan),
        "step_seconds": plan.step_seconds,
        "fixed_share": fixed_share(plan),
        "batch_size": plan.workload.batch_size,
        "batch_size_of_rank": batch_of_rank(plan),
        "steps_per_epoch": plan.workload.steps_per_epoch,
    }

"""Where the entity table lies for ``entities.placement: auto``.

It lies in memory if the plan of the run fits there. Otherwise it lies on disk, with the number of
parts that costs an epoch the least time, and the largest buffer of them that fits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kge_torchrec.config import ConfigError
from kge_torchrec.embeddings.torchrec.planner import amount
from kge_torchrec.planning.advice import fullest_limit
from kge_torchrec.planning.cost import Cost
from kge_torchrec.planning.layout import IN_MEMORY, Setup
from kge_torchrec.planning.plan import TrainingPlan, plan_setup
from kge_torchrec.planning.report import disk_use

PLACE, OPTIONS = "entities.placement", "entities.placement_options"
PARTS = (8, 16, 32, 64, 128, 256)
_SPEED = 1e9  # bytes per second that a disk reads; assumed


@dataclass(frozen=True)
class Placement:
    """A place for the table: the values of its keys, and why, for people."""

    settings: dict[str, Any]
    reason: str

    @property
    def words(self) -> str:
        """A line for people, with the keys that change the choice."""
        return f"{PLACE} auto chooses {self.reason}; {PLACE} and {OPTIONS} change it"


def choose_placement(setup: Setup, free: int | None = None) -> Placement:
    """Choose where the table of a run lies.

    Args:
        setup: The run, with entities.placement auto. Given options of the disk stay.
        free: Bytes that are free on the disk for each rank; None if unknown.
    """
    plan = plan_setup(setup.changed(IN_MEMORY))
    if plan.fits:
        return Placement(IN_MEMORY, f"memory, where {fullest_limit(plan)}")
    worst = plan.overruns[0]
    why = f"{worst.place} would need {amount(worst.need)} of {amount(worst.usable)} usable"
    try:
        on_disk = _on_disk(setup, plan.cost, free)
    except ConfigError as error:
        reason = f"memory, because the disk cannot be used ({error}), although {why}"
        return Placement(IN_MEMORY, reason)
    config = on_disk.workload.config.entities
    settings = {OPTIONS: config.placement_options, PLACE: "disk"}
    size = f"{config.storage.buffer} of {config.storage.parts} parts in memory"
    return Placement(settings, f"disk, with {size}, because without it {why}")


def _on_disk(setup: Setup, cost: Cost, free: int | None) -> TrainingPlan:
    """Return the plan on disk that adds the least time to an epoch.

    Raises:
        ConfigError: The disk does not go with the run, or is too small, or no buffer fits.
    """
    if setup.workload.num_features:
        raise ConfigError("entities have features, whose rows may be in parts that are not there")
    options = setup.workload.config.entities.placement_options
    counts = [options["parts"]] if "parts" in options else PARTS
    counts = [parts for parts in counts if parts >= options.get("buffer", 2)]
    plans = [plan for parts in counts if (plan := _largest_buffer(setup, parts, cost))]
    if not plans:
        raise ConfigError("even the smallest buffer of parts does not fit, see `plan`")
    best = min(plans, key=_added_seconds)
    use = disk_use(best)
    assert use is not None
    # Training has one version of the table, and the last checkpoint another one.
    need = 2 * use["table_bytes"]
    if free is not None and need > free:
        raise ConfigError(f"it has {amount(free)} free for a rank, which needs {amount(need)}")
    return best


def _largest_buffer(setup: Setup, parts: int, cost: Cost) -> TrainingPlan | None:
    """Return the plan with the largest buffer that fits; None if none does."""
    options = setup.workload.config.entities.placement_options

    def planned(buffer: int) -> TrainingPlan:
        cut = {**options, "parts": parts, "buffer": buffer}
        return plan_setup(setup.changed({OPTIONS: cut, PLACE: "disk"}), cost)

    buffers: Sequence[int] = range(2, parts + 1)
    if "buffer" in options:
        buffers = [options["buffer"]]
    fitting = bisect_left(buffers, True, key=lambda buffer: not planned(buffer).fits)
    return planned(buffers[fitting - 1]) if fitting else None


def _added_seconds(plan: TrainingPlan) -> float:
    """Return the seconds that a disk adds to an epoch: for reading, and for more steps."""
    use = disk_use(plan)
    assert use is not None
    steps = use["exchanges"] * plan.fixed_share * plan.step_seconds
    return float(use["epoch_bytes"] / _SPEED + steps)

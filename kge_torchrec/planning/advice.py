"""Advice: changes that make a run fit.

Every answer is found by planning it. Sizes are searched, so that the advised one fits and the next
smaller number of devices (or larger cache or buffer) does not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from kge_torchrec.config import ConfigError
from kge_torchrec.config.entities import MANAGED, PlacementOptions
from kge_torchrec.embeddings.optimizers import optimizer_class
from kge_torchrec.embeddings.torchrec.planner import amount
from kge_torchrec.planning.cost import Cost
from kge_torchrec.planning.devices import DEVICES_PER_HOST, Cluster
from kge_torchrec.planning.layout import Setup
from kge_torchrec.planning.plan import TrainingPlan, disk_use, plan_setup
from kge_torchrec.planning.step import FIXED, RESOURCES

MOST_DEVICES = 1024
_MATTERS = 0.05  # share of the usable memory from which on a part is worth a change


@dataclass(frozen=True)
class Advice:
    """One change and its result."""

    change: str
    fits: bool
    result: str


def advise(plan: TrainingPlan) -> list[Advice]:
    """Return what makes the run fit, then what does not."""
    results = []
    for name, change in _changes(plan).items():
        with suppress(ConfigError):  # another setting does not allow it
            results.append(_tried(name, plan.changed(change)))
    results += [*_disk(plan), _devices(plan), *_main_memory(plan)]
    return sorted(results, key=lambda advice: not advice.fits)


def _changes(plan: TrainingPlan) -> dict[str, dict[str, Any]]:
    """Return the changes without a size, by name, where they change something."""
    config, layout = plan.workload.config, plan.layout
    changes: dict[str, dict[str, Any]] = {}
    by_row = optimizer_class(plan.workload.optimizer).by_row
    if by_row and not layout.is_replicated and config.entities.preset == "fbgemm":
        changes[f"train.optimizer {by_row}"] = {"train.optimizer": by_row}
    if config.entities.cache_ratio:
        changes["entities.placement memory"] = {
            "entities.placement_options": PlacementOptions(),
            "entities.placement": "memory",
        }
    if layout.sharding != "row_wise":
        changes["sharding row_wise"] = {"sharding": "row_wise"}
    is_sharded = plan.dense.is_sharded or plan.cluster.world_size == 1
    dense = getattr(plan.memory[plan.fullest]["dense parameters"], plan.place)
    if not is_sharded and dense >= _MATTERS * plan.overruns[0].usable:
        changes["dense.wrapper fsdp"] = {"dense.wrapper": "fsdp"}
    return changes


def _tried(change: str, setup: Setup) -> Advice:
    plan = plan_setup(setup)
    if plan.fits:
        result = f"fits: {_fullest_limit(plan)}, modelled step {plan.step_seconds * 1e3:.3g} ms"
        return Advice(change, True, result)
    worst = plan.overruns[0]
    return Advice(
        change,
        False,
        f"is not enough: {worst.place} needs {amount(worst.need)} of {amount(worst.usable)} "
        f"usable, {amount(worst.over)} too much",
    )


def _fullest_limit(plan: TrainingPlan) -> str:
    """Return the limit that is nearest to being reached, in words."""
    limit = max(plan.limits, key=lambda x: x.need / x.usable if x.usable else 0.0)
    return f"{limit.place} holds {amount(limit.need)} of {amount(limit.usable)}"


def _devices(plan: TrainingPlan) -> Advice:
    """Return the smallest number of these devices, evenly on as few hosts as hold them."""
    clusters = _larger(plan.cluster)
    setups = [Setup(plan.workload, cluster, plan.layout) for cluster in clusters]
    smallest = _first(setups, plan.cost)
    if smallest is None:
        return Advice("more devices", False, f"are not enough: {clusters[-1]} do not suffice")
    limit = _fullest_limit(plan_setup(smallest))
    return Advice(str(smallest.cluster), True, f"is the smallest number that fits: {limit}")


def _larger(cluster: Cluster) -> list[Cluster]:
    """Return clusters of the same devices, in growing numbers."""
    device, world, local = cluster.device, cluster.world_size, cluster.local_world_size
    if not device.is_cuda:  # the ranks of a host share its memory, so only hosts help
        most = max(cluster.hosts + 1, MOST_DEVICES // local)
        return [
            replace(cluster, world_size=local * n, hosts=n)
            for n in range(cluster.hosts + 1, most + 1)
        ]
    per_host = max(local, DEVICES_PER_HOST)
    return [
        replace(cluster, world_size=count, hosts=hosts)
        for count in range(world + 1, max(2 * world, MOST_DEVICES) + 1)
        if count % (hosts := -(-count // per_host)) == 0
    ]


def _main_memory(plan: TrainingPlan) -> Iterator[Advice]:
    """Yield rows in main memory, with the largest cache on the GPU that fits."""
    if not plan.is_cuda or plan.layout.is_replicated:
        return
    ratios = [percent / 100 for percent in range(99, 0, -1)]
    where, key = {"entities.placement": MANAGED}, "entities.placement_options"
    try:
        setups = [plan.changed({**where, key: {"cache_ratio": ratio}}) for ratio in ratios]
    except ConfigError:  # such as all entities as candidates
        return
    cached = _first(setups, plan.cost)
    words = "of" if cached is None else "up to"
    cached = cached or setups[-1]
    ratio = cached.workload.config.entities.cache_ratio
    yield _tried(f"entities.placement {MANAGED} with a cache_ratio {words} {ratio:.2f}", cached)


PARTS = (8, 16, 32, 64, 128, 256)
_DISK_SPEED = 1e9  # bytes per second that a disk reads; assumed


def _disk(plan: TrainingPlan) -> Iterator[Advice]:
    """Yield the table on disk, with the parts and the buffer that add the least time to an epoch.

    For each number of parts, the buffer is the largest that fits.
    """
    entities = plan.workload.config.entities
    # The rows of an entity's features may be in parts that are not in memory.
    if plan.layout.is_replicated or plan.workload.num_features:
        return
    others = entities.placement_options if entities.on_disk else PlacementOptions()

    def planned(parts: int, buffer: int) -> TrainingPlan:
        changes = {
            "entities.placement_options": replace(others, parts=parts, buffer=buffer),
            "entities.placement": "disk",
        }
        return plan_setup(plan.changed(changes), plan.cost)

    def largest(parts: int) -> TrainingPlan | None:
        buffers = range(2, parts + 1)
        count = bisect_left(buffers, True, key=lambda buffer: not planned(parts, buffer).fits)
        return planned(parts, buffers[count - 1]) if count else None

    try:
        smallest = planned(PARTS[-1], 2)
    except ConfigError:  # such as all entities as candidates
        return
    fitting = filter(None, map(largest, PARTS))
    best = min(fitting, key=_added_seconds, default=smallest)
    cut = best.workload.config.entities.placement_options
    yield _tried(
        f"entities.placement disk, entities.placement_options.parts {cut.parts} and "
        f"entities.placement_options.buffer {cut.buffer}",
        best,
    )


def _added_seconds(plan: TrainingPlan) -> float:
    """Return the seconds that a disk adds to an epoch: for reading, and for more steps."""
    use = disk_use(plan)
    assert use is not None
    grows = {  # with the batch; each stage ends with a smaller one
        name: sum(plan.times.get(part, 0.0) for part in parts if part not in FIXED)
        for name, parts in RESOURCES.items()
    }
    working = grows["device"] + grows["links"]
    longest = max(grows["loader"], working) if plan.is_cuda else sum(grows.values())
    steps = use["exchanges"] * (plan.step_seconds - longest)
    return float(use["epoch_bytes"] / _DISK_SPEED + steps)


def _first(setups: Sequence[Setup], cost: Cost) -> Setup | None:
    """Return the first setup that fits, if those after it do too.

    Setups get lighter, so ``cost``, of the heavy one at hand, is an upper bound. It saves running
    the objective at every size; the end of the search takes the true cost.
    """

    def fits(setup: Setup, bound: Cost | None = None) -> bool:
        try:
            return plan_setup(setup, bound).fits
        except ConfigError:
            return False

    def search(bound: Cost | None = None) -> int:
        """Look in growing steps, then halve, since the far setups are slow to plan."""
        end = 1
        while end < len(setups) and not fits(setups[end - 1], bound):
            end *= 2
        rest = (end // 2, min(end, len(setups)))
        return bisect_left(setups, True, *rest, key=lambda setup: fits(setup, bound))

    first = search(cost)
    if first == len(setups):
        if not setups or not fits(setups[-1]):
            return None
        first = search()  # the bound is too high: activations decide
    while first and fits(setups[first - 1]):
        first -= 1
    return setups[first]

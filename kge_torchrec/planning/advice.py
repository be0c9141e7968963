"""Advice: changes that make a run fit, and changes that make its steps faster.

Every answer is found by planning it. Sizes are searched, so that the advised one fits and the next
smaller number of devices (or larger cache or dimension) does not.

Part of a step takes the same time however few triples it has: starting operations and collectives,
and sending what does not grow with the batch. Where that is more than ``MOST_FIXED`` of the
modelled step, batches are doubled until it no longer is. Every figure comes from the model in
``step``; nothing is measured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from kge_torchrec.config import ConfigError
from kge_torchrec.config.entities import MANAGED
from kge_torchrec.embeddings.optimizers import optimizer_class
from kge_torchrec.embeddings.torchrec.planner import amount
from kge_torchrec.planning.cost import Cost
from kge_torchrec.planning.devices import DEVICES_PER_HOST, Cluster
from kge_torchrec.planning.layout import Setup
from kge_torchrec.planning.plan import TrainingPlan, disk_use, plan_setup

MOST_DEVICES = 1024
_MATTERS = 0.05  # share of the usable memory from which on a part is worth a change


@dataclass(frozen=True)
class Advice:
    """One change and its result."""

    change: str
    fits: bool
    result: str


def advise(plan: TrainingPlan) -> list[Advice]:
    """Return what makes the run fit, then what does not.

    Pairs of changes are tried where no single one is enough.
    """
    changes = _changes(plan)
    for name, change in [*changes.items()]:
        try:
            plan.changed(change)
        except ConfigError:  # such as a table on disk against all entities
            del changes[name]
    results = [_tried(name, plan.changed(change)) for name, change in changes.items()]
    if not any(advice.fits for advice in results):
        for (one, first), (two, second) in combinations(changes.items(), 2):
            both = _tried(f"{one} and {two}", plan.changed(first | second))
            results += [both] if both.fits else []
    results += [*_disk(plan), _devices(plan), *_main_memory(plan), _dimension(plan), *_batch(plan)]
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
            "entities.placement_options": {},
            "entities.placement": "memory",
        }
    if layout.sharding != "row_wise":
        changes["sharding row_wise"] = {"sharding": "row_wise"}
    is_sharded = plan.dense.is_sharded or plan.cluster.world_size == 1
    if not is_sharded and _share(plan, "dense parameters") >= _MATTERS:
        changes["dense.wrapper fsdp"] = {"dense.wrapper": "fsdp"}
    return changes


def _share(plan: TrainingPlan, *parts: str) -> float:
    """Return the share of the usable memory that parts of the fullest rank take."""
    memory = plan.memory[plan.fullest]
    need = sum(getattr(memory[part], plan.place) for part in parts)
    return need / max(1, plan.overruns[0].usable)


def _tried(change: str, setup: Setup) -> Advice:
    plan = plan_setup(setup)
    if plan.fits:
        result = f"fits: {fullest_limit(plan)}, modelled step {plan.step_seconds * 1e3:.3g} ms"
        return Advice(change, True, result)
    worst = plan.overruns[0]
    return Advice(
        change,
        False,
        f"is not enough: {worst.place} needs {amount(worst.need)} of {amount(worst.usable)} "
        f"usable, {amount(worst.over)} too much",
    )


def fullest_limit(plan: TrainingPlan) -> str:
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
    limit = fullest_limit(plan_setup(smallest))
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
    others = entities.placement_options if entities.on_disk else {}

    def planned(parts: int, buffer: int) -> TrainingPlan:
        options = {**others, "parts": parts, "buffer": buffer}
        changes = {"entities.placement_options": options, "entities.placement": "disk"}
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
    cut = best.workload.config.entities.storage
    yield _tried(
        f"entities.placement disk, entities.placement_options.parts {cut.parts} and "
        f"entities.placement_options.buffer {cut.buffer}",
        best,
    )


def _added_seconds(plan: TrainingPlan) -> float:
    """Return the seconds that a disk adds to an epoch: for reading, and for more steps."""
    use = disk_use(plan)
    assert use is not None
    steps = use["exchanges"] * plan.fixed_share * plan.step_seconds
    return float(use["epoch_bytes"] / _DISK_SPEED + steps)


def _dimension(plan: TrainingPlan) -> Advice:
    """Return the largest D that fits and that the scorer and the kernels take."""
    smaller = []
    for dim in range(plan.workload.dim - 1, 0, -1):
        if dim % plan.dim_multiple == 0:
            with suppress(ConfigError):  # the scorer has no such size
                smaller.append(plan.changed({"model.dim": dim}))
    largest = _first(smaller, plan.cost)
    if largest is None:
        return Advice("a smaller model.dim", False, "is not enough: not even the smallest fits")
    return Advice(f"model.dim {largest.workload.dim}", True, "is the largest that fits")


def _batch(plan: TrainingPlan) -> Iterator[Advice]:
    """Yield the batch halved until it fits, where batches take much memory."""
    if _share(plan, "rows and ids", "activations", "batches") < _MATTERS:
        return
    sizes = [plan.workload.batch_size >> i for i in range(1, 40)]
    smaller = [plan.changed({"train.batch_size": size}) for size in sizes if size]
    largest = _first(smaller, plan.cost)
    if largest is None:
        yield Advice("a smaller train.batch_size", False, "is not enough")
    else:
        yield _tried(f"train.batch_size {largest.workload.batch_size}", largest)


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


MOST_FIXED = 0.25  # share of a step, above which a larger batch pays
# A larger batch is not advised if an epoch would have fewer steps: on a graph that small the number
# of steps matters more than their speed.
FEWEST_STEPS = 32
TOO_FEW_STEPS = f"larger batches would leave fewer than {FEWEST_STEPS} steps per epoch"
TOO_LARGE = "larger batches do not fit"
_WORTH = 0.05  # share of a step that another wrapper has to save


@dataclass(frozen=True)
class Faster:
    """Other settings of the same run, and the plan with them."""

    now: TrainingPlan
    then: TrainingPlan  # with the settings
    settings: dict[str, Any]  # by key of the config; empty where nothing helps
    limit: str = ""  # what keeps the batch from growing while the fixed part is still large

    def changed(self, settings: dict[str, Any]) -> Faster | None:
        """Return the plan with further settings; None if it does not fit or is not allowed."""
        try:
            plan = plan_setup(self.then.changed(settings))
        except ConfigError:
            return None
        return replace(self, then=plan, settings=self.settings | settings) if plan.fits else None


def faster(plan: TrainingPlan) -> Faster | None:
    """Return faster settings for a plan that fits; None if its work rules and no wrapper helps."""
    # The wrapper comes first: what it saves does not grow with the batch, and so decides its size.
    result = _with_other_wrapper(Faster(plan, plan, {}))
    if plan.fixed_share >= MOST_FIXED:
        if result.then.workload.micro_batches > 1:  # each starts everything again
            result = result.changed({"train.accumulation": 1}) or result
        result = _with_larger_batch(result)
    return result if result.settings or result.limit else None


def _with_other_wrapper(current: Faster) -> Faster:
    """Lay out the dense parameters differently, if sending them takes time and this saves some."""
    best = current
    if not current.then.times.get("dense gradients"):
        return current
    for name in ("ddp", "hybrid", "fsdp"):
        other = current.changed({"dense.wrapper": name})
        if other and other.then.step_seconds < (1 - _WORTH) * best.then.step_seconds:
            best = other
    return best


def _with_larger_batch(current: Faster) -> Faster:
    """Take the smallest power of two per rank with a small fixed part, or the largest batch."""
    workload, ranks = current.now.workload, current.now.cluster.world_size
    per_rank = 1 << (workload.batch_size // ranks).bit_length()  # the next power
    while current.then.fixed_share >= MOST_FIXED:
        size = per_rank * ranks
        if size > workload.examples // FEWEST_STEPS:
            return replace(current, limit=TOO_FEW_STEPS)
        larger = current.changed({"train.batch_size": size})
        if larger is None:
            return replace(current, limit=TOO_LARGE)
        current, per_rank = larger, 2 * per_rank
    return current

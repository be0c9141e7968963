"""What would make a run fit that does not, or its steps faster: found by planning each answer.

Sizes are searched by halving, so that what is advised fits and the next smaller number of devices
(or larger cache or dimension) does not.

Some of a step takes the same time however few triples it has: starting operations and collectives,
and sending what does not grow with the batch.  Where that is more than ``MOST_FIXED`` of the
modelled step, batches are doubled, and planned each time, until it no longer is.  Every figure is
``step_time``'s model; nothing is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, NamedTuple

from kge_torchrec.config import ConfigError
from kge_torchrec.embeddings.optimizers import optimizer_class
from kge_torchrec.embeddings.torchrec.planner import FUSED, UVM, UVM_CACHING, amount
from kge_torchrec.planning.choice import Choice
from kge_torchrec.planning.cost import FIXED
from kge_torchrec.planning.devices import Cluster
from kge_torchrec.planning.operations import Cost
from kge_torchrec.planning.plan import TrainingPlan, plan_training
from kge_torchrec.planning.workload import Workload

MOST_DEVICES = 1024
DEVICES_PER_HOST = 8  # GPUs that a host holds, unless the cluster's hold more
_MATTERS = 0.05  # share of the usable memory from which on a part is worth a change


@dataclass(frozen=True)
class Advice:
    """One change and what comes of it."""

    change: str
    fits: bool
    result: str


class _Setting(NamedTuple):
    workload: Workload
    cluster: Cluster
    choice: Choice

    def choose(self, **changes: Any) -> _Setting:
        return self._replace(choice=replace(self.choice, **changes))


_Change = Callable[[_Setting], _Setting]


def advise(plan: TrainingPlan) -> list[Advice]:
    """What makes the run fit, and what does not; pairs of changes where no single one does."""
    setting = _Setting(plan.workload, plan.cluster, plan.choice)
    changes = _changes(setting) | _changes_beside_the_table(plan)
    found = [_tried(name, change(setting)) for name, change in changes.items()]
    if not any(advice.fits for advice in found):
        for (one, first), (two, second) in combinations(changes.items(), 2):
            both = _tried(f"{one} and {two}", second(first(setting)))
            found += [both] if both.fits else []
    found += [_devices(setting, plan.cost), *_main_memory(setting, plan.cost)]
    found += [_dimension(setting, plan.cost), *_batch(setting, plan), *_replicas(setting)]
    return sorted(found, key=lambda advice: not advice.fits)


def _changes(setting: _Setting) -> dict[str, _Change]:
    """Changes without a size, where they change something."""
    workload, cluster, choice = setting
    changes: dict[str, _Change] = {}
    if choice.dtype == "fp32" and cluster.device.is_cuda:
        changes["16-bit values (fp16)"] = lambda s: s.choose(dtype="fp16")
    by_row = optimizer_class(workload.optimizer).by_row
    if (
        by_row
        and choice.sharding != "data_parallel"
        and workload.config.entities.preset == "fbgemm"
    ):
        changes[f"train.optimizer {by_row}"] = lambda s: s._replace(
            workload=s.workload.with_optimizer(by_row)
        )
    if choice.kernel != FUSED:
        changes[f"kernel {FUSED}"] = lambda s: s.choose(kernel=FUSED)
    if choice.sharding != "row_wise":
        changes["sharding row_wise"] = lambda s: s.choose(sharding="row_wise")
    if choice.replicas > 1:
        changes["one replica"] = lambda s: s.choose(replicas=1)
    return changes


def _weight(plan: TrainingPlan, *parts: str) -> float:
    """Share of the usable memory that parts of the fullest rank take."""
    is_cuda = plan.cluster.device.is_cuda
    sizes = [plan.memory[plan.fullest][part] for part in parts]
    need = sum(size.device if is_cuda else size.main for size in sizes)
    return need / max(1, plan.overruns[0].usable)


def _changes_beside_the_table(plan: TrainingPlan) -> dict[str, _Change]:
    """FSDP, where dense parameters are a matter of memory."""
    wrapper = plan.workload.config.dense.wrapper
    if wrapper in ("fsdp", "hybrid") or plan.cluster.world_size == 1:
        return {}
    if _weight(plan, "dense parameters") < _MATTERS:
        return {}
    return {
        "dense.wrapper fsdp": lambda s: s._replace(workload=s.workload.with_dense_wrapper("fsdp"))
    }


def _batch(setting: _Setting, plan: TrainingPlan) -> Iterator[Advice]:
    """The batch halved until it fits, where a batch is a matter of memory."""
    if _weight(plan, "rows and ids", "activations", "batches") < _MATTERS:
        return
    sizes = [setting.workload.batch_size >> i for i in range(1, 40)]
    smaller = [
        setting._replace(workload=setting.workload.with_batch_size(size)) for size in sizes if size
    ]
    at = _first(len(smaller), lambda i: smaller[i], plan.cost)
    if at is None:
        yield Advice("a smaller train.batch_size", False, "is not enough")
    else:
        yield _tried(f"train.batch_size {smaller[at].workload.batch_size}", smaller[at])


def _tried(change: str, setting: _Setting) -> Advice:
    plan = plan_training(*setting)
    if not plan.fits:
        return Advice(change, False, f"is not enough: {over(plan)}")
    return Advice(
        change, True, f"fits: {fill(plan)}, modelled step {plan.step_seconds * 1e3:.3g} ms"
    )


def over(plan: TrainingPlan) -> str:
    """The worst limit that is exceeded, in words."""
    worst = plan.overruns[0]
    return (
        f"{worst.place} needs {amount(worst.need)} of {amount(worst.usable)} usable, "
        f"{amount(worst.over)} too much"
    )


def fill(plan: TrainingPlan) -> str:
    """The limit that is nearest to being reached."""
    limit = max(plan.limits, key=lambda x: x.need / x.usable if x.usable else 0.0)
    return f"{limit.place} holds {amount(limit.need)} of {amount(limit.usable)}"


def _devices(setting: _Setting, cost: Cost) -> Advice:
    """The smallest number of these devices, evenly on as few hosts as hold them."""
    clusters = _larger(setting.cluster, setting.choice.replicas)
    at = _first(len(clusters), lambda i: setting._replace(cluster=clusters[i]), cost)
    if at is None:
        return Advice("more devices", False, f"are not enough: {clusters[-1]} do not suffice")
    plan = plan_training(*setting._replace(cluster=clusters[at]))
    return Advice(str(clusters[at]), True, f"is the smallest number that fits: {fill(plan)}")


def _larger(cluster: Cluster, multiple: int) -> list[Cluster]:
    """The same devices in growing numbers."""
    device, world, local = cluster.device, cluster.world_size, cluster.local_world_size
    if not device.is_cuda:  # the ranks of a host share its memory, so that only hosts help
        most = max(cluster.hosts + 1, MOST_DEVICES // local)
        return [Cluster(device, local * n, n) for n in range(cluster.hosts + 1, most + 1)]
    per_host = max(local, DEVICES_PER_HOST)
    return [
        Cluster(device, count, hosts)
        for count in range(world + 1, max(2 * world, MOST_DEVICES) + 1)
        if count % (hosts := -(-count // per_host)) == 0 and count % multiple == 0
    ]


def _main_memory(setting: _Setting, cost: Cost) -> Iterator[Advice]:
    """Rows in main memory, with the largest cache that fits, or without one."""
    choice = setting.choice
    if not setting.cluster.device.is_cuda or choice.sharding == "data_parallel":
        return

    def cached(i: int) -> _Setting:
        return setting.choose(kernel=UVM_CACHING, cache_ratio=(99 - i) / 100)

    at = _first(99, cached, cost)
    if at is not None:
        ratio = cached(at).choice.cache_ratio
        yield _tried(f"kernel {UVM_CACHING} with cache ratio up to {ratio:.2f}", cached(at))
    elif choice.kernel != UVM:
        yield _tried(f"kernel {UVM}", setting.choose(kernel=UVM))


def _dimension(setting: _Setting, cost: Cost) -> Advice:
    """The largest D that the scorer and the kernels take."""
    smaller = []
    for dim in range(setting.workload.dim - 1, 0, -1):
        if dim % setting.workload.numbers_at_once(setting.cluster.device.is_cuda):
            continue
        try:
            smaller.append(setting._replace(workload=setting.workload.with_dim(dim)))
        except ConfigError:  # the scorer has no such size
            continue
    at = _first(len(smaller), lambda i: smaller[i], cost)
    if at is None:
        return Advice("a smaller model.dim", False, "is not enough: not even the smallest fits")
    return Advice(f"model.dim {smaller[at].workload.dim}", True, "is the largest that fits")


def _replicas(setting: _Setting) -> Iterator[Advice]:
    """2-D parallelism holds the table several times: it never makes one fit."""
    if setting.cluster.device.is_cuda and setting.choice.sharding != "data_parallel":
        yield Advice(
            "2-D parallelism (DMPCollection)",
            False,
            "does not help: every replica is a whole table on its share of the devices, so that "
            "each rank would hold more",
        )


def _first(count: int, setting: Callable[[int], _Setting], cost: Cost) -> int | None:
    """The first i of 0 .. count - 1 whose setting fits, if those after it do too.

    Settings get lighter with i, so that ``cost``, of the heavy one at hand, is an upper bound that
    saves watching the objective at every size; the end of the search takes the true one.
    """

    def fits(i: int, bound: Cost | None = None) -> bool:
        try:
            return plan_training(*setting(i), bound).fits
        except ConfigError:
            return False

    found = _search(count, lambda i: fits(i, cost))
    if found is None:  # unless the activations decide
        return _search(count, fits) if count and fits(count - 1) else None
    while found and fits(found - 1):
        found -= 1
    return found


def _search(count: int, fits: Callable[[int], bool]) -> int | None:
    """The first i that fits, if those after it do too; looked for in growing steps, then halving.

    So the settings at the far end, which take longest to plan, are seldom looked at.
    """
    if not count:
        return None
    low, high, step = 0, 0, 1
    while not fits(high):
        if high == count - 1:
            return None
        low, high = high + 1, min(high + step, count - 1)
        step *= 2
    while low < high:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle + 1
    return low


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
    if not plan.times.get("dense gradients"):
        return found
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

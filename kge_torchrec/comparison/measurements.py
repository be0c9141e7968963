"""Measurements by the ranks of a world: training side by side, speed, split of a step, traffic.

Side by side, every variant takes step i before any takes step i + 1. All variants live in one
world, so they share store, batches and ranks, and the distance between their parameters can be
measured while they train. Speed, memory, split and traffic are those of one variant in a world of
its own.

A step is split by running its parts one after another:

    data      build the batch
    lookup    move it to the device, send its ids to their owners, get their rows
    score     scorer and loss
    backward  gradients, and the exchange of some
    update    the optimizers of table and dense parameters

FBGEMM's CUDA table steps inside backward, in one kernel with the gradient, and stays there.

Shapes: W ranks, D elements per row.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kge_torchrec.comparison.launch import Reporter
from kge_torchrec.config import Config
from kge_torchrec.data.batches.queries import QuerySampleBatches
from kge_torchrec.data.batches.triples import Batch, TripleBatches
from kge_torchrec.distributed.processes import Processes
from kge_torchrec.embeddings.exchange import observers
from kge_torchrec.environment import peak_resident_bytes
from kge_torchrec.training.assembly import build_batches
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session
from kge_torchrec.training.start import begin
from kge_torchrec.training.step import PARTS, SampledStep
from kge_torchrec.training.trainer import NonFiniteLoss, Trainer

if TYPE_CHECKING:
    from typing_extensions import Self

SampledBatches = TripleBatches | QuerySampleBatches

_IN_FLIGHT = 3  # batches that a pipeline may hold when the last block ends


@dataclass(frozen=True)
class Timing:
    """Numbers of steps."""

    steps: int = 100  # per timed block
    blocks: int = 3  # timed blocks
    warm_up: int = 10  # to fill the pipeline
    split: int = 40  # run part by part
    settling: int = 10  # run part by part before those, to compile kernels and set up buffers
    traffic: int = 5  # counted, with and again without de-duplication

    @property
    def total(self) -> int:
        """Number of steps of a whole measurement."""
        timed = self.warm_up + self.blocks * self.steps + _IN_FLIGHT
        return self.settling + self.split + timed + 2 * self.traffic


def measure_speed(
    reporter: Reporter, ranks: Processes, config: Config, timing: Timing
) -> dict[str, Any]:
    """Measure a variant. Every rank calls it.

    Returns:
        {"triples_per_second": per block, "threads", "peak_memory_bytes", "split": {part:
        milliseconds}, "traffic": {"deduplicated" | "duplicated": means per step of this rank}}, and
        "peak_device_bytes" on CUDA. Memory is read before the batches with duplicates, which are
        larger.
    """
    session = _session(config, ranks)
    results: dict[str, Any] = {"threads": torch.get_num_threads()}
    stream = _endless(_batches(session))
    step = SampledStep(session.backend, config.train, ranks.device)
    for steps in (timing.settling, timing.split):
        results["split"] = split_of_a_step(step, stream, steps)
        reporter.advance(steps)
    # The pipeline takes the lookup over: from here on nothing else may train the model.
    trainer = _trainer(session)
    results["triples_per_second"] = _timed_blocks(trainer, timing, reporter)
    results["peak_memory_bytes"] = peak_resident_bytes()
    if ranks.device.type == "cuda":
        results["peak_device_bytes"] = torch.cuda.max_memory_allocated(ranks.device)
    results["traffic"] = {
        name: _traffic(trainer, duplicates, timing, reporter)
        for name, duplicates in (("deduplicated", False), ("duplicated", True))
    }
    return results


def _batches(session: Session, duplicates: bool = False) -> SampledBatches:
    batches = build_batches(
        session.config, session.store, session.processes, session.disk, duplicates
    )
    return cast(SampledBatches, batches)  # compare refuses all entities as candidates


def _timed_blocks(trainer: Trainer, timing: Timing, reporter: Reporter) -> list[float]:
    """Return triples per second, over all ranks, for each block of steps."""
    session = trainer.session
    batches = _batches(session)
    blocks = [timing.warm_up, *[timing.steps] * timing.blocks]
    # Batches beyond the last block keep the pipeline as full there as in any other.
    steps_of_all = sum(blocks) + _IN_FLIGHT
    stream = islice(_endless(batches), steps_of_all * batches.plan.accumulation)
    sizes = _sizes(batches)
    rates = []
    for steps in blocks:
        triples = sum(islice(sizes, steps))
        started = _seconds_everywhere(session)
        for _ in range(steps):
            trainer.train_step(stream)
            reporter.advance(1)
        rates.append(triples / (_seconds_everywhere(session) - started))
    for _ in range(_IN_FLIGHT):
        trainer.train_step(stream)
    reporter.advance(_IN_FLIGHT)
    return rates[1:]


def _traffic(
    trainer: Trainer, duplicates: bool, timing: Timing, reporter: Reporter
) -> dict[str, Any]:
    """Count the first batches of epoch 0, which are the same for every variant and repeat."""
    session = trainer.session
    batches = _batches(session, duplicates)
    feature, looked_up = batches.delivery.feature, 0

    def in_order(ids: Tensor) -> Any:
        """Sort the ids, since an engine for distinct ids relies on it.

        With duplicates the rows are then not those of the triples; the traffic is the same.
        """
        nonlocal looked_up
        looked_up += ids.numel()
        return feature(ids.sort().values)

    batches.delivery = replace(batches.delivery, feature=in_order)
    counted = list(islice(_endless(batches), timing.traffic * batches.plan.accumulation))
    stream = iter(counted)
    with Traffic(session.backend.shard().dim) as traffic:
        for _ in range(timing.traffic):
            trainer.train_step(stream)
    reporter.advance(timing.traffic)
    return {"ids_looked_up": looked_up / timing.traffic, **traffic.per_step(timing.traffic)}


def _endless(batches: SampledBatches) -> Iterator[Any]:
    """Yield the batches of epoch after epoch."""
    for epoch in count():
        yield from batches.epoch(epoch)


def _sizes(batches: SampledBatches) -> Iterator[int]:
    """Yield the triples of each step of ``_endless``, over all ranks."""
    total, size = batches.examples, batches.plan.batch_size
    while True:
        for step in range(batches.steps_per_epoch):
            yield min(size, total - step * size)


def _seconds(device: torch.device) -> float:
    """Return the time, once the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _seconds_everywhere(session: Session) -> float:
    """Return the time, once all ranks have finished their steps, in threads and on GPUs too."""
    session.backend.shard()
    _seconds(session.processes.device)
    session.processes.barrier()
    return time.perf_counter()


def split_of_a_step(step: SampledStep, batches: Iterator[Batch], steps: int) -> dict[str, float]:
    """Return the median milliseconds of each part of a step. Collective.

    The micro-batches of a step are summed. Call it before a pipeline takes over the lookup.
    """
    times: list[dict[str, float]] = []
    device, last = step.device, _seconds(step.device)

    def watch(part: str) -> None:
        nonlocal last
        now = _seconds(device)
        times[-1][part] += now - last
        last = now

    with step.watched(watch):
        for _ in range(steps):
            times.append(dict.fromkeys(PARTS, 0.0))
            last = _seconds(device)
            step.progress(batches)
    return {part: 1e3 * statistics.median(step[part] for step in times) for part in PARTS}


# The first kind counts that begins an operator's name, both without underscores.
_KINDS = (
    "all_to_all", "all_reduce", "all_gather", "reduce_scatter", "reduce", "broadcast", "gather",
    "scatter",
)  # fmt: skip


class Traffic(TorchDispatchMode):
    """Counts this rank's collectives while entered, those of backward and of DDP included.

    It sees the collectives that torch dispatches, as torch.distributed.tensor.debug.CommDebugMode
    does, which counts collectives but not their bytes.  An exchange of rows between two ranks at a
    time reports itself and counts as one all_to_all.

    Attributes:
        collectives: Number per kind.
        payload_bytes: Per kind, the size of their inputs, this rank's own part included.
        integers_sent: Ids and their counts that all_to_all carried to other ranks.
        bytes_sent: Everything that all_to_all carried to other ranks.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.dim = dim
        self.collectives: dict[str, int] = defaultdict(int)
        self.payload_bytes: dict[str, int] = defaultdict(int)
        self.bytes_sent = self.integers_sent = self._floats_sent = 0

    def __enter__(self) -> Self:
        observers.append(self._count_exchange)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        observers.remove(self._count_exchange)

    def _count_exchange(self, rows: Tensor, send: list[int]) -> None:
        self._count("all_to_all", {"input": rows, "input_split_sizes": send})

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Count an operator if it is a collective, and run it."""
        kwargs = kwargs or {}
        if (kind := _kind(func)) is not None:
            names = [argument.name for argument in func._schema.arguments]
            self._count(kind, dict(zip(names, args, strict=False)) | kwargs)
        return func(*args, **kwargs)

    def _count(self, kind: str, arguments: dict[str, Any]) -> None:
        # A collective has inputs, or works in place on the tensors of its arguments.
        names = [name for name in arguments if name.startswith("input")] or list(arguments)
        leaves = tree_leaves([arguments[name] for name in names])
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.collectives[kind] += 1
        self.payload_bytes[kind] += sum(tensor.nbytes for tensor in inputs)
        if kind == "all_to_all":
            for tensor, elements in zip(inputs, _leaving(inputs, arguments), strict=True):
                self.bytes_sent += elements * tensor.element_size()
                if tensor.is_floating_point():
                    self._floats_sent += elements
                else:
                    self.integers_sent += elements

    def per_step(self, steps: int) -> dict[str, Any]:
        """Return the counts as means over steps; rows are of the table and of gradients."""
        return {
            "rows_sent": self._floats_sent / self.dim / steps,
            "integers_sent": self.integers_sent / steps,
            "bytes_sent": self.bytes_sent / steps,
            "collectives": {kind: n / steps for kind, n in self.collectives.items()},
            "payload_bytes": {kind: n / steps for kind, n in self.payload_bytes.items()},
        }


def _kind(func: OpOverload) -> str | None:
    """Return the kind of a collective; None for waits, barriers and all other operators."""
    if func.namespace not in ("c10d", "_c10d_functional"):
        return None
    name = func.overloadpacket.__name__.replace("_", "").removeprefix("i")
    return next((kind for kind in _KINDS if name.startswith(kind.replace("_", ""))), None)


def _leaving(inputs: list[Tensor], arguments: dict[str, Any]) -> list[int]:
    """Return the elements of each input of an all_to_all that go to other ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if len(inputs) == world and "input_tensors" in arguments:  # one tensor per rank
        return [0 if to == rank else tensor.numel() for to, tensor in enumerate(inputs)]
    (tensor,) = inputs
    splits = arguments.get("input_split_sizes")
    if not splits:  # equal parts
        return [tensor.numel() - tensor.numel() // world]
    others = sum(splits) - splits[rank]
    return [others * (tensor.numel() // max(1, tensor.shape[0]))]


CHUNK_NUMBERS = 1 << 22  # elements of the table that are compared at once: 16 MiB of each


def train_side_by_side(
    reporter: Reporter, ranks: Processes, configs: dict[str, Config]
) -> dict[str, Any]:
    """Train the variants for train.epochs epochs; 0 epochs compare their initial values only.

    Every rank calls it. It keeps the results so far every train.log_every steps.

    Returns:
        {"complete", "steps", "threads", "losses": {name: loss per step}, "differences": {name:
        [{"step", "entities", "dense"}]} from the first variant, "split": the split that was ranked
        at the end or None, "metrics": {name: as from Session.rank}}.

    Raises:
        NonFiniteLoss: A loss is not finite; the message names the variant.
    """
    train = next(iter(configs.values())).train
    trainers = {name: _trainer(_session(config, ranks)) for name, config in configs.items()}
    first, *others = trainers
    steps_per_epoch = trainers[first].batches.steps_per_epoch
    compared = set(measured_steps(train.epochs * steps_per_epoch))
    results: dict[str, Any] = {
        "complete": False,
        "steps": 0,
        "threads": torch.get_num_threads(),
        "losses": {name: [] for name in trainers},
        "differences": {name: [] for name in others},
        "split": None,
        "metrics": {},
    }

    def compare(step: int) -> None:
        for name in others:
            apart = largest_differences(trainers[first].session, trainers[name].session)
            results["differences"][name].append({"step": step, **apart})

    compare(0)
    for epoch in range(train.epochs):
        streams = {name: trainer.batches.epoch(epoch) for name, trainer in trainers.items()}
        for trainer in trainers.values():
            trainer.progress.step = 0
        for step in range(1, steps_per_epoch + 1):
            for name, trainer in trainers.items():
                trainer.train_step(streams[name])
            reporter.advance(len(trainers))
            steps = epoch * steps_per_epoch + step
            if steps in compared:
                compare(steps)
            if step % train.log_every == 0 or step == steps_per_epoch:
                for name, trainer in trainers.items():
                    results["losses"][name] += _losses(name, trainer, epoch, step)
                results["steps"] = steps
                reporter.keep(results)
    store = trainers[first].session.store
    split = next((name for name in ("test", "valid") if len(store.split(name))), None)
    if train.epochs and split is not None:
        results["split"] = split
        results["metrics"] = {
            name: trainer.session.rank(split) for name, trainer in trainers.items()
        }
    return {**results, "complete": True}


def _session(config: Config, ranks: Processes) -> Session:
    assert config.run.dir is not None  # the comparison's folder
    return Session(config, RunFolder(config.run.dir), ranks)


def _trainer(session: Session) -> Trainer:
    return Trainer(session, begin(session), None)


def _losses(name: str, trainer: Trainer, epoch: int, step: int) -> list[float]:
    """Return the losses of the steps since the last call. Collective."""
    try:
        return trainer.read_losses(epoch, step)
    except NonFiniteLoss as error:
        raise NonFiniteLoss(f"{name}: {error}") from None


@torch.no_grad()
def largest_differences(one: Session, other: Session) -> dict[str, float]:
    """Return {"entities", "dense"}: the largest absolute difference between parameters. Collective.

    It is NaN where either has one. No rank holds more than a part of the table.
    """
    first, second = one.backend.shard(), other.backend.shard()
    device, entities = first.rows.device, torch.zeros((), device=first.rows.device)
    step = max(1, CHUNK_NUMBERS // first.dim)
    for start in range(0, first.num_entities, step):
        ids = torch.arange(start, min(start + step, first.num_entities), device=device)
        entities = torch.maximum(entities, _largest(first.fetch(ids), second.fetch(ids)))
    with one.trained_model() as ours, other.trained_model() as others:
        pairs = zip(ours.scorer.parameters(), others.scorer.parameters(), strict=True)
        dense = [_largest(mine, theirs) for mine, theirs in pairs if mine.numel()]
    largest = float(torch.stack(dense).max()) if dense else 0.0
    return {"entities": float(entities), "dense": largest}


def _largest(first: Tensor, other: Tensor) -> Tensor:
    return (first.float() - other.float()).abs().max()


def measured_steps(last: int) -> list[int]:
    """Return 0, 1, 2, 5, 10, 20, 50, ... and the last step."""
    steps, unit = {0, last}, 1
    while unit < last:
        steps.update(step for step in (unit, 2 * unit, 5 * unit) if step < last)
        unit *= 10
    return sorted(steps)

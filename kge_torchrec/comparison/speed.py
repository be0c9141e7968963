"""One variant alone in a fresh world: its speed, memory, split of a step, and traffic.

A step is split with its parts run one after another:

    data      the batch is built
    lookup    it goes to the device, its ids to their owners, their rows come back
    score     scorer and loss
    backward  gradients, and what of them is exchanged
    update    the optimizers of table and dense parameters

FBGEMM's table steps inside backward on CUDA, in one kernel with the gradient, and stays there.

What a rank sends is seen where every backend must pass: the collectives that torch dispatches, as
in torch.distributed.tensor.debug.CommDebugMode, which counts collectives but not their bytes.
Collectives of backward are seen as well, those of DistributedDataParallel included.

Shapes: W ranks, D numbers per entity.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from kge_torchrec.comparison.launch import Reporter
from kge_torchrec.config import Config
from kge_torchrec.data.batches.lookup import as_feature
from kge_torchrec.data.batches.queries import QueryBatches, QuerySampleBatches, SampledBatch
from kge_torchrec.data.batches.triples import Batch, TripleBatches
from kge_torchrec.distributed.processes import Processes
from kge_torchrec.distributed.shared_memory import CollectiveWatch
from kge_torchrec.embeddings.backend import EmbeddingBackend
from kge_torchrec.environment import peak_resident_bytes
from kge_torchrec.training.assembly import build_batches
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session
from kge_torchrec.training.step import PARTS, PlainStep, StepOptimizer
from kge_torchrec.training.trainer import Trainer
from kge_torchrec.training.warm_start import begin

SampledBatches = TripleBatches | QuerySampleBatches

_IN_FLIGHT = 3  # batches that a pipeline may hold when the last block ends


@dataclass(frozen=True)
class Timing:
    """How many steps are taken for what.

    steps: of a timed block.  split: run part by part, the first ``settling`` of them unmeasured.
    warm_up: of the pipeline.  traffic: counted, with and again without de-duplication.
    """

    steps: int = 100
    blocks: int = 3
    warm_up: int = 10
    split: int = 40
    settling: int = 10
    traffic: int = 5

    @property
    def total(self) -> int:
        """Steps of a whole measurement."""
        timed = self.warm_up + self.blocks * self.steps + _IN_FLIGHT
        return self.settling + self.split + timed + 2 * self.traffic


def measure_speed(
    reporter: Reporter, ranks: Processes, config: Config, timing: Timing
) -> dict[str, Any]:
    """Measures a variant; every rank calls it.

    Returns {"triples_per_second": of each block, "threads", "peak_memory_bytes", "split": {part:
    milliseconds}, "traffic": {"deduplicated" | "duplicated": means a step of this rank}}; on CUDA
    also "peak_device_bytes".  Memory is read before the batches with duplicates, which are larger.
    """
    assert config.run.dir is not None  # the comparison's folder
    session = Session(config, RunFolder(config.run.dir), ranks)
    batches = _sampled(build_batches(config, session.store, session.processes))
    found: dict[str, Any] = {"threads": torch.get_num_threads()}
    found["split"] = _split(session, batches, timing, reporter)
    # The pipeline takes the lookup over: from here on nothing else may train the model.
    trainer = Trainer(session, begin(session), None)
    found["triples_per_second"] = _timed_blocks(trainer, timing, reporter)
    found |= _peak_memory(ranks.device)
    found["traffic"] = _traffic(trainer, timing, reporter)
    return found


def _sampled(batches: SampledBatches | QueryBatches) -> SampledBatches:
    assert not isinstance(batches, QueryBatches)  # compare has refused all entities as candidates
    return batches


def _split(
    session: Session, batches: SampledBatches, timing: Timing, reporter: Reporter
) -> dict[str, float]:
    """The first steps compile kernels and set up buffers; they are trained, but not counted."""
    stream, device = _endless(batches), session.processes.device
    update = StepOptimizer(session.backend, session.config.train)
    for steps in (timing.settling, timing.split):
        found = split_of_a_step(session.backend, update, stream, steps, device)
        reporter.advance(steps)
    return found


def _timed_blocks(trainer: Trainer, timing: Timing, reporter: Reporter) -> list[float]:
    """Triples a second, over all ranks, of each block of steps."""
    session, batches = trainer.session, _sampled(trainer.batches)
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


def _traffic(trainer: Trainer, timing: Timing, reporter: Reporter) -> dict[str, dict[str, Any]]:
    """Every variant and repeat counts the same batches, the first ones of epoch 0."""
    found, session = {}, trainer.session
    for name, deduplicate in (("deduplicated", True), ("duplicated", False)):
        entities = replace(session.config.entities, deduplicate=deduplicate)
        config = replace(session.config, entities=entities)
        batches = _sampled(build_batches(config, session.store, session.processes))
        some = islice(_endless(batches), timing.traffic * batches.plan.accumulation)
        counted = [_in_order(batch) for batch in some]
        stream = iter(counted)
        with Traffic(session.backend.shard().dim) as traffic:
            for _ in range(timing.traffic):
                trainer.train_step(stream)
        looked_up = sum(batch.ids.values().numel() for batch in counted) / timing.traffic
        found[name] = {"ids_looked_up": looked_up, **traffic.per_step(timing.traffic)}
        reporter.advance(timing.traffic)
    return found


def _in_order(batch: SampledBatch) -> SampledBatch:
    """A batch whose ids ascend, as an engine made for distinct ones takes for granted.

    With duplicates their rows are then not those of its triples; what is sent is the same.
    """
    ids = batch.ids
    return replace(batch, ids=as_feature(ids.values().sort().values, ids.stride()))


def _endless(batches: SampledBatches) -> Iterator[Any]:
    """Epoch after epoch."""
    for epoch in count():
        yield from batches.epoch(epoch)


def _sizes(batches: SampledBatches) -> Iterator[int]:
    """Triples of each step of ``_endless``, over all ranks."""
    total, size = batches.examples, batches.plan.batch_size
    while True:
        for step in range(batches.steps_per_epoch):
            yield min(size, total - step * size)


def _seconds_everywhere(session: Session) -> float:
    """The time once all ranks have done all their steps, those in threads and on GPUs included."""
    ranks = session.processes
    session.backend.shard()
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)
    ranks.barrier()
    return time.perf_counter()


def _peak_memory(device: torch.device) -> dict[str, int]:
    """Of this process so far, in bytes."""
    found = {"peak_memory_bytes": peak_resident_bytes()}
    if device.type == "cuda":
        found["peak_device_bytes"] = torch.cuda.max_memory_allocated(device)
    return found


def split_of_a_step(
    backend: EmbeddingBackend,
    optimizer: StepOptimizer,
    batches: Iterator[Batch],
    steps: int,
    device: torch.device,
) -> dict[str, float]:
    """Median milliseconds of each part, over so many steps.

    The micro-batches of a step are added up.  Collective.  To be called before a pipeline takes
    the engine's lookup over.
    """
    clock = _clock(device)
    found: list[dict[str, float]] = []
    last = clock()

    def watch(part: str) -> None:
        nonlocal last
        now = clock()
        found[-1][part] += now - last
        last = now

    step = PlainStep(backend, optimizer, device)
    with step.watched(watch):
        for _ in range(steps):
            found.append(dict.fromkeys(PARTS, 0.0))
            last = clock()
            step.progress(batches)
    return {part: 1e3 * statistics.median(step[part] for step in found) for part in PARTS}


def _clock(device: torch.device) -> Callable[[], float]:
    """Seconds, once the device has done what it was asked for."""
    if device.type != "cuda":
        return time.perf_counter

    def after_device() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return after_device


_NAMESPACES = ("c10d", "_c10d_functional")
# Beginning of an operator's name -> kind; of two that fit, the first one counts.
_KINDS = {
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "isend": "send",
}


class Traffic(CollectiveWatch):
    """While entered, counts this rank's collectives.

    collectives: by kind, how many.
    payload_bytes: by kind, the size of what was handed to them, this rank's own part included.
    rows_sent, integers_sent: what all_to_all carried to other ranks: rows of floats (of the table
        on their way to who asked, of gradients on their way back), and ids with the counts that
        announce them.
    bytes_sent: of both.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.dim = dim
        self.collectives: dict[str, int] = defaultdict(int)
        self.payload_bytes: dict[str, int] = defaultdict(int)
        self.bytes_sent = self.integers_sent = self._floats_sent = 0

    @property
    def rows_sent(self) -> float:
        return self._floats_sent / self.dim

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        kind = _kind(func)
        if kind is not None:
            names = [argument.name for argument in func._schema.arguments]
            self._count(kind, dict(zip(names, args, strict=False)) | kwargs)
        return func(*args, **kwargs)

    def _count(self, kind: str, arguments: dict[str, Any]) -> None:
        inputs = _inputs(arguments)
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
        """The counts as means over ``steps`` steps."""
        return {
            "rows_sent": self.rows_sent / steps,
            "integers_sent": self.integers_sent / steps,
            "bytes_sent": self.bytes_sent / steps,
            "collectives": {kind: n / steps for kind, n in self.collectives.items()},
            "payload_bytes": {kind: n / steps for kind, n in self.payload_bytes.items()},
        }


def _kind(func: OpOverload) -> str | None:
    """The kind of collective that an operator starts; None for waits, barriers and all others."""
    if func.namespace not in _NAMESPACES:
        return None
    name = func.overloadpacket.__name__.lstrip("_")
    return next((kind for start, kind in _KINDS.items() if name.startswith(start)), None)


def _inputs(arguments: dict[str, Any]) -> list[Tensor]:
    """What a collective is handed: its input, or the tensors it works on in place."""
    names = [name for name in arguments if name.startswith("input")] or list(arguments)
    leaves = tree_leaves([arguments[name] for name in names])
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _leaving(inputs: list[Tensor], arguments: dict[str, Any]) -> list[int]:
    """Elements of each input of an all_to_all that go to other ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if len(inputs) == world and "input_tensors" in arguments:  # one tensor a rank
        return [0 if to == rank else tensor.numel() for to, tensor in enumerate(inputs)]
    (tensor,) = inputs
    splits = arguments.get("input_split_sizes")
    if not splits:  # equal parts
        return [tensor.numel() - tensor.numel() // world]
    others = sum(splits) - splits[rank]
    return [others * (tensor.numel() // max(1, tensor.shape[0]))]

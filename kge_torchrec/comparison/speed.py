"""One contender alone in a fresh world: its speed, memory, split of a step, and traffic."""

from __future__ import annotations

import re
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch

from kge_torchrec.comparison.launch import Reporter
from kge_torchrec.comparison.split import split_of_a_step
from kge_torchrec.comparison.traffic import Traffic
from kge_torchrec.config import Config
from kge_torchrec.data.batches import Batch, BatchBuilder
from kge_torchrec.parallel.processes import Processes
from kge_torchrec.training.assembly import build_batches
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session
from kge_torchrec.training.steps import Pipeline, build_pipeline
from kge_torchrec.training.update import Update

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
    """Measures a contender; every rank calls it.

    Returns {"triples_per_second": of each block, "threads", "peak_memory_bytes", "split": {part:
    milliseconds}, "traffic": {"deduplicated" | "duplicated": means a step of this rank}}; on CUDA
    also "peak_device_bytes".  Memory is read before the batches with duplicates, which are larger.
    """
    session = Session(config, RunFolder(config.run.dir), ranks)
    batches = build_batches(config, session.store, ranks)
    found: dict[str, Any] = {"threads": torch.get_num_threads()}
    found["split"] = _split(session, batches, timing, reporter)
    # The pipeline takes the lookup over: from here on nothing else may train the model.
    pipeline = build_pipeline(config.train, session.engine, ranks.device)
    found["triples_per_second"] = _timed_blocks(session, pipeline, batches, timing, reporter)
    found |= _peak_memory(ranks.device)
    found["traffic"] = _traffic(session, pipeline, timing, reporter)
    return found


def _split(
    session: Session, batches: BatchBuilder, timing: Timing, reporter: Reporter
) -> dict[str, float]:
    """The first steps compile kernels and set up buffers; they are trained, but not counted."""
    stream, device = _endless(batches), session.processes.device
    update = Update(session.engine, session.config.train)
    for steps in (timing.settling, timing.split):
        found = split_of_a_step(session.engine, update, stream, steps, device)
        reporter.advance(steps)
    return found


def _timed_blocks(
    session: Session,
    pipeline: Pipeline,
    batches: BatchBuilder,
    timing: Timing,
    reporter: Reporter,
) -> list[float]:
    """Triples a second, over all ranks, of each block of steps."""
    blocks = [timing.warm_up, *[timing.steps] * timing.blocks]
    # Batches beyond the last block keep the pipeline as full there as in any other.
    steps_of_all = sum(blocks) + _IN_FLIGHT
    stream = islice(_endless(batches), steps_of_all * batches.accumulation)
    sizes = _sizes(batches)
    rates = []
    for steps in blocks:
        triples = sum(islice(sizes, steps))
        started = _seconds_everywhere(session)
        for _ in range(steps):
            session.engine.set_learning_rate(1.0)
            pipeline.progress(stream)
            reporter.advance(1)
        rates.append(triples / (_seconds_everywhere(session) - started))
    for _ in range(_IN_FLIGHT):
        pipeline.progress(stream)
    reporter.advance(_IN_FLIGHT)
    return rates[1:]


def _traffic(
    session: Session, pipeline: Pipeline, timing: Timing, reporter: Reporter
) -> dict[str, dict[str, Any]]:
    """Every contender and repeat counts the same batches, the first ones of epoch 0."""
    found = {}
    for name, deduplicate in (("deduplicated", True), ("duplicated", False)):
        entities = replace(session.config.entities, deduplicate=deduplicate)
        config = replace(session.config, entities=entities)
        batches = build_batches(config, session.store, session.processes)
        counted = list(islice(_endless(batches), timing.traffic * batches.accumulation))
        stream = iter(counted)
        with Traffic(session.engine.shard().dim) as traffic:
            for _ in range(timing.traffic):
                pipeline.progress(stream)
        looked_up = sum(batch.ids.values().numel() for batch in counted) / timing.traffic
        found[name] = {"ids_looked_up": looked_up, **traffic.per_step(timing.traffic)}
        reporter.advance(timing.traffic)
    return found


def _endless(batches: BatchBuilder) -> Iterator[Batch]:
    """Epoch after epoch."""
    for epoch in count():
        yield from batches.epoch(epoch)


def _sizes(batches: BatchBuilder) -> Iterator[int]:
    """Triples of each step of ``_endless``, over all ranks."""
    total, size = batches.examples, batches.batch_size
    while True:
        for step in range(batches.steps_per_epoch):
            yield min(size, total - step * size)


def _seconds_everywhere(session: Session) -> float:
    """The time once all ranks have done all their steps, those in threads and on GPUs included."""
    ranks = session.processes
    session.engine.shard()
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)
    ranks.barrier()
    return time.perf_counter()


def _peak_memory(device: torch.device) -> dict[str, int]:
    """Of this process so far, in bytes."""
    found = {"peak_memory_bytes": _peak_resident_bytes()}
    if device.type == "cuda":
        found["peak_device_bytes"] = torch.cuda.max_memory_allocated(device)
    return found


def _peak_resident_bytes() -> int:
    """The largest resident size so far.

    Linux's ru_maxrss may be that of the process which started this one; VmHWM is our own.
    """
    status = Path("/proc/self/status")
    if status.exists():
        kib = re.search(r"^VmHWM:\s*(\d+) kB", status.read_text(encoding="utf-8"), re.MULTILINE)
        if kib:
            return int(kib[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in KiB but on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

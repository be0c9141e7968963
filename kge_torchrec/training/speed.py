"""How fast a config trains: triples per second, memory, the parts of a step, and traffic.

A step is split by running its parts one after another:

    data      build the batch
    lookup    move it to the device, send its ids to their owners, get their rows
    score     scorer and loss
    backward  gradients, and the exchange of some
    update    the optimizers of table and dense parameters

FBGEMM's CUDA table steps inside backward, in one kernel with the gradient, and stays there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from itertools import count, islice
from typing import Any, cast

import torch
from torch import Tensor

from kge_torchrec.config import Config
from kge_torchrec.data.batches.queries import QuerySampleBatches
from kge_torchrec.data.batches.triples import Batch, TripleBatches
from kge_torchrec.distributed.processes import Processes
from kge_torchrec.distributed.traffic import Traffic
from kge_torchrec.environment import peak_resident_bytes
from kge_torchrec.training.assembly import build_batches
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session
from kge_torchrec.training.start import begin
from kge_torchrec.training.step import PARTS, SampledStep
from kge_torchrec.training.trainer import Trainer, seconds_on

SETTLING, SPLIT = 10, 40  # steps run part by part: to compile kernels, and measured
WARM_UP, BLOCKS = 10, 3  # steps that fill the pipeline, and timed blocks of steps
IN_FLIGHT = 3  # batches that a pipeline may hold when the last block ends
COUNTED = 5  # steps whose traffic is counted


def measure_speed(ranks: Processes, config: Config, steps: int) -> dict[str, Any]:
    """Measure a variant. Collective.

    Returns:
        {"triples_per_second": per block, "peak_memory_bytes", "split": {part: milliseconds},
        "traffic": means per step of this rank}, and "peak_device_bytes" on CUDA.
    """
    session = Session(config, RunFolder(str(config.run.dir)), ranks)
    stream = _endless(_batches(session))
    step = SampledStep(session.backend, config.train, ranks.device)
    split_of_a_step(step, stream, SETTLING)
    results: dict[str, Any] = {"split": split_of_a_step(step, stream, SPLIT)}
    # The pipeline takes the lookup over: from here on nothing else may train the model.
    trainer = Trainer(session, begin(session), None)
    results["triples_per_second"] = _timed_blocks(trainer, steps)
    results["peak_memory_bytes"] = peak_resident_bytes()
    if ranks.device.type == "cuda":
        results["peak_device_bytes"] = torch.cuda.max_memory_allocated(ranks.device)
    results["traffic"] = _traffic(trainer)
    return results


def _batches(session: Session) -> TripleBatches | QuerySampleBatches:
    batches = build_batches(session.config, session.store, session.processes, session.disk)
    return cast(TripleBatches | QuerySampleBatches, batches)  # compare refuses all entities


def _endless(batches: TripleBatches | QuerySampleBatches) -> Iterator[Any]:
    """Yield the batches of epoch after epoch."""
    for epoch in count():
        yield from batches.epoch(epoch)


def _timed_blocks(trainer: Trainer, steps: int) -> list[float]:
    """Return triples per second, over all ranks, for each block of steps."""
    session = trainer.session
    batches = _batches(session)
    blocks = [WARM_UP, *[steps] * BLOCKS]
    # Batches beyond the last block keep the pipeline as full there as in any other.
    needed = (sum(blocks) + IN_FLIGHT) * batches.plan.accumulation
    stream = islice(_endless(batches), needed)
    size, per_epoch, rates, done = batches.plan.batch_size, batches.steps_per_epoch, [], 0
    for block in blocks:
        triples = sum(
            min(size, batches.examples - step % per_epoch * size)
            for step in range(done, done + block)
        )
        done += block
        started = _seconds_everywhere(session)
        for _ in range(block):
            trainer.train_step(stream)
        rates.append(triples / (_seconds_everywhere(session) - started))
    for _ in range(IN_FLIGHT):
        trainer.train_step(stream)
    return rates[1:]


def _seconds_everywhere(session: Session) -> float:
    """Return the time, once all ranks have finished their steps, in threads and on GPUs too."""
    session.backend.shard()
    seconds_on(session.processes.device)
    session.processes.barrier()
    return time.perf_counter()


def split_of_a_step(step: SampledStep, batches: Iterator[Batch], steps: int) -> dict[str, float]:
    """Return the median milliseconds of each part of a step. Collective.

    The micro-batches of a step are summed. Call it before a pipeline takes over the lookup.
    """
    times: list[dict[str, float]] = []
    device, last = step.device, seconds_on(step.device)

    def watch(part: str) -> None:
        nonlocal last
        now = seconds_on(device)
        times[-1][part] += now - last
        last = now

    with step.watched(watch):
        for _ in range(steps):
            times.append(dict.fromkeys(PARTS, 0.0))
            last = seconds_on(device)
            step.progress(batches)
    return {part: 1e3 * statistics.median(step[part] for step in times) for part in PARTS}


def _traffic(trainer: Trainer) -> dict[str, Any]:
    """Count the first batches of epoch 0, which are the same for every variant and repeat."""
    source = _batches(trainer.session)
    batches = list(islice(_endless(source), COUNTED * source.plan.accumulation))
    ids = (x.ids if isinstance(x.ids, Tensor) else x.ids.values() for x in batches)
    looked_up, stream = sum(map(len, ids)), iter(batches)
    with Traffic() as traffic:
        for _ in range(COUNTED):
            trainer.train_step(stream)
    return {
        "rows_looked_up": looked_up / COUNTED,
        "sent": {kind: size / COUNTED for kind, size in traffic.sent.items()},
        "collectives": {kind: n / COUNTED for kind, n in traffic.collectives.items()},
    }

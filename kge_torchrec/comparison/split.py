"""Where the time of a training step goes, with its parts run one after another.

    data      the batch is built
    lookup    it goes to the device, its ids to their owners, their rows come back
    score     scorer and loss
    backward  gradients, and what of them is exchanged
    update    the optimizers of table and dense parameters

An engine's table may step inside backward.  CpuFusedTable's step is timed there and counted as
update; FBGEMM's on CUDA is one kernel with the gradient and stays in backward.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from kge_torchrec.data.batches import Batch
from kge_torchrec.entities.contract import EntityEngine
from kge_torchrec.entities.torchrec.cpu_table import CpuFusedTable
from kge_torchrec.models.model import KnowledgeGraphModel

PARTS = ("data", "lookup", "score", "backward", "update")


def split_of_a_step(
    engine: EntityEngine, batches: Iterator[Batch], device: torch.device
) -> dict[str, float]:
    """Median milliseconds of each part, over the steps that train ``batches``.

    Collective.  To be called before a pipeline takes the engine's lookup over.
    """
    clock = _clock(device)
    steps: list[list[float]] = []
    with _marks_of_forward(engine, clock) as marks, _timed_updates(clock) as in_backward:
        while True:
            marks.clear()
            in_backward.clear()
            started = clock()
            batch = next(batches, None)
            if batch is None:
                break
            built = clock()
            batch = engine.prepare(batch).to(device, non_blocking=True)
            engine.optimizer.zero_grad()
            loss, _ = engine.model(batch)
            loss.backward()
            after_backward = clock()
            engine.optimizer.step()
            update = clock() - after_backward
            scores, scored = marks
            inside = sum(in_backward)
            steps.append([
                built - started,
                scores - built,
                scored - scores,
                after_backward - scored - inside,
                update + inside,
            ])  # fmt: skip
    parts = zip(PARTS, zip(*steps, strict=True), strict=True)
    return {part: 1e3 * statistics.median(seconds) for part, seconds in parts}


def _clock(device: torch.device) -> Callable[[], float]:
    """Seconds, once the device has done what it was asked for."""
    if device.type != "cuda":
        return time.perf_counter

    def after_device() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return after_device


@contextmanager
def _marks_of_forward(engine: EntityEngine, clock: Callable[[], float]) -> Iterator[list[float]]:
    """A list that each forward appends two times to: when scoring begins and when it ends."""
    (model,) = (m for m in engine.model.modules() if isinstance(m, KnowledgeGraphModel))
    marks: list[float] = []

    def mark(*_: object) -> None:
        marks.append(clock())

    hooks = [
        model.objective.register_forward_pre_hook(mark),
        model.objective.register_forward_hook(mark),
    ]
    try:
        yield marks
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _timed_updates(clock: Callable[[], float]) -> Iterator[list[float]]:
    """A list that the seconds of every step of a CpuFusedTable go to."""
    seconds: list[float] = []
    update = CpuFusedTable.update

    def timed(self: CpuFusedTable, *args: object) -> None:
        started = clock()
        update(self, *args)
        seconds.append(clock() - started)

    CpuFusedTable.update = timed
    try:
        yield seconds
    finally:
        CpuFusedTable.update = update

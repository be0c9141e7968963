"""Where the time of a training step goes, with its parts run one after another.

    data      the batch is built
    lookup    it goes to the device, its ids to their owners, their rows come back
    score     scorer and loss
    backward  gradients, and what of them is exchanged
    update    the optimizers of table and dense parameters

FBGEMM's table steps inside backward on CUDA, in one kernel with the gradient, and stays there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kge_torchrec.data.batches import Batch
from kge_torchrec.entities.contract import EntityEngine
from kge_torchrec.training.update import Update

PARTS = ("data", "lookup", "score", "backward", "update")


def split_of_a_step(
    engine: EntityEngine,
    update: Update,
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

    def train_one() -> Tensor:
        marks.clear()
        times = [clock()]
        batch = next(batches)
        times.append(clock())
        batch = engine.prepare(batch).to(device, non_blocking=True)
        update.zero_grad()
        loss, detached = engine.model(batch)
        times += marks
        loss.backward()
        times.append(clock())
        update.step()
        times.append(clock())
        for part, start, stop in zip(PARTS, times, times[1:], strict=False):
            found[-1][part] += stop - start
        return detached

    with _marks_of_forward(engine, clock) as marks:
        for _ in range(steps):
            found.append(dict.fromkeys(PARTS, 0.0))
            update.group(train_one)
    return {part: 1e3 * statistics.median(step[part] for step in found) for part in PARTS}


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
    marks: list[float] = []

    def mark(*_: object) -> None:
        marks.append(clock())

    hooks = [
        engine.knowledge.objective.register_forward_pre_hook(mark),
        engine.knowledge.objective.register_forward_hook(mark),
    ]
    try:
        yield marks
    finally:
        for hook in hooks:
            hook.remove()

"""Schedules of the learning rate: one class each, a factor on the rates of all parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

from kge_torchrec.config.checks import Check, NonNegativeFloat, NonNegativeInt
from kge_torchrec.config.keys import key, only_without
from kge_torchrec.config.registry import construct
from kge_torchrec.config.training import TrainConfig

_VALIDATES = only_without("evaluation.every", 0, "evaluation.every above 0")
_FACTOR = Check("in (0, 1]", lambda factor: 0 < factor <= 1)


class Schedule:
    """A schedule of the learning rate.  Subclasses implement ``after_warmup``.

    Args:
        options: The ``Options`` of the class.
        warmup_steps: Steps over which the factor rises linearly.
        total_steps: Steps of the whole run.
        steps_per_epoch: Steps of one epoch.
    """

    @dataclass(frozen=True)
    class Options:
        """Settings of this schedule: ``train.schedule_options`` of the config."""

    def __init__(self, options: Any, warmup_steps: int, total_steps: int, steps_per_epoch: int):
        self.options, self.warmup_steps = options, warmup_steps
        self.total_steps, self.steps_per_epoch = total_steps, steps_per_epoch

    @staticmethod
    def of(train: TrainConfig, steps_per_epoch: int) -> Schedule:
        """Make the schedule of a run from the ``train`` section of its config."""
        return construct(
            "schedule",
            train.schedule,
            train.options_in("schedule_options"),
            train.warmup_steps,
            max(1, train.epochs * steps_per_epoch),
            steps_per_epoch,
        )

    def factor(self, step: int, plateaus: int = 0) -> float:
        """Return the factor for a step.

        Args:
            step: Global step, from 0.
            plateaus: Number of plateaus so far, see `Plateau`.
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        return self.after_warmup(done, step // self.steps_per_epoch, plateaus)

    def after_warmup(self, done: float, epoch: int, plateaus: int) -> float:
        """Return the factor for a step after the warmup.

        Args:
            done: Share of the steps after the warmup that are done, from 0 to 1.
            epoch: Epoch of the step, from 0.
            plateaus: Number of plateaus so far.
        """
        raise NotImplementedError


class Constant(Schedule):
    """The same rate for all steps."""

    def after_warmup(self, done: float, epoch: int, plateaus: int) -> float:
        return 1.0


class Linear(Schedule):
    """A rate that falls linearly to 0."""

    def after_warmup(self, done: float, epoch: int, plateaus: int) -> float:
        return max(0.0, 1 - done)


class Cosine(Schedule):
    """A rate that falls to 0 along half a cosine (Loshchilov and Hutter 2017)."""

    def after_warmup(self, done: float, epoch: int, plateaus: int) -> float:
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


class Exponential(Schedule):
    """A rate that is multiplied by ``decay`` after each epoch."""

    @dataclass(frozen=True)
    class Options:
        """Settings of the schedule."""

        decay: Annotated[float, _FACTOR] = 0.95
        """Factor of the learning rate per epoch (exponential) or at a plateau."""

    def after_warmup(self, done: float, epoch: int, plateaus: int) -> float:
        return self.options.decay**epoch


class Plateau(Schedule):
    """A rate that is multiplied by ``decay`` where validation makes no progress."""

    @dataclass(frozen=True)
    class Options(Exponential.Options):
        """Settings of the schedule, as of torch's ReduceLROnPlateau."""

        patience: NonNegativeInt = key(3, acts=_VALIDATES)
        """Validations without progress before a plateau."""
        threshold: NonNegativeFloat = key(1e-4, acts=_VALIDATES)
        """Relative gain over the best value that counts as progress."""

    def after_warmup(self, done: float, epoch: int, plateaus: int) -> float:
        return self.options.decay**plateaus

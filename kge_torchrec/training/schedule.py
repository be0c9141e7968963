"""The learning rate as a factor of its base value: a function of the step, so it resumes itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kge_torchrec.config import TrainConfig


@dataclass(frozen=True)
class Schedule:
    """Factor on every learning rate, table and dense alike."""

    name: str
    warmup_steps: int
    total_steps: int
    steps_per_epoch: int
    decay: float

    @classmethod
    def of(cls, config: TrainConfig, steps_per_epoch: int) -> Schedule:
        """The schedule of a run of ``config.epochs`` epochs."""
        return cls(
            config.schedule,
            config.warmup_steps,
            max(1, config.epochs * steps_per_epoch),
            steps_per_epoch,
            config.decay,
        )

    def factor(self, step: int, plateaus: int = 0) -> float:
        """The factor for the step-th step (from 0) after ``plateaus`` decays by plateau."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        if self.name == "linear":
            return max(0.0, 1 - done)
        if self.name == "cosine":
            return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        if self.name == "exponential":
            return self.decay ** (step // self.steps_per_epoch)
        if self.name == "plateau":
            return self.decay**plateaus
        return 1.0

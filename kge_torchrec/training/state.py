"""The progress of a run: all values that a resume needs besides tensors."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from kge_torchrec.config import EvaluationConfig

LEAST_GAIN = 0.002  # relative; a smaller gain is no progress where patience is a share
LEAST_VALIDATIONS = 4  # in the share of the training without progress


@dataclass
class TrainState:
    """The position in the data, and the state of validation and learning-rate schedule."""

    epoch: int = 0  # finished epochs
    step: int = 0  # finished steps in the current epoch
    global_step: int = 0
    epoch_loss: float = 0.0  # sum of the losses of these steps
    seconds: float = 0.0  # of training, without validation and checkpoints
    triples: int = 0  # number of trained positives
    best_metric: float | None = None
    best_checkpoint: str | None = None
    bad_validations: int = 0  # since the best validation
    validations: list[list[float]] = field(default_factory=list)  # (epoch, value) of each
    plateaus: int = 0
    plateau_wait: int = 0
    plateau_best: float | None = None  # the last value that counted as progress
    loss_scale: dict[str, float] = field(default_factory=dict)  # for fp16, from LossScale.state
    table_step: int = 0  # steps of the table's optimizer
    averaged: int = 0  # number of weights in the average
    parts: str = ""  # how a table on disk is cut
    data: str = ""  # fingerprint of the training store

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    def has_stalled(self, metric: str, share: float) -> bool:
        """Return whether the last share of the epochs so far gained less than ``LEAST_GAIN``.

        It covers at least ``LEAST_VALIDATIONS`` validations.
        """
        last = self.validations[-1][0] if self.validations else 0
        recent = sum(epoch > (1 - share) * last for epoch, _ in self.validations)
        start = len(self.validations) - max(recent, LEAST_VALIDATIONS)
        if start <= 0:
            return False
        best = min if metric == "mr" else max
        before, since = (
            best(value for _, value in part)
            for part in (self.validations[:start], self.validations[start:])
        )
        return not beats(metric, since, before, LEAST_GAIN)

    def early_stop(self, evaluation: EvaluationConfig) -> str:
        """Return why evaluation.patience ends training here, or ""."""
        metric, patience = evaluation.metric, evaluation.patience
        setting = f"evaluation.patience {patience}"
        if 0 < patience < 1:
            if not self.has_stalled(metric, patience):
                return ""
            share = f"in the last {patience:.0%} of the epochs"
            return f"valid {metric} gained less than {LEAST_GAIN:.1%} {share} ({setting})"
        if not patience or self.bad_validations < patience:
            return ""
        best = [epoch for epoch, value in self.validations if value == self.best_metric]
        where = f", {self.best_metric:.4f} at epoch {best[0]:.0f}" if best else ""
        times = f"{self.bad_validations} validation{'s' * (self.bad_validations != 1)}"
        return f"{times} without a better valid {metric} than the best{where} ({setting})"

    def waits_on_plateau(self, metric: str, value: float, threshold: float) -> int:
        """Record a validation for the plateau schedule; return how many brought no progress.

        Progress is a relative gain of more than ``threshold`` over the best value.
        """
        if beats(metric, value, self.plateau_best, threshold):
            self.plateau_best, self.plateau_wait = value, 0
        else:
            self.plateau_wait += 1
        return self.plateau_wait


def beats(metric: str, value: float, best: float | None, threshold: float = 0.0) -> bool:
    """Return whether a value beats the best one by a relative threshold; a lower mr is better."""
    if best is None:
        return True
    if metric == "mr":
        return value < best * (1 - threshold)
    return value > best * (1 + threshold)

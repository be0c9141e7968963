"""Where a run stands: everything a resume needs that is not a tensor."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass
class TrainState:
    """The data position and what validation has seen so far."""

    epoch: int = 0  # epochs finished
    step: int = 0  # steps finished in the epoch under way
    global_step: int = 0
    epoch_loss: float = 0.0  # sum over these steps of the epoch under way
    seconds: float = 0.0  # of training, validation and checkpoints not counted
    triples: int = 0  # positives trained
    best_metric: float | None = None
    selection: str = ""  # what best_metric is a value of; "" in checkpoints of old
    best_checkpoint: str | None = None
    bad_validations: int = 0  # since the best one
    plateaus: int = 0
    plateau_wait: int = 0
    plateau_best: float | None = None  # the last value that was progress
    loss_scale: dict[str, float] = field(default_factory=dict)  # of fp16, as LossScale gives it
    data: str = ""  # fingerprint of the store that was trained on

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainState:
        """The inverse of ``to_dict``; values that a later version has added are left out."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})

    def select_by(self, selection: str) -> bool:
        """Says what validations are compared by; True if the best so far was by something else.

        Then its value is forgotten, and the next validation is the best.
        """
        changed = self.selection not in ("", selection)
        if changed:
            self.best_metric, self.bad_validations = None, 0
            self.plateau_best, self.plateau_wait = None, 0
        self.selection = selection
        return changed

    def is_better(self, metric: str, value: float) -> bool:
        """Whether ``value`` beats the best so far; a mean rank is better when lower."""
        return _beats(metric, value, self.best_metric)

    def waits_on_plateau(self, metric: str, value: float, threshold: float) -> int:
        """Takes the value of a validation; returns how many have been no progress since the last.

        threshold: share of the best value that a better one has to differ by.
        """
        if _beats(metric, value, self.plateau_best, threshold):
            self.plateau_best, self.plateau_wait = value, 0
        else:
            self.plateau_wait += 1
        return self.plateau_wait


def _beats(metric: str, value: float, best: float | None, threshold: float = 0.0) -> bool:
    if best is None:
        return True
    if metric == "mr":
        return value < best * (1 - threshold)
    return value > best * (1 + threshold)

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
            self.best_metric, self.bad_validations, self.plateau_wait = None, 0, 0
        self.selection = selection
        return changed

    def is_better(self, metric: str, value: float) -> bool:
        """Whether ``value`` beats the best so far; a mean rank is better when lower."""
        if self.best_metric is None:
            return True
        return value < self.best_metric if metric == "mr" else value > self.best_metric

"""Unscaling and clipping of a step's gradient, before the optimizers use it.

    unscale      fp16: divide by the loss scale, or skip the step on all ranks
    clip_value   clip each element of each gradient
    clip_norm    clip the norm over all dense parameters and all rows of the table, on all ranks

This is the gradient of the whole step, summed over micro-batches, ranks and the duplicates of a
row, so results do not depend on how the step was divided.  Dense gradients are read from the
parameters; the caller passes the gradients of rows.

Shapes: U rows of this rank's shard with a gradient, D elements per row.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from kge_torchrec.config import TrainConfig
from kge_torchrec.distributed.dense import local_part
from kge_torchrec.distributed.processes import world_size
from kge_torchrec.embeddings.backend import EmbeddingBackend
from kge_torchrec.models.loss_scaling import LossScale


class StepGradient:
    """The gradient of table and dense parameters between backward and step."""

    def __init__(self, backend: EmbeddingBackend, train: TrainConfig):
        self.backend = backend
        self.clip_norm, self.clip_value = train.clip_norm, train.clip_value
        scale = backend.unwrapped_model.scale
        self.scale = scale if isinstance(scale, LossScale) else None

    @property
    def loss_factor(self) -> float:
        """The factor on the loss before backward."""
        return 1.0 if self.scale is None else self.scale.value

    @property
    def clips(self) -> bool:
        return self.clip_norm is not None or self.clip_value is not None

    def unscale(self, rows: list[Tensor]) -> float | None:
        """Divide dense gradients by the loss scale.  Collective.

        Args:
            rows: (U, D) each, only checked for overflow.

        Returns:
            The factor by which the caller must multiply ``rows``, or None if a gradient overflowed
            on any rank and the step must be skipped.

        Raises:
            ScaleTooSmall: Gradients keep overflowing.
        """
        if self.scale is None:
            return 1.0
        factor = 1 / self.scale.value
        overflow = _any_rank(~_is_finite([*self._dense(), *rows]))
        self.scale.after_step(overflow)
        if overflow:
            return None
        for gradient in self._dense():
            gradient.mul_(factor)
        return factor

    def clip(self, rows: Tensor) -> None:
        """Clip dense gradients and those of rows (U, D) in place.  Collective."""
        if self.backend.dense.frozen is not None:
            self.backend.dense.frozen.drop_gradients()
        if self.clip_value is not None:
            for gradient in [*self._dense(), rows]:
                gradient.clamp_(-self.clip_value, self.clip_value)
        if self.clip_norm is not None:
            self._clip_norm(self.clip_norm, rows)

    def _clip_norm(self, limit: float, rows: Tensor) -> None:
        dense, device = list(self._dense()), self.backend.shard().rows.device
        of_dense = sum((_squares(g).to(device) for g in dense), torch.zeros((), device=device))
        of_rows = _squares(rows).to(device)
        if world_size() > 1:
            dist.all_reduce(of_rows)
        norm = (self.backend.dense.sum_of_parts(of_dense) + of_rows).sqrt()
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)  # formula of torch's clip_grad_norm_
        for gradient in [*dense, rows]:
            gradient.mul_(factor.to(gradient.device))

    def _dense(self) -> Iterator[Tensor]:
        """Yield this rank's parts of the dense gradients, as views."""
        for parameter in self.backend.dense.parameters():
            if parameter.grad is not None:
                yield local_part(parameter.grad)


def _squares(gradient: Tensor) -> Tensor:
    """Return the sum of squares, (), without a temporary of the gradient's size."""
    return torch.linalg.vector_norm(gradient).square()


def _any_rank(flag: Tensor) -> bool:
    """Return whether a flag () is true on any rank.  Collective."""
    found = flag.float()
    if world_size() > 1:
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found)


def _is_finite(gradients: list[Tensor]) -> Tensor:
    """Return () bool: whether all elements are finite, on the device of the last gradient."""
    device = gradients[-1].device  # the last gradients are those of rows
    return torch.stack([g.isfinite().all().to(device) for g in gradients]).all()

"""Unscaling and clipping of a step's gradient, before the optimizers use it.

    unscale      fp16: divide by the loss scale, or skip the step on all ranks
    clip.value   clip each element of each gradient
    clip.norm    clip the norm over all dense parameters and all rows of the table, on all ranks

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
from kge_torchrec.distributed.processes import reduced
from kge_torchrec.embeddings.backend import EmbeddingBackend
from kge_torchrec.models.loss_scaling import LossScale


def unscale(scale: LossScale, backend: EmbeddingBackend, rows: list[Tensor]) -> float | None:
    """Divide dense gradients by the loss scale and update the scale.  Collective.

    Args:
        scale: The loss scale.
        backend: Its dense gradients are those of this step.
        rows: (U, D) each, only checked for overflow.

    Returns:
        The factor by which the caller must multiply ``rows``, or None if a gradient overflowed on
        any rank and the step must be skipped.

    Raises:
        ScaleTooSmall: Gradients keep overflowing.
    """
    factor = 1 / scale.value
    finite = _is_finite([*_dense(backend), *rows]).float()
    overflow = not reduced(finite, dist.ReduceOp.MIN)  # of all ranks
    scale.after_step(overflow)
    if overflow:
        return None
    for gradient in _dense(backend):
        gradient.mul_(factor)
    return factor


def clip(train: TrainConfig, backend: EmbeddingBackend, rows: Tensor, device: torch.device) -> None:
    """Clip dense gradients and those of rows (U, D) in place.  Collective."""
    if backend.dense.frozen is not None:
        backend.dense.frozen.drop_gradients()
    gradients = [*_dense(backend), rows]
    bounds = train.clipping
    if bounds.value is not None:
        for gradient in gradients:
            gradient.clamp_(-bounds.value, bounds.value)
    if bounds.norm is not None:
        factor = (bounds.norm / (_norm(backend, rows, device) + 1e-6)).clamp(max=1.0)
        for gradient in gradients:  # formula of torch's clip_grad_norm_
            gradient.mul_(factor.to(gradient.device))


def _norm(backend: EmbeddingBackend, rows: Tensor, device: torch.device) -> Tensor:
    """Return the norm (), over all ranks, of dense gradients and those of rows (U, D)."""
    dense_part = torch.zeros((), device=device)
    dense_part = sum((_squares(g).to(device) for g in _dense(backend)), dense_part)
    row_part = reduced(_squares(rows).to(device))
    return (backend.dense.sum_of_parts(dense_part) + row_part).sqrt()


def _dense(backend: EmbeddingBackend) -> Iterator[Tensor]:
    """Yield this rank's parts of the dense gradients, as views."""
    for parameter in backend.dense.parameters():
        if parameter.grad is not None:
            yield local_part(parameter.grad)


def _squares(gradient: Tensor) -> Tensor:
    """Return the sum of squares, (), without a temporary of the gradient's size."""
    return torch.linalg.vector_norm(gradient).square()


def _is_finite(gradients: list[Tensor]) -> Tensor:
    """Return () bool: whether all elements are finite, on the device of the last gradient."""
    device = gradients[-1].device  # the last gradients are those of rows
    return torch.stack([g.isfinite().all().to(device) for g in gradients]).all()

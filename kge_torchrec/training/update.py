"""From gradients to a step: micro-batches summed, gradients unscaled, checked and clipped.

    group        backward of every micro-batch of a step; dense gradients travel at the last one
    unscale      float16: divide by the loss scale, or skip the step on all ranks alike
    clip_value   each number of each gradient
    clip_norm    the norm over all dense parameters and all rows of the table, on all ranks
    step         table and dense parameters

What is clipped is the gradient of the whole step: summed over micro-batches, ranks and a row's
duplicates, so that nothing depends on how the step was divided.

Shapes: U rows of this rank's shard with a gradient, D numbers a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from kge_torchrec.config import TrainConfig
from kge_torchrec.entities.contract import EntityEngine
from kge_torchrec.models.loss_scaling import LossScale
from kge_torchrec.parallel.dense import local_part


class Update:
    """The optimizer of an engine as a pipeline sees it: told of every micro-batch."""

    def __init__(self, engine: EntityEngine, train: TrainConfig):
        self.engine, self.parts = engine, train.accumulation
        self.clip_norm, self.clip_value = train.clip_norm, train.clip_value
        model = engine.knowledge
        self.scale = model.scale if isinstance(model.scale, LossScale) else None
        self.held = model.hold
        self._part = 0

    def group(self, train_one: Callable[[], Tensor]) -> Tensor:
        """Calls ``train_one`` for every micro-batch of a step; returns the sum of their losses."""
        if self.parts == 1:
            return train_one()
        losses = []
        for part in range(self.parts):
            self._part = part
            with self.engine.dense.synchronised(self._is_last):
                losses.append(train_one())
        return torch.stack(losses).sum()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Before a micro-batch: forgets gradients before the first one only."""
        if self._part == 0:
            self.engine.optimizer.zero_grad(set_to_none)
            if self.scale is not None:
                self.held.drop()

    def step(self) -> None:
        """After a micro-batch: steps after the last one only.  Collective."""
        if not self._is_last:
            return
        if self.scale is not None and not self._unscale(self.scale):
            self.engine.skip_step()
            return
        if self.clip_value is not None:
            self._clip_value(self.clip_value)
        if self.clip_norm is not None:
            self._clip_norm(self.clip_norm)
        self.engine.optimizer.step()

    @property
    def _is_last(self) -> bool:
        return self._part == self.parts - 1

    def _dense(self) -> Iterator[Tensor]:
        """This rank's parts of the dense gradients, as views."""
        for parameter in self.engine.dense.parameters():
            if parameter.grad is not None:
                yield local_part(parameter.grad)

    def _unscale(self, scale: LossScale) -> bool:
        """Divides by the scale and ends the table's backward; False if a gradient overflowed."""
        factor = 1 / scale.value
        overflow = self._any_rank(~_is_finite([*self._dense(), *self.held.gradients()]))
        scale.after_step(overflow)
        if overflow:
            self.held.drop()
            return False
        for gradient in self._dense():
            gradient.mul_(factor)
        self.held.release(factor)
        return True

    def _clip_value(self, limit: float) -> None:
        for gradient in self._dense():
            gradient.clamp_(-limit, limit)
        self.engine.pending.sums().clamp_(-limit, limit)

    def _clip_norm(self, limit: float) -> None:
        rows = self.engine.pending.sums()
        dense = list(self._dense())
        device = self.engine.shard().rows.device
        of_dense = sum((g.square().sum().to(device) for g in dense), torch.zeros((), device=device))
        squares = self.engine.dense.sum_of_parts(of_dense)
        of_rows = rows.square().sum().to(device)
        if dist.get_world_size() > 1:
            dist.all_reduce(of_rows)
        norm = (squares + of_rows).sqrt()
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)  # as torch's clip_grad_norm_
        for gradient in [*dense, rows]:
            gradient.mul_(factor.to(gradient.device))

    def _any_rank(self, flag: Tensor) -> bool:
        """Whether a flag () is true on any rank."""
        found = flag.float()
        if dist.get_world_size() > 1:
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return bool(found)


def _is_finite(gradients: list[Tensor]) -> Tensor:
    """() bool."""
    device = gradients[-1].device  # of the looked-up rows
    return torch.stack([g.isfinite().all().to(device) for g in gradients]).all()

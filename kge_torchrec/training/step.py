"""One training step: forward and backward of each micro-batch, unscale, clip, update.

    Step           the order of a step; ``progress`` shows it
    SampledStep    forward and backward with sampled candidates
    PipelinedStep  the same in TorchRec's pipeline

``captured_step`` has the step with a CUDA graph, and ``full_candidates`` the step with all entities
as candidates.  A step unscales and clips its whole gradient, summed over micro-batches, ranks and
the duplicates of a row, so results do not depend on how the step was divided.

Shapes: U rows of this rank's shard with a gradient, D elements per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from kge_torchrec.config import TrainConfig
from kge_torchrec.data.batches import SampledBatch
from kge_torchrec.distributed.dense import local_part
from kge_torchrec.distributed.processes import reduced
from kge_torchrec.embeddings.backend import EmbeddingBackend
from kge_torchrec.models.loss_scaling import GradientBarrier, LossScale

PARTS = ("data", "lookup", "score", "backward", "update")  # of a step, see SampledStep.watched


class Step:
    """The order of a training step.

    Subclasses run forward and backward and say where the gradients of rows are.

    Attributes:
        watch: Called with the name of each of ``PARTS`` when it ends, or None.
    """

    def __init__(self, backend: EmbeddingBackend, train: TrainConfig, device: torch.device):
        self.backend, self.train, self.device = backend, train, device
        scale = backend.unwrapped_model.scale
        self.scale = scale if isinstance(scale, LossScale) else None
        self._clips = train.clips
        self.watch: Callable[[str], object] | None = None

    def progress(self, batches: Iterator[Any]) -> Tensor:
        """Train one step of micro-batches; return its loss, detached.  Collective.

        Raises:
            StopIteration: There is no batch left.
        """
        self.backend.optimizer.zero_grad()  # also passes the learning rate to the table
        loss = self.forward_backward(batches)
        if self.scale is None or self.unscaled(self.scale):
            if self._clips:
                clip(self.train, self.backend, self.row_gradients(), self.device)
            self.update()
        if self.watch is not None:
            self.watch("update")
        return loss

    def forward_backward(self, batches: Iterator[Any]) -> Tensor:
        """Run forward and backward of the step's micro-batches; return the loss, detached."""
        raise NotImplementedError

    def unscaled(self, scale: LossScale) -> bool:
        """Divide all gradients by the loss scale.  Collective.

        Returns:
            False if a gradient overflowed on any rank, so that the step is skipped.
        """
        raise NotImplementedError

    def row_gradients(self) -> list[Tensor]:
        """Return the gradients (U, D) of rows.  Changes in place take effect in ``update``."""
        raise NotImplementedError

    def update(self) -> None:
        """Update the parameters."""
        self.backend.optimizer.step()


class SampledStep(Step):
    """A step with sampled candidates."""

    def __init__(self, backend: EmbeddingBackend, train: TrainConfig, device: torch.device):
        super().__init__(backend, train, device)
        self._barrier = backend.unwrapped_model.hold

    @contextmanager
    def watched(self, watch: Callable[[str], object]) -> Iterator[None]:
        """Inside the block, call ``watch`` with the name of each of ``PARTS`` when it ends."""
        objective = self.backend.unwrapped_model.objective
        hooks = [
            objective.register_forward_pre_hook(lambda *_: watch("lookup")),
            objective.register_forward_hook(lambda *_: watch("score")),
        ]
        self.watch = watch
        try:
            yield
        finally:
            self.watch = None
            for hook in hooks:
                hook.remove()

    def forward_backward(self, batches: Iterator[SampledBatch]) -> Tensor:
        count = self.train.accumulation
        if count == 1:
            return self.train_next(batches)
        with self.backend.dense.without_exchange():
            losses = [self.train_next(batches) for _ in range(count - 1)]
        return torch.stack([*losses, self.train_next(batches)]).sum()

    def train_next(self, batches: Iterator[SampledBatch]) -> Tensor:
        batch = next(batches)
        if self.watch is not None:
            self.watch("data")
        if self.backend.prepare is not None:
            batch = self.backend.prepare(batch)
        if self.device.type != "cpu":
            batch = batch.to(self.device, non_blocking=True)
        return self.train_batch(batch)

    def train_batch(self, batch: SampledBatch) -> Tensor:
        loss, detached = self.backend.model(batch)
        loss.backward()  # FBGEMM's table on CUDA steps here, unless deferred
        if self.watch is not None:
            self.watch("backward")
        return detached

    def unscaled(self, scale: LossScale) -> bool:
        barrier = self._barrier
        assert isinstance(barrier, GradientBarrier)  # there is a loss scale
        factor = unscale(scale, self.backend, barrier.of_rows())
        if factor is None:
            barrier.drop()
            self.backend.skip_step()
            return False
        barrier.release(factor)
        return True

    def row_gradients(self) -> list[Tensor]:
        assert self.backend.pending is not None  # ensured by TrainConfig.steps_on_sums
        return [self.backend.pending.sums()]


def unscale(scale: LossScale, backend: EmbeddingBackend, rows: list[Tensor]) -> float | None:
    """Divide dense gradients by the loss scale and update the scale.  Collective.

    Returns:
        The factor for the gradients ``rows`` (U, D) of rows, which are only checked for overflow.
        None if a gradient overflowed on any rank and the step must be skipped.

    Raises:
        ScaleTooSmall: Gradients keep overflowing.
    """
    factor = 1 / scale.value
    gradients = [*_dense(backend), *rows]
    device = gradients[-1].device  # the last gradients are those of rows
    finite = torch.stack([g.isfinite().all().to(device) for g in gradients]).all().float()
    overflow = not reduced(finite, dist.ReduceOp.MIN)  # of all ranks
    scale.after_step(overflow)
    if overflow:
        return None
    for gradient in _dense(backend):
        gradient.mul_(factor)
    return factor


def clip(
    train: TrainConfig, backend: EmbeddingBackend, rows: list[Tensor], device: torch.device
) -> None:
    """Clip dense gradients and those of rows, (U, D) each, in place.  Collective.

    clip.value bounds each element, clip.norm the norm over all dense parameters and all rows.
    """
    if backend.dense.frozen is not None:
        backend.dense.frozen.drop_gradients()
    gradients = [*_dense(backend), *rows]
    bounds = train.clip
    if bounds.value is not None:
        for gradient in gradients:
            gradient.clamp_(-bounds.value, bounds.value)
    if bounds.norm is not None:
        dense_part = torch.zeros((), device=device)
        dense_part = sum((_squares(g).to(device) for g in _dense(backend)), dense_part)
        row_part = reduced(torch.stack([_squares(g).to(device) for g in rows]).sum())
        norm = (backend.dense.sum_of_parts(dense_part) + row_part).sqrt()  # over all ranks
        factor = (bounds.norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:  # formula of torch's clip_grad_norm_
            gradient.mul_(factor.to(gradient.device))


def _dense(backend: EmbeddingBackend) -> Iterator[Tensor]:
    """Yield this rank's parts of the dense gradients, as views."""
    for parameter in backend.dense.parameters():
        if parameter.grad is not None:
            yield local_part(parameter.grad)


def _squares(gradient: Tensor) -> Tensor:
    """Return the sum of squares, (), without a temporary of the gradient's size."""
    return torch.linalg.vector_norm(gradient).square()


class PipelinedStep(SampledStep):
    """A step in TorchRec's pipeline, which sends the ids of the next batch during the current one.

    Rows are looked up after the previous step, so results are the same as with ``SampledStep``.
    """

    def __init__(self, backend: EmbeddingBackend, train: TrainConfig, device: torch.device):
        from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

        super().__init__(backend, train, device)
        # The pipeline runs forward and backward only; ``Step`` clears gradients and updates.
        nothing = SimpleNamespace(zero_grad=lambda: None, step=lambda: None)
        self._pipeline = TrainPipelineSparseDist(
            backend.model, nothing, device, execute_all_batches=True
        )

    def train_next(self, batches: Iterator[SampledBatch]) -> Tensor:
        loss: Tensor = self._pipeline.progress(batches)
        return loss


def seed_generators(*words: int) -> None:
    """Seed torch's generators on all devices with a hash of the words.

    It avoids ``torch.manual_seed``, which takes 1 ms per call while CUDA is not initialized: it
    formats the call stack for a possible later CUDA error.
    """
    seed = int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)

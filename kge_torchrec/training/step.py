"""One training step with sampled candidates: lookup, score, loss, backward, clipping, optimizers.

    PlainStep      the parts of a step one after another
    PipelinedStep  the same in TorchRec's pipeline
    StepOptimizer  sums micro-batches, unscales and clips gradients (see ``gradients``), and steps
                   table and dense parameters

Dropout is a function of the position in training, not of earlier random draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.config import TrainConfig
from kge_torchrec.data.batches.queries import SampledBatch
from kge_torchrec.embeddings.backend import EmbeddingBackend
from kge_torchrec.errors import KGEError
from kge_torchrec.models.loss_scaling import GradientBarrier
from kge_torchrec.training.gradients import StepGradient


class Pipeline(Protocol):
    """An object that trains one step per call of ``progress``.

    ``progress`` takes an iterator of micro-batches and raises StopIteration at its end.
    """

    def progress(self, batches: Iterator[Any]) -> Tensor: ...


PARTS = ("data", "lookup", "score", "backward", "update")  # of a step, see PlainStep.watched


class PlainStep:
    """A step without overlap: batch, device, forward, backward, optimizer, one after another."""

    def __init__(self, backend: EmbeddingBackend, optimizer: StepOptimizer, device: torch.device):
        self.backend, self.optimizer, self.device = backend, optimizer, device
        self._ended: Callable[[str], object] = lambda part: None

    @contextmanager
    def watched(self, watch: Callable[[str], object]) -> Iterator[None]:
        """Inside the block, call ``watch`` with the name of each of ``PARTS`` when it ends."""
        objective, unwatched = self.backend.unwrapped_model.objective, self._ended
        hooks = [
            objective.register_forward_pre_hook(lambda *_: watch("lookup")),
            objective.register_forward_hook(lambda *_: watch("score")),
        ]
        self._ended = watch
        try:
            yield
        finally:
            self._ended = unwatched
            for hook in hooks:
                hook.remove()

    def progress(self, batches: Iterator[SampledBatch]) -> Tensor:
        """Train one step; return its loss, detached."""
        return self.optimizer.group(lambda: self._train(batches))

    def _train(self, batches: Iterator[SampledBatch]) -> Tensor:
        batch = next(batches)
        self._ended("data")
        batch = self.backend.prepare(batch).to(self.device, non_blocking=True)
        self.optimizer.zero_grad()
        loss, detached = self.backend.model(batch)
        loss.backward()  # FBGEMM's table on CUDA steps here, unless deferred
        self._ended("backward")
        self.optimizer.step()
        self._ended("update")
        return detached


class NotPipelined(KGEError, RuntimeError):
    """TorchRec fell back to an entity lookup without the pipeline."""

    on_every_rank = True


class PipelinedStep:
    """TorchRec's pipeline, which sends the ids of the next batch during the current one.

    Only ids are sent ahead.  Rows are looked up after the previous step, so results are the same as
    with ``PlainStep``.

    Raises:
        NotPipelined: TorchRec could not pipeline the lookup.  Raised after the first step.
    """

    def __init__(self, backend: EmbeddingBackend, optimizer: StepOptimizer, device: torch.device):
        from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

        # The pipeline calls the optimizer for every micro-batch, as StepOptimizer expects.
        self._pipeline = TrainPipelineSparseDist(
            backend.model, optimizer, device, execute_all_batches=True
        )
        self.optimizer, self._model, self._checked = optimizer, backend.model, False

    def progress(self, batches: Iterator[SampledBatch]) -> Tensor:
        """Train one step; return its loss, detached."""
        loss = self.optimizer.group(lambda: self._pipeline.progress(batches))
        if not self._checked:
            self._check()
        return loss

    def _check(self) -> None:
        from torchrec.distributed.embedding import ShardedEmbeddingCollection

        tables = [m for m in self._model.modules() if isinstance(m, ShardedEmbeddingCollection)]
        if not (tables and all(table.is_pipelined for table in tables)):
            raise NotPipelined(
                "TorchRec could not pipeline the entity lookup; use train.pipeline loop"
            )
        self._checked = True


def build_pipeline(train: TrainConfig, backend: EmbeddingBackend, device: torch.device) -> Pipeline:
    """Make the pipeline that train.pipeline names; "auto" is sparse_dist where it is faster."""
    name = train.pipeline
    if name == "auto":
        name = "sparse_dist" if backend.gains_by_pipeline else "loop"
    optimizer = StepOptimizer(backend, train)
    if name == "sparse_dist":
        return PipelinedStep(backend, optimizer, device)
    return PlainStep(backend, optimizer, device)


class StepOptimizer:
    """An optimizer for pipelines that call it for every micro-batch; it steps at the last one."""

    def __init__(self, backend: EmbeddingBackend, train: TrainConfig):
        self.backend, self.parts = backend, train.accumulation
        self.gradient = StepGradient(backend, train)
        held = backend.unwrapped_model.hold
        self.held = held if isinstance(held, GradientBarrier) else None
        self._part = 0

    def group(self, train_one: Callable[[], Tensor]) -> Tensor:
        """Call ``train_one`` for every micro-batch of a step; return the sum of the losses."""
        if self.parts == 1:
            return train_one()
        losses = []
        for part in range(self.parts):
            self._part = part
            with self.backend.dense.synchronised(self._is_last):
                losses.append(train_one())
        return torch.stack(losses).sum()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients before the first micro-batch; do nothing before later ones."""
        if self._part == 0:
            self.backend.optimizer.zero_grad(set_to_none)
            if self.held is not None:
                self.held.drop()

    def step(self) -> None:
        """Step after the last micro-batch; do nothing after earlier ones.  Collective."""
        if not self._is_last:
            return
        if not self._unscale():
            self.backend.skip_step()
            return
        if self.gradient.clips:
            assert self.backend.pending is not None  # ensured by TrainConfig.steps_on_sums
            self.gradient.clip(self.backend.pending.sums())
        self.backend.optimizer.step()

    @property
    def _is_last(self) -> bool:
        return self._part == self.parts - 1

    def _unscale(self) -> bool:
        """Divide by the loss scale, if there is one, and finish the table's backward.

        Returns:
            False if a gradient overflowed.
        """
        if self.held is None:
            return True
        factor = self.gradient.unscale(self.held.gradients())
        if factor is None:
            self.held.drop()
            return False
        self.held.release(factor)
        return True


_STREAM = 0xD60  # separates these random streams from others with the same seed


def seed_dropout(seed: int, step: int, rank: int) -> None:
    """Seed torch's generators on all devices for one step on this rank.

    A resumed run therefore repeats the dropout of an uninterrupted run with the same number of
    ranks.

    Args:
        seed: Seed of the run.
        step: Global step.
        rank: This rank.
    """
    seed_generators(seed, _STREAM, step, rank)


def seed_generators(*words: int) -> None:
    """Seed torch's generators on all devices with a hash of the words.

    It avoids ``torch.manual_seed``, which takes 1 ms per call while CUDA is not initialized: it
    formats the call stack for a possible later CUDA error.
    """
    seed = int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)

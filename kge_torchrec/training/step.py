"""One training step: lookup, score, loss, backward, and what lies between that and the optimizers.

    PlainStep      the step as it reads; PipelinedStep is the same in TorchRec's pipeline
    StepOptimizer  micro-batches summed, gradients unscaled, checked and clipped, then stepped by:

        group        backward of every micro-batch; dense gradients travel at the last one
        unscale      float16, or skip the step, and
        clip         as ``gradients`` has it
        step         table and dense parameters

What a step drops is a function of where it is in training, not of what was drawn before.
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
    """Trains the next step of an iterator of micro-batches; StopIteration when all are trained."""

    def progress(self, batches: Iterator[Any]) -> Tensor: ...


PARTS = ("data", "lookup", "score", "backward", "update")  # of a step, as a watcher hears of them


class PlainStep:
    """batch -> device -> forward -> backward -> step, one after another."""

    def __init__(self, backend: EmbeddingBackend, optimizer: StepOptimizer, device: torch.device):
        self.backend, self.optimizer, self.device = backend, optimizer, device
        self._ended: Callable[[str], object] = lambda part: None

    @contextmanager
    def watched(self, watch: Callable[[str], object]) -> Iterator[None]:
        """Calls ``watch`` with the name of each of ``PARTS`` as it ends, within the block."""
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
        """Trains one step; returns its loss, detached."""
        return self.optimizer.group(lambda: self._train(batches))

    def _train(self, batches: Iterator[SampledBatch]) -> Tensor:
        batch = next(batches)
        self._ended("data")
        batch = self.backend.prepare(batch).to(self.device, non_blocking=True)
        self.optimizer.zero_grad()
        loss, detached = self.backend.model(batch)
        loss.backward()  # FBGEMM's table steps here on CUDA, all others below
        self._ended("backward")
        self.optimizer.step()
        self._ended("update")
        return detached


class NotPipelined(KGEError, RuntimeError):
    """TorchRec fell back to looking entities up without the pipeline."""

    on_every_rank = True


class PipelinedStep:
    """TorchRec's pipeline: the next batch's ids travel while this batch is computed.

    Only ids are sent ahead, rows are looked up after the step before: training is as exact as in
    ``PlainStep``.  Raises NotPipelined at the first step if TorchRec could not pipeline the lookup.
    """

    def __init__(self, backend: EmbeddingBackend, optimizer: StepOptimizer, device: torch.device):
        from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

        # It tells its optimizer of every batch, as a StepOptimizer wants it.
        self._pipeline = TrainPipelineSparseDist(
            backend.model, optimizer, device, execute_all_batches=True
        )
        self.optimizer, self._model, self._checked = optimizer, backend.model, False

    def progress(self, batches: Iterator[SampledBatch]) -> Tensor:
        """Trains one step; returns its loss, detached."""
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
    """What train.pipeline names; "auto" is sparse_dist where it pays."""
    name = train.pipeline
    if name == "auto":
        name = "sparse_dist" if backend.gains_by_pipeline else "loop"
    optimizer = StepOptimizer(backend, train)
    if name == "sparse_dist":
        return PipelinedStep(backend, optimizer, device)
    return PlainStep(backend, optimizer, device)


class StepOptimizer:
    """The optimizers of a backend as a pipeline sees it: told of every micro-batch."""

    def __init__(self, backend: EmbeddingBackend, train: TrainConfig):
        self.backend, self.parts = backend, train.accumulation
        self.gradient = StepGradient(backend, train)
        held = backend.unwrapped_model.hold
        self.held = held if isinstance(held, GradientBarrier) else None
        self._part = 0

    def group(self, train_one: Callable[[], Tensor]) -> Tensor:
        """Calls ``train_one`` for every micro-batch of a step; returns the sum of their losses."""
        if self.parts == 1:
            return train_one()
        losses = []
        for part in range(self.parts):
            self._part = part
            with self.backend.dense.synchronised(self._is_last):
                losses.append(train_one())
        return torch.stack(losses).sum()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Before a micro-batch: forgets gradients before the first one only."""
        if self._part == 0:
            self.backend.optimizer.zero_grad(set_to_none)
            if self.held is not None:
                self.held.drop()

    def step(self) -> None:
        """After a micro-batch: steps after the last one only.  Collective."""
        if not self._is_last:
            return
        if not self._unscale():
            self.backend.skip_step()
            return
        if self.gradient.clips:
            assert self.backend.pending is not None  # as TrainConfig.steps_on_sums
            self.gradient.clip(self.backend.pending.sums())
        self.backend.optimizer.step()

    @property
    def _is_last(self) -> bool:
        return self._part == self.parts - 1

    def _unscale(self) -> bool:
        """Divides by the scale, if there is one, and ends the table's backward.

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


_STREAM = 0xD60  # keeps these draws apart from others of the same seed


def seed_dropout(seed: int, step: int, rank: int) -> None:
    """Seeds torch's generators, on all devices, for step number ``step`` of a run on this rank.

    So a resumed run drops what the uninterrupted one does; another number of ranks does not.
    """
    seed_generators(seed, _STREAM, step, rank)


def seed_generators(*words: int) -> None:
    """Makes what torch draws next a function of the words.

    ``torch.manual_seed`` would do, but where CUDA is not in use it formats the call stack each
    time, in case CUDA will be: a millisecond.
    """
    seed = int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)

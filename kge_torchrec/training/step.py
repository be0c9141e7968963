"""One training step: lookup, score, loss, backward, and what lies between that and the optimizers.

    PlainStep      the step as it reads; PipelinedStep is the same in TorchRec's pipeline
    StepOptimizer  micro-batches summed, gradients unscaled, checked and clipped, then stepped by:

        group        backward of every micro-batch; dense gradients travel at the last one
        unscale      float16: divide by the loss scale, or skip the step on all ranks alike
        clip_value   each number of each gradient
        clip_norm    the norm over all dense parameters and all rows of the table, on all ranks
        step         table and dense parameters

What is clipped is the gradient of the whole step: summed over micro-batches, ranks and a row's
duplicates, so that nothing depends on how the step was divided.  What a step drops is a function of
where it is in training, not of what was drawn before.

Shapes: U rows of this rank's shard with a gradient, D numbers a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from kge_torchrec.config import TrainConfig
from kge_torchrec.data.queries import SampledBatch
from kge_torchrec.distributed.dense import local_part
from kge_torchrec.distributed.processes import world_size
from kge_torchrec.embeddings.backend import EmbeddingBackend
from kge_torchrec.errors import KGEError
from kge_torchrec.models.loss_scaling import GradientBarrier, LossScale


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
        tables = [m for m in self._model.modules() if isinstance(m, ShardedEmbeddingCollection)]
        if not (tables and all(table.is_pipelined for table in tables)):
            raise NotPipelined(
                "TorchRec could not pipeline the entity lookup; use train.pipeline loop"
            )
        self._checked = True


def build_pipeline(train: TrainConfig, backend: EmbeddingBackend, device: torch.device) -> Pipeline:
    """What train.pipeline names; "auto" is sparse_dist where the backend can."""
    name = train.pipeline
    if name == "auto":
        name = "sparse_dist" if backend.has_sparse_dist else "loop"
    optimizer = StepOptimizer(backend, train)
    if name == "sparse_dist":
        return PipelinedStep(backend, optimizer, device)
    return PlainStep(backend, optimizer, device)


class StepOptimizer:
    """The optimizers of a backend as a pipeline sees it: told of every micro-batch."""

    def __init__(self, backend: EmbeddingBackend, train: TrainConfig):
        self.backend, self.parts = backend, train.accumulation
        self.clip_norm, self.clip_value = train.clip_norm, train.clip_value
        model = backend.unwrapped_model
        self.scale = model.scale if isinstance(model.scale, LossScale) else None
        self.held = model.hold if isinstance(model.hold, GradientBarrier) else None
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
        if self.clip_value is not None:
            self._clip_value(self.clip_value)
        if self.clip_norm is not None:
            self._clip_norm(self.clip_norm)
        self.backend.optimizer.step()

    @property
    def _is_last(self) -> bool:
        return self._part == self.parts - 1

    def _dense(self) -> Iterator[Tensor]:
        """This rank's parts of the dense gradients, as views."""
        for parameter in self.backend.dense.parameters():
            if parameter.grad is not None:
                yield local_part(parameter.grad)

    def _row_gradients(self) -> Tensor:
        """(U, D) of the table's rows, as they will be stepped by."""
        assert self.backend.pending is not None  # as TrainConfig.steps_on_sums
        return self.backend.pending.sums()

    def _unscale(self) -> bool:
        """Divides by the scale, if there is one, and ends the table's backward.

        False if a gradient overflowed.
        """
        scale, held = self.scale, self.held
        if scale is None or held is None:
            return True
        factor = 1 / scale.value
        overflow = self._any_rank(~_is_finite([*self._dense(), *held.gradients()]))
        scale.after_step(overflow)
        if overflow:
            held.drop()
            return False
        for gradient in self._dense():
            gradient.mul_(factor)
        held.release(factor)
        return True

    def _clip_value(self, limit: float) -> None:
        for gradient in self._dense():
            gradient.clamp_(-limit, limit)
        self._row_gradients().clamp_(-limit, limit)

    def _clip_norm(self, limit: float) -> None:
        rows = self._row_gradients()
        dense = list(self._dense())
        device = self.backend.shard().rows.device
        of_dense = sum((g.square().sum().to(device) for g in dense), torch.zeros((), device=device))
        squares = self.backend.dense.sum_of_parts(of_dense)
        of_rows = rows.square().sum().to(device)
        if world_size() > 1:
            dist.all_reduce(of_rows)
        norm = (squares + of_rows).sqrt()
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)  # as torch's clip_grad_norm_
        for gradient in [*dense, rows]:
            gradient.mul_(factor.to(gradient.device))

    def _any_rank(self, flag: Tensor) -> bool:
        """Whether a flag () is true on any rank."""
        found = flag.float()
        if world_size() > 1:
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return bool(found)


def _is_finite(gradients: list[Tensor]) -> Tensor:
    """() bool."""
    device = gradients[-1].device  # of the looked-up rows
    return torch.stack([g.isfinite().all().to(device) for g in gradients]).all()


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

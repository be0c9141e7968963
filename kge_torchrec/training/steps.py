"""One training step after another: TorchRec's pipeline, or the same steps in a plain loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from kge_torchrec.config import TrainConfig
from kge_torchrec.data.batches import Batch
from kge_torchrec.entities.contract import EntityEngine
from kge_torchrec.errors import KGEError
from kge_torchrec.training.update import Update


class Pipeline(Protocol):
    """Trains the next step of an iterator of micro-batches; StopIteration when all are trained."""

    def progress(self, batches: Iterator[Batch]) -> Tensor: ...


class Loop:
    """batch -> device -> forward -> backward -> step, one after another."""

    def __init__(self, engine: EntityEngine, update: Update, device: torch.device):
        self.engine, self.update, self.device = engine, update, device

    def progress(self, batches: Iterator[Batch]) -> Tensor:
        """Trains one step; returns its loss, detached."""
        return self.update.group(lambda: self._train(batches))

    def _train(self, batches: Iterator[Batch]) -> Tensor:
        batch = self.engine.prepare(next(batches)).to(self.device, non_blocking=True)
        self.update.zero_grad()
        loss, detached = self.engine.model(batch)
        loss.backward()  # FBGEMM's table steps here on CUDA, all others below
        self.update.step()
        return detached


class NotPipelined(KGEError, RuntimeError):
    """TorchRec fell back to looking entities up without the pipeline."""

    on_every_rank = True


class SparseDist:
    """TorchRec's pipeline: the next batch's ids travel while this batch is computed.

    Only ids are sent ahead, rows are looked up after the step before: training is as exact as in
    ``Loop``.  Raises NotPipelined at the first step if TorchRec could not pipeline the lookup.
    """

    def __init__(self, engine: EntityEngine, update: Update, device: torch.device):
        # It tells its optimizer of every batch, as an Update wants it.
        self._pipeline = TrainPipelineSparseDist(
            engine.model, update, device, execute_all_batches=True
        )
        self.update, self._model, self._checked = update, engine.model, False

    def progress(self, batches: Iterator[Batch]) -> Tensor:
        """Trains one step; returns its loss, detached."""
        loss = self.update.group(lambda: self._pipeline.progress(batches))
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


def build_pipeline(train: TrainConfig, engine: EntityEngine, device: torch.device) -> Pipeline:
    """What train.pipeline names; "auto" is sparse_dist where the engine can."""
    name = train.pipeline
    if name == "auto":
        name = "sparse_dist" if engine.has_sparse_dist else "loop"
    return {"sparse_dist": SparseDist, "loop": Loop}[name](engine, Update(engine, train), device)

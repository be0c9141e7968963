"""FBGEMM's table: its steps counted and taken from outside, and a form that steps when told to.

FBGEMM's kernel steps inside the backward of a lookup.  That is the fastest way, but whoever wants
to sum several backward passes or to clip their sum comes too late.  ``DeferredEmbedding`` keeps
what reaches this rank instead, and steps once, with one lookup and backward of all of it.

Shapes: n rows on this rank, D numbers a row, M gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.batched_embedding_kernel import (
    BatchedFusedEmbedding,
    EmbeddingFusedOptimizer,
)
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig

from kge_torchrec.entities.row_gradients import PendingGradients, RowGradients, recorded_lookup


def steps_taken(table: nn.Module) -> int:
    """Number of optimizer steps that FBGEMM's table has counted; no state_dict holds it."""
    # FBGEMM corrects the Adams' bias with the copy on the host, which can be read without waiting.
    return int(table.iter_cpu.item() or table.iter.item())


def set_steps_taken(table: nn.Module, steps: int) -> None:
    """Sets what ``steps_taken`` reads, without waiting for the device."""
    table.iter.fill_(steps)
    table.iter_cpu.fill_(steps)


def step_rows(table: nn.Module, gradients: Iterable[RowGradients]) -> None:
    """One step of FBGEMM's optimizer, with gradients in parts; no row is in two of them.

    Those of a row within a part are summed.
    """
    step = steps_taken(table)
    for part in gradients:
        if part.ids.numel() == 0:
            continue
        set_steps_taken(table, step)  # every lookup counts as one
        # a bag each, as each has a warp
        offsets = torch.arange(part.ids.numel() + 1, device=part.ids.device)
        with torch.enable_grad():
            rows = table(indices=part.ids, offsets=offsets)
        rows.backward(part.grad.to(rows.dtype))
    set_steps_taken(table, step + 1)


class DeferredEmbedding(BatchedFusedEmbedding):
    """TorchRec's kernel around FBGEMM's table, with gradients kept for the optimizer's step.

    All gradients since the last step are one sum, so that accumulating, clipping and scaling are
    exact.  It takes (M, D) numbers more memory and one more pass over the rows of a batch.
    """

    def __init__(self, config: GroupedEmbeddingConfig, pg=None, device=None) -> None:
        super().__init__(config, pg, device)
        self.pending = PendingGradients()
        self._optim = _StepsWhenTold(config, self._emb_module, pg, self.pending)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """(M, D) rows of the local ids."""
        (rows,) = self.split_embedding_weights()
        return recorded_lookup(rows.detach(), features.values(), self.pending)


class _StepsWhenTold(EmbeddingFusedOptimizer):
    def __init__(
        self, config: GroupedEmbeddingConfig, table: nn.Module, pg: Any, pending: PendingGradients
    ) -> None:
        super().__init__(config, table, pg)
        self._table, self._pending = table, pending

    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none)
        self._pending.clear()

    def step(self, closure: Any = None) -> None:
        super().step(closure)  # gives the table its learning rate
        if self._pending:
            step_rows(self._table, [self._pending.take()])

"""The entity table on CPU, a replacement for FBGEMM's table op.

FBGEMM's CPU op supports neither Adam nor tables without rows.  This module implements the part of
``SplitTableBatchedEmbeddingBagsCodegen`` that TorchRec uses, for one table.

Shapes: n rows on this rank, D elements per row, M ids.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from torch import Tensor, nn

from kge_torchrec.embeddings.init import zeros_on_huge_pages
from kge_torchrec.embeddings.optimizers import TableOptimizer
from kge_torchrec.embeddings.row_gradients import (
    PendingGradients,
    RowGradients,
    recorded_lookup,
    step_rows,
)
from kge_torchrec.kernels.row_updates import update_rows


class CpuFusedTable(nn.Module):
    """A table of n rows whose optimizer runs in ``step``, not in backward.

    All gradients since the last step form one sum, so accumulating, clipping and scaling are exact.
    FBGEMM counts every lookup as an iteration.  This table counts steps, so lookups between steps,
    as in ranking, change nothing.
    """

    weights_host: Tensor

    def __init__(self, num_rows: int, dim: int, optimizer: TableOptimizer) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.learning_rate = optimizer.lr
        self.iteration = 0
        # TorchRec slices the table itself and expects it flat, under FBGEMM's names.
        self.embedding_specs = [(num_rows, dim, EmbeddingLocation.HOST, None)]
        self.weights_physical_offsets = [0]
        self.weights_precision = SparseType.FP32
        weights = zeros_on_huge_pages(num_rows * dim)
        self.register_buffer("weights_host", weights, persistent=False)
        for name, rowwise in optimizer.kind.states:
            shape = (num_rows,) if rowwise else (num_rows, dim)
            self.register_buffer(name, zeros_on_huge_pages(*shape), persistent=False)
        self.pending = PendingGradients()

    @property
    def rows(self) -> Tensor:
        """The table as an (n, D) view."""
        num_rows, dim, *_ = self.embedding_specs[0]
        return self.weights_host.view(num_rows, dim)

    def forward(self, indices: Tensor, offsets: Tensor | None = None) -> Tensor:
        """Look up rows.

        Args:
            indices: (M,) local ids.
            offsets: Ignored; part of FBGEMM's interface.

        Returns:
            (M, D).

        Raises:
            IndexError: An id is outside [0, n).
        """
        return recorded_lookup(self.rows, indices, self.pending)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that no step has used."""
        self.pending.clear()

    def step(self) -> None:
        """Step the rows looked up since the last step, if there was a backward."""
        if self.pending:
            self.iteration += 1
            self.update(self.pending.take())

    def step_rows(self, gradients: Iterable[RowGradients]) -> None:
        """Take one step with gradients of distinct rows, in parts, without a lookup."""
        self.iteration += 1
        for part in gradients:
            self.update(part.without(self.pending.frozen))

    @torch.no_grad()
    def update(self, gradients: RowGradients) -> None:
        """Run the optimizer's step number ``iteration``."""
        numbers = self.optimizer, self.learning_rate, self.iteration
        step = update_rows if self.optimizer.is_ours else step_rows
        step(*numbers, gradients.ids, gradients.grad, self.rows, *self._states().values())

    def _states(self) -> dict[str, Tensor]:
        return {name: self.get_buffer(name) for name, _ in self.optimizer.kind.states}

    # The interface to TorchRec's kernel wrapper and its EmbeddingFusedOptimizer.

    def split_embedding_weights(self) -> list[Tensor]:
        return [self.rows]

    def get_optimizer_state(self) -> list[dict[str, Tensor]]:
        states = self._states()
        return [states] if states else []  # like FBGEMM: no entry for sgd, which has no state

    def get_learning_rate(self) -> float:
        return self.learning_rate

    def set_learning_rate(self, lr: float) -> None:
        self.learning_rate = float(lr)

    def set_optimizer_step(self, step: int) -> None:
        self.iteration = int(step)

    def flush(self) -> None:
        """Do nothing: there is no cache."""

    def reset_cache_states(self) -> None:
        """Do nothing: there is no cache."""

"""The entity table on CPU, in place of FBGEMM's table op.

FBGEMM's CPU op has neither Adam nor tables without rows.  This one has the part of
``SplitTableBatchedEmbeddingBagsCodegen`` that TorchRec touches, for one table.

Shapes: n rows on this rank, D numbers a row, M ids.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from torch import Tensor, nn

from kge_torchrec.entities.row_gradients import RowGradients
from kge_torchrec.entities.row_update import update_rows
from kge_torchrec.entities.table_optimizer import TableOptimizer

# Names as FBGEMM gives them to the optimizer's states.  A state is (n, D), or (n,) if row-wise.
_STATES = {
    "adam": {"exp_avg": False, "exp_avg_sq": False},
    "rowwise_adam": {"exp_avg": False, "exp_avg_sq": True},
    "adagrad": {"sum": False},
    "rowwise_adagrad": {"sum": True},
    "sgd": {},
}


class _Lookup(torch.autograd.Function):
    """Rows in forward, one optimizer step on those rows in backward."""

    @staticmethod
    def forward(ctx, anchor: Tensor, table: CpuFusedTable, ids: Tensor, step: int) -> Tensor:
        ctx.table, ctx.step = table, step
        ctx.save_for_backward(ids)
        return table.rows.index_select(0, ids)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        (ids,) = ctx.saved_tensors
        ctx.table.update(ids, grad, ctx.step)
        return None, None, None, None


class CpuFusedTable(nn.Module):
    """A table of n rows whose optimizer steps in backward.

    Unlike FBGEMM, which counts every lookup as an iteration, this counts those that are going to
    be trained (gradients enabled), so ranking in the middle of training changes nothing.
    """

    def __init__(self, num_rows: int, dim: int, optimizer: TableOptimizer) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.learning_rate = optimizer.lr
        self.iteration = 0
        # TorchRec slices the table itself and wants it flat, under FBGEMM's names.
        self.embedding_specs = [(num_rows, dim, EmbeddingLocation.HOST, None)]
        self.weights_physical_offsets = [0]
        self.weights_precision = SparseType.FP32
        weights = torch.empty(num_rows * dim)
        self.register_buffer("weights_host", weights, persistent=False)
        for name, rowwise in _STATES[optimizer.name].items():
            state = torch.zeros(num_rows) if rowwise else torch.zeros(num_rows, dim)
            self.register_buffer(name, state, persistent=False)
        self._anchor = torch.empty(0, requires_grad=True)  # makes autograd call our backward

    @property
    def rows(self) -> Tensor:
        """(n, D) view of the table."""
        num_rows, dim, *_ = self.embedding_specs[0]
        return self.weights_host.view(num_rows, dim)

    def forward(self, indices: Tensor, offsets: Tensor | None = None) -> Tensor:
        """(M, D) rows of the local ids (M,); ``offsets`` says nothing for a single table.

        Raises IndexError on an id outside [0, n).
        """
        if not torch.is_grad_enabled():
            return self.rows.index_select(0, indices)
        self.iteration += 1
        return _Lookup.apply(self._anchor, self, indices, self.iteration)

    def step_rows(self, gradients: Iterable[RowGradients]) -> None:
        """One step with gradients of distinct rows that no lookup brought, in parts."""
        self.iteration += 1
        for part in gradients:
            self.update(part.ids, part.grad, self.iteration)

    @torch.no_grad()
    def update(self, ids: Tensor, grad: Tensor, step: int) -> None:
        """The optimizer's step number ``step`` with the gradients (M, D) of the local ids (M,)."""
        states = self._states().values()
        update_rows(self.optimizer, self.learning_rate, step, ids, grad, self.rows, *states)

    def _states(self) -> dict[str, Tensor]:
        return {name: self.get_buffer(name) for name in _STATES[self.optimizer.name]}

    # What TorchRec's kernel wrapper and its EmbeddingFusedOptimizer call.

    def split_embedding_weights(self) -> list[Tensor]:
        return [self.rows]

    def get_optimizer_state(self) -> list[dict[str, Tensor]]:
        states = self._states()
        return [states] if states else []  # as FBGEMM: stateless sgd has no entry for its table

    def get_learning_rate(self) -> float:
        return self.learning_rate

    def set_learning_rate(self, lr: float) -> None:
        self.learning_rate = float(lr)

    def set_optimizer_step(self, step: int) -> None:
        self.iteration = int(step)

    def flush(self) -> None:
        """Nothing is cached."""

    def reset_cache_states(self) -> None:
        """Nothing is cached."""

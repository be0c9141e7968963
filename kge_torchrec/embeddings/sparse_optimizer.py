"""The sparse optimizer of the hand-rolled table: it steps only rows that have a gradient.

``entities.preset`` names the system whose optimizer it imitates:

    fbgemm  FBGEMM's fused kernels; with it both engines give the same parameters
    dicee   dice-embeddings' sparse Adam: each shard counts the steps in which it had rows, epsilon
            is added before the bias of the second moment is corrected (as torch's SparseAdam does),
            moments are kept in bfloat16 in main memory, the step runs in a thread
    dgl     DGL's distributed SparseAdam and SparseAdagrad: the mean over duplicates, a step count
            per row, epsilon inside Adagrad's root

The formulas are those of ``kernels.rows``.  On a CPU, fbgemm uses the fused kernel of that file.
Everything else uses torch operations on a bounded number of rows at a time.  Each preset counts
steps with the arithmetic of its system:

    fbgemm  betas and their powers in float32
    dicee   betas and their powers in float64
    dgl     betas in float64, their powers in float32

Shapes: n rows on this rank, D elements per row, M gradients, U distinct rows among them, u rows at
a time, K state elements per row (D, or 1 if the state is row-wise).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.embeddings.init import zeros_on_huge_pages
from kge_torchrec.embeddings.optimizers import TableOptimizer
from kge_torchrec.embeddings.row_gradients import RowGradients
from kge_torchrec.embeddings.row_gradients import step_rows as step_foreign_rows
from kge_torchrec.kernels.rows import update_rows

# On a CPU the temporaries of a chunk should fit in the cache; on a GPU they only need to be small.
_CHUNK_ROWS = {"cpu": 2048, "cuda": 1 << 16}


class SparseOptimizer:
    """Updates this rank's rows of the entity table in place.

    Args:
        optimizer: The optimizer and its constants.
        preset: fbgemm, dicee or dgl.
        rows: (n, D) float32, the memory of the table; n may be 0.

    Attributes:
        lr: Learning rate of the next step, initially the optimizer's.
        steps: Number of steps so far.  With dicee, only steps in which this shard had gradients
            count.  Set it to resume.
        states: Tensors to save with the table, by FBGEMM's names, initially zeros.  Write into them
            to resume.  ``momentum1`` is (n, D), or (n,) for rowwise_adagrad.  ``exp_avg_sq`` is
            (n, D), or (n,) for rowwise_adam.  ``row_step`` is (n,) int32, the steps of each row,
            for Adam with dgl.
        fused: Whether the kernel of ``kernels.rows`` takes the steps.
        chunk_rows: Rows at a time without the fused kernel.  Results do not depend on it.
    """

    def __init__(self, optimizer: TableOptimizer, preset: str, rows: Tensor) -> None:
        self.optimizer, self.preset = optimizer, preset
        self.rows = rows.detach()
        self.lr = optimizer.lr
        self.steps = 0
        self.device = torch.device("cpu") if preset == "dicee" else rows.device
        self.states = self._new_states()
        self.fused = optimizer.is_ours and rows.device.type == "cpu" and preset == "fbgemm"
        self.chunk_rows = _CHUNK_ROWS[self.device.type]
        rounded = (float(np.float32(beta)) for beta in optimizer.betas)
        betas = rounded if preset == "fbgemm" else optimizer.betas
        self._decays = [(beta, 1 - beta) for beta in betas]

    def count(self, has_rows: bool) -> None:
        """Count one step; with dicee only a step in which there are rows."""
        if has_rows or self.preset != "dicee":
            self.steps += 1

    @torch.no_grad()
    def step_part(self, part: RowGradients) -> None:
        """Take a part of the step that was counted last.  Rows without a gradient do not change.

        The parts of a step have no row in common.
        """
        ids, grad, occurrences, distinct = part
        if len(ids) == 0:
            return
        if self.fused or not self.optimizer.is_ours:
            states = self.states.values()
            step_rows = update_rows if self.fused else step_foreign_rows
            step_rows(self.optimizer, self.lr, self.steps, ids, grad.float(), self.rows, *states)
            return
        for rows, total in self._row_gradients(ids, grad, occurrences, distinct):
            self._update(rows, total)

    def _new_states(self) -> dict[str, Tensor]:
        n, dim = self.rows.shape
        dtype = torch.bfloat16 if self.preset == "dicee" else torch.float32
        states = {
            name: zeros_on_huge_pages(
                *((n,) if rowwise else (n, dim)), dtype=dtype, device=self.device
            )
            for name, rowwise in self.optimizer.kind.saved_states()
        }
        if self.optimizer.kind.corrects_bias and self.preset == "dgl":
            states["row_step"] = zeros_on_huge_pages(n, dtype=torch.int32, device=self.device)
        return states

    # Gradients: one per row

    def _row_gradients(
        self, ids: Tensor, grad: Tensor, occurrences: Tensor | None, distinct: bool
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield distinct rows (u,) and their gradients (u, D), chunk by chunk."""
        if not distinct:
            ids, grad, occurrences = self._sum_duplicates(ids, grad, occurrences)
        for part in self._chunks(len(ids)):
            total = grad[part].float()
            if occurrences is not None:
                total = total / occurrences[part].unsqueeze(1)
            yield ids[part], total

    def _sum_duplicates(
        self, ids: Tensor, grad: Tensor, occurrences: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return rows (U,), sums of gradients (U, D) and, for the mean, occurrences (U,).

        On a CPU, gradients are added in the order of ``ids``.
        """
        rows, inverse = torch.unique(ids, return_inverse=True)
        total = torch.zeros(len(rows), grad.shape[1], device=grad.device)
        for part in self._chunks(len(ids)):
            total.index_add_(0, inverse[part], grad[part].float())
        if self.preset != "dgl":
            return rows, total, None
        places = torch.ones_like(ids) if occurrences is None else occurrences.long()
        return rows, total, torch.zeros_like(rows).index_add_(0, inverse, places)

    def _chunks(self, count: int) -> Iterator[slice]:
        for start in range(0, count, self.chunk_rows):
            yield slice(start, start + self.chunk_rows)

    # The step.  It avoids fused multiply-adds (addcmul, alpha=...): torch rounds them once or
    # twice, depending on the processor.

    def _update(self, rows: Tensor, grad: Tensor) -> None:
        """Update distinct rows (u,) with their gradients (u, D)."""
        grad = grad.to(self.device)
        decayed = None
        if self.optimizer.weight_decay:
            weights = self.rows.index_select(0, rows).to(self.device)
            decayed = weights.mul_(self.optimizer.weight_decay)
            if self.optimizer.kind.weight_decay == "l2":
                grad = grad + decayed
        change = self._change(rows.to(self.device), grad)
        if decayed is not None and self.optimizer.kind.weight_decay == "decoupled":
            change += decayed
        self.rows.index_add_(0, rows, (change * -self.lr).to(self.rows.device))

    def _change(self, rows: Tensor, grad: Tensor) -> Tensor:
        """Update the states and return the direction (u, D): the change is -lr times it."""
        if self.optimizer.kind.corrects_bias:
            return self._adam(rows, grad)
        if self.optimizer.kind.states:
            total = self._read("momentum1", rows).add_(self._square(grad))
            self._write("momentum1", rows, total)
            return grad / self._root(total)
        return grad

    def _adam(self, rows: Tensor, grad: Tensor) -> Tensor:
        (beta1, rest1), (beta2, rest2) = self._decays
        m = self._read("momentum1", rows).mul_(beta1).add_(grad * rest1)
        v = self._read("exp_avg_sq", rows).mul_(beta2).add_(self._square(grad).mul_(rest2))
        self._write("momentum1", rows, m)
        self._write("exp_avg_sq", rows, v)
        correction1, correction2 = self._corrections(rows)
        if self.preset == "dicee":
            return m.div_(self._root(v)).mul_(correction2**0.5 / correction1)
        return m.div_(correction1).div_(self._root(v.div_(correction2)))

    def _square(self, grad: Tensor) -> Tensor:
        """Return the squared gradient, (u, D), or its mean over the row, (u, 1)."""
        square = grad.square()
        by_row = self.optimizer.kind.states[-1].by_row
        return square.mean(1, keepdim=True) if by_row else square

    def _root(self, squares: Tensor) -> Tensor:
        """Return the square root with epsilon inside or outside; overwrites ``squares``."""
        if self.preset == "dgl" and not self.optimizer.kind.corrects_bias:
            return squares.add_(self.optimizer.eps).sqrt_()
        return squares.sqrt_().add_(self.optimizer.eps)

    def _corrections(self, rows: Tensor) -> list[float] | list[Tensor]:
        """Return 1 - beta^t for both betas: numbers, or (u, 1) if rows count their own steps."""
        if self.preset == "dicee":
            return [1 - beta**self.steps for beta in self.optimizer.betas]
        if self.preset == "fbgemm":
            step = np.float32(self.steps)
            return [1 - float(np.power(np.float32(beta), step)) for beta in self.optimizer.betas]
        counts = self.states["row_step"].index_select(0, rows).add_(1)
        self.states["row_step"].index_copy_(0, rows, counts)
        # torch computes the end of a tensor with a different routine, and float32 powers of the
        # two differ in the last bit.  Powers in float64, then rounded, are the same.
        bases = (float(np.float32(beta)) for beta in self.optimizer.betas)
        powers = (torch.pow(base, counts.double()).float() for base in bases)
        return [(1 - power).unsqueeze(1) for power in powers]

    # States

    def _read(self, name: str, rows: Tensor) -> Tensor:
        """Return a float32 copy (u, K) of a state."""
        return self.states[name].index_select(0, rows).float().view(len(rows), -1)

    def _write(self, name: str, rows: Tensor, values: Tensor) -> None:
        state = self.states[name]
        state.index_copy_(0, rows, values.to(state.dtype).view(-1, *state.shape[1:]))

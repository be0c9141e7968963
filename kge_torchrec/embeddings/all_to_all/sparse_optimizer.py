"""The sparse optimizer of the hand-rolled table: it steps only rows that have a gradient.

The formulas are those of ``kernels.rows``, with the variants of ``SparseOptions``.  FBGEMM's
variants on a CPU table use the fused kernel of that file.  All other variants use torch operations
on a bounded number of rows at a time.  Each way to count steps uses the arithmetic of the system
that it comes from:

    table  FBGEMM           betas and their powers in float32
    shard  dice-embeddings  betas and their powers in float64
    row    DGL              betas in float64, their powers in float32

bfloat16 states use stochastic rounding (Gupta et al., Deep Learning with Limited Numerical
Precision, 2015): a value is rounded up or down at random, and the expected result is the value.
Rounding to nearest would lose every change below half the distance between two neighbors; with
beta 0.999, a second moment would stop at a quarter of its value.

The random bits are a function of (step, state, global row, column), not a stream.  Results
therefore do not depend on ranks, chunks or device, nor on a resume.  The function is SplitMix64
(Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014), which computes any
element of its sequence directly.

Shapes: n rows on this rank, D elements per row, M gradients, U distinct rows among them, u rows at
a time, K state elements per row (D, or 1 if the state is row-wise).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.config.sparse_options import SparseOptions
from kge_torchrec.embeddings.init import zeros_on_huge_pages
from kge_torchrec.embeddings.optimizers import TableOptimizer
from kge_torchrec.embeddings.row_gradients import RowGradients
from kge_torchrec.embeddings.row_gradients import step_rows as step_foreign_rows
from kge_torchrec.kernels.random_formulas import mix_, signed
from kge_torchrec.kernels.rows import update_rows

_ROUNDED = ("momentum1", "exp_avg_sq")  # a state's index here is an input of its random bits

# On a CPU the temporaries of a chunk should fit in the cache; on a GPU they only need to be small.
_CHUNK_ROWS = {"cpu": 2048, "cuda": 1 << 16}


class SparseOptimizer:
    """Updates this rank's rows of the entity table in place.

    Args:
        optimizer: The optimizer and its constants.
        options: How the optimizer differs from FBGEMM's.
        rows: (n, D) float32, the memory of the table; n may be 0.
        first_row: Global id of ``rows[0]``, an input of stochastic rounding.

    Attributes:
        lr: Learning rate of the next step, initially the optimizer's.
        steps: Number of steps so far.  With ``bias_correction`` shard, only steps in which this
            shard had gradients count.  Set it to resume.
        states: Tensors to save with the table, by FBGEMM's names, initially zeros.  Write into them
            to resume.  ``momentum1`` is (n, D), or (n,) for rowwise_adagrad.  ``exp_avg_sq`` is
            (n, D), or (n,) for rowwise_adam.  ``row_step`` is (n,) int32, the steps of each row,
            for Adam variants with ``bias_correction`` row.
        fused: Whether the kernel of ``kernels.rows`` takes the steps.
        chunk_rows: Rows at a time without the fused kernel.  Results do not depend on it.
    """

    def __init__(
        self, optimizer: TableOptimizer, options: SparseOptions, rows: Tensor, first_row: int = 0
    ) -> None:
        self.optimizer = optimizer
        self.options = options
        self.rows = rows.detach()
        self.first_row = first_row
        self.lr = optimizer.lr
        self.steps = 0
        self.device = torch.device("cpu") if options.state_device == "cpu" else rows.device
        self.states = self._new_states()
        self.fused = optimizer.is_ours and rows.device.type == "cpu" and _is_fbgemms(options)
        self.chunk_rows = _CHUNK_ROWS[self.device.type]
        self._decays = _decays(optimizer.betas, options.bias_correction)

    def step(
        self, ids: Tensor, grad: Tensor, occurrences: Tensor | None = None, distinct: bool = False
    ) -> None:
        """Take one step on the rows that have a gradient.  Other rows do not change.

        Args:
            ids: (M,) int64, the row of each gradient, in [0, n).  With M = 0 the step changes no
                row but may be counted, see ``steps``.
            grad: (M, D), on the device of the table.
            occurrences: (M,) integers, the number of batch positions that each gradient is the sum
                of.  ``duplicates`` mean divides by it.  None: one each.
            distinct: Whether every row occurs only once.
        """
        self.count(bool(len(ids)))
        self.step_part(RowGradients(ids, grad, occurrences, distinct))

    def count(self, has_rows: bool) -> None:
        """Count one step; with ``bias_correction`` shard only a step in which there are rows."""
        if has_rows or self.options.bias_correction != "shard":
            self.steps += 1

    @torch.no_grad()
    def step_part(self, part: RowGradients) -> None:
        """Take a part of the step that was counted last; its parts have no row in common."""
        ids, grad, occurrences, distinct = part
        if len(ids) == 0:
            return
        if self.fused or not self.optimizer.is_ours:
            states = self.states.values()
            step_rows = update_rows if self.fused else step_foreign_rows
            step_rows(self.optimizer, self.lr, self.steps, ids, grad.float(), self.rows, *states)
            return
        if self.options.duplicates == "sum":
            occurrences = None
        for rows, total in self._row_gradients(ids, grad, occurrences, distinct):
            self._update(rows, total)

    def _new_states(self) -> dict[str, Tensor]:
        n, dim = self.rows.shape
        dtype = torch.bfloat16 if self.options.state_dtype == "bf16" else torch.float32
        states = {
            name: zeros_on_huge_pages(
                *((n,) if rowwise else (n, dim)), dtype=dtype, device=self.device
            )
            for name, rowwise in self.optimizer.kind.saved_states()
        }
        if self.optimizer.kind.corrects_bias and self.options.bias_correction == "row":
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
        if self.options.duplicates == "sum":
            return rows, total, None
        places = torch.ones_like(ids) if occurrences is None else occurrences.long()
        return rows, total, torch.zeros_like(rows).index_add_(0, inverse, places)

    def _chunks(self, count: int) -> Iterator[slice]:
        for start in range(0, count, self.chunk_rows):
            yield slice(start, start + self.chunk_rows)

    # The step.  It avoids fused multiply-adds (addcmul, alpha=...): torch rounds them once or
    # twice, depending on the processor, and bfloat16 rounding can amplify the difference.

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
        if self.options.epsilon == "uncorrected":
            return m.div_(self._root(v)).mul_(correction2**0.5 / correction1)
        return m.div_(correction1).div_(self._root(v.div_(correction2)))

    def _square(self, grad: Tensor) -> Tensor:
        """Return the squared gradient, (u, D), or its mean over the row, (u, 1)."""
        square = grad.square()
        by_row = self.optimizer.kind.states[-1].by_row
        return square.mean(1, keepdim=True) if by_row else square

    def _root(self, squares: Tensor) -> Tensor:
        """Return the square root with epsilon inside or outside; overwrites ``squares``."""
        if self.options.epsilon == "inside":
            return squares.add_(self.optimizer.eps).sqrt_()
        return squares.sqrt_().add_(self.optimizer.eps)

    def _corrections(self, rows: Tensor) -> list[float] | list[Tensor]:
        """Return 1 - beta^t for both betas: numbers, or (u, 1) if rows count their own steps."""
        if self.options.bias_correction == "shard":
            return [1 - beta**self.steps for beta in self.optimizer.betas]
        if self.options.bias_correction == "table":
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
        if state.dtype == torch.bfloat16 and self.options.state_rounding == "stochastic":
            places = rows + self.first_row, self.steps, _ROUNDED.index(name)
            values = round_stochastically(values, *places)
        state.index_copy_(0, rows, values.to(state.dtype).view(-1, *state.shape[1:]))


def _is_fbgemms(options: SparseOptions) -> bool:
    semantics = options.duplicates, options.bias_correction, options.epsilon, options.state_dtype
    return semantics == ("sum", "table", "outside", "fp32")


def _decays(betas: tuple[float, float], counting: str) -> list[tuple[float, float]]:
    """Return (beta, 1 - beta) for both betas."""
    if counting == "table":
        return [(beta, 1 - beta) for beta in (float(np.float32(beta)) for beta in betas)]
    return [(beta, 1 - beta) for beta in betas]


_GAMMA = signed(0x9E3779B97F4A7C15)
_UPPER_HALF = signed(0xFFFFFFFFFFFF0000)  # clears the bits of a float32 that bfloat16 drops


def _split_mix(start: Tensor, index: Tensor) -> Tensor:
    """Return element ``index`` (from 0) of SplitMix64 seeded with ``start``; int64, broadcast."""
    return mix_(start + (index + 1) * _GAMMA)


def random_bits(rows: Tensor, columns: int, step: int, state: int) -> Tensor:
    """Return independent uniform random integers in [0, 65536).

    Args:
        rows: (u,) int64, global ids of the rows.
        columns: K.
        step: Number of the optimizer's step.
        state: Index of the state within its optimizer.

    Returns:
        (u, K) int32 on the device of ``rows``.
    """
    key = _split_mix(torch.tensor(0), torch.tensor(step))
    key = _split_mix(key, torch.tensor(state))
    row_keys = _split_mix(key, rows)
    # Each 64-bit number provides 16 bits for four columns.
    index = torch.arange(-(-columns // 4), device=rows.device)
    quarters = _split_mix(row_keys.unsqueeze(1), index).view(torch.int16)
    return quarters[:, :columns].to(torch.int32).bitwise_and_(0xFFFF)


def round_stochastically(values: Tensor, rows: Tensor, step: int, state: int) -> Tensor:
    """Round float32 values (u, K) to bfloat16 stochastically.

    Values that bfloat16 represents exactly, infinities and NaN do not change.  Beyond the largest
    bfloat16, 3.39e38, the upper neighbor is infinity, as with rounding to nearest.  See
    ``random_bits`` for the other arguments.
    """
    bits = values.view(torch.int32) + random_bits(rows, values.shape[1], step, state)
    rounded = bits.bitwise_and_(_UPPER_HALF).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)

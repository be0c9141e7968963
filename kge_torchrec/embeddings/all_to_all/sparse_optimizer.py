"""Own sparse optimizer: one step on the rows that have a gradient, and on no other.

The formulas are those of ``row_updates``, with the choices of ``SparseOptions``.  FBGEMM's own
choices on a CPU table take the fused kernel of that file; all else is torch operations, a bounded
number of rows at a time.  Each way to count steps comes with the arithmetic of the system that
counts so:

    table  FBGEMM           betas and their powers in float32
    shard  dice-embeddings  betas and their powers in float64
    row    DGL              betas in float64, their powers in float32

A state in bfloat16 is rounded up or down at random, such that the mean is the number itself.
Rounding to the nearest loses every change that is smaller than half the distance between two
neighbours; with a beta of 0.999 a second moment then stops at a quarter of its value.  Here a
number between two neighbours goes to the upper one with the probability that its place between
them says, so small changes arrive on average (Gupta et al., Deep Learning with Limited Numerical
Precision, 2015).  The random bits are no stream that is drawn one after another but a function of
where they are used: (step, which state, global row, column).  The same run on other ranks, in other
chunks, on another device or after a resume therefore rounds the same way.  That function is
SplitMix64 (Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014), of which
any number can be computed without those before it.

Shapes: n rows on this rank, D numbers a row, M gradients, U distinct rows among them, u rows at a
time, K numbers of a state per row: D, or 1 if it is row-wise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.config.sparse_options import SparseOptions
from kge_torchrec.embeddings.foreign_optimizer import step_rows as step_foreign_rows
from kge_torchrec.embeddings.init import zeros_on_huge_pages
from kge_torchrec.embeddings.optimizers import TableOptimizer
from kge_torchrec.embeddings.pending import RowGradients
from kge_torchrec.kernels.row_updates import update_rows

_ROUNDED = ("momentum1", "exp_avg_sq")  # the place is the state's number in the random bits

# On a CPU what a pass computes should stay in the cache; on a GPU it only has to stay small.
_CHUNK_ROWS = {"cpu": 2048, "cuda": 1 << 16}


class SparseOptimizer:
    """Steps this rank's rows of the entity table in place.

    Args:
        optimizer: which optimizer, and its constants.
        options: how it differs from FBGEMM's.
        rows: (n, D) float32, the table's own memory; n may be 0.
        first_row: global number of ``rows[0]``; stochastic rounding depends on it.

    Attributes:
        lr: learning rate of the next step, at first the optimizer's.
        steps: steps so far: those that this shard had rows in for ``bias_correction`` shard, all
            of them otherwise.  Set it to resume.
        states: what to keep with the table, by FBGEMM's names, zeros at first: ``momentum1``
            (n, D), for rowwise_adagrad (n,); ``exp_avg_sq`` (n, D), for rowwise_adam (n,);
            ``row_step`` (n,) int32, steps of each row, of the Adams with ``bias_correction`` row.
            Write into them to resume.
        fused: whether the kernel of ``row_updates`` takes the steps.
        chunk_rows: rows at a time where it does not; no result depends on it.

    Raises ValueError when ``rows`` is not a matrix of float32.
    """

    def __init__(
        self, optimizer: TableOptimizer, options: SparseOptions, rows: Tensor, first_row: int = 0
    ) -> None:
        if rows.dim() != 2 or rows.dtype != torch.float32:
            raise ValueError(f"rows: {tuple(rows.shape)} {rows.dtype} is not (n, D) float32")
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

    @torch.no_grad()
    def step(
        self,
        ids: Tensor,
        grad: Tensor,
        occurrences: Tensor | None = None,
        distinct: bool = False,
    ) -> None:
        """One step on the rows that have a gradient; all others keep every bit.

        Args:
            ids: (M,) int64, the row of each gradient, in [0, n); M may be 0, which is counted
                (or not) and changes nothing else.
            grad: (M, D), on the device of the table.
            occurrences: (M,) integers: how many places of the batch each gradient is the sum of,
                which ``duplicates`` mean divides by; None: one each.
            distinct: no row occurs twice, so nobody has to look.

        Raises ValueError when the shapes disagree.
        """
        self._check(ids, grad, occurrences)
        self._count(bool(len(ids)))
        self._step_rows(ids, grad, occurrences, distinct)

    @torch.no_grad()
    def step_parts(self, parts: Iterable[RowGradients]) -> None:
        """The same with gradients that come in parts, no row in two of them: one step in all."""
        self._count(bool(len(self.rows)))
        for part in parts:
            self._check(part.ids, part.grad, part.occurrences)
            self._step_rows(*part)

    def _count(self, has_rows: bool) -> None:
        if has_rows or self.options.bias_correction != "shard":
            self.steps += 1

    def _step_rows(
        self, ids: Tensor, grad: Tensor, occurrences: Tensor | None, distinct: bool
    ) -> None:
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

    def _check(self, ids: Tensor, grad: Tensor, occurrences: Tensor | None) -> None:
        expected = (len(ids), self.rows.shape[1])
        if grad.shape != expected:
            raise ValueError(f"grad: {tuple(grad.shape)} is not {expected}, ids by columns")
        if occurrences is not None and occurrences.shape != ids.shape:
            raise ValueError(
                f"occurrences: {tuple(occurrences.shape)} is not {tuple(ids.shape)}, that of ids"
            )

    def _new_states(self) -> dict[str, Tensor]:
        n, dim = self.rows.shape
        dtype = torch.bfloat16 if self.options.state_dtype == "bf16" else torch.float32
        states = {
            name: zeros_on_huge_pages(
                *((n,) if rowwise else (n, dim)), dtype=dtype, device=self.device
            )
            for name, rowwise in _saved_states(self.optimizer)
        }
        if self.optimizer.kind.corrects_bias and self.options.bias_correction == "row":
            states["row_step"] = zeros_on_huge_pages(n, dtype=torch.int32, device=self.device)
        return states

    # Gradients: one a row

    def _row_gradients(
        self, ids: Tensor, grad: Tensor, occurrences: Tensor | None, distinct: bool
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Some distinct rows (u,) at a time with their gradients (u, D)."""
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
        """(U,) rows, (U, D) sums and, for the mean, (U,) the places that they come from.

        On a CPU gradients are added in the order they came.
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

    # The step.  No multiply-add in one operation (addcmul, alpha=...): torch rounds once or twice
    # in those, depending on the processor, and a bfloat16 state shows a last bit as a whole step.

    def _update(self, rows: Tensor, grad: Tensor) -> None:
        """Moves distinct rows (u,) that have the gradients (u, D)."""
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
        """(u, D) what the learning rate multiplies; updates the states."""
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
        """(u, K) the square of the gradient, or its mean over the row."""
        square = grad.square()
        by_row = self.optimizer.kind.states[-1].by_row
        return square.mean(1, keepdim=True) if by_row else square

    def _root(self, squares: Tensor) -> Tensor:
        """The root with its epsilon; writes over ``squares``."""
        if self.options.epsilon == "inside":
            return squares.add_(self.optimizer.eps).sqrt_()
        return squares.sqrt_().add_(self.optimizer.eps)

    def _corrections(self, rows: Tensor) -> list[float] | list[Tensor]:
        """1 - beta^t of both betas: numbers, or (u, 1) when each row counts its own steps."""
        if self.options.bias_correction == "shard":
            return [1 - beta**self.steps for beta in self.optimizer.betas]
        if self.options.bias_correction == "table":
            step = np.float32(self.steps)
            return [1 - float(np.power(np.float32(beta), step)) for beta in self.optimizer.betas]
        counts = self.states["row_step"].index_select(0, rows).add_(1)
        self.states["row_step"].index_copy_(0, rows, counts)
        # In float64, then rounded: torch computes the end of a chunk by another routine, and the
        # two differ in the last bit of a power.
        bases = (float(np.float32(beta)) for beta in self.optimizer.betas)
        powers = (torch.pow(base, counts.double()).float() for base in bases)
        return [(1 - power).unsqueeze(1) for power in powers]

    # States

    def _read(self, name: str, rows: Tensor) -> Tensor:
        """(u, K) float32, a copy."""
        return self.states[name].index_select(0, rows).float().view(len(rows), -1)

    def _write(self, name: str, rows: Tensor, values: Tensor) -> None:
        state = self.states[name]
        if state.dtype == torch.bfloat16 and self.options.state_rounding == "stochastic":
            places = rows + self.first_row, self.steps, _ROUNDED.index(name)
            values = round_stochastically(values, *places)
        state.index_copy_(0, rows, values.to(state.dtype).view(-1, *state.shape[1:]))


def _saved_states(optimizer: TableOptimizer) -> list[tuple[str, bool]]:
    """Names of the states in a checkpoint, whether they have one number per row: as TorchRec's."""
    return [
        ("momentum1" if place == 0 else name, by_row)
        for place, (name, by_row) in enumerate(optimizer.kind.states)
    ]


def _is_fbgemms(options: SparseOptions) -> bool:
    semantics = options.duplicates, options.bias_correction, options.epsilon, options.state_dtype
    return semantics == ("sum", "table", "outside", "fp32")


def _decays(betas: tuple[float, float], counting: str) -> list[tuple[float, float]]:
    """(beta, 1 - beta) of both betas."""
    if counting == "table":
        return [(beta, 1 - beta) for beta in (float(np.float32(beta)) for beta in betas)]
    return [(beta, 1 - beta) for beta in betas]


def _signed(number: int) -> int:
    """The int64 with the bits of a 64-bit number; products of int64 tensors wrap around."""
    return number - (1 << 64) if number >> 63 else number


_GAMMA = _signed(0x9E3779B97F4A7C15)
_FACTOR_1 = _signed(0xBF58476D1CE4E5B9)
_FACTOR_2 = _signed(0x94D049BB133111EB)
_UPPER_HALF = _signed(0xFFFFFFFFFFFF0000)  # of a float32: what bfloat16 keeps


def _fold_(numbers: Tensor, shift: int) -> Tensor:
    """numbers ^= numbers >> shift; torch shifts the sign in, so that is masked away."""
    upper = (numbers >> shift).bitwise_and_((1 << (64 - shift)) - 1)
    return numbers.bitwise_xor_(upper)


def _split_mix(start: Tensor, index: Tensor) -> Tensor:
    """Number ``index``, from 0, of the SplitMix64 stream from ``start``; int64, broadcast."""
    numbers = start + (index + 1) * _GAMMA
    _fold_(numbers, 30).mul_(_FACTOR_1)
    _fold_(numbers, 27).mul_(_FACTOR_2)
    return _fold_(numbers, 31)


def random_bits(rows: Tensor, columns: int, step: int, state: int) -> Tensor:
    """(u, K) int32 in [0, 65536) on the device of ``rows``, independent and uniform.

    Args:
        rows: (u,) int64, global numbers of the rows.
        columns: K.
        step: number of the optimizer's step.
        state: number of the state within its optimizer.
    """
    key = _split_mix(torch.tensor(0), torch.tensor(step))
    key = _split_mix(key, torch.tensor(state))
    row_keys = _split_mix(key, rows)
    # A number of 64 bits serves four columns.
    index = torch.arange(-(-columns // 4), device=rows.device)
    quarters = _split_mix(row_keys.unsqueeze(1), index).view(torch.int16)
    return quarters[:, :columns].to(torch.int32).bitwise_and_(0xFFFF)


def round_stochastically(values: Tensor, rows: Tensor, step: int, state: int) -> Tensor:
    """(u, K) bfloat16 from ``values`` (u, K) float32; the other arguments as ``random_bits``.

    A number that bfloat16 has stays what it is, as do infinities and NaN.  Beyond the largest
    bfloat16, 3.39e38, the upper neighbour is infinity, as it is when rounding to the nearest.
    """
    bits = values.view(torch.int32) + random_bits(rows, values.shape[1], step, state)
    rounded = bits.bitwise_and_(_UPPER_HALF).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)

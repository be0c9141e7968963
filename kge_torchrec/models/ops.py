"""What scorers compute with: products of complex numbers, blocks of pairs of rows, and dropout.

**Complex numbers.**  Rows of D real numbers are read as D/2 complex ones, interleaved: (re, im, re,
im, ...).  Products come in two forms.  With torch's complex numbers they are one operation, on a
CPU three times as fast as the eight real ones; but Inductor compiles no complex numbers, so that
what is compiled takes the real form, which it makes one kernel of, with what is around it.

**Pairs.**  For scores that are no matrix product a block of pairs at a time is expanded, and
expanded again for its gradient, so that the (b, K, D) intermediates are never in memory whole.  A
pair's score is computed from its own numbers alone, so that blocks do not change its bits.

**Dropout.**  torch's, but on a CPU, where a draw is a hash (``kernels/dropout.py``).

Shapes: C chunks, b queries, K rows, D numbers (D/2 complex ones) a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kge_torchrec.kernels.kinds import block_device
from kge_torchrec.kernels.operators import dropped

# Numbers of a block's intermediates: what stays in a CPU's L2 cache, enough work for a GPU.
BLOCK_NUMBERS = {"cpu": 1 << 18, "cuda": 1 << 25}
_COMPILED_BLOCKS = 4


def pairwise(
    score: Callable[..., Tensor], queries: Sequence[Tensor], rows: Sequence[Tensor], width: int
) -> Tensor:
    """score(*queries, *rows) for all pairs of a chunk: (C, b, K).

    queries: (C, b, ·) each, handed to score as (C, block, 1, ·); rows: (C, K, ·) each, handed to
    it as (C, 1, K, ·).  width: numbers that score expands a pair to.
    """
    chunks, count = queries[0].shape[:2]
    rows = [x[:, None] for x in rows]
    numbers = BLOCK_NUMBERS[block_device(queries[0])]
    step = max(1, numbers // max(1, chunks * rows[0].shape[2] * width))
    if torch.compiler.is_compiling():  # which writes each block out
        step = max(step, -(-count // _COMPILED_BLOCKS))
    parts = []
    for start in range(0, max(1, count), step):
        block = [x[:, start : start + step, None] for x in queries]
        if step < count and torch.is_grad_enabled():
            parts.append(checkpoint(score, *block, *rows, use_reentrant=False))
        else:
            parts.append(score(*block, *rows))
    return torch.cat(parts, 1)


def as_complex(rows: Tensor) -> Tensor:
    """(..., D) real -> (..., D/2) complex view."""
    return torch.view_as_complex(rows.unflatten(-1, (-1, 2)))


def as_real(numbers: Tensor) -> Tensor:
    """(..., D/2) complex -> (..., D) real view."""
    return torch.view_as_real(numbers).flatten(-2)


def parts(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Real and imaginary parts, (..., D/2) each."""
    return rows.unflatten(-1, (-1, 2)).unbind(-1)


def times(rows: Tensor, factor: Tensor, conjugate: bool = False) -> Tensor:
    """Products number by number, of the conjugate of the factor if so: (..., D), (..., D)."""
    if torch.compiler.is_compiling():
        return _times(parts(rows), parts(factor), conjugate)
    numbers = as_complex(factor)
    return as_real(as_complex(rows) * (numbers.conj() if conjugate else numbers))


def rotated(rows: Tensor, phase: Tensor) -> Tensor:
    """Each number turned by an angle: (..., D), (..., D/2) -> (..., D)."""
    if torch.compiler.is_compiling():
        return _times(parts(rows), (phase.cos(), phase.sin()), conjugate=False)
    # torch.polar's gradient has a kernel that CUDA compiles when it first comes to it.
    return as_real(as_complex(rows) * torch.complex(phase.cos(), phase.sin()))


def _times(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], conjugate: bool) -> Tensor:
    """The real form."""
    (real, imaginary), (x, y) = one, other
    if conjugate:
        y = -y
    return torch.stack([real * x - imaginary * y, real * y + imaginary * x], -1).flatten(-2)


def lookup(table: Tensor, ids: Tensor) -> Tensor:
    """Rows of a dense table that many ids repeat: (R, D), (...) int64 -> (..., D).

    A GPU adds their gradients one to another as they come; embedding's own would sort the ids
    first, by some twenty kernels.
    """
    is_here = block_device(table) == "cpu"
    return nn.functional.embedding(ids, table) if is_here else pick(table, ids)


def pick(rows: Tensor, index: Tensor) -> Tensor:
    """rows[index], summing gradients in a fixed order on a CPU: (U, D), (...) -> (..., D)."""
    return rows.index_select(0, index.reshape(-1)).view(*index.shape, rows.shape[1])


class Dropout(nn.Dropout):
    """torch's, whose draws are other ones on a CPU: the same for a state of torch's generator."""

    def forward(self, input: Tensor) -> Tensor:
        """(...) -> (...)"""
        return dropped(input, self.p) if self.training else input

"""Operations that scorers use: complex products, blocks of pairs of rows, and dropout.

**Complex numbers.** Rows of D real numbers hold D/2 complex numbers, interleaved: (re, im, re, im,
...). Products come in two forms. With torch's complex dtype a product is one operation, three times
as fast on a CPU as eight real operations. Inductor does not compile complex numbers, so compiled
code uses the real form, which Inductor fuses with its surroundings.

**Pairs.** Scores that are not a matrix product are computed for one block of pairs at a time and
recomputed for the gradient, so that a (b, K, D) tensor is never materialized. A pair's score
depends only on its own elements, so the block size does not change its bits.

**Dropout.** Uses torch's dropout, except on a CPU, where draws come from a hash
(``kernels/dropout.py``).

Shapes: C chunks, b queries, K rows, D elements (D/2 complex numbers) per row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kge_torchrec.kernels.kinds import block_device
from kge_torchrec.kernels.operators import dropped

# Elements per block of intermediates: fits a CPU's L2 cache, or gives a GPU enough work.
BLOCK_NUMBERS = {"cpu": 1 << 18, "cuda": 1 << 25}
_COMPILED_BLOCKS = 4


def pairwise(
    score: Callable[..., Tensor], queries: Sequence[Tensor], rows: Sequence[Tensor], width: int
) -> Tensor:
    """Evaluate score(*queries, *rows) for all pairs of a chunk, block by block.

    Args:
        score: Function of broadcastable tensors.
        queries: Tensors (C, b, ·), passed to ``score`` as (C, block, 1, ·).
        rows: Tensors (C, K, ·), passed to ``score`` as (C, 1, K, ·).
        width: Elements per pair in the intermediates of ``score``.

    Returns:
        (C, b, K).
    """
    chunks, count = queries[0].shape[:2]
    rows = [x[:, None] for x in rows]
    numbers = BLOCK_NUMBERS[block_device(queries[0])]
    step = max(1, numbers // max(1, chunks * rows[0].shape[2] * width))
    if torch.compiler.is_compiling():  # the compiler unrolls the blocks
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
    """View real rows as complex: (..., D) -> (..., D/2)."""
    return torch.view_as_complex(rows.unflatten(-1, (-1, 2)))


def as_real(numbers: Tensor) -> Tensor:
    """View complex rows as real: (..., D/2) -> (..., D)."""
    return torch.view_as_real(numbers).flatten(-2)


def parts(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Split rows into real and imaginary parts, (..., D/2) each."""
    return rows.unflatten(-1, (-1, 2)).unbind(-1)


def times(rows: Tensor, factor: Tensor, conjugate: bool = False) -> Tensor:
    """Multiply complex rows elementwise, by the conjugate of ``factor`` if ``conjugate`` is set.

    Args:
        rows: (..., D).
        factor: (..., D).
        conjugate: Whether to conjugate the factor.

    Returns:
        (..., D).
    """
    if torch.compiler.is_compiling():
        return _times(parts(rows), parts(factor), conjugate)
    numbers = as_complex(factor)
    return as_real(as_complex(rows) * (numbers.conj() if conjugate else numbers))


def rotated(rows: Tensor, phase: Tensor) -> Tensor:
    """Rotate each complex number by an angle in radians: (..., D), (..., D/2) -> (..., D)."""
    if torch.compiler.is_compiling():
        return _times(parts(rows), (phase.cos(), phase.sin()), conjugate=False)
    # Not torch.polar: CUDA compiles a kernel of its gradient at first use.
    return as_real(as_complex(rows) * torch.complex(phase.cos(), phase.sin()))


def _times(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], conjugate: bool) -> Tensor:
    """Multiply complex numbers in the real form."""
    (real, imaginary), (x, y) = one, other
    if conjugate:
        y = -y
    return torch.stack([real * x - imaginary * y, real * y + imaginary * x], -1).flatten(-2)


def lookup(table: Tensor, ids: Tensor) -> Tensor:
    """Look up rows of a dense table that many ids share: (R, D), (...) int64 -> (..., D).

    On a GPU, index_select's backward adds gradients as they come. The backward of embedding would
    first sort the ids with about twenty kernels.
    """
    is_here = block_device(table) == "cpu"
    return nn.functional.embedding(ids, table) if is_here else pick(table, ids)


def pick(rows: Tensor, index: Tensor) -> Tensor:
    """Return rows[index]: (U, D), (...) int64 -> (..., D).

    On a CPU the gradients of repeated indices are summed in a fixed order.
    """
    return rows.index_select(0, index.reshape(-1)).view(*index.shape, rows.shape[1])


class Dropout(nn.Dropout):
    """torch's dropout; on a CPU with other draws, which depend on torch's generator state only."""

    def forward(self, input: Tensor) -> Tensor:
        """Apply dropout: (...) -> (...)."""
        return dropped(input, self.p) if self.training else input

"""Operators as callers use them: each takes its fused kernel or torch's own operations.

``IMPLEMENTATION`` is the choice. The formulas in plain torch serve other devices and dtypes, code
that torch.compile fuses itself, and the tests of kernels. numba takes a second to load, so a file
of kernels is imported when the first of them is called.

Shapes: U rows, M places, D elements (D/2 complex numbers: re, im, re, im, ...) per row; K
candidates; Q queries, m entities of a block; C chunks, b queries per chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout, embedding, softplus
from torch.utils.checkpoint import checkpoint

from kge_torchrec.kernels.library import has_triton

_planned_for = ContextVar("planned_for", default="cuda")
# Scores per temporary; on a CPU these fit in the cache.
_CHUNK_SCORES = {"cpu": 1 << 19, "cuda": 1 << 25}


def block_device(x: Tensor) -> str:
    """Return the device whose implementation serves a tensor, "cpu" or "cuda".

    Tensors on the meta device stand for the device that ``planning_for`` names.
    """
    kind = x.device.type
    return _planned_for.get() if kind == "meta" else "cpu" if kind == "cpu" else "cuda"


@contextmanager
def planning_for(kind: str) -> Iterator[None]:
    """Let tensors on the meta device stand for those of "cpu" or "cuda" inside the context."""
    token = _planned_for.set(kind)
    try:
        yield
    finally:
        _planned_for.reset(token)


def _for_pairs(rows: Tensor) -> str:
    return "numba" if block_device(rows) == "cpu" and rows.dtype != torch.float64 else "torch"


def _for_distances(query: Tensor) -> str:
    """Choose for distances of all pairs; a plan counts the kernel of a CPU also for a GPU."""
    if query.is_meta or _for_pairs(query) == "numba":
        return "numba"
    if query.device.type == "cpu":
        return "torch"
    if torch.compiler.is_compiling():
        return "inductor"
    if not has_triton():
        return "torch"
    return "inductor" if torch.is_grad_enabled() else "triton"


def _for_products(query: Tensor) -> str:
    is_exact = query.dtype != torch.float64 and not torch.is_grad_enabled()
    return "triton" if query.device.type == "cuda" and is_exact and has_triton() else "torch"


def _for_float32(values: Tensor) -> str:
    """Choose for elementwise work, which compiled code fuses itself."""
    is_float = values.dtype == torch.float32 and not torch.compiler.is_compiling()
    return "numba" if values.device.type == "cpu" and is_float else "torch"


def _for_sums(scores: Tensor) -> str:
    """Choose as ``_for_float32``; a plan for a CPU, on the meta device, is that of its kernel."""
    planned = scores.is_meta and block_device(scores) == "cpu" and scores.dtype == torch.float32
    return "numba" if planned else _for_float32(scores)


def _for_full_scores(scores: Tensor) -> str:
    """Choose for scores (Q, m) of float32 or bfloat16 that are contiguous for each query."""
    if scores.dtype not in (torch.float32, torch.bfloat16) or scores.stride(1) != 1:
        return "torch"
    if scores.device.type != "cpu":
        return "triton" if scores.device.type == "cuda" and has_triton() else "torch"
    # numba's kernels read an array (Q, stride): the last row must not end before its stride does.
    step = scores.stride(0)
    end = scores.storage_offset() + len(scores) * step
    available = scores.untyped_storage().nbytes() // scores.element_size()
    return "numba" if step >= scores.shape[1] and end <= available else "torch"


def _for_counts(scores: Tensor) -> str:
    return "numba" if scores.device.type == "cpu" else "triton" if has_triton() else "torch"


def _for_ids(ids: Tensor) -> str:
    return "numba" if ids.device.type == "cpu" else "torch"


# Which implementation runs: for each operation, a function of one of its tensors. "numba" serves
# CPUs, "triton" CUDA, "inductor" CUDA where distances need gradients, and "torch" everything else.
IMPLEMENTATION: dict[str, Callable[[Tensor], str]] = {
    "triples": _for_ids,  # rows of triples and their encoded queries: side_rows
    "pairs": _for_pairs,  # scores of queries with rows that an index selects, by pair_scores
    "distances": _for_distances,  # pair_scores, triton_pairs, fused_distances
    "products": _for_products,  # inner products whose bits do not depend on places: triton_pairs
    "sums": _for_sums,  # log_sums: scores
    "dropout": _for_float32,
    "full_scores": _for_full_scores,  # normalizers and gradients: scores, triton_scores
    "counts": _for_counts,  # scores, triton_scores
    "ids": _for_ids,  # distinct ids, and members of sorted arrays: ids, data.store.search
}


def pick(rows: Tensor, index: Tensor | None) -> Tensor:
    """Return rows[index]: (U, D), (...) int64 -> (..., D); or the rows, without an index."""
    if index is None:
        return rows
    return rows.index_select(0, index.reshape(-1)).view(*index.shape, rows.shape[1])


def lookup(table: Tensor, ids: Tensor) -> Tensor:
    """Look up rows of a dense table that many ids share: (R, D), (...) int64 -> (..., D).

    On a GPU, index_select's backward adds gradients as they come. The backward of embedding would
    first sort the ids with about twenty kernels.
    """
    return embedding(ids, table) if block_device(table) == "cpu" else pick(table, ids)


def unequal(ids: Tensor, others: Tensor) -> Tensor:
    """Return which ids (C, K) differ from which others (C, b), all in [0, 2^31): (C, b, K) bool.

    A CPU compares one pair after the other, in 83 us for 1,024 x 128; differences take 21 us.
    """
    if block_device(ids) == "cpu":
        return (ids.int()[:, None] - others.int()[..., None]).bool()
    return ids[:, None] != others[..., None]


def dropped(values: Tensor, share: float) -> Tensor:
    """Set elements to 0 with a probability and divide the others by its complement.

    A kernel hashes places with a key from torch's generator, so that equal states of the generator
    drop the same elements. torch itself draws elsewhere.
    """
    if 0 < share < 1 and IMPLEMENTATION["dropout"](values) == "numba":
        from kge_torchrec.kernels import dropout as kernels

        return kernels.dropped(values, share, int(torch.randint(2**62, ())))
    return dropout(values, share)


def log_sums(scores: Tensor, mask: Tensor, softmax: bool) -> Tensor:
    """Return log sum exp s, or the sum of log(1 + exp s), over the candidates that count.

    Scores (..., K) and a mask (..., K) bool become (...).
    """
    if scores.shape[-1] and IMPLEMENTATION["sums"](scores) == "numba":
        from kge_torchrec.kernels.scores import LogSums

        sums: Tensor = LogSums.apply(scores, mask, softmax)
        return sums
    if softmax:
        return scores.masked_fill(~mask, torch.finfo(scores.dtype).min / 2).logsumexp(-1)
    return (softplus(scores) * mask).sum(-1)


def normalizers(scores: Tensor, out: Tensor, softmax: bool) -> None:
    """Write log sum exp s, or the sum of log(1 + exp s), of scores (Q, m) into out (Q,) float64."""
    if not scores.shape[1]:
        out.fill_(-torch.inf if softmax else 0.0)
        return
    if (found := IMPLEMENTATION["full_scores"](scores)) != "torch":
        _score_kernels(found).normalizers(scores, out, softmax)
        return
    for part in _chunks(scores):
        if softmax:
            top = scores[part].amax(1)  # added in float64 at the end; torch.logsumexp would round
            out[part].copy_((scores[part] - top[:, None]).exp_().sum(1).log_()).add_(top)
        else:
            out[part].copy_(softplus(scores[part]).sum(1))


def gradients(
    scores: Tensor, normalizer: Tensor, weight: Tensor, rest: Tensor, softmax: bool
) -> None:
    """Overwrite scores by the gradients of weight (normalizer - rest sum s).

    Args:
        scores: (Q, m), overwritten.
        normalizer: (Q,) float64, from ``normalizers``, over the scores of all entities.
        weight: (Q,) float32.
        rest: (Q,) float64, subtracted from every gradient before the weight.
        softmax: Which of the two sums the normalizer is.
    """
    if (found := IMPLEMENTATION["full_scores"](scores)) != "torch":
        _score_kernels(found).gradients(scores, normalizer, weight, rest, softmax)
        return
    if softmax:
        scores.sub_(normalizer[:, None]).exp_()
    else:
        scores.sigmoid_()
    scores.sub_(rest[:, None]).mul_(weight[:, None])


def count_block(
    scores: Tensor, values: Tensor, less: Tensor, equal: Tensor, query: Tensor | None = None
) -> None:
    """Add to running counts how many scores are below a value, or equal to it, for ranks.

    Comparisons with NaN are false, so a NaN is counted neither as less nor as equal.

    Args:
        scores: (B, n) float32, contiguous: the scores of B queries in a block.
        values: (M,) float32.
        less: (M,) int64, contiguous.
        equal: (M,) int64, contiguous.
        query: (M,) int64, the row of scores that each value is compared with.  None: M is B.
    """
    if (found := IMPLEMENTATION["counts"](scores)) != "torch":
        _score_kernels(found).counts(scores, values, query, less, equal)
    elif query is None:
        less += (scores < values[:, None]).sum(1)
        equal += (scores == values[:, None]).sum(1)
    else:
        for first in range(0, len(values), max(1, len(scores))):
            part = slice(first, first + max(1, len(scores)))
            count_block(scores[query[part]], values[part], less[part], equal[part])


def _score_kernels(found: str) -> Any:
    name = "scores" if found == "numba" else "triton_scores"  # they load slowly
    return import_module(f"kge_torchrec.kernels.{name}")


def distinct(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct ids (U,) in ascending order, and the place of each id among them.

    The ids (M,) are int64 and not negative, which is not checked.
    """
    if IMPLEMENTATION["ids"](ids) == "numba":
        from kge_torchrec.kernels import ids as kernels

        unique, places = kernels.distinct(ids.numpy())
        return torch.from_numpy(unique), torch.from_numpy(places)
    return torch.unique(ids, return_inverse=True)


def _chunks(scores: Tensor) -> Iterator[slice]:
    """Yield slices of queries that limit the size of temporaries."""
    at_once = _CHUNK_SCORES[block_device(scores)]
    step = max(1, at_once // max(1, scores.shape[1]))
    for start in range(0, scores.shape[0], step):
        yield slice(start, start + step)


# Products of complex numbers come in two forms. With torch's complex dtype a product is one
# operation, three times as fast on a CPU as eight real ones. Inductor does not compile complex
# numbers, so compiled code uses the real form, which Inductor fuses with its surroundings.


def times(rows: Tensor, factor: Tensor, conjugate: bool = False) -> Tensor:
    """Multiply complex rows (..., D) by a factor (..., D) or its conjugate, element by element."""
    if torch.compiler.is_compiling():
        return _times(_parts(rows), _parts(factor), conjugate)
    numbers, factors = [torch.view_as_complex(x.unflatten(-1, (-1, 2))) for x in (rows, factor)]
    return torch.view_as_real(numbers * (factors.conj() if conjugate else factors)).flatten(-2)


def rotated(rows: Tensor, phase: Tensor) -> Tensor:
    """Rotate each complex number by an angle in radians: (..., D), (..., D/2) -> (..., D)."""
    if torch.compiler.is_compiling():
        return _times(_parts(rows), (phase.cos(), phase.sin()), conjugate=False)
    numbers = torch.view_as_complex(rows.unflatten(-1, (-1, 2)))
    # Not torch.polar: CUDA compiles a kernel of its gradient at first use.
    return torch.view_as_real(numbers * torch.complex(phase.cos(), phase.sin())).flatten(-2)


def _parts(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Split rows into real and imaginary parts, (..., D/2) each."""
    return rows.unflatten(-1, (-1, 2)).unbind(-1)


def _times(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], conjugate: bool) -> Tensor:
    """Multiply complex numbers in the real form."""
    (real, imaginary), (x, y) = one, other
    if conjugate:
        y = -y
    return torch.stack([real * x - imaginary * y, real * y + imaginary * x], -1).flatten(-2)


# Elements per block of intermediates: fits a CPU's L2 cache, or gives a GPU enough work.
BLOCK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 25}
_COMPILED_BLOCKS = 4


def pairwise(
    score: Callable[..., Tensor], queries: Sequence[Tensor], rows: Sequence[Tensor], width: int
) -> Tensor:
    """Evaluate score(*queries, *rows) for all pairs of a chunk, block by block: (C, b, K).

    A block is recomputed for the gradient, so that a (b, K, D) tensor is never materialized. A
    pair's score depends only on its own elements, so the block size does not change its bits.

    Args:
        score: Function of broadcastable tensors.
        queries: Tensors (C, b, ·), passed to ``score`` as (C, block, 1, ·).
        rows: Tensors (C, K, ·), passed to ``score`` as (C, 1, K, ·).
        width: Elements per pair in the intermediates of ``score``.
    """
    chunks, count = queries[0].shape[:2]
    rows = [x[:, None] for x in rows]
    elements = BLOCK_ELEMENTS[block_device(queries[0])]
    step = max(1, elements // max(1, chunks * rows[0].shape[2] * width))
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

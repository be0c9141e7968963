"""The entity rows that the scores of a batch of triples read, one set per side: ``read_rows``.

    encoded    the scorer multiplies anchor and relation elementwise: on a CPU one operator
               computes queries and scores of triples while it reads the rows (``triple_products``)
    in place   several chunks select the same candidates: a comparison reads them where they are, as
               the kernels of ``pair_scores`` do, or copies them itself
    gathered   all others copy the rows; backward then sums all gradients of a row once. With one
               operator per copy, autograd would make a full gradient of all rows for each

Shapes: U distinct rows of the batch, M positions, C chunks, b triples per chunk, K candidates per
chunk and side, D elements per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kge_torchrec.kernels.operators import IMPLEMENTATION

# With more queries per chunk than this, candidates are copied: one matrix product then saves more
# time than the copy costs.
_MOST_QUERIES_IN_PLACE = 32


class SideRows(NamedTuple):
    """The rows of one side."""

    anchor: Any  # (C, b, D), or None if the queries are encoded
    target: Any  # the same
    candidates: Tensor  # (C, K, D), or (U, D) with positions
    positions: Tensor | None = None  # (C, K) int64, of the candidates
    encoded: tuple[Tensor, Tensor] | None = None  # queries (C, b, D) and their scores (C, b)


def read_rows(
    scorer: Any,
    rows: Tensor,
    batch: Any,
    ends: dict[str, Tensor],
    candidates: dict[str, Tensor],
    weight: Tensor | None,
    gathers: bool,
    drops: bool,
) -> tuple[dict[str, SideRows], tuple[Tensor, ...], Tensor | None]:
    """Read the rows of every side, and those of heads and tails for penalties.

    Args:
        scorer: The scorer.
        rows: (U, D) entity rows.
        batch: A batch of triples (``data.batches``).
        ends: Positions of "head" and "tail" in ``rows``, (C, b) each.
        candidates: Positions of the candidates of each side, (C, K).
        weight: (C, b) weights of the triples in penalties of entities; None without penalties.
        gathers: Whether anchors and targets must be gathered for other uses than scores.
        drops: Whether rows are dropped out, for which every place needs a row of its own.

    Returns:
        The rows of each side; then the rows that penalties read and their weights: heads and tails
        (C, b, D) with (C, b), the distinct ones (P, D) with (P,), or none and None.
    """
    by_kernels = batch.deduplicated and IMPLEMENTATION["triples"](rows) == "numba"
    many = sum(batch.sizes[2:]) > len(rows) and batch.relation.shape[1] <= _MOST_QUERIES_IN_PLACE
    in_place = by_kernels and many and not drops
    if by_kernels and not (gathers or in_place) and _encodes(scorer, rows):
        return _encode(scorer, rows, batch, ends, candidates, weight)
    sizes = batch.sizes[:2] if in_place else batch.sizes
    if batch.deduplicated:
        parts = Gather.apply(rows, batch.entities[: sum(sizes)], sizes)
    else:
        parts = rows.split(sizes)
    shape = *batch.relation.shape, -1
    head, tail = parts[0].view(shape), parts[1].view(shape)
    sides = {}
    for i, (side, places) in enumerate(candidates.items()):
        pair = (head, tail) if side == "tail" else (tail, head)
        if in_place:
            sides[side] = SideRows(*pair, rows, places)
        else:
            sides[side] = SideRows(*pair, parts[2 + i].view(*places.shape, -1))
    return sides, (() if weight is None else (head, tail)), weight


class Gather(torch.autograd.Function):
    """Returns rows[index] in parts of some sizes: (U, D), (M,) int64 -> (size, D) each.

    With one lookup per part, autograd would make a full gradient of all rows per part and add them.
    On a CPU the gradients of repeated indices are summed in a fixed order, so runs repeat bitwise.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        ctx.save_for_backward(index)
        ctx.count = rows.shape[0]
        return (*[rows.index_select(0, part) for part in index.split(sizes)],)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        sums = grads[0].new_zeros(ctx.count, grads[0].shape[1])
        for places, grad in zip(index.split([*map(len, grads)]), grads, strict=True):
            sums.index_add_(0, places, grad)  # on a CPU in their order, with any number of threads
        return sums, None, None


def summed_weights(ids: Tensor, weight: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the distinct ids with a weight other than 0, and the sums of their weights.

    The ids (M,) are in [0, count).
    """
    sums = torch.bincount(ids, weight, count)
    used = sums.nonzero().squeeze(1)
    return used, sums.index_select(0, used).to(weight.dtype)


def _encodes(scorer: Any, rows: Tensor) -> bool:
    """Whether ``triple_products`` supports a scorer: float32, no dropout, no norms."""
    if scorer.multiplies is None or scorer.has_biases:
        return False
    drops = scorer.relation_dropout.p or scorer.input_dropout.p or scorer.hidden_dropout.p
    if scorer.training and drops:
        return False
    if not (rows.dtype == scorer.relations.dtype == torch.float32):
        return False
    is_plain = isinstance(scorer.entity_norm, nn.Identity)
    return is_plain and isinstance(scorer.relation_norm, nn.Identity)


def _encode(
    scorer: Any,
    rows: Tensor,
    batch: Any,
    ends: dict[str, Tensor],
    candidates: dict[str, Tensor],
    weight: Tensor | None,
) -> tuple[dict[str, SideRows], tuple[Tensor, ...], Tensor | None]:
    """Encode the queries of every side while their rows are read."""
    from kge_torchrec.kernels.ids import check_within  # numba loads slowly
    from kge_torchrec.kernels.triple_products import COMPLEX, CONJUGATE, REAL, EncodeTriples

    relation = batch.relation
    check_within("entities", batch.entities, len(rows))
    check_within("relations", relation, scorer.num_relations)
    head, tail = ends["head"].reshape(-1), ends["tail"].reshape(-1)
    penalized, shares = head.new_empty(0), None
    if weight is not None:
        weights = weight.flatten().repeat(2)
        penalized, shares = summed_weights(torch.cat([head, tail]), weights, len(rows))
    actions, positions = [], []
    for side, places in candidates.items():
        ids, direct = scorer.direct(relation.reshape(-1), side)
        pair = (head, tail) if side == "tail" else (tail, head)
        of_complex = COMPLEX if direct == "tail" else CONJUGATE
        actions.append(REAL if scorer.multiplies == "real" else of_complex)
        positions += [pair[0], ids, pair[1], places.reshape(-1)]
    args = scorer.relations, actions, penalized, *positions
    *parts, copies = EncodeTriples.apply(rows, *args)
    sides = {}
    for i, (side, places) in enumerate(candidates.items()):
        query, score, others = parts[3 * i : 3 * i + 3]
        encoded = query.view(*relation.shape, -1), score.view(relation.shape)
        sides[side] = SideRows(None, None, others.view(*places.shape, -1), None, encoded)
    return sides, (() if shares is None else (copies,)), shares

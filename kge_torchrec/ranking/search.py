"""The best entities of queries, and how given answers compare with the other candidates.

Every rank scores its own rows for the same queries, block by block. In a block, entities that are
excluded or no candidates become NaN, which is neither below, equal to nor above a score. A query is
scored once, however many answers it has.

Shapes: M answers, U distinct queries, B queries of a batch, n rows of a block, k listed entities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.data.store.filter_index import Answers, FilterIndex, Ranges
from kge_torchrec.distributed.processes import gathered, reduced
from kge_torchrec.kernels.operators import count_block
from kge_torchrec.models.scorers.base import Side
from kge_torchrec.ranking.blocks import Queries, Scores, erase, restrict
from kge_torchrec.ranking.candidates import Candidates

ID_LIMIT = 2**32 - 1  # the largest id; ids use the lower half of a key
NOTHING = torch.iinfo(torch.int64).min  # the key of an excluded or missing answer
LARGEST = torch.finfo(torch.float32).max


def allowed_scores(
    scores: Scores,
    queries: Queries,
    exclude: Answers | None,
    nan_is_best: bool,
    block_bytes: int | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """Yield (id of the first row, scores (B, n)) of the rows of this rank. Collective.

    A score is NaN where an entity is excluded or no candidate. Scores that are NaN themselves
    become infinity, above every other score, if ``nan_is_best``, and minus infinity otherwise.
    """
    nan, highest = (torch.inf, LARGEST) if nan_is_best else (-torch.inf, torch.inf)
    for first, block in scores.blocks(queries, block_bytes):
        block.nan_to_num_(nan=nan, posinf=highest, neginf=-torch.inf)
        if exclude is not None:
            erase(block, first, exclude)
        if queries.only is not None:
            restrict(block, first, queries, queries.only)
        yield first, block


def top_k(
    scores: Scores, queries: Queries, k: int, exclude: Answers | None = None
) -> tuple[Tensor, Tensor]:
    """Return the k best entities of each query, without answers to ``exclude``. Collective.

    The queries are the same on every rank, and so are the results: scores (B, k) float32, best
    first, and ids (B, k) int64. Equal scores come in order of id; NaN counts as -inf. Missing
    answers have score -inf and id -1.

    Raises:
        ValueError: ``k`` is below 1.
        IndexError: An id is outside [0, N).
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    best = torch.full((len(queries.anchors), k), NOTHING, device=scores.shard.device)
    for first, block in allowed_scores(scores, queries, exclude, nan_is_best=False):
        best = _with_block(best, block, first)
    return _best_of_ranks(best, scores.shard.ranks)


@dataclass(frozen=True)
class RankOptions:
    """The candidates of a ranking, and the pieces in which it is computed."""

    candidates: Candidates | None = None  # None: all entities
    block_bytes: int | None = None  # size of a block of scores; None: the default of the device
    batch_size: int = 512  # distinct queries per batch
    progress: Callable[[int], object] = lambda answers: None  # called with the answers of a batch


ALL_ENTITIES = RankOptions()


class Counts(NamedTuple):
    """How M answers to U queries compare with the other candidates of their queries.

    The answers are grouped by query, in order of relation, anchor and answer.
    """

    order: np.ndarray  # (M,) int64, the row in ``triples`` of each answer
    starts: np.ndarray  # (U,) int64, where the answers of each query start
    better: np.ndarray  # (M,) int64, the candidates with a higher score or with NaN
    equal: np.ndarray  # (M,) int64, the other candidates with the same score
    pool: np.ndarray  # (M,) int64, the candidates of its query
    has_score: np.ndarray  # (M,) bool: the score of the answer is not NaN
    is_inside: np.ndarray  # (M,) bool: ``options.candidates`` has the answer
    is_known: np.ndarray  # (M,) bool: ``known`` has the answer
    lists: np.ndarray  # (U, k) int64, the best candidates; -1 where there are fewer


def columns(side: Side) -> tuple[int, int]:
    """Return the columns of the anchor and of the answer."""
    return (0, 2) if side == "tail" else (2, 0)


def by_query(triples: np.ndarray, side: Side = "tail") -> tuple[np.ndarray, np.ndarray]:
    """Return the order of triples (M,) by query and answer, and where each query starts: (U,)."""
    anchor, answer = columns(side)
    order = np.lexsort(triples[:, [answer, anchor, 1]].T)
    pairs = triples[order][:, [anchor, 1]]
    is_first = np.ones(len(pairs), bool)
    is_first[1:] = (pairs[1:] != pairs[:-1]).any(1)
    return order, np.flatnonzero(is_first)


def compare(
    scores: Scores,
    triples: np.ndarray,
    side: Side,
    known: FilterIndex | None,
    options: RankOptions,
    k: int | None = None,
) -> Counts:
    """Compare answers with the candidates of their queries, and list the k best. Collective.

    The answers are those of triples (M, 3) int64 on a side, the same on every rank. Answers of
    ``known`` do not compete; with lists (k is not None), nor do the answers with each other.
    """
    anchor, answer = columns(side)
    order, starts = by_query(triples, side)
    triples, bounds = triples[order], np.append(starts, len(triples))
    true = scores.of(*Queries.of(triples, side))[:, 0].clamp(max=LARGEST)
    counts = torch.empty(3, len(triples), dtype=torch.int64, device=scores.shard.device)
    lists = np.empty((len(starts), k or 0), np.int64)
    is_inside, is_known = np.ones(len(triples), bool), np.zeros(len(triples), bool)
    for low in range(0, len(starts), options.batch_size):
        ends = bounds[low : low + options.batch_size + 1]
        batch, ends = slice(ends[0], ends[-1]), ends - ends[0]
        anchors, relations, answers = triples[batch][:, [anchor, 1, answer]].T.copy()
        anchor_of, relation_of, exclude = anchors[ends[:-1]], relations[ends[:-1]], None
        if known is not None:
            exclude = known.answers(side, anchor_of, relation_of)
            is_known[batch] = known.contains(side, anchors, relations, answers[:, None])[:, 0]
        if options.candidates is not None:
            is_inside[batch] = options.candidates.contain(side, relations, answers)
        queries = Queries(
            torch.from_numpy(anchor_of), torch.from_numpy(relation_of), side, options.candidates
        )
        its_answers = Ranges(answers, ends[:-1], ends[1:])
        counts[:, batch], lists[low : low + len(anchor_of)] = _counts(
            scores, queries, exclude, its_answers, true[batch], k, options.block_bytes
        )
        options.progress(len(answers))
    less, equal, pool = reduced(counts).cpu().numpy()
    has_score = (~true.isnan()).cpu().numpy()
    is_counted = ~is_known & is_inside & (k is None)  # the answer is one of the candidates itself
    better = pool - less - equal - (is_counted & ~has_score)
    return Counts(order, starts, better, equal - (is_counted & has_score), pool,
                  has_score, is_inside, is_known, lists)  # fmt: skip


def _counts(
    scores: Scores,
    queries: Queries,
    exclude: Answers | None,
    answers: Ranges,
    true: Tensor,
    k: int | None,
    block_bytes: int | None,
) -> tuple[Tensor, np.ndarray]:
    """Compare the answers of a batch with scores ``true`` (M,), and list the k best. Collective.

    Returns:
        How many candidates on this rank are below each answer, equal to it, and there at all:
        (3, M) int64; and the lists of all ranks (B, k).
    """
    size, device = len(answers.starts), scores.shard.device
    query = np.repeat(np.arange(size), answers.stops - answers.starts)
    # One more value per query, infinity, counts all of its candidates.
    values = torch.cat([true, true.new_full((size,), torch.inf)])
    rows = torch.from_numpy(np.append(query, np.arange(size))).to(device)
    less, equal = torch.zeros(2, len(values), dtype=torch.int64, device=device)
    best = torch.full((size, k or 0), NOTHING, device=device)
    for first, block in allowed_scores(scores, queries, exclude, True, block_bytes):
        if k:
            best = _with_block(best, block, first)
        if k is not None:
            erase(block, first, Answers(size, [answers]))
        count_block(block, values, less, equal, rows)
    pool = (less + equal)[len(true) :][rows[: len(true)]]
    lists = np.empty((size, 0), np.int64)
    if k:
        lists = _best_of_ranks(best, scores.shard.ranks)[1].cpu().numpy()
    return torch.stack([less[: len(true)], equal[: len(true)], pool]), lists


# A score and an entity id are packed into one int64 key, which sorts by score and then by smaller
# id. Keys are unique, so the result does not depend on blocks or ranks. Only scores that can still
# be among the k best of their query get a key, which is few of them after the first block.


def _with_block(best: Tensor, scores: Tensor, first: int) -> Tensor:
    """Return the best keys (B, k) so far and of one more block; NaN is no answer."""
    keys = torch.cat([best, _contenders(scores, first, best)], 1)
    return keys.topk(best.shape[1], dim=1).values


def _best_of_ranks(best: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """Return the scores and ids (B, k) of the best keys (B, k) of all ranks. Collective."""
    keys = best if ranks == 1 else torch.cat(gathered(best), 1)
    return _unpack(keys.topk(best.shape[1], dim=1).values)


def _contenders(scores: Tensor, first: int, best: Tensor) -> Tensor:
    """Return the keys (B, c) of the scores (B, n) of a block that can be among the k best.

    ``best`` (B, k) are the best keys of each query so far, in descending order.
    """
    k, least = best.shape[1], _unpack(best[:, -1])[0]
    if k < scores.shape[1] and bool(least.isneginf().any()):  # such as in the first block
        own = scores.nan_to_num(nan=-torch.inf, neginf=-torch.inf).topk(k, sorted=False).values
        least = torch.maximum(least, own.amin(1))
    query, column = (scores >= least[:, None]).nonzero(as_tuple=True)
    counts = query.bincount(minlength=len(scores))
    place = torch.arange(len(query), device=query.device) - (counts.cumsum(0) - counts)[query]
    keys = torch.full((len(scores), int(counts.max())), NOTHING, device=scores.device)
    # Adding zero turns -0.0 into 0.0, which is equal but has different bits.
    bits = _order((scores[query, column] + 0.0).view(torch.int32))
    keys[query, place] = (bits.long() << 32) + (ID_LIMIT - (first + column))
    return keys


def _order(bits: Tensor) -> Tensor:
    """Map float bits to integers of the same order, and back.

    Integers order the bits of negative floats in reverse, so these bits are flipped.
    """
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _unpack(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scores (B, k) and ids (B, k) of keys (B, k)."""
    missing = keys == NOTHING
    scores = _order((keys >> 32).int()).view(torch.float32)
    ids = ID_LIMIT - (keys & ID_LIMIT)
    return scores.masked_fill(missing, -torch.inf), ids.masked_fill(missing, -1)

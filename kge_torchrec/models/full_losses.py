"""Losses of queries over all entities, in closed form over blocks of scores.

No rank has all scores of a query, so such a loss works in two steps: ``start`` turns a block of
scores into the loss's slopes but for a factor per query, and tells what it saw of the block;
``join`` makes of what was seen in all blocks, on all ranks, what one block of all scores would have
shown; with that ``finish`` makes gradients of the slopes.  Both losses are

    normalizer - sum_answers target s - rest sum_all s

where s are the query's N scores, and differ in the normalizer:

    softmax  log sum exp s             cross-entropy against its answers alike (LibKGE's KvsAll)
    bce      sum log(1 + exp s)        sum over the N entities, answers being 1 and others 0

Label smoothing e takes e of an answer's target and spreads it: over all N for softmax, as e/2 of
each 0 and 1 for bce (targets 1 - e/2 and e/2).

Shapes: Q queries, M answers of the queries within a block; m entities of a block, N entities, B
blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import softplus

from kge_torchrec.models.distances import has_kernels
from kge_torchrec.models.ops import block_device

KEPT_BYTES = 256 << 20  # of a step's scores that are kept rather than computed twice
CPU_BLOCK_BYTES = 31 << 20  # glibc gives freed blocks of 32 MiB and more back to the kernel
CUDA_BLOCK_BYTES = 256 << 20  # enough work per kernel launch
# Scores handled at once: on a CPU they stay in the cache from one operation to the next.
_CHUNK_SCORES = {"cpu": 1 << 19, "cuda": 1 << 28}
_SMALLEST_EXPONENT = -87.0  # whose exponential is a normal number of float32


class BlockAnswers(NamedTuple):
    """Where the answers of the queries stand in a block; no place occurs twice."""

    query: Tensor  # (M,) int64
    column: Tensor  # (M,) int64, in the block
    share: Tensor  # (M,) one over the number of answers of that query, wherever they are


class FullLoss(Protocol):
    """One loss over all entities.

    ``seen`` is (3, Q): of each query the normalizer, the sum over answers of their target times
    their score, and the sum of all scores (0 without label smoothing).
    """

    normalizes: bool  # whether the gradient at one entity depends on the scores of all others

    def start(self, scores: Tensor, answers: BlockAnswers) -> tuple[Tensor, Tensor]:
        """Overwrites scores (Q, m) by slopes.  Returns their log factor (Q,) and what was seen."""

    def join(self, seen: Tensor) -> Tensor:
        """What was seen in several blocks, (B, 3, Q), as if they were one: (3, Q)."""

    def values(self, seen: Tensor) -> Tensor:
        """(Q,) the losses, from what was seen of all scores."""

    def finish(
        self, slopes: Tensor, top: Tensor, seen: Tensor | None, answers: BlockAnswers, weight: float
    ) -> None:
        """Overwrites slopes (Q, m) by the gradients of the sum of weight times the losses.

        top: the log factor of these slopes.  seen: of all scores; not read unless ``normalizes``.
        """


class _FullLoss:
    def __init__(self, num_entities: int, label_smoothing: float = 0.0):
        self.num_entities, self.smoothing = num_entities, label_smoothing

    def start(self, scores: Tensor, answers: BlockAnswers) -> tuple[Tensor, Tensor]:
        top, normalizer, of_answers, total = scores.new_zeros(4, scores.shape[0])
        targets = scores[answers.query, answers.column] * self._target(answers)
        of_answers.index_add_(0, answers.query, targets)
        for part in _chunks(scores):
            if self.smoothing:
                total[part] = scores[part].sum(1)
            self._to_slopes(scores[part], top[part], normalizer[part])
        return top, torch.stack([normalizer, of_answers, total])

    def values(self, seen: Tensor) -> Tensor:
        normalizer, of_answers, total = seen
        return normalizer - of_answers - self._rest() * total

    def finish(
        self, slopes: Tensor, top: Tensor, seen: Tensor | None, answers: BlockAnswers, weight: float
    ) -> None:
        slopes.mul_(self._factor(top, seen)[:, None] * weight)
        if self.smoothing:
            slopes.sub_(self._rest() * weight)
        place = answers.query, answers.column
        slopes[place] = slopes[place] - self._target(answers) * weight  # no place occurs twice

    def _target(self, answers: BlockAnswers) -> Tensor:
        """(M,) the factor of an answer's score."""
        raise NotImplementedError

    def _rest(self) -> float:
        """The factor of every score, by label smoothing."""
        raise NotImplementedError

    def _to_slopes(self, scores: Tensor, top: Tensor, normalizer: Tensor) -> None:
        """Overwrites all three: the last two, (Q,), are 0 before."""
        raise NotImplementedError

    def _factor(self, top: Tensor, seen: Tensor | None) -> Tensor:
        """(Q,) the factor of slopes."""
        raise NotImplementedError


class FullSoftmax(_FullLoss):
    """Cross-entropy of all entities against the uniform distribution over a query's answers.

    With a single answer it is the full softmax of Lacroix et al. (2018).  Every query has answers.
    Slopes are exp(s - top), top being the largest score of the block.
    """

    normalizes = True

    def join(self, seen: Tensor) -> Tensor:
        normalizer, of_answers, total = seen.unbind(1)
        return torch.stack([normalizer.logsumexp(0), of_answers.sum(0), total.sum(0)])

    def _target(self, answers: BlockAnswers) -> Tensor:
        return answers.share * (1 - self.smoothing)

    def _rest(self) -> float:
        return self.smoothing / self.num_entities

    def _to_slopes(self, scores: Tensor, top: Tensor, normalizer: Tensor) -> None:
        torch.amax(scores, 1, out=top)
        # A CPU takes what underflows one by one, 50 times as slowly.
        scores.sub_(top[:, None]).clamp_(min=_SMALLEST_EXPONENT).exp_()
        normalizer.copy_(scores.sum(1).log_().add_(top))

    def _factor(self, top: Tensor, seen: Tensor | None) -> Tensor:
        assert seen is not None  # as it normalizes
        return torch.exp(top - seen[0])


class FullBinaryCrossEntropy(_FullLoss):
    """Logistic loss of every entity, all weighing the same; a query may have no answer.

    reduction: "sum" (LibKGE's bce) or "mean" (ConvE's) over the N entities.  Slopes are the
    sigmoids of the scores.
    """

    normalizes = False

    def __init__(self, num_entities: int, label_smoothing: float = 0.0, reduction: str = "sum"):
        super().__init__(num_entities, label_smoothing)
        self._weight = 1.0 if reduction == "sum" else 1 / num_entities  # of each entity

    def join(self, seen: Tensor) -> Tensor:
        return seen.sum(0)

    def _target(self, answers: BlockAnswers) -> Tensor:
        return torch.full_like(answers.share, (1 - self.smoothing) * self._weight)

    def _rest(self) -> float:
        return self.smoothing / 2 * self._weight

    def _to_slopes(self, scores: Tensor, top: Tensor, normalizer: Tensor) -> None:
        if has_kernels(scores) and scores.is_contiguous():
            from kge_torchrec.models.slope_kernels import logistic_slopes  # numba takes its time

            logistic_slopes(scores, normalizer)
        else:
            torch.sum(softplus(scores), 1, out=normalizer)
            scores.sigmoid_()
        normalizer.mul_(self._weight)

    def _factor(self, top: Tensor, seen: Tensor | None) -> Tensor:
        return torch.full_like(top, self._weight)


def _chunks(scores: Tensor) -> Iterator[slice]:
    """Some queries at a time."""
    at_once = _CHUNK_SCORES[block_device(scores)]
    step = max(1, at_once // max(1, scores.shape[1]))
    for start in range(0, scores.shape[0], step):
        yield slice(start, start + step)


def block_bytes_of(device: str) -> int:
    """Scores of a block on a device of this kind."""
    return CUDA_BLOCK_BYTES if device == "cuda" else CPU_BLOCK_BYTES


def keeps_scores(rows: int, queries: int, kept_bytes: int) -> bool:
    """Whether the scores of n rows for Q queries stay in memory from start to finish."""
    return 4 * rows * queries <= kept_bytes


def score_blocks(rows: int, queries: int, block_bytes: int) -> list[range]:
    """The n rows of a rank in blocks of at most ``block_bytes`` of scores, but at least a row.

    Training against all entities and its plan count with the same blocks.
    """
    height = max(1, block_bytes // (4 * max(1, queries)))
    return [range(i, min(i + height, rows)) for i in range(0, rows, height)]

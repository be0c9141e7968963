"""Losses over all entities, in closed form over blocks of scores.

No rank holds all scores of a query, so such a loss has four parts: ``OverAll``. Both built-in
losses are

    normalizer - sum_answers target s - rest sum_all s

where s are the query's N scores. They differ in the normalizer:

    softmax  log sum exp s             cross-entropy, answers weighted equally (LibKGE's KvsAll)
    bce      sum log(1 + exp s)        sum over the N entities, target 1 for answers and 0 otherwise

Label smoothing e multiplies the targets of answers by 1 - e and adds ``rest`` to all targets:

    standard  softmax adds e / N, which keeps their sum 1; bce adds e / 2, half of e on each side
    libkge    adds 1 / N, as ConvE does; softmax then divides all targets by their sum

Shapes: Q queries, M answers of the queries within a block, m entities of a block, N entities, B
blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kge_torchrec.kernels import operators

KEPT_BYTES = 256 << 20  # scores of a step up to this size are always kept, not recomputed
# Scores of a block: glibc returns freed blocks of 32 MiB or more to the kernel, and a GPU needs
# enough work per kernel launch.
BLOCK_BYTES = {"cpu": 31 << 20, "cuda": 256 << 20}


class BlockAnswers(NamedTuple):
    """Positions of the queries' answers in a block; no position occurs twice."""

    query: Tensor  # (M,) int64
    column: Tensor  # (M,) int64, in the block
    share: Tensor  # (M,) 1 / number of answers of the query, over all blocks
    counts: Tensor  # (Q,) number of answers of each query, over all blocks


class OverAll:
    """A loss over all entities: statistics of each block, their sum, the losses, gradients.

    The statistics are (3, Q), and each loss defines their meaning. For the built-in losses they
    are, per query: the normalizer, the sum over answers of target times score, and the sum over all
    entities of rest times score. They are float64, because float32 has a resolution of only 1e-5 at
    150.
    """

    normalizes = False  # whether the gradient at one entity depends on the scores of all others

    def accepts(self, scores: Tensor) -> bool:
        """Return whether the loss takes scores of this type; otherwise they become float32."""
        return scores.dtype == torch.float32

    def partial_statistics(self, scores: Tensor, answers: BlockAnswers) -> Tensor:
        """Return the statistics (3, Q) of a block of scores (Q, m)."""
        raise NotImplementedError

    def reduce(self, statistics: Tensor) -> Tensor:
        """Reduce the statistics of several blocks and ranks to one: (B, 3, Q) -> (3, Q)."""
        return statistics.sum(0)

    def loss(self, statistics: Tensor) -> Tensor:
        """Return the losses (Q,) from the statistics of all scores."""
        raise NotImplementedError

    def backward(
        self, scores: Tensor, statistics: Tensor, answers: BlockAnswers, weight: Tensor
    ) -> None:
        """Overwrite scores (Q, m) by the gradients of the weighted sum of losses, weights (Q,).

        The statistics (3, Q) are those of all scores, or of this block unless ``normalizes``.
        """
        raise NotImplementedError


def spread_share(label_smoothing: float, smoothing: str, answers: Tensor | int) -> Tensor | float:
    """Return the share of a query's targets that softmax spreads over all candidates.

    LibKGE's targets (1 - e) y + 1/N sum to k (1 - e) + 1 for k answers, and the terms 1/N to 1.
    """
    return label_smoothing if smoothing == "standard" else 1 / (1 + answers * (1 - label_smoothing))


def low_target(label_smoothing: float, smoothing: str, candidates: Tensor | int) -> Tensor | float:
    """Return what bce adds to the targets, which is the target of candidates that are no answers.

    LibKGE refuses e <= 1/N, where an answer's target would exceed 1. Here 1/N is at most e.
    """
    if smoothing == "standard":
        return label_smoothing / 2
    return (1 / torch.as_tensor(candidates)).clamp(max=label_smoothing)


class _BuiltIn(OverAll):
    """The common formula of the built-in losses, with their options."""

    def __init__(
        self,
        num_entities: int,
        label_smoothing: float = 0.0,
        smoothing: str = "standard",
        reduction: str = "sum",
    ):
        self.num_entities = num_entities
        self.label_smoothing, self.smoothing = label_smoothing, smoothing
        self.factor = 1.0 if reduction == "sum" else 1 / num_entities

    def accepts(self, scores: Tensor) -> bool:
        has_kernel = operators.IMPLEMENTATION["full_scores"](scores) != "torch"
        return super().accepts(scores) or (scores.dtype == torch.bfloat16 and has_kernel)

    def targets(self, answers: BlockAnswers) -> tuple[Tensor, Tensor | float]:
        """Return the factors of the answers' scores, (M,), and of all scores, (Q,) or one."""
        raise NotImplementedError

    def partial_statistics(self, scores: Tensor, answers: BlockAnswers) -> Tensor:
        statistics = scores.new_zeros(3, len(scores), dtype=torch.float64)
        normalizer, answer_part, rest_part = statistics
        target, rest = self.targets(answers)
        targets = scores[answers.query, answers.column] * target
        answer_part.index_add_(0, answers.query, targets.to(statistics.dtype))
        if self.label_smoothing:
            torch.sum(scores, 1, dtype=statistics.dtype, out=rest_part).mul_(rest)
        operators.normalizers(scores, normalizer, self.normalizes)
        return statistics

    def loss(self, statistics: Tensor) -> Tensor:
        normalizer, answer_part, rest_part = statistics
        return (normalizer - answer_part - rest_part) * self.factor

    def backward(
        self, scores: Tensor, statistics: Tensor, answers: BlockAnswers, weight: Tensor
    ) -> None:
        normalizer, weight = statistics[0], weight * self.factor
        query, place = answers.query, (answers.query, answers.column)
        target, rest = self.targets(answers)
        # In float64: float32 would lose a small value next to the target.
        answer_part = scores[place].to(statistics.dtype)
        if self.normalizes:
            answer_part.sub_(normalizer[query]).exp_()
        else:
            answer_part.sigmoid_()
        answer_part -= target
        rests = torch.zeros_like(normalizer) + rest
        answer_part -= rests[query]
        operators.gradients(scores, normalizer, weight, rests, self.normalizes)
        scores[place] = (answer_part * weight[query]).to(scores.dtype)  # no position occurs twice


class SoftmaxOverAll(_BuiltIn):
    """Softmax of queries with answers; with one that of Lacroix et al. (2018)."""

    normalizes = True

    def targets(self, answers: BlockAnswers) -> tuple[Tensor, Tensor | float]:
        if not self.label_smoothing:
            return answers.share, 0.0
        share = spread_share(self.label_smoothing, self.smoothing, answers.counts)
        of_answer = share[answers.query] if isinstance(share, Tensor) else share
        return answers.share * (1 - of_answer), share / self.num_entities

    def reduce(self, statistics: Tensor) -> Tensor:
        normalizer, answer_part, rest_part = statistics.unbind(1)
        return torch.stack([normalizer.logsumexp(0), answer_part.sum(0), rest_part.sum(0)])


class BinaryCrossEntropyOverAll(_BuiltIn):
    """Logistic loss: the sum over the entities is LibKGE's bce, the mean that of ConvE."""

    def targets(self, answers: BlockAnswers) -> tuple[Tensor, Tensor | float]:
        low = low_target(self.label_smoothing, self.smoothing, self.num_entities)
        return torch.full_like(answers.share, 1 - self.label_smoothing), low


def kept_bytes(free: int, rows: int, dim: int) -> int:
    """Return the size of scores up to which a rank computes them once, at least ``KEPT_BYTES``.

    These scores and the gradients of all rows take at most a quarter of the free bytes of a GPU (0
    on a CPU). Autograd and autocast may hold each score two more times.
    """
    return max(KEPT_BYTES, free // 4 - 4 * rows * dim)


def block_height(queries: int, block_bytes: int) -> int:
    """Return the rows of a block of at most ``block_bytes`` of float32 scores; at least one row."""
    return max(1, block_bytes // (4 * max(1, queries)))

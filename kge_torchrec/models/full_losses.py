"""Losses of queries over all entities, in closed form over blocks of scores.

No rank holds all scores of a query, so such a loss has four parts. ``partial_statistics`` computes
the statistics of one block. ``reduce`` reduces the statistics of all blocks and ranks to those of
all scores. ``loss`` computes the loss from them, and ``backward`` the gradients of a block.
Both losses are

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

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kge_torchrec.kernels import operators

KEPT_BYTES = 256 << 20  # scores of a step up to this size are always kept, not recomputed
CPU_BLOCK_BYTES = 31 << 20  # glibc returns freed blocks of 32 MiB or more to the kernel
CUDA_BLOCK_BYTES = 256 << 20  # enough work per kernel launch


class BlockAnswers(NamedTuple):
    """Positions of the queries' answers in a block; no position occurs twice."""

    query: Tensor  # (M,) int64
    column: Tensor  # (M,) int64, in the block
    share: Tensor  # (M,) 1 / number of answers of the query, over all blocks
    counts: Tensor  # (Q,) number of answers of each query, over all blocks


class FullLoss(Protocol):
    """A loss over all entities in closed form.

    The statistics are (3, Q), and each loss defines their meaning. For the built-in losses they
    are, per query: the normalizer, the sum over answers of target times score, and the sum over all
    entities of rest times score. They are float64, because float32 has a resolution of only 1e-5 at
    150.
    """

    normalizes: bool  # whether the gradient at one entity depends on the scores of all others

    def partial_statistics(self, scores: Tensor, answers: BlockAnswers) -> Tensor:
        """Return the statistics (3, Q) of a block of scores (Q, m)."""

    def reduce(self, statistics: Tensor) -> Tensor:
        """Reduce the statistics of several blocks to one: (B, 3, Q) -> (3, Q)."""

    def loss(self, statistics: Tensor) -> Tensor:
        """Return the losses (Q,) from the statistics of all scores."""

    def backward(
        self, scores: Tensor, statistics: Tensor, answers: BlockAnswers, weight: Tensor
    ) -> None:
        """Overwrite scores by the gradients of the weighted sum of losses.

        Args:
            scores: (Q, m) scores of a block, overwritten.
            statistics: (3, Q) of all scores. Those of this block are enough unless the loss
                ``normalizes``.
            answers: The answers in this block.
            weight: (Q,) weight of each query's loss.
        """


def keeps_bfloat16(loss: FullLoss, scores: Tensor) -> bool:
    """Return whether a loss accepts these bfloat16 scores; otherwise cast them to float32."""
    return isinstance(loss, _ClosedForm) and operators.keeps_bfloat16(scores)


def spread_share(label_smoothing: float, smoothing: str, answers: Tensor | int) -> Tensor | float:
    """Return the share of a query's targets that softmax spreads over all candidates.

    LibKGE's targets (1 - e) y + 1/N sum to k (1 - e) + 1 for k answers, and the terms 1/N to 1.

    Args:
        label_smoothing: e.
        smoothing: "standard" or "libkge".
        answers: Number of answers of the query, or of each query.
    """
    return label_smoothing if smoothing == "standard" else 1 / (1 + answers * (1 - label_smoothing))


def low_target(label_smoothing: float, smoothing: str, candidates: Tensor | int) -> Tensor | float:
    """Return what bce adds to the targets, which is the target of candidates that are no answers.

    LibKGE refuses e <= 1/N, where an answer's target would exceed 1. Here 1/N is at most e.

    Args:
        label_smoothing: e.
        smoothing: "standard" or "libkge".
        candidates: Number of candidates of the query, answers included, or of each query.
    """
    if smoothing == "standard":
        return label_smoothing / 2
    return (1 / torch.as_tensor(candidates)).clamp(max=label_smoothing)


class _ClosedForm:
    """The common formula of the built-in losses.

    Args:
        num_entities: N.
        label_smoothing: e in [0, 1).
        smoothing: "standard" or "libkge".
    """

    normalizes: bool
    factor = 1.0  # multiplies the whole loss

    def __init__(
        self, num_entities: int, label_smoothing: float = 0.0, smoothing: str = "standard"
    ):
        self.num_entities = num_entities
        self.label_smoothing, self.smoothing = label_smoothing, smoothing

    def partial_statistics(self, scores: Tensor, answers: BlockAnswers) -> Tensor:
        statistics = scores.new_zeros(3, len(scores), dtype=torch.float64)
        normalizer, answer_part, rest_part = statistics
        targets = scores[answers.query, answers.column] * self._target(answers)
        answer_part.index_add_(0, answers.query, targets.to(statistics.dtype))
        if self.label_smoothing:
            torch.sum(scores, 1, dtype=statistics.dtype, out=rest_part).mul_(self._rest(answers))
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
        # In float64: float32 would lose a small value next to the target.
        answer_part = self._derivative(scores[place].to(statistics.dtype), normalizer[query])
        answer_part -= self._target(answers)
        rest = None
        if self.label_smoothing:
            rest = torch.zeros_like(normalizer) + self._rest(answers)
            answer_part -= rest[query]
        operators.gradients(scores, normalizer, weight, rest, self.normalizes)
        scores[place] = (answer_part * weight[query]).to(scores.dtype)  # no position occurs twice

    def _target(self, answers: BlockAnswers) -> Tensor:
        """Return the factors (M,) of the answers' scores."""
        raise NotImplementedError

    def _rest(self, answers: BlockAnswers) -> Tensor | float:
        """Return the factor of all scores of each query, (Q,) or one for all queries."""
        raise NotImplementedError

    def _derivative(self, scores: Tensor, normalizer: Tensor) -> Tensor:
        """Return the derivatives (M,) of the normalizers by the answers' scores (M,)."""
        raise NotImplementedError


class FullSoftmax(_ClosedForm):
    """Cross-entropy of all entities against the uniform distribution over a query's answers.

    With one answer this is the full softmax of Lacroix et al. (2018). Every query must have an
    answer.
    """

    normalizes = True

    def reduce(self, statistics: Tensor) -> Tensor:
        normalizer, answer_part, rest_part = statistics.unbind(1)
        return torch.stack([normalizer.logsumexp(0), answer_part.sum(0), rest_part.sum(0)])

    def _target(self, answers: BlockAnswers) -> Tensor:
        if not self.label_smoothing:
            return answers.share
        counts = answers.counts[answers.query]
        return answers.share * (1 - spread_share(self.label_smoothing, self.smoothing, counts))

    def _rest(self, answers: BlockAnswers) -> Tensor | float:
        share = spread_share(self.label_smoothing, self.smoothing, answers.counts)
        return share / self.num_entities

    def _derivative(self, scores: Tensor, normalizer: Tensor) -> Tensor:
        return (scores - normalizer).exp_()


class FullBinaryCrossEntropy(_ClosedForm):
    """Logistic loss of every entity with equal weights; a query may have no answer.

    Args:
        num_entities: N.
        label_smoothing: e in [0, 1).
        reduction: "sum" (LibKGE's bce) or "mean" (ConvE's) over the N entities.
        smoothing: "standard" or "libkge".
    """

    normalizes = False

    def __init__(
        self,
        num_entities: int,
        label_smoothing: float = 0.0,
        reduction: str = "sum",
        smoothing: str = "standard",
    ):
        super().__init__(num_entities, label_smoothing, smoothing)
        self.factor = 1.0 if reduction == "sum" else 1 / num_entities

    def reduce(self, statistics: Tensor) -> Tensor:
        return statistics.sum(0)

    def _target(self, answers: BlockAnswers) -> Tensor:
        return torch.full_like(answers.share, 1 - self.label_smoothing)

    def _rest(self, answers: BlockAnswers) -> Tensor | float:
        return low_target(self.label_smoothing, self.smoothing, self.num_entities)

    def _derivative(self, scores: Tensor, normalizer: Tensor) -> Tensor:
        return scores.sigmoid_()


def block_bytes_of(device: str) -> int:
    """Return the bytes of scores per block on a kind of device, "cpu" or "cuda"."""
    return CUDA_BLOCK_BYTES if device == "cuda" else CPU_BLOCK_BYTES


def kept_bytes(free: int, rows: int, dim: int) -> int:
    """Return the size up to which a rank keeps scores, at least ``KEPT_BYTES``.

    Kept scores and the gradients of all rows take at most a quarter of the free memory. Autograd
    and autocast may hold each score two more times.

    Args:
        free: Free bytes of the GPU beside the table; 0 on a CPU.
        rows: n.
        dim: D.
    """
    return max(KEPT_BYTES, free // 4 - 4 * rows * dim)


def keeps_scores(rows: int, queries: int, kept_bytes: int) -> bool:
    """Return whether the float32 scores of all rows and queries fit in ``kept_bytes``.

    If so they stay in memory between forward and backward and are computed once.
    """
    return 4 * rows * queries <= kept_bytes


def score_blocks(rows: int, queries: int, block_bytes: int) -> list[range]:
    """Split the rows of a rank into blocks of at most ``block_bytes`` of scores, or of one row.

    Training against all entities and its plan use the same blocks.
    """
    height = max(1, block_bytes // (4 * max(1, queries)))
    return [range(i, min(i + height, rows)) for i in range(0, rows, height)]

"""Losses of queries over all entities, in closed form over blocks of scores.

No rank has all scores of a query, so such a loss works in two steps: ``observe`` tells what it saw
of a block; ``join`` makes of what was seen in all blocks, on all ranks, what one block of all
scores would have shown; with that ``finish`` makes gradients of the scores.  Both losses are

    normalizer - sum_answers target s - rest sum_all s

where s are the query's N scores, and differ in the normalizer:

    softmax  log sum exp s             cross-entropy against its answers alike (LibKGE's KvsAll)
    bce      sum log(1 + exp s)        sum over the N entities, answers being 1 and others 0

Label smoothing e takes e of an answer's target and spreads it: over all N for softmax, as e/2 of
each 0 and 1 for bce (targets 1 - e/2 and e/2).

On a CPU ``score_gradients`` read the scores once for each step.  It has scores in bfloat16 as they
are, and computes in float32.

Shapes: Q queries, M answers of the queries within a block; m entities of a block, N entities, B
blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import softplus

from kge_torchrec.kernels.kinds import block_device

KEPT_BYTES = 256 << 20  # of a step's scores that are kept rather than computed twice
CPU_BLOCK_BYTES = 31 << 20  # glibc gives freed blocks of 32 MiB and more back to the kernel
CUDA_BLOCK_BYTES = 256 << 20  # enough work per kernel launch
# Scores that temporaries are made of at once: on a CPU they stay in the cache.
_CHUNK_SCORES = {"cpu": 1 << 19, "cuda": 1 << 25}


class BlockAnswers(NamedTuple):
    """Where the answers of the queries stand in a block; no place occurs twice."""

    query: Tensor  # (M,) int64
    column: Tensor  # (M,) int64, in the block
    share: Tensor  # (M,) one over the number of answers of that query, wherever they are


class FullLoss(Protocol):
    """One loss over all entities.

    ``seen`` is (3, Q), and what its three numbers are is the loss's own.  Ours are of float64, as
    float32 has steps of 1e-5 at 150: of each query the normalizer, the sum over answers of their
    target times their score, and the sum of all scores (0 without label smoothing).
    """

    normalizes: bool  # whether the gradient at one entity depends on the scores of all others

    def observe(self, scores: Tensor, answers: BlockAnswers) -> Tensor:
        """What is seen of a block of scores (Q, m)."""

    def join(self, seen: Tensor) -> Tensor:
        """What was seen in several blocks, (B, 3, Q), as if they were one: (3, Q)."""

    def values(self, seen: Tensor) -> Tensor:
        """(Q,) the losses, from what was seen of all scores."""

    def finish(self, scores: Tensor, seen: Tensor, answers: BlockAnswers, weight: Tensor) -> None:
        """Overwrites scores (Q, m) by the gradients of the sum of weight (Q,) times the losses.

        seen: of all scores; of this block alone will do unless the loss ``normalizes``.
        """


def keeps_bfloat16(loss: FullLoss, scores: Tensor) -> bool:
    """Whether a loss takes scores of this type as they are; others are for it to be float32."""
    is_ours = isinstance(loss, _FullLoss) and scores.dtype == torch.bfloat16
    return is_ours and _kernels_for(scores) is not None


class _FullLoss:
    normalizes: bool

    def __init__(self, num_entities: int, label_smoothing: float = 0.0):
        self.num_entities, self.smoothing = num_entities, label_smoothing
        self.factor = 1.0  # of the whole loss

    def observe(self, scores: Tensor, answers: BlockAnswers) -> Tensor:
        seen = scores.new_zeros(3, len(scores), dtype=torch.float64)
        normalizer, of_answers, total = seen
        targets = scores[answers.query, answers.column] * self._target(answers)
        of_answers.index_add_(0, answers.query, targets.to(seen.dtype))
        if self.smoothing:
            torch.sum(scores, 1, dtype=seen.dtype, out=total)
        if kernels := _kernels_for(scores):
            kernels.normalizers(scores, normalizer, softmax=self.normalizes)
        else:
            for part in _chunks(scores):
                self._normalizers(scores[part], normalizer[part])
        return seen

    def values(self, seen: Tensor) -> Tensor:
        normalizer, of_answers, total = seen
        return (normalizer - of_answers - self._rest() * total) * self.factor

    def finish(self, scores: Tensor, seen: Tensor, answers: BlockAnswers, weight: Tensor) -> None:
        normalizer, weight = seen[0], weight * self.factor
        query, place = answers.query, (answers.query, answers.column)
        # Apart, since what is small beside a target would be rounded with it.
        of_answers = scores[place].to(seen.dtype)[:, None]
        self._to_slopes(of_answers, normalizer[query])
        of_answers = of_answers[:, 0] - (self._target(answers) + self._rest())
        if kernels := _kernels_for(scores):
            kernels.gradients(scores, normalizer, weight, self._rest(), softmax=self.normalizes)
        else:
            self._to_slopes(scores, normalizer)
            if self.smoothing:
                scores.sub_(self._rest())
            scores.mul_(weight[:, None])
        scores[place] = (of_answers * weight[query]).to(scores.dtype)  # no place occurs twice

    def _target(self, answers: BlockAnswers) -> Tensor:
        """(M,) the factor of an answer's score."""
        raise NotImplementedError

    def _rest(self) -> float:
        """The factor of every score, by label smoothing."""
        raise NotImplementedError

    def _normalizers(self, scores: Tensor, normalizer: Tensor) -> None:
        """Overwrites the second, (Q,)."""
        raise NotImplementedError

    def _to_slopes(self, scores: Tensor, normalizer: Tensor) -> None:
        """Overwrites scores by the slopes of the normalizer of all of them."""
        raise NotImplementedError


class FullSoftmax(_FullLoss):
    """Cross-entropy of all entities against the uniform distribution over a query's answers.

    With a single answer it is the full softmax of Lacroix et al. (2018).  Every query has answers.
    """

    normalizes = True

    def join(self, seen: Tensor) -> Tensor:
        normalizer, of_answers, total = seen.unbind(1)
        return torch.stack([normalizer.logsumexp(0), of_answers.sum(0), total.sum(0)])

    def _target(self, answers: BlockAnswers) -> Tensor:
        return answers.share * (1 - self.smoothing)

    def _rest(self) -> float:
        return self.smoothing / self.num_entities

    def _normalizers(self, scores: Tensor, normalizer: Tensor) -> None:
        top = scores.amax(1)  # apart until the end, which torch's own would round
        normalizer.copy_((scores - top[:, None]).exp_().sum(1).log_()).add_(top)

    def _to_slopes(self, scores: Tensor, normalizer: Tensor) -> None:
        scores.sub_(normalizer[:, None]).exp_()


class FullBinaryCrossEntropy(_FullLoss):
    """Logistic loss of every entity, all weighing the same; a query may have no answer.

    reduction: "sum" (LibKGE's bce) or "mean" (ConvE's) over the N entities.
    """

    normalizes = False

    def __init__(self, num_entities: int, label_smoothing: float = 0.0, reduction: str = "sum"):
        super().__init__(num_entities, label_smoothing)
        self.factor = 1.0 if reduction == "sum" else 1 / num_entities

    def join(self, seen: Tensor) -> Tensor:
        return seen.sum(0)

    def _target(self, answers: BlockAnswers) -> Tensor:
        return torch.full_like(answers.share, 1 - self.smoothing)

    def _rest(self) -> float:
        return self.smoothing / 2

    def _normalizers(self, scores: Tensor, normalizer: Tensor) -> None:
        normalizer.copy_(softplus(scores).sum(1))

    def _to_slopes(self, scores: Tensor, normalizer: Tensor) -> None:
        scores.sigmoid_()


def _kernels_for(scores: Tensor) -> ModuleType | None:
    """What computes these on a CPU; None where torch does."""
    if scores.device.type != "cpu":
        return None
    from kge_torchrec.kernels import score_gradients  # numba takes its time

    return score_gradients if score_gradients.takes(scores) else None


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

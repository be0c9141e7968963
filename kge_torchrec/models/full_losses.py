"""Losses of queries over all entities, in closed form over blocks of scores.

No rank holds all scores of a query, so a loss has four parts. ``observe`` computes the partial
statistics of one block. ``join`` reduces the statistics of all blocks and ranks to those of all
scores. ``values`` computes the loss from them, and ``finish`` the gradients of a block's scores.
Both losses are

    normalizer - sum_answers target s - rest sum_all s

where s are the query's N scores. They differ in the normalizer:

    softmax  log sum exp s             cross-entropy, answers weighted equally (LibKGE's KvsAll)
    bce      sum log(1 + exp s)        sum over the N entities, target 1 for answers and 0 otherwise

Label smoothing e takes the share e of an answer's target and spreads it. softmax spreads it over
all N entities. bce spreads it as e/2 over the targets 0 and 1, which become e/2 and 1 - e/2.

On a CPU ``score_gradients`` reads the scores once in each of ``observe`` and ``finish``. It reads
bfloat16 scores directly and computes in float32.

Shapes: Q queries, M answers of the queries within a block, m entities of a block, N entities, B
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

KEPT_BYTES = 256 << 20  # scores of a step up to this size are kept, not recomputed
CPU_BLOCK_BYTES = 31 << 20  # glibc returns freed blocks of 32 MiB or more to the kernel
CUDA_BLOCK_BYTES = 256 << 20  # enough work per kernel launch
# Scores per temporary; on a CPU these fit in the cache.
_CHUNK_SCORES = {"cpu": 1 << 19, "cuda": 1 << 25}


class BlockAnswers(NamedTuple):
    """Positions of the queries' answers in a block; no position occurs twice."""

    query: Tensor  # (M,) int64
    column: Tensor  # (M,) int64, in the block
    share: Tensor  # (M,) 1 / number of answers of the query, over all blocks


class FullLoss(Protocol):
    """A loss over all entities.

    The statistics ``seen`` are (3, Q), and each loss defines their meaning. For the built-in losses
    they are, per query: the normalizer, the sum over answers of target times score, and the sum of
    all scores (0 without label smoothing). They are float64, because float32 has a resolution of
    only 1e-5 at 150.
    """

    normalizes: bool  # whether the gradient at one entity depends on the scores of all others

    def observe(self, scores: Tensor, answers: BlockAnswers) -> Tensor:
        """Return the partial statistics (3, Q) of a block of scores (Q, m)."""

    def join(self, seen: Tensor) -> Tensor:
        """Reduce the statistics of several blocks to one: (B, 3, Q) -> (3, Q)."""

    def values(self, seen: Tensor) -> Tensor:
        """Return the losses (Q,) from the statistics of all scores."""

    def finish(self, scores: Tensor, seen: Tensor, answers: BlockAnswers, weight: Tensor) -> None:
        """Overwrite scores by the gradients of the weighted sum of losses.

        Args:
            scores: (Q, m) scores of a block, overwritten.
            seen: (3, Q) statistics of all scores. Those of this block are enough unless the loss
                ``normalizes``.
            answers: The answers in this block.
            weight: (Q,) weight of each query's loss.
        """


def keeps_bfloat16(loss: FullLoss, scores: Tensor) -> bool:
    """Whether a loss accepts these bfloat16 scores; otherwise they must be cast to float32."""
    is_ours = isinstance(loss, _FullLoss) and scores.dtype == torch.bfloat16
    return is_ours and _kernels_for(scores) is not None


class _FullLoss:
    normalizes: bool

    def __init__(self, num_entities: int, label_smoothing: float = 0.0):
        self.num_entities, self.smoothing = num_entities, label_smoothing
        self.factor = 1.0  # multiplies the whole loss

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
        # In float64: float32 would lose a small value next to the target.
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
        scores[place] = (of_answers * weight[query]).to(scores.dtype)  # no position occurs twice

    def _target(self, answers: BlockAnswers) -> Tensor:
        """Return the factors (M,) of the answers' scores."""
        raise NotImplementedError

    def _rest(self) -> float:
        """Return the factor of every score that label smoothing adds."""
        raise NotImplementedError

    def _normalizers(self, scores: Tensor, normalizer: Tensor) -> None:
        """Write the normalizers of scores (Q, m) into ``normalizer`` (Q,)."""
        raise NotImplementedError

    def _to_slopes(self, scores: Tensor, normalizer: Tensor) -> None:
        """Overwrite scores by the gradients of the normalizer of all scores."""
        raise NotImplementedError


class FullSoftmax(_FullLoss):
    """Cross-entropy of all entities against the uniform distribution over a query's answers.

    With one answer this is the full softmax of Lacroix et al. (2018). Every query must have an
    answer.
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
        top = scores.amax(1)  # added in float64 at the end; torch.logsumexp would round
        normalizer.copy_((scores - top[:, None]).exp_().sum(1).log_()).add_(top)

    def _to_slopes(self, scores: Tensor, normalizer: Tensor) -> None:
        scores.sub_(normalizer[:, None]).exp_()


class FullBinaryCrossEntropy(_FullLoss):
    """Logistic loss of every entity with equal weights; a query may have no answer.

    Args:
        num_entities: N.
        label_smoothing: e in [0, 1); the targets are 1 - e/2 and e/2.
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
    """Return the CPU kernels if they support these scores, otherwise None."""
    if scores.device.type != "cpu":
        return None
    from kge_torchrec.kernels import score_gradients  # numba loads slowly

    return score_gradients if score_gradients.takes(scores) else None


def _chunks(scores: Tensor) -> Iterator[slice]:
    """Yield slices of queries that limit the size of temporaries."""
    at_once = _CHUNK_SCORES[block_device(scores)]
    step = max(1, at_once // max(1, scores.shape[1]))
    for start in range(0, scores.shape[0], step):
        yield slice(start, start + step)


def block_bytes_of(device: str) -> int:
    """Return the bytes of scores per block on a kind of device, "cpu" or "cuda"."""
    return CUDA_BLOCK_BYTES if device == "cuda" else CPU_BLOCK_BYTES


def keeps_scores(rows: int, queries: int, kept_bytes: int) -> bool:
    """Whether the float32 scores of all rows and queries fit in ``kept_bytes``.

    If so they stay in memory from ``observe`` to ``finish`` and are computed once.
    """
    return 4 * rows * queries <= kept_bytes


def score_blocks(rows: int, queries: int, block_bytes: int) -> list[range]:
    """Split the rows of a rank into blocks of at most ``block_bytes`` of scores, or of one row.

    Training against all entities and its plan use the same blocks.
    """
    height = max(1, block_bytes // (4 * max(1, queries)))
    return [range(i, min(i + height, rows)) for i in range(0, rows, height)]

"""Losses, each in three forms; the same name means the same loss in every training type.

1.  Sampled candidates.  ``Loss.forward`` maps ``positive`` (C, b), ``negative`` (C, b, K) and
    ``mask`` (C, b, K) to one loss per query, (C, b).  ``mask`` is false where a candidate is no
    negative (the answer itself, a known fact); None stands for all true.
2.  Queries with any number of answers, among those and sampled candidates: ``Loss.over_answers``.
3.  Queries over all entities, in closed form over blocks of scores: ``Loss.over_all``.  No rank has
    all scores of a query, so such a loss works in two steps: ``start`` turns a block of scores into
    the loss's slopes but for a factor per query, and tells what it saw of the block; ``join`` makes
    of what was seen in all blocks, on all ranks, what one block of all scores would have shown;
    with that ``finish`` makes gradients of the slopes.  Both losses are

        normalizer - sum_answers target s - rest sum_all s

    where s are the query's N scores, and differ in the normalizer:

        softmax  log sum exp s             cross-entropy against its answers alike (LibKGE's KvsAll)
        bce      sum log(1 + exp s)        sum over the N entities, answers being 1 and others 0

    Label smoothing e takes e of an answer's target and spreads it: over all N for softmax, as e/2
    of each 0 and 1 for bce (targets 1 - e/2 and e/2).

With one answer form 2 is form 1; if all entities are candidates, both are form 3.

Shapes: C chunks, b queries a chunk, K candidates a chunk; Q queries, M answers of the queries (of
form 3: within a block); m entities of a block, N entities, B blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, relu, softplus

from kge_torchrec.models.ops import block_device


def _masked_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over the candidates that count; 0 where none does.  (C, b, K) -> (C, b)"""
    if mask is None:
        return values.mean(-1)
    return (values * mask).sum(-1) / mask.sum(-1).clamp(min=1)


class Loss(nn.Module):
    """The loss of a query.  The other forms are for training types that a loss may do without.

    Constructed with its ``Options`` by name.
    """

    @dataclass(frozen=True)
    class Options:
        """Settings of this loss: keys of ``loss`` that it has in common, others in loss.options."""

    needs_answers = False  # nothing to learn from a query without any

    def forward(self, positive: Tensor, negative: Tensor, mask: Tensor | None) -> Tensor:
        """(C, b), (C, b, K), (C, b, K) bool -> (C, b)"""
        raise NotImplementedError

    def over_answers(self) -> nn.Module:
        """Form 2: called with positive (M,) of all answers of all queries, query (M,) which query
        each belongs to, negative (Q, K) and mask (Q, K); returns (Q,).
        """
        raise NotImplementedError

    def over_all(self, num_entities: int) -> FullLoss:
        """Form 3."""
        raise NotImplementedError

    @classmethod
    def covers(cls, form: str) -> bool:
        """Whether it has the form "over_answers" or "over_all"."""
        return getattr(cls, form) is not getattr(Loss, form)


class SoftmaxLoss(Loss):
    """Cross-entropy of the positive among itself and the candidates (Lacroix et al. 2018).

    Label smoothing e moves the weight e from the positive to all choices alike.
    """

    @dataclass(frozen=True)
    class Options:
        """Settings of the loss.

        Args:
            label_smoothing: Share of the target that is spread, in [0, 1).
        """

        label_smoothing: float = 0.0

    needs_answers = True

    def __init__(self, label_smoothing: float = 0.0):
        super().__init__()
        self.label_smoothing = label_smoothing

    def forward(self, positive: Tensor, negative: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            negative = negative.masked_fill(~mask, torch.finfo(negative.dtype).min / 2)
        normalizer = torch.logaddexp(positive, negative.logsumexp(-1))
        if not self.label_smoothing:
            return normalizer - positive
        choices: int | Tensor = negative.shape[-1] + 1
        if mask is None:
            total = negative.sum(-1) + positive
        else:
            total = negative.masked_fill(~mask, 0.0).sum(-1) + positive
            choices = mask.sum(-1) + 1
        smooth = self.label_smoothing
        return normalizer - (1 - smooth) * positive - smooth * total / choices

    def over_answers(self) -> nn.Module:
        return AnswersSoftmax(self.label_smoothing)

    def over_all(self, num_entities: int) -> FullLoss:
        return FullSoftmax(num_entities, self.label_smoothing)


class BinaryCrossEntropyLoss(Loss):
    """Logistic loss of every choice, the positive being 1 and candidates 0; all weigh the same.

    reduction: "sum" (LibKGE's bce) or "mean" over the choices.  Label smoothing e sets the targets
    to 1 - e/2 and e/2.
    """

    @dataclass(frozen=True)
    class Options:
        """Settings of the loss.

        Args:
            label_smoothing: Share of the target that is spread, in [0, 1).
            reduction: sum, or mean, over all candidates of a query, answers included.
        """

        label_smoothing: float = 0.0
        reduction: str = "sum"

    def __init__(self, label_smoothing: float = 0.0, reduction: str = "sum"):
        super().__init__()
        self.label_smoothing, self.reduction = label_smoothing, reduction

    def forward(self, positive: Tensor, negative: Tensor, mask: Tensor | None) -> Tensor:
        low = self.label_smoothing / 2
        of_positive, of_negative = softplus(-positive), softplus(negative)
        if low:  # softplus(-x) = softplus(x) - x
            of_positive, of_negative = of_positive + low * positive, of_negative - low * negative
        if mask is not None:
            of_negative = of_negative * mask
        total = of_positive + of_negative.sum(-1)
        if self.reduction == "sum":
            return total
        return total / (1 + (negative.shape[-1] if mask is None else mask.sum(-1)))

    def over_answers(self) -> nn.Module:
        return AnswersBinaryCrossEntropy(self.label_smoothing, self.reduction)

    def over_all(self, num_entities: int) -> FullLoss:
        return FullBinaryCrossEntropy(num_entities, self.label_smoothing, self.reduction)


class MarginLoss(Loss):
    """Margin ranking (Bordes et al. 2013): mean over candidates of max(0, margin - pos + neg)."""

    @dataclass(frozen=True)
    class Options:
        """Settings of the loss.

        Args:
            margin: Between the answer and a candidate.
        """

        margin: float = 9.0

    def __init__(self, margin: float = 1.0):
        super().__init__()
        self.margin = margin

    def forward(self, positive: Tensor, negative: Tensor, mask: Tensor | None) -> Tensor:
        return _masked_mean(relu(self.margin - positive[..., None] + negative), mask)


class SelfAdversarialLoss(Loss):
    """Self-adversarial negative sampling (Sun et al. 2019).

    Half -log sigmoid(margin + pos), half the same of the candidates, -log sigmoid(-margin - neg),
    weighted by softmax(temperature * neg), through which no gradient flows.
    """

    @dataclass(frozen=True)
    class Options:
        """Settings of the loss.

        Args:
            margin: Added to scores before the logistic loss.
            temperature: Of the softmax that weights candidates.
        """

        margin: float = 9.0
        temperature: float = 1.0

    def __init__(self, margin: float = 9.0, temperature: float = 1.0):
        super().__init__()
        self.margin, self.temperature = margin, temperature

    def forward(self, positive: Tensor, negative: Tensor, mask: Tensor | None) -> Tensor:
        logits = self.temperature * negative.detach()
        if mask is not None:
            logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
        weight = logits.softmax(-1)
        if mask is not None:
            weight = weight * mask
        of_negative = -(weight * logsigmoid(-self.margin - negative)).sum(-1)
        return (of_negative - logsigmoid(self.margin + positive)) / 2


def _sums(values: Tensor, query: Tensor, queries: int) -> Tensor:
    """Sums over the answers of each query: (M,) -> (Q,)"""
    return values.new_zeros(queries).index_add(0, query, values)


class AnswersSoftmax(nn.Module):
    """Cross-entropy of all candidates against the uniform distribution over the answers.

    Label smoothing e moves the weight e from the answers to all candidates alike.
    """

    def __init__(self, label_smoothing: float = 0.0):
        super().__init__()
        self.label_smoothing = label_smoothing

    def forward(self, positive: Tensor, query: Tensor, negative: Tensor, mask: Tensor) -> Tensor:
        queries = len(negative)
        others = negative.masked_fill(~mask, torch.finfo(negative.dtype).min / 2).logsumexp(1)
        top = others.detach().index_select(0, query)
        top = torch.maximum(top, positive.detach())
        largest = others.detach().scatter_reduce(0, query, top, "amax")
        shifted = (positive - largest.index_select(0, query)).exp()
        total = _sums(shifted, query, queries) + (others - largest).exp()
        normalizer = largest + total.log()
        answers = _sums(torch.ones_like(positive), query, queries)
        mean = _sums(positive, query, queries) / answers
        smooth = self.label_smoothing
        if not smooth:
            return normalizer - mean
        every = _sums(positive, query, queries) + (negative * mask).sum(1)
        return normalizer - (1 - smooth) * mean - smooth * every / (answers + mask.sum(1))


class AnswersBinaryCrossEntropy(nn.Module):
    """Logistic loss of every candidate, answers being 1 and others 0; all weigh the same.

    reduction: "sum" (LibKGE's bce) or "mean" over all candidates, answers included.  Label
    smoothing e sets the targets to 1 - e/2 and e/2.
    """

    def __init__(self, label_smoothing: float = 0.0, reduction: str = "sum"):
        super().__init__()
        self.label_smoothing, self.reduction = label_smoothing, reduction

    def forward(self, positive: Tensor, query: Tensor, negative: Tensor, mask: Tensor) -> Tensor:
        low, queries = self.label_smoothing / 2, len(negative)
        of_positive = softplus(-positive) + low * positive  # softplus(-x) = softplus(x) - x
        of_negative = ((softplus(negative) - low * negative) * mask).sum(1)
        total = _sums(of_positive, query, queries) + of_negative
        if self.reduction == "sum":
            return total
        return total / (_sums(torch.ones_like(positive), query, queries) + mask.sum(1))


KEPT_BYTES = 256 << 20  # of a step's scores that are kept rather than computed twice
CPU_BLOCK_BYTES = 32 << 20
CUDA_BLOCK_BYTES = 256 << 20  # enough work per kernel launch
# Scores handled at once: on a CPU they stay in the cache from one operation to the next.
_CHUNK_SCORES = {"cpu": 1 << 18, "cuda": 1 << 28}


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
        scores.sub_(top[:, None]).exp_()
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
        normalizer.copy_(softplus(scores).sum(1).mul_(self._weight))
        scores.sigmoid_()

    def _factor(self, top: Tensor, seen: Tensor | None) -> Tensor:
        return torch.full_like(top, self._weight)


def _chunks(scores: Tensor) -> Iterator[slice]:
    """Some queries at a time."""
    at_once = _CHUNK_SCORES[block_device(scores)]
    step = max(1, at_once // max(1, scores.shape[1]))
    for start in range(0, scores.shape[0], step):
        yield slice(start, start + step)


def block_bytes_of(device: str) -> int:
    """Scores of a block on a device of this kind, unless all are kept."""
    return CUDA_BLOCK_BYTES if device == "cuda" else CPU_BLOCK_BYTES


def score_blocks(rows: int, queries: int, kept_bytes: int, block_bytes: int) -> list[range]:
    """The n rows of a rank for Q queries: one block up to ``kept_bytes``, else several.

    Blocks of several have at most ``block_bytes`` of scores, but at least a row.  Training against
    all entities and its plan count with the same blocks.
    """
    row_bytes = 4 * max(1, queries)
    whole = rows * row_bytes <= kept_bytes
    height = rows if whole else max(1, block_bytes // row_bytes)
    return [range(i, min(i + height, rows)) for i in range(0, rows, max(1, height))]

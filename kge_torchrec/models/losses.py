"""Losses: functions of scores. A name means the same loss in every training type.

``Loss.forward`` maps ``positive`` (C, b), ``negative`` (C, b, K) and ``mask`` (C, b, K) to one loss
per query, (C, b). ``mask`` is false for candidates that are not negatives (the answer itself or a
known fact). None means all true. That is enough for sampled candidates:

    one answer       ``forward``
    several answers  ``over_answers``: by default the mean of ``forward`` over the answers
    all entities     ``over_all``: a closed form (``full_losses``), which not every loss has

A loss overrides ``over_answers`` where it has a formula of its own.  With one answer, all three are
equal if all entities are candidates.

Shapes: C chunks, b queries per chunk, K candidates per chunk, Q queries, M answers of the queries,
N entities.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, relu, softplus

from kge_torchrec.config.checks import ConfigError, check_share, not_negative, one_of
from kge_torchrec.kernels.operators import log_sum_exp, softplus_sum
from kge_torchrec.models.full_losses import (
    FullBinaryCrossEntropy,
    FullLoss,
    FullSoftmax,
    low_target,
    spread_share,
)

SMOOTHINGS = ("standard", "libkge")


def _check_smoothing(smoothing: str, label_smoothing: float) -> None:
    one_of("loss.options.smoothing", smoothing, SMOOTHINGS)
    check_share("loss.options.label_smoothing", label_smoothing)
    if smoothing != "standard" and not label_smoothing:
        raise ConfigError(
            f"loss.options.smoothing: {smoothing} acts only with label smoothing; set "
            "loss.options.label_smoothing, such as 0.1"
        )


def _masked_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Average over the unmasked candidates, 0 if there are none: (C, b, K) -> (C, b)."""
    if mask is None:
        return values.mean(-1)
    return (values * mask).sum(-1) / mask.sum(-1).clamp(min=1)


class Loss(nn.Module):
    """The loss of a query, a function of the scores of its answer and of candidates.

    The fields of ``Options`` are passed to the constructor by name.
    """

    @dataclass(frozen=True)
    class Options:
        """Options of this loss: ``loss.options`` of the config."""

    needs_answers = False  # whether every query must have an answer

    def forward(self, positive: Tensor, negative: Tensor, mask: Tensor | None) -> Tensor:
        """Compute the loss of each query.

        Args:
            positive: (C, b) scores of the answers.
            negative: (C, b, K) scores of the candidates.
            mask: (C, b, K) bool, true for negatives; None means all true.

        Returns:
            (C, b) losses.
        """
        raise NotImplementedError

    def over_answers(self) -> nn.Module:
        """Return the loss of queries with any number of answers.

        The module is called with positive (M,), the scores of all answers of all queries; query
        (M,), the query of each answer; negative (Q, K); and mask (Q, K). It returns (Q,).
        """
        return MeanOverAnswers(self)

    def over_all(self, num_entities: int) -> FullLoss:
        """Return the closed form over all entities, for losses that have one."""
        raise NotImplementedError

    @classmethod
    def has_closed_form(cls) -> bool:
        """Return whether the loss can train against all entities, by ``over_all``."""
        return cls.over_all is not Loss.over_all


class _BuiltIn(Loss):
    """A loss that keeps its ``Options``."""

    def __init__(self, *values: Any, **options: Any):
        super().__init__()
        self.options: Any = self.Options(*values, **options)  # typed Any: each loss has its own


class MeanOverAnswers(nn.Module):
    """The mean over a query's answers of a loss of one answer; 0 for a query without answers."""

    def __init__(self, loss: Loss):
        super().__init__()
        self.loss = loss

    def forward(self, positive: Tensor, query: Tensor, negative: Tensor, mask: Tensor) -> Tensor:
        """Compute the losses as ``Loss.over_answers`` says; it copies (M, K) scores."""
        candidates = (x.index_select(0, query)[None] for x in (negative, mask))
        losses = self.loss(positive[None], *candidates)[0]
        answers = _sums(torch.ones_like(losses), query, len(negative))
        return _sums(losses, query, len(negative)) / answers.clamp(min=1)


class OfHardest(nn.Module):
    """Restricts a loss of sampled candidates to the highest-scoring candidates of each query."""

    def __init__(self, loss: Loss, count: int):
        super().__init__()
        self.loss, self.count = loss, count

    def forward(self, positive: Tensor, negative: Tensor, mask: Tensor) -> Tensor:
        """Compute the loss as ``Loss.forward`` does.

        Masked candidates are kept only if a query has fewer than ``count`` negatives.
        """
        if self.count < negative.shape[-1]:
            order = negative.detach().masked_fill(~mask, -torch.inf)
            places = order.topk(self.count, sorted=False).indices
            negative, mask = negative.gather(-1, places), mask.gather(-1, places)
        loss: Tensor = self.loss(positive, negative, mask)
        return loss


class SoftmaxLoss(_BuiltIn):
    """Cross-entropy of the positive among itself and the candidates (Lacroix et al. 2018).

    Label smoothing moves a share of the positive's weight to all choices equally.
    """

    @dataclass(frozen=True)
    class Options:
        """Options of the softmax loss.

        Args:
            label_smoothing: Share e of the target that is spread over all choices, in [0, 1).
            smoothing: standard: as above; libkge: spreads 1 / (1 + k (1 - e)) for k answers, as
                LibKGE's KvsAll with loss kl.
            answers: mean or, with negatives.regime kvsall, sum of the losses of a query's answers.
                With sum every triple counts alike (the multinomial likelihood of Liang et al.
                2018).
        """

        label_smoothing: float = 0.0
        smoothing: str = "standard"
        answers: str = "mean"

        def __post_init__(self) -> None:
            _check_smoothing(self.smoothing, self.label_smoothing)
            one_of("loss.options.answers", self.answers, ("mean", "sum"))

    needs_answers = True  # the batches weigh queries by their answers for "sum"

    def forward(self, positive: Tensor, negative: Tensor, mask: Tensor | None) -> Tensor:
        normalizer = torch.logaddexp(positive, log_sum_exp(negative, mask))
        if not self.options.label_smoothing:
            return normalizer - positive
        choices: int | Tensor = negative.shape[-1] + 1
        if mask is None:
            total = negative.sum(-1) + positive
        else:
            total = negative.masked_fill(~mask, 0.0).sum(-1) + positive
            choices = mask.sum(-1) + 1
        share = spread_share(self.options.label_smoothing, self.options.smoothing, 1)
        return normalizer - (1 - share) * positive - share * total / choices

    def over_answers(self) -> nn.Module:
        return AnswersSoftmax(self.options)

    def over_all(self, num_entities: int) -> FullLoss:
        return FullSoftmax(num_entities, self.options.label_smoothing, self.options.smoothing)


class BinaryCrossEntropyLoss(_BuiltIn):
    """Logistic loss of the positive (target 1) and the candidates (target 0), equally weighted.

    ``reduction`` is "sum" (LibKGE's bce) or "mean" over the positive and the candidates.
    """

    @dataclass(frozen=True)
    class Options:
        """Options of the binary cross-entropy loss.

        Args:
            label_smoothing: Label smoothing e in [0, 1).
            reduction: sum, or mean, over all candidates of a query, answers included.
            smoothing: standard: the targets are 1 - e/2 and e/2; libkge: 1 - e + 1/N and 1/N for N
                candidates, as LibKGE's KvsAll, ConvE and dice-embeddings.
        """

        label_smoothing: float = 0.0
        reduction: str = "sum"
        smoothing: str = "standard"

        def __post_init__(self) -> None:
            _check_smoothing(self.smoothing, self.label_smoothing)
            one_of("loss.options.reduction", self.reduction, ("sum", "mean"))

    def forward(self, positive: Tensor, negative: Tensor, mask: Tensor | None) -> Tensor:
        smooth = self.options.label_smoothing
        candidates = 1 + (negative.shape[-1] if mask is None else mask.sum(-1))
        total = softplus(-positive) + softplus_sum(negative, mask)
        if smooth:  # softplus(-x) = softplus(x) - x
            low = low_target(smooth, self.options.smoothing, candidates)
            others = negative if mask is None else negative * mask
            total = total + (smooth - low) * positive - low * others.sum(-1)
        return total if self.options.reduction == "sum" else total / candidates

    def over_answers(self) -> nn.Module:
        return AnswersBinaryCrossEntropy(self.options)

    def over_all(self, num_entities: int) -> FullLoss:
        return FullBinaryCrossEntropy(num_entities, **asdict(self.options))


class MarginLoss(_BuiltIn):
    """Margin ranking (Bordes et al. 2013): mean over candidates of max(0, margin - pos + neg)."""

    @dataclass(frozen=True)
    class Options:
        """Options of the margin loss.

        Args:
            margin: Required difference between the scores of the answer and of a candidate.
        """

        margin: float = 9.0

        def __post_init__(self) -> None:
            not_negative("loss.options.margin", self.margin)

    def forward(self, positive: Tensor, negative: Tensor, mask: Tensor | None) -> Tensor:
        return _masked_mean(relu(self.options.margin - positive[..., None] + negative), mask)


class BPRLoss(Loss):
    """Bayesian personalized ranking (Rendle et al. 2009): mean of -log sigmoid(pos - neg)."""

    def forward(self, positive: Tensor, negative: Tensor, mask: Tensor | None) -> Tensor:
        return _masked_mean(softplus(negative - positive[..., None]), mask)


class SelfAdversarialLoss(_BuiltIn):
    """Self-adversarial negative sampling (Sun et al. 2019).

    The loss is the mean of -log sigmoid(margin + pos) and of the weighted sum over candidates of
    -log sigmoid(-margin - neg). The weights are softmax(temperature * neg), without gradient.
    """

    @dataclass(frozen=True)
    class Options:
        """Options of the self-adversarial loss.

        Args:
            margin: Added to scores before the logistic loss.
            temperature: Factor of the scores in the softmax that weights candidates.
        """

        margin: float = 9.0
        temperature: float = 1.0

        def __post_init__(self) -> None:
            not_negative("loss.options.margin", self.margin)
            not_negative("loss.options.temperature", self.temperature)

    def forward(self, positive: Tensor, negative: Tensor, mask: Tensor | None) -> Tensor:
        logits = self.options.temperature * negative.detach()
        if mask is not None:
            logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
        weight = logits.softmax(-1)
        if mask is not None:
            weight = weight * mask
        margin = self.options.margin
        negative_loss = -(weight * logsigmoid(-margin - negative)).sum(-1)
        return (negative_loss - logsigmoid(margin + positive)) / 2


def _sums(values: Tensor, query: Tensor, queries: int) -> Tensor:
    """Sum over the answers of each query: (M,) -> (Q,)."""
    return values.new_zeros(queries).index_add(0, query, values)


class AnswersSoftmax(nn.Module):
    """Cross-entropy of all candidates against the uniform distribution over the answers.

    Label smoothing moves a share of the answers' weight to all candidates equally.
    """

    def __init__(self, options: SoftmaxLoss.Options):
        super().__init__()
        self.options = options

    def forward(self, positive: Tensor, query: Tensor, negative: Tensor, mask: Tensor) -> Tensor:
        queries = len(negative)
        others = log_sum_exp(negative, mask)
        top = others.detach().index_select(0, query)
        top = torch.maximum(top, positive.detach())
        largest = others.detach().scatter_reduce(0, query, top, "amax")
        shifted = (positive - largest.index_select(0, query)).exp()
        total = _sums(shifted, query, queries) + (others - largest).exp()
        normalizer = largest + total.log()
        answers = _sums(torch.ones_like(positive), query, queries)
        mean = _sums(positive, query, queries) / answers
        if not self.options.label_smoothing:
            return normalizer - mean
        share = spread_share(self.options.label_smoothing, self.options.smoothing, answers)
        score_sum = _sums(positive, query, queries) + (negative * mask).sum(1)
        return normalizer - (1 - share) * mean - share * score_sum / (answers + mask.sum(1))


class AnswersBinaryCrossEntropy(nn.Module):
    """Logistic loss of the answers (target 1) and other candidates (target 0), equally weighted."""

    def __init__(self, options: BinaryCrossEntropyLoss.Options):
        super().__init__()
        self.options = options

    def forward(self, positive: Tensor, query: Tensor, negative: Tensor, mask: Tensor) -> Tensor:
        smooth, queries = self.options.label_smoothing, len(negative)
        candidates = _sums(torch.ones_like(positive), query, queries) + mask.sum(1)
        total = _sums(softplus(-positive), query, queries) + softplus_sum(negative, mask)
        if smooth:  # softplus(-x) = softplus(x) - x
            low = low_target(smooth, self.options.smoothing, candidates)
            answer_sum, other_sum = _sums(positive, query, queries), (negative * mask).sum(1)
            total = total + (smooth - low) * answer_sum - low * other_sum
        return total if self.options.reduction == "sum" else total / candidates

"""Losses: functions of scores. A name means the same loss in every training type.

A loss that trains against all entities has a closed form over blocks of scores beside ``forward``
(``over_all``). With one answer, both are equal if all entities are candidates.

Shapes: Q queries, M answers of the queries, K candidates per query.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, relu, softplus

from kge_torchrec.config.checks import ConfigError, NonNegativeFloat, Share
from kge_torchrec.config.model import LossConfig
from kge_torchrec.config.registry import construct
from kge_torchrec.kernels.operators import log_sums
from kge_torchrec.models.over_all import (
    BinaryCrossEntropyOverAll,
    OverAll,
    SoftmaxOverAll,
    low_target,
    spread_share,
)

Smoothing = Literal["standard", "libkge"]


class Loss(nn.Module):
    """The loss of a query, a function of the scores of its answers and of candidates.

    The constructor takes the fields of ``Options`` and keeps them as ``options``.
    """

    @dataclass(frozen=True)
    class Options:
        """Options of this loss: ``loss.options`` of the config."""

    needs_answers = False  # whether every query must have an answer

    def __init__(self, *values: Any, **options: Any):
        super().__init__()
        self.options: Any = self.Options(*values, **options)  # typed Any: each loss has its own

    def forward(
        self, positive: Tensor, query: Tensor | None, negative: Tensor, mask: Tensor
    ) -> Tensor:
        """Compute the loss of each query.

        Args:
            positive: (M,) scores of the answers of all queries.
            query: (M,) int64, the query of each answer; None: answer i is the only one of query i.
            negative: (Q, K) scores of the candidates.
            mask: (Q, K) bool, false for candidates that are not negatives: answers and known facts.

        Returns:
            (Q,) losses.
        """
        raise NotImplementedError

    def over_all(self, num_entities: int) -> OverAll:
        """Return the closed form over all entities, for losses that have one."""
        raise NotImplementedError

    @classmethod
    def has_closed_form(cls) -> bool:
        """Return whether the loss can train against all entities, by ``over_all``."""
        return cls.over_all is not Loss.over_all


def of_answers(values: Tensor, query: Tensor | None, queries: int) -> Tensor:
    """Sum a value of each answer over the answers of each query: (M,) -> (Q,)."""
    return values if query is None else values.new_zeros(queries).index_add(0, query, values)


def mean_over_answers(
    loss: Loss, positive: Tensor, query: Tensor, negative: Tensor, mask: Tensor
) -> Tensor:
    """Average a loss of one answer over the answers of each query, 0 if there are none."""
    candidates = (x.index_select(0, query) for x in (negative, mask))
    losses = loss(positive, None, *candidates)
    counts = of_answers(torch.ones_like(losses), query, len(negative))
    return of_answers(losses, query, len(negative)) / counts.clamp(min=1)


def _masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Average over the unmasked candidates, 0 if there are none: (Q, K) -> (Q,)."""
    return (values * mask).sum(1) / mask.sum(1).clamp(min=1)


def _check_smoothing(smoothing: str, label_smoothing: float) -> None:
    if smoothing != "standard" and not label_smoothing:
        raise ConfigError(
            f"loss.options.smoothing: {smoothing} acts only with label smoothing; set "
            "loss.options.label_smoothing, such as 0.1"
        )


class SoftmaxLoss(Loss):
    """Cross-entropy of all candidates against the uniform distribution over a query's answers.

    With one answer it is that of Lacroix et al. (2018). Label smoothing moves a share of the
    answers' weight to all choices equally.
    """

    @dataclass(frozen=True)
    class Options:
        """Options of the softmax loss."""

        label_smoothing: Share = 0.0
        """Share e of the target that is spread over all choices, in [0, 1)."""
        smoothing: Smoothing = "standard"
        """standard: as above; libkge: spreads 1 / (1 + k (1 - e)) for k answers, as LibKGE's KvsAll
        with loss kl."""
        answers: Literal["mean", "sum"] = "mean"
        """mean or, with negatives.regime kvsall, sum of the losses of a query's answers. With sum
        every triple counts alike (the multinomial likelihood of Liang et al. 2018)."""

        def __post_init__(self) -> None:
            _check_smoothing(self.smoothing, self.label_smoothing)

    needs_answers = True  # the batches weigh queries by their answers for "sum"

    def forward(
        self, positive: Tensor, query: Tensor | None, negative: Tensor, mask: Tensor
    ) -> Tensor:
        others = log_sums(negative, mask, True)
        answers: int | Tensor = 1
        positives = mean = of_answers(positive, query, len(negative))
        if query is None:
            normalizer = torch.logaddexp(positive, others)
        else:
            answers = of_answers(torch.ones_like(positive), query, len(negative))
            mean = positives / answers
            top = torch.maximum(others.detach().index_select(0, query), positive.detach())
            largest = others.detach().scatter_reduce(0, query, top, "amax")
            shifted = (positive - largest.index_select(0, query)).exp()
            total = of_answers(shifted, query, len(negative)) + (others - largest).exp()
            normalizer = largest + total.log()
        if not self.options.label_smoothing:
            return normalizer - mean
        share = spread_share(self.options.label_smoothing, self.options.smoothing, answers)
        all_scores = negative.masked_fill(~mask, 0.0).sum(1) + positives
        return normalizer - (1 - share) * mean - share * all_scores / (mask.sum(1) + answers)

    def over_all(self, num_entities: int) -> OverAll:
        options = self.options
        return SoftmaxOverAll(num_entities, options.label_smoothing, options.smoothing)


class BinaryCrossEntropyLoss(Loss):
    """Logistic loss of the answers (target 1) and the candidates (target 0), equally weighted."""

    @dataclass(frozen=True)
    class Options:
        """Options of the binary cross-entropy loss."""

        label_smoothing: Share = 0.0
        """Label smoothing e in [0, 1)."""
        reduction: Literal["mean", "sum"] = "sum"
        """sum, or mean, over all candidates of a query, answers included."""
        smoothing: Smoothing = "standard"
        """standard: the targets are 1 - e/2 and e/2; libkge: 1 - e + 1/N and 1/N for N candidates,
        as LibKGE's KvsAll, ConvE and dice-embeddings."""

        def __post_init__(self) -> None:
            _check_smoothing(self.smoothing, self.label_smoothing)

    def forward(
        self, positive: Tensor, query: Tensor | None, negative: Tensor, mask: Tensor
    ) -> Tensor:
        smooth, queries = self.options.label_smoothing, len(negative)
        total = of_answers(softplus(-positive), query, queries) + log_sums(negative, mask, False)
        if not smooth and self.options.reduction == "sum":
            return total  # counting the candidates would be another pass over the mask
        answers: int | Tensor = 1
        if query is not None:
            answers = of_answers(torch.ones_like(positive), query, queries)
        candidates = mask.sum(1) + answers
        if smooth:  # softplus(-x) = softplus(x) - x
            low = low_target(smooth, self.options.smoothing, candidates)
            positives = of_answers(positive, query, queries)
            total = total + (smooth - low) * positives - low * (negative * mask).sum(1)
        return total if self.options.reduction == "sum" else total / candidates

    def over_all(self, num_entities: int) -> OverAll:
        return BinaryCrossEntropyOverAll(num_entities, **asdict(self.options))


class MarginLoss(Loss):
    """Margin ranking (Bordes et al. 2013): mean over candidates of max(0, margin - pos + neg)."""

    @dataclass(frozen=True)
    class Options:
        """Options of the margin loss."""

        margin: NonNegativeFloat = 9.0
        """Required difference between the scores of the answer and of a candidate."""

    def forward(
        self, positive: Tensor, query: Tensor | None, negative: Tensor, mask: Tensor
    ) -> Tensor:
        if query is not None:
            return mean_over_answers(self, positive, query, negative, mask)
        return _masked_mean(relu(self.options.margin - positive[:, None] + negative), mask)


class BPRLoss(Loss):
    """Bayesian personalized ranking (Rendle et al. 2009): mean of -log sigmoid(pos - neg)."""

    def forward(
        self, positive: Tensor, query: Tensor | None, negative: Tensor, mask: Tensor
    ) -> Tensor:
        if query is not None:
            return mean_over_answers(self, positive, query, negative, mask)
        return _masked_mean(softplus(negative - positive[:, None]), mask)


class SelfAdversarialLoss(Loss):
    """Self-adversarial negative sampling (Sun et al. 2019).

    The loss is the mean of -log sigmoid(margin + pos) and of the weighted sum over candidates of
    -log sigmoid(-margin - neg). The weights are softmax(temperature * neg), without gradient.
    """

    @dataclass(frozen=True)
    class Options:
        """Options of the self-adversarial loss."""

        margin: NonNegativeFloat = 9.0
        """Added to scores before the logistic loss."""
        temperature: NonNegativeFloat = 1.0
        """Factor of the scores in the softmax that weights candidates."""

    def forward(
        self, positive: Tensor, query: Tensor | None, negative: Tensor, mask: Tensor
    ) -> Tensor:
        if query is not None:
            return mean_over_answers(self, positive, query, negative, mask)
        margin, logits = self.options.margin, self.options.temperature * negative.detach()
        weight = logits.masked_fill(~mask, torch.finfo(logits.dtype).min).softmax(1) * mask
        of_candidates = -(weight * logsigmoid(-margin - negative)).sum(1)
        return (of_candidates - logsigmoid(margin + positive)) / 2


def build_loss(config: LossConfig) -> Loss:
    """Make the loss of a query."""
    loss: Loss = construct("loss", config.name, **asdict(config.options_in("options")))
    return loss

"""Losses of a query: one positive score against its candidates' scores.

Every loss maps ``positive`` (C, b), ``negative`` (C, b, K) and ``counted`` (C, b, K) to one loss a
query, (C, b).  ``counted`` is false where a candidate is no negative (the answer itself, a known
fact); None means that all count.

Shapes: C chunks, b queries a chunk, K candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, relu, softplus


def _mean_over_counted(values: Tensor, counted: Tensor | None) -> Tensor:
    """Mean over the candidates that count; 0 where none does.  (C, b, K) -> (C, b)"""
    if counted is None:
        return values.mean(-1)
    return (values * counted).sum(-1) / counted.sum(-1).clamp(min=1)


class SoftmaxLoss(nn.Module):
    """Cross-entropy of the positive among itself and the candidates (Lacroix et al. 2018).

    Label smoothing e moves the weight e from the positive to all choices alike.
    """

    def __init__(self, label_smoothing: float = 0.0):
        super().__init__()
        self.label_smoothing = label_smoothing

    def forward(self, positive: Tensor, negative: Tensor, counted: Tensor | None) -> Tensor:
        if counted is not None:
            negative = negative.masked_fill(~counted, torch.finfo(negative.dtype).min / 2)
        normalizer = torch.logaddexp(positive, negative.logsumexp(-1))
        if not self.label_smoothing:
            return normalizer - positive
        if counted is None:
            total, choices = negative.sum(-1) + positive, negative.shape[-1] + 1
        else:
            total = negative.masked_fill(~counted, 0.0).sum(-1) + positive
            choices = counted.sum(-1) + 1
        smooth = self.label_smoothing
        return normalizer - (1 - smooth) * positive - smooth * total / choices


class BinaryCrossEntropyLoss(nn.Module):
    """Logistic loss of every choice, the positive being 1 and candidates 0; all weigh the same.

    reduction: "sum" (LibKGE's bce) or "mean" over the choices.  Label smoothing e sets the targets
    to 1 - e/2 and e/2.
    """

    def __init__(self, label_smoothing: float = 0.0, reduction: str = "sum"):
        super().__init__()
        self.label_smoothing, self.reduction = label_smoothing, reduction

    def forward(self, positive: Tensor, negative: Tensor, counted: Tensor | None) -> Tensor:
        low = self.label_smoothing / 2
        of_positive, of_negative = softplus(-positive), softplus(negative)
        if low:  # softplus(-x) = softplus(x) - x
            of_positive, of_negative = of_positive + low * positive, of_negative - low * negative
        if counted is not None:
            of_negative = of_negative * counted
        total = of_positive + of_negative.sum(-1)
        if self.reduction == "sum":
            return total
        return total / (1 + (negative.shape[-1] if counted is None else counted.sum(-1)))


class MarginLoss(nn.Module):
    """Margin ranking (Bordes et al. 2013): mean over candidates of max(0, margin - pos + neg)."""

    def __init__(self, margin: float = 1.0):
        super().__init__()
        self.margin = margin

    def forward(self, positive: Tensor, negative: Tensor, counted: Tensor | None) -> Tensor:
        return _mean_over_counted(relu(self.margin - positive[..., None] + negative), counted)


class SelfAdversarialLoss(nn.Module):
    """Self-adversarial negative sampling (Sun et al. 2019).

    Half -log sigmoid(margin + pos), half the same of the candidates, -log sigmoid(-margin - neg),
    weighted by softmax(temperature * neg), through which no gradient flows.
    """

    def __init__(self, margin: float = 9.0, temperature: float = 1.0):
        super().__init__()
        self.margin, self.temperature = margin, temperature

    def forward(self, positive: Tensor, negative: Tensor, counted: Tensor | None) -> Tensor:
        logits = self.temperature * negative.detach()
        if counted is not None:
            logits = logits.masked_fill(~counted, torch.finfo(logits.dtype).min)
        weight = logits.softmax(-1)
        if counted is not None:
            weight = weight * counted
        of_negative = -(weight * logsigmoid(-self.margin - negative)).sum(-1)
        return (of_negative - logsigmoid(self.margin + positive)) / 2

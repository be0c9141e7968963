"""Losses of a query with any number of answers, among those and some other candidates.

Every loss maps ``positive`` (M,), the scores of all answers of all queries, ``query`` (M,), which
query each belongs to, ``negative`` (Q, K) and ``counted`` (Q, K), false where a candidate is an
answer itself, to one loss a query, (Q,).  With one answer they are the losses of ``losses``.

Shapes: Q queries, M answers, K other candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus


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

    def forward(self, positive: Tensor, query: Tensor, negative: Tensor, counted: Tensor) -> Tensor:
        queries = len(negative)
        others = negative.masked_fill(~counted, torch.finfo(negative.dtype).min / 2).logsumexp(1)
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
        every = _sums(positive, query, queries) + (negative * counted).sum(1)
        return normalizer - (1 - smooth) * mean - smooth * every / (answers + counted.sum(1))


class AnswersBinaryCrossEntropy(nn.Module):
    """Logistic loss of every candidate, answers being 1 and others 0; all weigh the same.

    reduction: "sum" (LibKGE's bce) or "mean" over all candidates, answers included.  Label
    smoothing e sets the targets to 1 - e/2 and e/2.
    """

    def __init__(self, label_smoothing: float = 0.0, reduction: str = "sum"):
        super().__init__()
        self.label_smoothing, self.reduction = label_smoothing, reduction

    def forward(self, positive: Tensor, query: Tensor, negative: Tensor, counted: Tensor) -> Tensor:
        low, queries = self.label_smoothing / 2, len(negative)
        of_positive = softplus(-positive) + low * positive  # softplus(-x) = softplus(x) - x
        of_negative = ((softplus(negative) - low * negative) * counted).sum(1)
        total = _sums(of_positive, query, queries) + of_negative
        if self.reduction == "sum":
            return total
        return total / (_sums(torch.ones_like(positive), query, queries) + counted.sum(1))

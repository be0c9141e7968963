"""The loss of one query by torch's own functions, in float64: what every form of it must equal."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    logsigmoid,
    normalize,
    relu,
)

from kge_torchrec.config import LossConfig


def loss_of_query(config: LossConfig, positive: Tensor, negative: Tensor) -> Tensor:
    """Return the loss () from the scores of its answers (k,) and of its other candidates (n,)."""
    options, scores = config.options_in("options"), torch.cat([positive, negative])
    smooth = getattr(options, "label_smoothing", 0.0)
    is_libkge = getattr(options, "smoothing", "") == "libkge"
    label, count = torch.cat([torch.ones_like(positive), torch.zeros_like(negative)]), len(scores)
    if config.name == "softmax":
        target = (1 - smooth) * label / max(1, len(positive)) + smooth / count
        if is_libkge:  # its KvsAll lifts all labels, and its loss kl divides them by their sum
            target = normalize((1 - smooth) * label + 1 / count, p=1, dim=0)
        return cross_entropy(scores[None], target[None])
    if config.name == "bce":
        low = min(1 / count, smooth) if is_libkge else smooth / 2
        target = (1 - smooth) * label + low
        return binary_cross_entropy_with_logits(scores, target, reduction=options.reduction)
    each = [_of_answer(config.name, options, score, negative) for score in positive]
    return sum(each, 0 * scores.sum()) / max(1, len(each))


def _of_answer(name: str, options, positive: Tensor, negative: Tensor) -> Tensor:
    count = max(1, len(negative))
    if name == "margin":
        return relu(options.margin - positive + negative).sum() / count
    if name == "bpr":
        return -logsigmoid(positive - negative).sum() / count
    if name == "foreign_parts:MeanGap":
        return torch.log1p(negative.exp().sum() / count / positive.exp())
    weight = (options.temperature * negative.detach()).softmax(0)  # without gradient
    of_candidates = (weight * logsigmoid(-options.margin - negative)).sum()
    return -(of_candidates + logsigmoid(options.margin + positive)) / 2

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from kge_torchrec.models.losses import (
    BinaryCrossEntropyLoss,
    BPRLoss,
    MarginLoss,
    SelfAdversarialLoss,
    SoftmaxLoss,
    hardest,
)

LOSSES = {
    "softmax": SoftmaxLoss,
    "sum": BinaryCrossEntropyLoss,
    "mean": lambda smoothing: BinaryCrossEntropyLoss(smoothing, "mean"),
}


@st.composite
def cases(draw):
    """Loss, smoothing, number of answers of each query, scores of answers and others, mask."""
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    others = draw(st.integers(1, 5))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    scale = draw(st.sampled_from([0.1, 3, 60]))
    positive = torch.randn(sum(counts), generator=seed, dtype=torch.float64) * scale
    negative = torch.randn(len(counts), others, generator=seed, dtype=torch.float64) * scale
    mask = torch.rand(negative.shape, generator=seed) < 0.6
    name, smoothing = draw(st.sampled_from(sorted(LOSSES))), draw(st.sampled_from([0.0, 0.2]))
    return name, smoothing, counts, positive, negative, mask


def of_one_query(name, smoothing, positive, others):
    """torch's own loss over a query's candidates."""
    scores = torch.cat([positive, others])
    label = torch.cat([torch.ones_like(positive), torch.zeros_like(others)])
    if name == "softmax":
        label = (1 - smoothing) * label / len(positive) + smoothing / len(scores)
        return cross_entropy(scores[None], label[None])
    label = (1 - smoothing) * label + smoothing / 2
    return binary_cross_entropy_with_logits(scores, label, reduction=name)


@given(cases())
def test_losses_and_gradients_equal_those_of_torch(case):
    name, smoothing, counts, positive, negative, mask = case
    positive.requires_grad_()
    negative.requires_grad_()
    query = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    actual = LOSSES[name](smoothing)(positive, query, negative, mask)
    expected = torch.stack([
        of_one_query(name, smoothing, part, row[mask])
        for part, row, mask in zip(positive.split(counts), negative, mask, strict=True)
    ])  # fmt: skip
    assert torch.allclose(actual, expected, atol=1e-9)
    weights = torch.arange(1.0, len(counts) + 1)
    pairs = zip(
        torch.autograd.grad((actual * weights).sum(), [positive, negative]),
        torch.autograd.grad((expected * weights).sum(), [positive, negative]),
        strict=True,
    )
    for ours, theirs in pairs:
        assert torch.allclose(ours, theirs, atol=1e-9)


@pytest.mark.parametrize("loss", [MarginLoss(1.0), BPRLoss(), SelfAdversarialLoss(1.0)])
def test_query_without_answers_has_no_loss(loss):
    negative = torch.tensor([[0.5, -1.0], [2.0, 0.0]], requires_grad=True)
    mask = torch.ones(2, 2, dtype=torch.bool)
    losses = loss(torch.tensor([0.3, 1.0]), torch.tensor([1, 1]), negative, mask)
    (gradient,) = torch.autograd.grad(losses.sum(), negative)
    assert losses[0] == 0 < losses[1]
    assert not gradient[0].any() and gradient[1].all()


def test_hardest_candidates_are_negatives_where_there_are_enough():
    negative = torch.tensor([[9.0, 1.0, 3.0, 2.0], [9.0, 8.0, 7.0, 1.0]])
    mask = torch.tensor([[False, True, True, True], [False, False, False, True]])
    scores, kept = hardest(negative, mask, 2)
    assert kept[0].all() and sorted(scores[0].tolist()) == [2, 3]
    assert kept[1].sum() == 1 and scores[1][kept[1]] == 1

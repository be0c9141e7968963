from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from kge_torchrec.models.full_losses import BlockAnswers, FullBinaryCrossEntropy, FullSoftmax

LOSSES = {
    "softmax": FullSoftmax,
    "sum": FullBinaryCrossEntropy,
    "mean": lambda *options: FullBinaryCrossEntropy(*options, "mean"),
}


@st.composite
def cases(draw):
    """Loss, smoothing, scores (Q, N) over a wide range, labels (Q, N) and cuts into blocks."""
    name = draw(st.sampled_from(sorted(LOSSES)))
    queries, entities = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    scores = torch.randn(queries, entities, generator=seed) * draw(st.sampled_from([0.1, 3, 60]))
    labels = torch.rand(queries, entities, generator=seed) < draw(st.sampled_from([0.1, 0.6]))
    if name == "softmax":
        labels[:, draw(st.integers(0, entities - 1))] = True  # every query has an answer
    cuts = sorted(draw(st.lists(st.integers(0, entities), max_size=3)))
    return name, draw(st.sampled_from([0.0, 0.2])), scores, labels, [0, *cuts, entities]


def dense(name, smoothing, scores, labels):
    """Losses (Q,) and the gradient of their sum, by autograd in float64."""
    scores = scores.double().requires_grad_()
    labels = labels.double()
    if name == "softmax":
        target = (1 - smoothing) * labels / labels.sum(1, keepdim=True)
        losses = cross_entropy(scores, target + smoothing / labels.shape[1], reduction="none")
    else:
        target = (1 - smoothing) * labels + smoothing / 2
        losses = binary_cross_entropy_with_logits(scores, target, reduction="none")
        losses = losses.sum(1) if name == "sum" else losses.mean(1)
    (gradient,) = torch.autograd.grad(losses.sum(), scores)
    return losses.detach(), gradient


def answers_of(labels, start, stop) -> BlockAnswers:
    query, column = labels[:, start:stop].nonzero(as_tuple=True)
    return BlockAnswers(query, column, 1 / labels.sum(1)[query].float())


@settings(deadline=None)
@given(cases())
def test_blocks_together_equal_torchs_losses(case):
    name, smoothing, scores, labels, cuts = case
    loss = LOSSES[name](scores.shape[1], smoothing)
    blocks, seen = [], []
    for start, stop in itertools.pairwise(cuts):
        if start == stop:  # ranks without rows start no block
            continue
        block, answers = scores[:, start:stop].clone(), answers_of(labels, start, stop)
        top, of_block = loss.start(block, answers)
        blocks.append((block, top, answers))
        seen.append(of_block)
    joined = loss.join(torch.stack(seen))
    for block, top, answers in blocks:
        loss.finish(block, top, joined, answers, 0.5)
    losses, gradient = dense(name, smoothing, scores, labels)
    scale = 1 + scores.abs().max().item()
    assert (loss.values(joined) - losses).abs().max() < 1e-5 * scale
    found = torch.cat([block for block, _, _ in blocks], 1)
    assert (found - 0.5 * gradient).abs().max() < 1e-5


def test_a_rank_without_rows_changes_nothing():
    scores = torch.tensor([[1.0, 2.0]])
    answers = BlockAnswers(torch.tensor([0]), torch.tensor([1]), torch.tensor([1.0]))
    _, seen = FullSoftmax(2).start(scores, answers)
    nothing = torch.tensor([[-torch.inf], [0.0], [0.0]])
    assert torch.equal(FullSoftmax(2).join(torch.stack([nothing, seen])), seen)


def test_bce_needs_no_other_block():
    loss = FullBinaryCrossEntropy(4, reduction="mean")
    assert not loss.normalizes
    scores = torch.tensor([[0.0, 2.0]])
    answers = BlockAnswers(torch.tensor([0]), torch.tensor([1]), torch.tensor([1.0]))
    top, _ = loss.start(scores, answers)
    loss.finish(scores, top, None, answers, 1.0)
    expected = torch.tensor([[0.5, torch.sigmoid(torch.tensor(2.0)).item() - 1]]) / 4
    assert scores.tolist()[0] == pytest.approx(expected.tolist()[0])


def test_many_queries_go_through_in_chunks(monkeypatch):
    from kge_torchrec.models import full_losses

    scores = torch.randn(7, 5)
    labels = torch.eye(7, 5, dtype=torch.bool)
    labels[:, 0] = True

    def gradient():
        block, answers = scores.clone(), answers_of(labels, 0, 5)
        loss = FullSoftmax(5, 0.1)
        top, seen = loss.start(block, answers)
        loss.finish(block, top, seen, answers, 1.0)
        return block

    at_once = gradient()
    monkeypatch.setitem(full_losses._CHUNK_SCORES, "cpu", 11)  # two queries at a time
    assert torch.allclose(gradient(), at_once, atol=1e-7)


def test_scores_far_apart_underflow_to_nothing():
    scores, answers = (
        torch.tensor([[0.0, -60.0, -200.0, -1e6]]),
        torch.tensor([[True] + [False] * 3]),
    )
    block, of_block, loss = scores.clone(), answers_of(answers, 0, 4), FullSoftmax(4, 0.0)
    top, seen = loss.start(block, of_block)
    assert not (block < torch.finfo(torch.float32).tiny).any()  # slow numbers, to a CPU
    loss.finish(block, top, seen, of_block, 1.0)
    assert block.abs().max() < 1e-6 and float(loss.values(seen)) < 1e-6

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, normalize

from kge_torchrec.kernels import operators
from kge_torchrec.models.over_all import (
    BinaryCrossEntropyOverAll,
    BlockAnswers,
    SoftmaxOverAll,
)

LOSSES = {
    "softmax": SoftmaxOverAll,
    "sum": BinaryCrossEntropyOverAll,
    "mean": partial(BinaryCrossEntropyOverAll, reduction="mean"),
    "softmax of libkge": partial(SoftmaxOverAll, smoothing="libkge"),
    "sum of libkge": partial(BinaryCrossEntropyOverAll, smoothing="libkge"),
}


@st.composite
def cases(draw):
    """Loss, smoothing, scores (Q, N) over a wide range, labels (Q, N), cuts into blocks, layout."""
    name = draw(st.sampled_from(sorted(LOSSES)))
    queries, entities = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    scores = torch.randn(queries, entities, generator=seed) * draw(st.sampled_from([0.1, 3, 60]))
    scores += draw(st.sampled_from([0, 3000]))  # where float32 has steps of 2e-4
    labels = torch.rand(queries, entities, generator=seed) < draw(st.sampled_from([0.1, 0.6]))
    if "softmax" in name:
        labels[:, draw(st.integers(0, entities - 1))] = True  # every query has an answer
    cuts = sorted(draw(st.lists(st.integers(0, entities), max_size=3)))
    cuts, by_column = [0, *cuts, entities], draw(st.booleans())  # which kernels do not take
    return name, draw(st.sampled_from([0.0, 0.2])), scores, labels, cuts, by_column


def dense(name, smoothing, scores, labels):
    """Losses (Q,) and the gradient of their sum, by autograd in float64."""
    scores = scores.double().requires_grad_()
    labels, count = labels.double(), labels.shape[1]
    is_libkge = smoothing and "libkge" in name
    if "softmax" in name:
        target = (1 - smoothing) * labels / labels.sum(1, keepdim=True) + smoothing / count
        if is_libkge:
            target = normalize((1 - smoothing) * labels + 1 / count, p=1, dim=1)
        losses = cross_entropy(scores, target, reduction="none")
    else:
        low = min(1 / count, smoothing) if is_libkge else smoothing / 2
        target = (1 - smoothing) * labels + low
        losses = binary_cross_entropy_with_logits(scores, target, reduction="none")
        losses = losses.mean(1) if name == "mean" else losses.sum(1)
    (gradient,) = torch.autograd.grad(losses.sum(), scores)
    return losses.detach(), gradient


def answers_of(labels, start, stop) -> BlockAnswers:
    query, column = labels[:, start:stop].nonzero(as_tuple=True)
    counts = labels.sum(1)
    return BlockAnswers(query, column, 1 / counts[query].float(), counts)


@given(cases())
def test_losses_of_blocks_add_up_to_those_of_torch(case):
    name, smoothing, scores, labels, cuts, by_column = case
    loss = LOSSES[name](scores.shape[1], smoothing)
    blocks, statistics = [], []
    for start, stop in itertools.pairwise(cuts):
        if start == stop:  # ranks without rows start no block
            continue
        block, answers = scores[:, start:stop].clone(), answers_of(labels, start, stop)
        if by_column:
            block = block.T.contiguous().T
        blocks.append((block, answers))
        statistics.append(loss.partial_statistics(block, answers))
    joined = loss.reduce(torch.stack(statistics))
    weight = torch.linspace(0.5, 2, len(scores))
    for block, answers in blocks:
        loss.backward(block, joined, answers, weight)
    losses, gradient = dense(name, smoothing, scores, labels)
    scale = 1 + scores.abs().max().item()
    assert (loss.loss(joined) - losses).abs().max() < 1e-5 * scale
    result = torch.cat([block for block, _ in blocks], 1)
    assert (result - weight[:, None] * gradient).abs().max() < 1e-5


def test_normalizers_of_torch_keep_their_digits_far_from_0():
    scores = (torch.randn(4, 9) + 3000).T.contiguous().T  # which kernels do not take
    statistics = SoftmaxOverAll(9).partial_statistics(scores, answers_of(torch.eye(4, 9) > 0, 0, 9))
    assert (statistics[0] - scores.double().logsumexp(1)).abs().max() < 2e-6


def test_gradients_of_kernels_keep_their_digits_far_from_0():
    scores = torch.randn(4, 9, generator=torch.Generator().manual_seed(0)) + 3000
    answers, loss = answers_of(torch.eye(4, 9) > 0, 0, 9), SoftmaxOverAll(9)
    _, expected = dense("softmax", 0.0, scores, torch.eye(4, 9) > 0)
    loss.backward(scores, loss.partial_statistics(scores, answers), answers, torch.ones(4))
    assert (scores - expected).abs().max() < 1e-6


def test_rank_without_rows_changes_nothing():
    scores = torch.tensor([[1.0, 2.0]])
    answers = answers_of(torch.tensor([[False, True]]), 0, 2)
    statistics = SoftmaxOverAll(2).partial_statistics(scores, answers)
    nothing = torch.tensor([[-torch.inf], [0.0], [0.0]])
    assert torch.equal(SoftmaxOverAll(2).reduce(torch.stack([nothing, statistics])), statistics)


def test_bce_needs_no_statistics_of_other_blocks():
    loss = BinaryCrossEntropyOverAll(4, reduction="mean")
    assert not loss.normalizes
    scores = torch.tensor([[0.0, 2.0]])
    answers = answers_of(torch.tensor([[False, True]]), 0, 2)
    of_this_block = loss.partial_statistics(scores, answers)
    loss.backward(scores, of_this_block, answers, torch.ones(1))
    expected = torch.tensor([[0.5, torch.sigmoid(torch.tensor(2.0)).item() - 1]]) / 4
    assert scores.tolist()[0] == pytest.approx(expected.tolist()[0])


@pytest.mark.parametrize(
    ("kind", "name"),
    [("bfloat16", "mean"), ("padded", "softmax"), ("columns", "sum"),
     ("double", "softmax of libkge")],
)  # fmt: skip
def test_gradients_do_not_depend_on_the_layout_of_scores(kind, name):
    """Some scores go to torch, others to the kernels, without a copy."""
    torch.manual_seed(0)
    scores = (3 * torch.randn(7, 70)).bfloat16().float()
    labels = torch.rand(7, 70) < 0.2
    labels[:, 3] = True
    block = scores.double() if kind == "double" else scores.clone()
    if kind == "columns":
        block = scores.T.contiguous().T
    if kind == "bfloat16":
        block = block.bfloat16()
    if kind == "padded":
        block = torch.full((7, 80), torch.nan)[:, :70].copy_(scores)
    loss, answers = LOSSES[name](70, 0.2), answers_of(labels, 0, 70)
    is_kept = block.dtype == torch.bfloat16 and loss.accepts(block)
    assert is_kept == (kind == "bfloat16")
    statistics = loss.partial_statistics(block, answers)
    loss.backward(block, statistics, answers, torch.ones(7, dtype=statistics.dtype))
    losses, gradient = dense(name, 0.2, scores, labels)
    torch.testing.assert_close(loss.loss(statistics).double(), losses, rtol=1e-5, atol=1e-5)
    close = {"rtol": 2**-8, "atol": 1e-7} if is_kept else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(block.double(), gradient, **close)


def test_many_queries_are_processed_in_chunks(monkeypatch):
    scores, labels = torch.randn(7, 5).double(), torch.eye(7, 5, dtype=torch.bool)
    statistics = {}
    for name in sorted(LOSSES):
        statistics[name] = LOSSES[name](5, 0.0).partial_statistics(scores, answers_of(labels, 0, 5))
    monkeypatch.setitem(operators._CHUNK_SCORES, "cpu", 11)  # two queries at a time
    for name in sorted(LOSSES):
        again = LOSSES[name](5, 0.0).partial_statistics(scores, answers_of(labels, 0, 5))
        assert torch.equal(again, statistics[name])


def test_distant_scores_underflow_to_zero():
    scores, labels = torch.tensor([[0.0, -60.0, -200.0, -1e6]]), torch.eye(1, 4, dtype=torch.bool)
    answers, loss = answers_of(labels, 0, 4), SoftmaxOverAll(4)
    statistics = loss.partial_statistics(scores, answers)
    loss.backward(scores, statistics, answers, torch.ones(1))
    assert not (scores.abs()[0, 1:] < torch.finfo(torch.float32).tiny).any()  # slow, to a CPU
    assert scores.abs().max() < 1e-6 and float(loss.loss(statistics)) < 1e-6

"""A loss of one name is one function, with sampled candidates, several answers or all entities.

Each is compared with the loss of one query after the other, by torch's functions in float64.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_losses import loss_of_query
from torch import Tensor

from kge_torchrec.config import ConfigError, LossConfig
from kge_torchrec.kernels import operators
from kge_torchrec.models.losses import build_loss
from kge_torchrec.models.over_all import BlockAnswers

CONFIGS = [
    LossConfig(name, options=options)
    for name, options in [
        ("softmax", {}),
        ("softmax", {"label_smoothing": 0.2}),
        ("softmax", {"label_smoothing": 0.2, "smoothing": "libkge"}),
        ("bce", {}),
        ("bce", {"label_smoothing": 0.2}),
        ("bce", {"reduction": "mean"}),
        ("bce", {"reduction": "mean", "label_smoothing": 0.2}),
        ("bce", {"label_smoothing": 0.3, "smoothing": "libkge"}),
        ("bce", {"label_smoothing": 0.05, "smoothing": "libkge"}),  # e < 1/N
        ("margin", {"margin": 1.5}),
        ("bpr", {}),
        ("self_adversarial", {"margin": 1.5, "temperature": 0.7}),
        ("self_adversarial", {"margin": 1.0, "temperature": 0.0}),
    ]
]
CLOSED = [config for config in CONFIGS if type(build_loss(config)).has_closed_form()]


def name_of(config: LossConfig) -> str:
    return " ".join([config.name, *map(str, config.options.values())])


every_loss = pytest.mark.parametrize("config", CONFIGS, ids=name_of)
every_closed_form = pytest.mark.parametrize("config", CLOSED, ids=name_of)


def drawn(draw, *sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    seed = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    return torch.randn(sizes, generator=seed, dtype=dtype) * draw(st.sampled_from([0.1, 3, 60]))


# Sampled candidates


@st.composite
def samples(draw, config: LossConfig):
    """Number of answers of each query, scores of answers and candidates, which of them count."""
    fewest = 1 if build_loss(config).needs_answers else 0
    counts = draw(st.lists(st.integers(fewest, 3), min_size=1, max_size=4))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    positive = drawn(draw, sum(counts), dtype=dtype)
    negative = drawn(draw, len(counts), draw(st.integers(1, 5)), dtype=dtype)
    seed = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    mask = torch.rand(negative.shape, generator=seed) < draw(st.sampled_from([0.0, 0.6, 1.0]))
    mask[torch.tensor(counts) == 0, 0] = True  # else a query would have no score at all
    return counts, positive, negative, mask


@every_loss
@given(data=st.data())
def test_losses_and_gradients_equal_the_formula(config, data):
    counts, positive, negative, mask = data.draw(samples(config))
    answered = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    is_one = counts == [1] * len(counts) and data.draw(st.booleans())
    inputs = positive, negative.where(mask, 1e4 * negative)  # what does not count has no effect
    exact = [x.double().requires_grad_() for x in inputs]
    expected = torch.stack([
        loss_of_query(config, part, row[chosen])
        for part, row, chosen in zip(exact[0].split(counts), exact[1], mask, strict=True)
    ])  # fmt: skip
    inputs = [x.detach().requires_grad_() for x in inputs]
    query = None if is_one else answered
    actual = build_loss(config)(inputs[0], query, inputs[1], mask)
    assert actual.shape == (len(counts),) and actual.dtype == positive.dtype
    weight = torch.arange(1.0, len(counts) + 1, dtype=torch.float64)
    results = actual, *torch.autograd.grad((actual * weight).sum(), inputs)
    wanted = expected, *torch.autograd.grad((expected * weight).sum(), exact)
    largest = max(x.abs().max() for x in (*positive, negative))
    atol = 1e-9 if actual.dtype == torch.float64 else 3e-6 * (1 + float(largest))
    for one, other in zip(results, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=atol)
    assert not results[2][~mask].any()


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_scores_stay_finite(config, dtype):
    mask = torch.rand(6, 5, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[0], mask[1] = False, True
    masks, extremes = (torch.ones_like(mask), mask, torch.zeros_like(mask)), (-1e4, 0.0, 1e4)
    for high, low, chosen in itertools.product(extremes, extremes, masks):
        positive = torch.full((6,), high, dtype=dtype, requires_grad=True)
        negative = torch.full((6, 5), low, dtype=dtype)
        negative[:, 0] = 3.0
        negative.requires_grad_()
        result = build_loss(config)(positive, None, negative, chosen)
        result.sum().backward()
        assert result.isfinite().all() and (result >= -1e5 * torch.finfo(dtype).eps).all()
        assert positive.grad.isfinite().all() and negative.grad.isfinite().all()


# All entities


def dense(config: LossConfig, scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Losses (Q,) and the gradients (Q, N) of their sum, in float64."""
    exact = scores.double().requires_grad_()
    pairs = zip(exact, labels, strict=True)
    losses = torch.stack([loss_of_query(config, row[of], row[~of]) for row, of in pairs])
    return losses.detach(), torch.autograd.grad(losses.sum(), exact)[0]


def answers_of(labels: Tensor, start: int = 0, stop: int | None = None) -> BlockAnswers:
    query, column = labels[:, start:stop].nonzero(as_tuple=True)
    counts = labels.sum(1)
    return BlockAnswers(query, column, 1 / counts[query].float(), counts)


def closed(name: str, entities: int, **options):
    return build_loss(LossConfig(name, options=options)).over_all(entities)


@st.composite
def blocks_of_scores(draw):
    """Config, scores (Q, N) over a wide range, labels (Q, N), cuts into blocks, layout."""
    config = draw(st.sampled_from(CLOSED))
    queries, entities = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    scores = drawn(draw, queries, entities)
    scores += draw(st.sampled_from([0, 3000]))  # where float32 has steps of 2e-4
    seed = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    labels = torch.rand(scores.shape, generator=seed) < draw(st.sampled_from([0.1, 0.6]))
    if config.name == "softmax":
        labels[:, draw(st.integers(0, entities - 1))] = True  # every query has an answer
    cuts = sorted(draw(st.lists(st.integers(0, entities), max_size=3)))
    return config, scores, labels, [0, *cuts, entities], draw(st.booleans())


@settings(max_examples=100)
@given(blocks_of_scores())
def test_losses_of_blocks_add_up_to_the_formula(case):
    config, scores, labels, cuts, by_column = case  # by column: which kernels do not take
    loss, blocks, statistics = build_loss(config).over_all(scores.shape[1]), [], []
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
    for (block, answers), own in zip(blocks, statistics, strict=True):
        loss.backward(block, joined if loss.normalizes else own, answers, weight)
    losses, gradient = dense(config, scores, labels)
    scale = 1 + scores.abs().max().item()
    assert (loss.loss(joined) - losses).abs().max() < 1e-5 * scale
    result = torch.cat([block for block, _ in blocks], 1)
    assert (result - weight[:, None] * gradient).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("kind", "name", "options"),
    [("bfloat16", "bce", {"reduction": "mean"}), ("padded", "softmax", {}),
     ("double", "softmax", {"smoothing": "libkge"})],
)  # fmt: skip
def test_gradients_do_not_depend_on_the_layout_of_scores(kind, name, options):
    """Some scores go to torch, others to the kernels, without a copy."""
    torch.manual_seed(0)
    scores = (3 * torch.randn(7, 70)).bfloat16().float()
    labels = torch.rand(7, 70) < 0.2
    labels[:, 3] = True
    block = scores.double() if kind == "double" else scores.clone()
    if kind == "bfloat16":
        block = block.bfloat16()
    if kind == "padded":
        block = torch.full((7, 80), torch.nan)[:, :70].copy_(scores)
    config = LossConfig(name, options={"label_smoothing": 0.2, **options})
    loss, answers = build_loss(config).over_all(70), answers_of(labels)
    is_kept = block.dtype == torch.bfloat16 and loss.accepts(block)
    assert is_kept == (kind == "bfloat16")
    statistics = loss.partial_statistics(block, answers)
    loss.backward(block, statistics, answers, torch.ones(7, dtype=statistics.dtype))
    losses, gradient = dense(config, scores, labels)
    torch.testing.assert_close(loss.loss(statistics).double(), losses, rtol=1e-5, atol=1e-5)
    close = {"rtol": 2**-8, "atol": 1e-7} if is_kept else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(block.double(), gradient, **close)


@every_closed_form
def test_many_queries_are_processed_in_chunks(monkeypatch, config):
    scores, answers = torch.randn(7, 5).double(), answers_of(torch.eye(7, 5, dtype=torch.bool))
    loss = build_loss(config).over_all(5)
    expected = loss.partial_statistics(scores, answers)
    monkeypatch.setitem(operators._CHUNK_SCORES, "cpu", 11)  # two queries at a time
    torch.testing.assert_close(loss.partial_statistics(scores, answers), expected)


def test_distant_scores_underflow_to_zero():
    scores, labels = torch.tensor([[0.0, -60.0, -200.0, -1e6]]), torch.eye(1, 4, dtype=torch.bool)
    answers, loss = answers_of(labels), closed("softmax", 4)
    statistics = loss.partial_statistics(scores, answers)
    loss.backward(scores, statistics, answers, torch.ones(1))
    assert not (scores.abs()[0, 1:] < torch.finfo(torch.float32).tiny).any()  # slow, to a CPU
    assert scores.abs().max() < 1e-6 and float(loss.loss(statistics)) < 1e-6


@pytest.mark.parametrize(
    ("options", "words"),
    [({"smoothing": "libkge"}, "acts only with label smoothing"),
     ({"smoothing": "conve", "label_smoothing": 0.1}, "must be one of standard, libkge")],
)  # fmt: skip
def test_wrong_smoothings_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        LossConfig("bce", options=options)

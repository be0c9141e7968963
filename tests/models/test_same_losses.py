"""A loss of one name is one loss, whatever the training type computes it by."""

from __future__ import annotations

import pytest
import torch
from torch import xlogy
from torch.nn.functional import binary_cross_entropy_with_logits, kl_div, normalize

from kge_torchrec.config import ConfigError, LossConfig
from kge_torchrec.models.over_all import BlockAnswers
from kge_torchrec.training.assembly import build_loss

QUERIES, ENTITIES = 4, 9
CONFIGS = [
    LossConfig("softmax"),
    LossConfig("softmax", options={"label_smoothing": 0.2}),
    LossConfig("bce"),
    LossConfig("bce", options={"label_smoothing": 0.2}),
    LossConfig("bce", options={"reduction": "mean"}),
    LossConfig("bce", options={"reduction": "mean", "label_smoothing": 0.2}),
    LossConfig("softmax", options={"label_smoothing": 0.2, "smoothing": "libkge"}),
    LossConfig("bce", options={"label_smoothing": 0.2, "smoothing": "libkge"}),
    LossConfig("bce", options={"label_smoothing": 0.05, "smoothing": "libkge"}),  # e < 1/N
]
every_loss = pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.name} {c.options}")


def random_scores() -> torch.Tensor:
    return 3 * torch.randn(QUERIES, ENTITIES, generator=torch.Generator().manual_seed(0))


def of_full(config: LossConfig, answers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses (Q,) and their gradients (Q, N); answers (Q, N) bool."""
    loss, scores = build_loss(config).over_all(ENTITIES), random_scores()
    query, column = answers.nonzero(as_tuple=True)
    counts = answers.sum(1)
    block = BlockAnswers(query, column, 1 / counts[query].float(), counts)
    statistics = loss.partial_statistics(scores, block)
    loss.backward(scores, statistics, block, torch.ones(QUERIES))
    return loss.loss(statistics).float(), scores


def of_answers(config: LossConfig, answers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with all other entities sampled, as kvssample does, its answers among them."""
    scores = random_scores().requires_grad_()
    query = answers.nonzero()[:, 0]
    losses = build_loss(config)(scores[answers], query, scores, ~answers)
    return losses.detach(), torch.autograd.grad(losses.sum(), scores)[0]


def of_sampled(config: LossConfig, answers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with one answer a query and all entities sampled, the answer among them."""
    scores = random_scores().requires_grad_()
    losses = build_loss(config)(scores[answers], None, scores, ~answers)
    return losses.detach(), torch.autograd.grad(losses.sum(), scores)[0]


@every_loss
def test_single_answers_have_the_same_loss_in_every_regime(config):
    answers = torch.eye(QUERIES, ENTITIES, dtype=torch.bool)
    expected = of_full(config, answers)
    for actual in (of_answers(config, answers), of_sampled(config, answers)):
        torch.testing.assert_close(actual, expected)


@every_loss
def test_several_answers_have_the_same_loss_in_every_regime(config):
    answers = torch.rand(QUERIES, ENTITIES, generator=torch.Generator().manual_seed(1)) < 0.4
    answers[:, 0] = True
    torch.testing.assert_close(of_answers(config, answers), of_full(config, answers))


@pytest.mark.parametrize("name", ["softmax", "bce"])
@pytest.mark.parametrize("label_smoothing", [0.3, 0.12])
def test_libkge_smoothing_has_the_gradients_of_its_training_job(name, label_smoothing):
    """LibKGE's KvsAll lifts all labels by 1/N; its loss kl divides the labels by their sum."""
    labels = (torch.rand(QUERIES, ENTITIES, generator=torch.Generator().manual_seed(1)) < 0.4) * 1.0
    labels[:, 0] = 1
    smoothed = (1.0 - label_smoothing) * labels + 1.0 / labels.size(1)
    scores = random_scores().requires_grad_()
    if name == "softmax":
        target = normalize(smoothed, p=1, dim=1)
        total = kl_div(scores.log_softmax(1), target, reduction="sum")
        entropy = xlogy(target, target).sum()
    else:
        total = binary_cross_entropy_with_logits(scores, smoothed, reduction="sum")
        entropy = torch.zeros(())
    (gradient,) = torch.autograd.grad(total, scores)
    options = {"label_smoothing": label_smoothing, "smoothing": "libkge"}
    losses, actual = of_full(LossConfig(name, options=options), labels > 0)
    torch.testing.assert_close(actual, gradient)
    torch.testing.assert_close(losses.sum(), (total - entropy).detach())


def test_libkge_smoothing_needs_a_label_smoothing():
    with pytest.raises(ConfigError, match="acts only with label smoothing"):
        LossConfig("bce", options={"smoothing": "libkge"})
    with pytest.raises(ConfigError, match="must be one of standard, libkge"):
        LossConfig("bce", options={"smoothing": "conve", "label_smoothing": 0.1})

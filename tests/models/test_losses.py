"""Losses against their formulas, query by query in float64 Python."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from kge_torchrec.models.losses import (
    BinaryCrossEntropyLoss,
    BPRLoss,
    MarginLoss,
    SelfAdversarialLoss,
    SoftmaxLoss,
)

SHAPE = (6, 5)  # queries, candidates
ALL = torch.ones(SHAPE, dtype=torch.bool)


def log_sigmoid(x):
    return -np.logaddexp(0, -x)


def softmax(positive, negative, smooth):
    choices = np.append(positive, negative)
    log_shares = choices - np.logaddexp.reduce(choices)
    target = np.full(len(choices), smooth / len(choices))
    target[0] += 1 - smooth
    return -(target * log_shares).sum()


def bce(positive, negative, smooth, reduce=np.sum):
    def cross(target, score):
        return -target * log_sigmoid(score) - (1 - target) * log_sigmoid(-score)

    return reduce(np.append(cross(1 - smooth / 2, positive), cross(smooth / 2, negative)))


def margin(positive, negative, gap):
    return np.maximum(0, gap - positive + negative).mean() if len(negative) else 0.0


def bpr(positive, negative):
    return -log_sigmoid(positive - negative).mean() if len(negative) else 0.0


def self_adversarial(positive, negative, gap, temperature):
    share = np.exp(temperature * negative)
    share = share / share.sum()
    negative_loss = -(share * log_sigmoid(-gap - negative)).sum()
    return (negative_loss - log_sigmoid(gap + positive)) / 2


CASES = {
    "softmax": (SoftmaxLoss(), lambda p, n: softmax(p, n, 0)),
    "softmax smoothed": (SoftmaxLoss(0.3), lambda p, n: softmax(p, n, 0.3)),
    "bce": (BinaryCrossEntropyLoss(), lambda p, n: bce(p, n, 0)),
    "bce smoothed": (BinaryCrossEntropyLoss(0.3), lambda p, n: bce(p, n, 0.3)),
    "bce mean": (BinaryCrossEntropyLoss(0.3, "mean"), lambda p, n: bce(p, n, 0.3, np.mean)),
    "margin": (MarginLoss(1.5), lambda p, n: margin(p, n, 1.5)),
    "bpr": (BPRLoss(), bpr),
    "self-adversarial": (
        SelfAdversarialLoss(1.5, 0.7),
        lambda p, n: self_adversarial(p, n, 1.5, 0.7),
    ),
}
every_loss = pytest.mark.parametrize(("loss", "oracle"), CASES.values(), ids=CASES)


def scores(dtype=torch.float64):
    torch.manual_seed(0)
    positive, negative = torch.randn(SHAPE[0], dtype=dtype), torch.randn(SHAPE, dtype=dtype)
    return (2 * positive).requires_grad_(), (2 * negative).requires_grad_()


def some_masked():
    """Everywhere some candidates, except that the first query has none and the second all."""
    mask = torch.rand(SHAPE, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[0], mask[1] = False, True
    return mask


@every_loss
def test_value_equals_the_formula(loss, oracle):
    for mask, dtype in ((ALL, torch.float32), (some_masked(), torch.float64)):
        positive, negative = scores(dtype)
        actual = loss(positive, None, negative, mask)
        assert actual.shape == SHAPE[:1] and actual.dtype == dtype
        for query in np.ndindex(*SHAPE[:1]):
            candidates = negative[query][mask[query]]
            expected = oracle(positive[query].item(), candidates.detach().double().numpy())
            rtol = 1e-5 if dtype == torch.float32 else 1e-12
            assert actual[query].item() == pytest.approx(expected, rel=rtol, abs=rtol)


@every_loss
def test_masked_candidates_change_nothing(loss, oracle):
    positive, negative = scores()
    mask = some_masked()
    changed = torch.where(mask, negative, 1e4 * negative)
    torch.testing.assert_close(
        loss(positive, None, negative, mask), loss(positive, None, changed, mask), rtol=0, atol=0
    )
    loss(positive, None, negative, mask).sum().backward()
    assert not negative.grad[~mask].any()


# Without self-adversarial: its weights are constants by design, which has a test below.
@pytest.mark.parametrize("name", [name for name in CASES if name != "self-adversarial"])
def test_gradients_equal_finite_differences(name):
    loss, _ = CASES[name]
    for mask in (ALL, some_masked()):
        assert torch.autograd.gradcheck(lambda p, n, mask=mask: loss(p, None, n, mask), scores())


@every_loss
def test_extreme_scores_stay_finite(loss, oracle):
    masks = ALL, some_masked(), ~ALL
    extremes = -1e4, 0.0, 1e4
    for high, low, mask in itertools.product(extremes, extremes, masks):
        positive = torch.full(SHAPE[:1], high, requires_grad=True)
        negative = torch.full(SHAPE, low).index_fill(1, torch.tensor(0), 3.0).requires_grad_()
        result = loss(positive, None, negative, mask)
        result.sum().backward()
        assert result.isfinite().all() and (result >= -1e-3).all()
        assert positive.grad.isfinite().all() and negative.grad.isfinite().all()


@pytest.mark.parametrize("smooth", [0.0, 0.3])
def test_softmax_equals_cross_entropy_of_torch(smooth):
    positive, negative = scores()
    logits = torch.cat([positive[:, None], negative], 1)
    expected = cross_entropy(
        logits, torch.zeros(len(logits), dtype=torch.int64),
        label_smoothing=smooth, reduction="none",
    )  # fmt: skip
    torch.testing.assert_close(SoftmaxLoss(smooth)(positive, None, negative, ALL), expected)


def test_self_adversarial_weights_carry_no_gradient():
    positive, negative = scores()
    SelfAdversarialLoss(1.5, 0.7)(positive, None, negative, ALL).sum().backward()
    # d/dn of -log sigmoid(-m - n) is sigmoid(m + n); the weight is a constant to it.
    weight = (0.7 * negative).detach().softmax(-1)
    expected = weight * torch.sigmoid(1.5 + negative.detach()) / 2
    torch.testing.assert_close(negative.grad, expected)
    torch.testing.assert_close(positive.grad, -torch.sigmoid(-1.5 - positive.detach()) / 2)


def test_self_adversarial_without_temperature_has_equal_weights():
    positive, negative = scores()
    result = SelfAdversarialLoss(1.0, 0.0)(positive, None, negative, ALL)
    negative_loss = torch.nn.functional.softplus(1 + negative).mean(-1)
    positive_loss = torch.nn.functional.softplus(-1 - positive)
    torch.testing.assert_close(result, (negative_loss + positive_loss) / 2)


def test_perfect_margin_has_zero_loss():
    scores = torch.tensor([5.0]), None, torch.tensor([[3.0, 4.0]]), torch.tensor([[True, True]])
    assert MarginLoss(1.0)(*scores).item() == 0
    assert MarginLoss(2.0)(*scores).item() == pytest.approx(0.5)


def test_softmax_without_candidates_is_zero():
    """A query whose candidates are all known facts teaches nothing, and costs nothing."""
    positive = torch.tensor([3.0], requires_grad=True)
    none = torch.zeros(1, 4, dtype=torch.bool)
    for smooth in (0.0, 0.2):
        loss = SoftmaxLoss(smooth)(positive, None, torch.randn(1, 4), none)
        (gradient,) = torch.autograd.grad(loss.sum(), positive)
        assert math.isclose(loss.item(), 0, abs_tol=1e-6) and abs(gradient.item()) < 1e-6

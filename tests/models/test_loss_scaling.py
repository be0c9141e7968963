"""The loss scale by itself, and rows whose gradients wait."""

from __future__ import annotations

import math

import pytest
import torch

from kge_torchrec.models import loss_scaling
from kge_torchrec.models.loss_scaling import GradientBarrier, LossScale, ScaleTooSmall


def test_scale_halves_at_an_overflow_and_doubles_after_good_steps(monkeypatch):
    monkeypatch.setattr(loss_scaling, "GROWTH_INTERVAL", 3)
    scale = LossScale()
    for overflow in (False, False, True, False, False):
        scale.after_step(overflow)
    assert scale.state() == {"value": 32768.0, "good_steps": 2, "skipped": 1}
    scale.after_step(False)
    assert scale.state() == {"value": 65536.0, "good_steps": 0, "skipped": 1}
    for _ in range(300):
        scale.after_step(False)
    assert scale.value == loss_scaling.LARGEST


def test_gradients_that_are_never_finite_end_training_with_an_error():
    scale = LossScale()
    with pytest.raises(ScaleTooSmall, match=r"train.precision fp16: .*not finite however small"):
        for _ in range(100):
            scale.after_step(True)
    assert scale.skipped == math.log2(loss_scaling.START / loss_scaling.SMALLEST) + 1


def test_rows_get_gradients_only_at_release():
    hold, table = GradientBarrier(), torch.ones(3, 2, requires_grad=True)
    for factor in (8.0, 16.0):
        (hold(table * 1).sum() * factor).backward()
    assert table.grad is None
    assert [float(g[0, 0]) for g in hold.of_rows()] == [8.0, 16.0]
    hold.release(1 / 8)
    assert torch.equal(table.grad, torch.full((3, 2), 3.0)) and hold.of_rows() == []


def test_dropped_rows_get_no_gradients():
    hold, table = GradientBarrier(), torch.ones(3, 2, requires_grad=True)
    hold(table * 1).sum().backward()
    hold.drop()
    hold.release(1.0)
    assert table.grad is None
    with torch.no_grad():
        rows = hold(table * 1)
    assert not rows.requires_grad and hold.of_rows() == []

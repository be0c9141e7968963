"""One variant in a world of its own: its split of a step, its blocks, its memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn
from training_runs import config_of, tiny_store

from kge_torchrec import comparison
from kge_torchrec.comparison import PARTS, split_of_a_step
from kge_torchrec.distributed.processes import processes
from kge_torchrec.models.model import KGEModel
from kge_torchrec.training.assembly import build_batches
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session
from kge_torchrec.training.step import SampledStep

DELAY = 0.05  # seconds, far above what any part of a step of a tiny graph takes


@pytest.fixture
def session(tmp_path, request) -> Iterator[Session]:
    store = tiny_store(tmp_path / "store")
    config = config_of(store.path, tmp_path / "run", entities__engine=request.param)
    with processes("cpu") as ranks:
        yield Session(config, RunFolder(tmp_path / "run"), ranks)


def after_a_delay(function: Callable[..., Any]) -> Callable[..., Any]:
    def delayed(*args: Any, **kwargs: Any) -> Any:
        time.sleep(DELAY)
        return function(*args, **kwargs)

    return delayed


class _SlowGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(DELAY)
        return grad


def slow_down(part: str, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes one part of every step of the engine slow."""
    model = next(m for m in session.backend.model.modules() if isinstance(m, KGEModel))
    objective: nn.Module = model.objective
    if part == "lookup":
        monkeypatch.setattr(model.entities, "forward", after_a_delay(model.entities.forward))
    elif part == "score":
        monkeypatch.setattr(objective, "forward", after_a_delay(objective.forward))
    elif part == "backward":
        forward = objective.forward
        monkeypatch.setattr(objective, "forward", lambda *a: _SlowGradient.apply(forward(*a)))
    elif part == "update":
        table = session.backend.table
        monkeypatch.setattr(table, "update", after_a_delay(table.update))


@pytest.mark.parametrize(
    ("session", "part"),
    [("torchrec", "lookup"), ("handrolled", "backward"), ("torchrec", "update"),
     ("handrolled", "update"), ("handrolled", "data"), ("torchrec", "score")],
    indirect=["session"],
)  # fmt: skip
def test_slow_part_is_measured(session, part, monkeypatch):
    batches = build_batches(session.config, session.store, session.processes)
    if part == "data":
        monkeypatch.setattr(batches, "batch", after_a_delay(batches.batch))
    slow_down(part, session, monkeypatch)
    cpu = session.processes.device
    step = SampledStep(session.backend, session.config.train, cpu)
    results = split_of_a_step(step, batches.epoch(0), 3)
    assert list(results) == list(PARTS)
    assert results.pop(part) >= 1e3 * DELAY
    assert max(results.values()) < 1e3 * DELAY and min(results.values()) > 0
    objective = session.backend.unwrapped_model.objective  # as it was: nobody watches any more
    assert not objective._forward_hooks and not objective._forward_pre_hooks


@pytest.mark.parametrize("session", ["torchrec", "handrolled"], indirect=True)
def test_blocks_count_the_triples_that_they_train(session, monkeypatch):
    """130 triples in batches of 32: every fifth step trains 2."""
    seconds = count()
    monkeypatch.setattr(comparison, "_seconds_everywhere", lambda session: float(next(seconds)))
    monkeypatch.setattr(comparison, "WARM_UP", 2)
    results = comparison.measure_speed(session.processes, session.config, 4)
    #    warm-up:  32 32, then 32 32 2 32, 32 32 32 2, 32 32 32 32
    assert results["triples_per_second"] == [98, 98, 128]

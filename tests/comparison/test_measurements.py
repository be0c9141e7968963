"""What the ranks of a comparison measure: losses, differences, the parts of a step, traffic."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training_runs import config_of, fit, parameters, tiny_store
from worlds import run_world as run_test_world

from kge_torchrec import comparison
from kge_torchrec.comparison import measured_steps, train_side_by_side
from kge_torchrec.config import Config
from kge_torchrec.distributed.processes import Processes, processes
from kge_torchrec.distributed.traffic import Traffic
from kge_torchrec.distributed.worlds import run_world
from kge_torchrec.models.model import KGEModel
from kge_torchrec.training import speed
from kge_torchrec.training.assembly import build_batches
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session
from kge_torchrec.training.step import PARTS, SampledStep

# losses and differences


@pytest.mark.parametrize(
    "last, steps", [(0, [0]), (1, [0, 1]), (60, [0, 1, 2, 5, 10, 20, 50, 60]),
                    (100, [0, 1, 2, 5, 10, 20, 50, 100])])  # fmt: skip
def test_steps_at_which_parameters_are_compared(last, steps):
    assert measured_steps(last) == steps


def trained(world_size: int, **configs: Config) -> list[dict]:
    return run_world(world_size, "cpu", train_side_by_side, configs)


def test_equal_contenders_agree_and_different_ones_do_not(store, tmp_path):
    config = config_of(store, tmp_path, train__optimizer="adam", train__schedule="linear")
    faster = config_of(store, tmp_path, train__optimizer="adam", train__lr=0.1)
    results, *others = trained(2, one=config, two=config, faster=faster)
    assert all(other == results for other in others)  # every rank finds the same
    assert results["steps"] == 2 * 5
    assert {len(losses) for losses in results["losses"].values()} == {10}
    assert results["losses"]["one"] == results["losses"]["two"] != results["losses"]["faster"]
    assert results["losses"]["one"][0] == results["losses"]["faster"][0]

    same, other = results["differences"]["two"], results["differences"]["faster"]
    assert [each["step"] for each in same] == [each["step"] for each in other] == [0, 1, 2, 5, 10]
    assert all(each["entities"] == each["dense"] == 0 for each in [*same, other[0]])
    # Adam's first step is the learning rate, whatever the gradient
    assert other[1]["entities"] == pytest.approx(0.05, rel=1e-2)
    assert other[-1]["entities"] > other[1]["entities"]
    assert set(results["metrics"]) == {"one", "two", "faster"} and results["split"] == "test"
    assert results["metrics"]["one"] == results["metrics"]["two"]


def test_losses_and_metrics_equal_those_of_a_normal_run(store, tmp_path):
    """``kge-torchrec train`` reports the same losses and metrics."""
    events = []
    config = config_of(store, tmp_path / "run", train__log_every=1)
    session = fit(config, lambda loop: loop.callbacks.append(lambda *event: events.append(event)))
    with processes("cpu") as ranks:
        results = train_side_by_side(ranks, {"one": config, "two": config})
    losses = [values["loss"] for kind, values in events if kind == "step"]
    assert results["losses"]["one"] == losses
    assert results["metrics"]["one"] == session.rank("test")


CHANGES = {"row": 0.75, "nan": float("nan"), "dense": -0.25}


def rank_compares(store: Path, folder: Path) -> dict[str, tuple[dict, dict]]:
    """By change, made on the last rank: the differences, and the same from whole tables."""
    comparison.CHUNK_NUMBERS = 5 * 8  # several chunks of 5 rows, the last one smaller
    results = {}
    with processes("cpu") as ranks:
        one, other = (Session(config_of(store), RunFolder(folder), ranks) for _ in range(2))
        for change, by in CHANGES.items():
            rows, dense = other.backend.shard().rows, next(iter(other.scorer.parameters())).data
            changed = dense[0] if change == "dense" else rows[-1]
            before = changed.clone()
            if change == "dense" or ranks.rank == ranks.world_size - 1:
                changed[3] += by
            mine, theirs = parameters(one), parameters(other)
            apart = {name: float((mine[name] - theirs[name]).abs().max()) for name in mine}
            expected = {"entities": apart.pop("entities"), "dense": max(apart.values())}
            results[change] = (comparison.largest_differences(one, other), expected)
            changed.copy_(before)
    return results


def test_differences_against_whole_tables(store, tmp_path):
    for results in run_test_world(2, rank_compares, store, tmp_path):
        for measured, expected in results.values():
            np.testing.assert_equal(measured, expected)
        assert results["row"][0] == {"entities": pytest.approx(0.75), "dense": 0}
        assert results["dense"][0] == {"entities": 0, "dense": pytest.approx(0.25)}
        assert np.isnan(results["nan"][0]["entities"]) and results["nan"][0]["dense"] == 0


# speed

DELAY = 0.05  # seconds, far above what any part of a step of a tiny graph takes


@pytest.fixture
def session(tmp_path, store, request):
    config = config_of(store, tmp_path / "run", entities__engine=request.param)
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


@pytest.mark.parametrize(
    ("session", "part"),
    [("torchrec", "lookup"), ("handrolled", "backward"), ("torchrec", "update"),
     ("handrolled", "update"), ("handrolled", "data"), ("torchrec", "score")],
    indirect=["session"],
)  # fmt: skip
def test_slow_part_is_measured(session, part, monkeypatch):
    batches = build_batches(session.config, session.store, session.processes)
    model = next(m for m in session.backend.model.modules() if isinstance(m, KGEModel))
    if part == "backward":
        forward = model.objective.forward
        slow = lambda *args: _SlowGradient.apply(forward(*args))  # noqa: E731
        monkeypatch.setattr(model.objective, "forward", slow)
    else:
        owner, name = {
            "data": (batches, "batch"),
            "lookup": (model.entities, "forward"),
            "score": (model.objective, "forward"),
            "update": (session.backend.table, "update"),
        }[part]
        monkeypatch.setattr(owner, name, after_a_delay(getattr(owner, name)))
    step = SampledStep(session.backend, session.config.train, session.processes.device)
    results = speed.split_of_a_step(step, batches.epoch(0), 3)
    assert list(results) == list(PARTS)
    assert results.pop(part) >= 1e3 * DELAY
    assert max(results.values()) < 1e3 * DELAY and min(results.values()) > 0
    objective = session.backend.unwrapped_model.objective  # as it was: nobody watches any more
    assert not objective._forward_hooks and not objective._forward_pre_hooks


@pytest.mark.parametrize("session", ["torchrec", "handrolled"], indirect=True)
def test_blocks_count_the_triples_that_they_train(session, monkeypatch):
    """130 triples in batches of 32: every fifth step trains 2."""
    seconds = count()
    monkeypatch.setattr(speed, "_seconds_everywhere", lambda session: float(next(seconds)))
    monkeypatch.setattr(speed, "WARM_UP", 2)
    results = speed.measure_speed(session.processes, session.config, 4)
    #    warm-up:  32 32, then 32 32 2 32, 32 32 32 2, 32 32 32 32
    assert results["triples_per_second"] == [98, 98, 128]


# traffic, against a count by hand of what each rank of two has to send


def rank_sends_known_sizes() -> tuple[tuple, tuple]:
    rank = dist.get_rank()
    with Traffic() as traffic:
        ids = torch.arange(5 + rank)  # 2 stay on rank 0 and 3 leave; 2 leave rank 1 and 4 stay
        splits = [2, 3 + rank]
        theirs = [2, 2] if rank == 0 else [3, 4]
        dist.all_to_all_single(torch.empty(sum(theirs), dtype=torch.int64), ids, theirs, splits)
        counts = torch.zeros(6, dtype=torch.int32)  # equal parts: half of them leave
        dist.all_to_all_single(torch.empty_like(counts), counts)
        rows = torch.zeros(sum(splits), 4, dtype=torch.bfloat16)
        dist.all_to_all_single(torch.empty(sum(theirs), 4, dtype=rows.dtype), rows, theirs, splits)
        dist.all_reduce(torch.zeros(10))
        dist.all_gather([torch.empty(3), torch.empty(3)], torch.zeros(3))
        if rank == 0:
            dist.send(torch.zeros(7), 1)
        else:
            dist.recv(torch.empty(7), 0)
        dist.barrier()
    model = DistributedDataParallel(nn.Linear(3, 2))
    for _ in range(4):  # the first steps set DDP up, which takes collectives of its own
        with Traffic() as gradients:
            model(torch.ones(1, 3)).sum().backward()
    return vars_of(traffic), vars_of(gradients)


def vars_of(traffic: Traffic) -> tuple[dict, dict]:
    return dict(traffic.collectives), traffic.sent


def test_collectives_of_known_sizes_and_of_ddp():
    (first, one), (second, two) = run_test_world(2, rank_sends_known_sizes)
    kinds = {"all_to_all": 3, "all_reduce": 1, "all_gather": 1}
    dense = 10 * 4 + 3 * 4  # of rings of two: all of a sum, one part of two of a gather
    ids, rows = (3 * 8 + 3 * 4, 2 * 8 + 3 * 4), (3 * 4 * 2 + 7 * 4, 2 * 4 * 2)
    assert first[0] == kinds | {"send": 1} and second[0] == kinds
    for (_, sent), ids_sent, rows_sent in zip((first, second), ids, rows, strict=True):
        assert sent == {"ids": ids_sent, "rows": rows_sent, "gradients": 0, "dense": dense}
    sums = {"ids": 0, "rows": 0, "gradients": 0, "dense": (3 * 2 + 2) * 4}
    assert one == two == ({"all_reduce": 1}, sums)


def looked_up(config, store, world_size: int) -> list[list[np.ndarray]]:
    """[rank][step]: the ids that each rank looks up in the steps whose traffic is counted."""
    results = []
    for rank in range(world_size):
        ranks = Processes(rank, world_size, world_size, torch.device("cpu"))
        stream = build_batches(config, store, ranks).epoch(0)
        results.append([next(stream).ids.values().numpy() for _ in range(speed.COUNTED)])
    return results


def test_bytes_of_a_step(tmp_path):
    """TorchRec tells the numbers of lengths and ids, the batch size and the lengths before ids."""
    second_starts, counts, exchanges, dim = 19, 4, 5, 8  # rank 0 has the larger part of 37 rows
    store = tiny_store(tmp_path / "store")
    config = config_of(store.path, tmp_path)
    ranks = run_world(2, "cpu", speed.measure_speed, config, 2)
    ids = looked_up(config, store, 2)
    numbers = np.array([[len(step) for step in rank] for rank in ids])
    from_first = np.array([[(step < second_starts).sum() for step in rank] for rank in ids])
    # What a rank looks up on the other one: its ids go there, their gradients as well.
    elsewhere = np.stack([(numbers - from_first)[0], from_first[1]])
    for rank, sent in enumerate(one["traffic"] for one in ranks):
        out, back = elsewhere[rank].mean(), elsewhere[1 - rank].mean()
        assert sent["rows_looked_up"] == pytest.approx(numbers[rank].mean())
        sizes = {"ids": 8 * (out + counts), "rows": 4 * dim * back, "gradients": 4 * dim * out}
        assert sent["sent"] == pytest.approx(sizes | {"dense": 4 * dim * 2 * store.num_relations})
        assert sent["collectives"] == {"all_to_all": exchanges, "all_reduce": 1}

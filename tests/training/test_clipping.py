"""Clipping covers the table as it covers the relations, on any number of ranks."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from oracle_training import train_dense
from training_runs import (
    config_of,
    fit,
    kernels_of_cuda,
    largest_difference,
    parameters,
    shared_folder,
    tiny_store,
    without_checkpoints,
)
from worlds import run_world

from kge_torchrec.config import Config, ConfigError, TrainConfig
from kge_torchrec.data.store import TripleStore
from kge_torchrec.distributed.processes import processes
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session
from kge_torchrec.training.trainer import Trainer

LIMITS = {
    "norm": {"train__clip__norm": 0.05},
    "value": {"train__clip__value": 0.004},
    "both": {"train__clip__norm": 0.03, "train__clip__value": 0.004},
    "far": {"train__clip__norm": 1e3, "train__clip__value": 1e3},
}
OPTIMIZERS = {
    "norm": {"train__optimizer": "sgd", "train__lr": 0.5},
    "value": {"train__optimizer": "rowwise_adagrad", "train__lr": 0.02},
    "both": {"train__optimizer": "adagrad", "train__lr": 0.02},
    "far": {"train__optimizer": "sgd", "train__lr": 0.5},
}
PARTS = {
    "torchrec": {},
    "handrolled": {"entities__engine": "handrolled", "train__accumulation": 3},
    "fsdp": {"dense__wrapper": "fsdp"},
    "fbgemm": {"train__accumulation": 3},  # its own kernels, as on CUDA
}
# Every limit and every way of parts, shared out over the numbers of ranks.
CASES = {
    1: [("norm", "torchrec"), ("both", "fbgemm"), ("far", "handrolled"), ("value", "fsdp")],
    2: [("norm", "torchrec"), ("value", "handrolled"), ("both", "fsdp"), ("far", "fbgemm")],
    4: [("norm", "handrolled"), ("value", "fbgemm")],
}  # fmt: skip


@functools.cache
def the_store() -> Path:
    return tiny_store(shared_folder() / "store").path


def variant(store: Path, limit: str, parts: str, folder: Path | None = None) -> Config:
    changes = {**OPTIMIZERS[limit], **LIMITS[limit], **PARTS[parts]}
    return config_of(store, folder, train__optimizer_options__eps=1e-3, **changes)


def rank_trains_all(store: Path, folder: Path) -> dict:
    with processes("cpu") as ranks:
        start = parameters(Session(variant(store, "far", "torchrec"), RunFolder(folder), ranks))
        cases = CASES[ranks.world_size]
    results = {"start": start}
    for limit, parts in cases:
        config = variant(store, limit, parts, folder / f"{limit}-{parts}")
        with kernels_of_cuda(parts == "fbgemm"):
            session = fit(config, without_checkpoints)
        assert session.backend.state()["table_step"] == 10  # micro-batches are none
        results[limit, parts] = session.parameters
    return results


@functools.cache
def trained(world_size: int) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        return run_world(world_size, rank_trains_all, the_store(), Path(folder))


@functools.cache
def oracle(limit: str, bound: bool = True) -> dict:
    config = variant(the_store(), limit, "torchrec")
    if not bound:
        config = replace(config, train=replace(config.train, clip={}))
    return train_dense(config, TripleStore.open(the_store()), trained(1)[0]["start"])


@pytest.mark.parametrize(
    "world_size, limit, parts",
    [
        pytest.param(size, *case, marks=pytest.mark.slow if size == 4 else ())
        for size in CASES
        for case in CASES[size]
    ],
)
def test_clipped_runs_equal_the_dense_oracle(limit, parts, world_size):
    first, *others = (results[limit, parts] for results in trained(world_size))
    assert all(largest_difference(first, other) == 0 for other in others)
    assert largest_difference(first, oracle(limit)) < 1e-5


def test_limits_take_effect():
    for limit in ("norm", "value"):
        for name in ("entities", "relations"):
            clipped, free = oracle(limit)[name], oracle(limit, bound=False)[name]
            assert float((clipped - free).abs().max()) > 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adam", "rowwise_adagrad"])
def test_steps_on_sums_on_cuda_equal_those_on_the_cpu(tmp_path, optimizer):
    ends = []
    for device in ("cpu", "cuda"):
        config = config_of(
            the_store(), tmp_path / device, device=device, train__optimizer=optimizer,
            train__optimizer_options__eps=1e-3, train__accumulation=3, **LIMITS["both"],
        )  # fmt: skip
        with processes(device) as ranks:
            session = Session(config, RunFolder(config.run.dir), ranks)
            loop = Trainer(session, session.restore(), None)
            without_checkpoints(loop)
            loop.run()
            ends.append({name: x.cpu() for name, x in parameters(session).items()})
    assert largest_difference(*ends) < 1e-4


@pytest.mark.parametrize("key", ["norm", "value"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_limit_must_be_above_zero(key, value):
    with pytest.raises(ConfigError, match=rf"train.clip.{key} must be a number > 0"):
        TrainConfig(clip={key: value})

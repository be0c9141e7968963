"""Steps against all entities that wait for a sum, and such with sharded dense parameters.

Every one of them is the step of the dense oracle, on 1, 2 and 4 ranks; float16 is near it.
"""

from __future__ import annotations

import functools
import math
import tempfile
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from oracle_full_candidates import train_dense
from torch.distributed.tensor import DTensor
from training_runs import (
    config_of,
    fit,
    kernels_of_cuda,
    largest_difference,
    parameters,
    rank,
    shared_folder,
    tiny_store,
    without_checkpoints,
)
from worlds import run_world

from kge_torchrec.config import Config
from kge_torchrec.data.batches import BatchPlan
from kge_torchrec.data.batches.queries import QueryBatches, TripleQueries
from kge_torchrec.data.store import TripleStore
from kge_torchrec.distributed.dense import local_part
from kge_torchrec.distributed.processes import processes
from kge_torchrec.training import assembly
from kge_torchrec.training.assembly import examples_per_epoch
from kge_torchrec.training.full_candidates import FullCandidates
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session
from kge_torchrec.training.trainer import Trainer

# What is trained; two of 90 triples are left for the last step, so that of three micro-batches one
# is empty.  23 entities on 4 ranks, 6 relation rows on 4 ranks: the last has none of the latter.
RUNS = {
    "plain": {"train__optimizer": "adam", "train__optimizer_options__weight_decay": 0.02},
    "norm": {"train__optimizer": "sgd", "train__lr": 0.5, "train__clip__norm": 0.1},
    "value": {"train__optimizer": "rowwise_adagrad", "train__clip__value": 0.004,
              "negatives__regime": "kvsall", "loss__name": "bce", "model__reciprocal": False},
    "both": {"train__optimizer": "adagrad", "train__clip__norm": 0.1, "train__clip__value": 0.01,
             "model__scorer": "keci", "loss__relation_weight": 0.5},
    "far": {"train__optimizer": "rowwise_adam", "train__clip__norm": 1e3,
            "negatives__regime": "allvsall", "loss__name": "bce", "train__batch_size": 47},
}  # fmt: skip
# How its steps are taken, which must not show.
WAYS = {
    "torchrec": {},
    "handrolled": {"entities__engine": "handrolled"},
    "parts": {"train__accumulation": 3},
    "fbgemm parts": {"train__accumulation": 3},  # its own kernels, as on CUDA
    "handrolled parts": {"entities__engine": "handrolled", "train__accumulation": 3},
    "fsdp": {"dense__wrapper": "fsdp"},
    "fsdp parts": {"dense__wrapper": "fsdp", "train__accumulation": 2,
                   "entities__engine": "handrolled"},
    "grad_op": {"dense__wrapper": "fsdp", "dense__options__sharding": "grad_op"},
    "offload": {"dense__wrapper": "fsdp", "dense__options__cpu_offload": True,
                "entities__engine": "handrolled"},
    "hybrid": {"dense__wrapper": "hybrid", "dense__options__replicas": 2},
    "hybrid parts": {"dense__wrapper": "hybrid", "dense__options__replicas": 2,
                     "train__accumulation": 2, "entities__engine": "handrolled"},
}  # fmt: skip
# Every run in every way, shared out over the numbers of ranks.
CASES = {
    1: [("plain", "parts"), ("norm", "handrolled")],
    2: [("norm", "torchrec"), ("value", "handrolled parts"), ("both", "fsdp"),
        ("value", "fbgemm parts")],
    4: [("norm", "fsdp parts"), ("value", "torchrec")],
}  # fmt: skip
MORE = {
    1: [("value", "torchrec")],
    2: [("plain", "offload"), ("far", "fsdp parts")],
    4: [("both", "hybrid parts"), ("plain", "grad_op")],
}  # in the second tier
IN_SMALL_BLOCKS = {("plain", "parts"), ("both", "fsdp"), ("norm", "fsdp parts")}


def variant(store: Path, run: str, way: str, folder: Path | None = None, **more) -> Config:
    changes = {"negatives__regime": "1vsall", "train__batch_size": 22, "train__lr": 0.02,
               "train__optimizer_options__eps": 1e-3, "train__epochs": 2,
               "loss__n3": 0.01}  # fmt: skip
    return config_of(store, folder, **changes | RUNS[run] | WAYS[way] | more)


@functools.cache
def the_store() -> Path:
    return tiny_store(shared_folder() / "store", entities=23, train=90, held_out=2).path


def in_small_blocks(loop: Trainer) -> None:
    """Scores of two or three entities at a time, computed twice."""
    without_checkpoints(loop)
    loop.pipeline.full.kept_bytes, loop.pipeline.full.block_bytes = 0, 200


def rank_trains_all(store: Path, folder: Path, first: bool) -> dict:
    results = {}
    with processes("cpu") as ranks:
        cases = (CASES if first else MORE)[ranks.world_size]
        for run in RUNS if ranks.world_size == 1 else ():
            session = Session(variant(store, run, "torchrec"), RunFolder(folder), ranks)
            results[run, "start"] = parameters(session)
    for run, way in cases:
        config = variant(store, run, way, folder / f"{run}-{way}")
        small = (run, way) in IN_SMALL_BLOCKS
        with kernels_of_cuda(way.startswith("fbgemm")):
            session = fit(config, in_small_blocks if small else without_checkpoints)
        for parameter in session.scorer.parameters():
            assert isinstance(parameter, DTensor) == ("dense__wrapper" in WAYS[way])
            assert type(parameter.grad) is type(parameter.data)
            assert local_part(parameter.grad).shape == local_part(parameter).shape
        results[run, way] = session.parameters
        results[run, way, "steps"] = int(session.backend.state()["table_step"])
    return results


@functools.cache
def trained(world_size: int, first: bool = True) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        return run_world(world_size, rank_trains_all, the_store(), Path(folder), first)


@functools.cache
def oracle(run: str, bound: bool = True) -> dict:
    free = {} if bound else {"train__clip__norm": None, "train__clip__value": None}
    config = variant(the_store(), run, "torchrec", **free)
    return train_dense(config, TripleStore.open(the_store()), trained(1)[0][run, "start"])


@pytest.mark.parametrize(
    "world_size, run, way",
    [
        pytest.param(size, *case, marks=() if cases is CASES else pytest.mark.slow)
        for cases in (CASES, MORE)
        for size in cases
        for case in cases[size]
    ],
)
def test_runs_equal_the_dense_oracle(run, way, world_size):
    results = trained(world_size, (run, way) in CASES[world_size])
    first, *others = (ends[run, way] for ends in results)
    assert all(largest_difference(first, other) == 0 for other in others)
    assert largest_difference(first, oracle(run)) < 1e-5
    assert results[0][run, way, "steps"] == expected_steps(run)


def expected_steps(run: str) -> int:
    """Count the steps of the table; micro-batches do not count."""
    config, store = variant(the_store(), run, "torchrec"), TripleStore.open(the_store())
    return 2 * -(-examples_per_epoch(config, store) // config.train.batch_size)


@pytest.mark.parametrize("run", ["norm", "value", pytest.param("both", marks=pytest.mark.slow)])
def test_limits_take_effect(run):
    for name in ("entities", "relations"):
        clipped, free = oracle(run)[name], oracle(run, bound=False)[name]
        assert float((clipped - free).abs().max()) > 1e-3


def rank_trains(store: Path, folder: Path, run: str, way: str, changes: dict) -> dict:
    return fit(variant(store, run, way, folder, **changes)).parameters


@pytest.mark.parametrize(
    "before, after",
    [
        (("fsdp parts", 2), ("handrolled", 1)),
        pytest.param(("hybrid parts", 4), ("fsdp", 2), marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_run_resumes_in_the_middle_of_an_epoch(tmp_path, before, after):
    """Under another wrapper, engine, number of micro-batches and of ranks."""
    changes = {"checkpoint__every__steps": 3, "checkpoint__every__epochs": 0}
    (way, ranks), (next_way, next_ranks) = before, after
    run_world(ranks, rank_trains, the_store(), tmp_path, "both", way, changes)
    drop_newest(tmp_path / "checkpoints")
    results = run_world(next_ranks, rank_trains, the_store(), tmp_path, "both", next_way, changes)
    assert largest_difference(results[0], oracle("both")) < 1e-5


def drop_newest(checkpoints: Path) -> None:
    """Remove the last checkpoint; the one before is from the middle of an epoch."""
    newest = max(checkpoints.glob("step-*"))
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()


def rank_trains_in(store: Path, folder: Path) -> dict:
    """Return results by precision; "scaled" is fp32 with loss scaling."""
    results = {}
    for precision in ("fp32", "fp16", "scaled"):
        name = "fp16" if precision == "scaled" else precision
        config = variant(store, "plain", "torchrec", folder / precision, train__precision=name)
        kind = torch.float32 if precision == "scaled" else torch.float16
        with patch.dict(assembly._DTYPES, fp16=kind):
            session = fit(config, without_checkpoints)
        results[precision] = session.parameters, session.loss_scale
    return results


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.slow
def test_float16_ends_near_float32_and_scaling_changes_no_bit(tmp_path, world_size):
    first, *others = run_world(world_size, rank_trains_in, the_store(), tmp_path)
    (full, none), (half, _), (scaled, scale) = first.values()
    assert none == {} and scale == {"value": 65536.0, "good_steps": 10, "skipped": 0}
    assert largest_difference(full, scaled) == 0
    assert 0 < largest_difference(full, half) < 0.02
    assert all(largest_difference(half, other["fp16"][0]) == 0 for other in others)


def rank_overflows(store: Path, folder: Path) -> tuple:
    """A row's gradient is infinite on the last rank at the 8th step."""
    same, gradients = [], FullCandidates.scaled_row_gradients

    def spoilt(step: FullCandidates) -> list[torch.Tensor]:
        (sums,) = gradients(step)
        if rank() == dist.get_world_size() - 1:
            sums[0, 0] = math.inf
        return [sums]

    def inject(loop: Trainer) -> None:
        without_checkpoints(loop)
        progress = loop.pipeline.progress

        def watched(batches):
            is_spoilt = loop.progress.global_step == 7
            before = parameters(loop.session)
            used = spoilt if is_spoilt else gradients
            with patch.object(FullCandidates, "scaled_row_gradients", used):
                loss = progress(batches)
            same.append(largest_difference(before, parameters(loop.session)) == 0)
            return loss

        loop.pipeline.progress = watched

    config = variant(store, "plain", "hybrid parts", folder, train__precision="fp16")
    session = fit(config, inject)
    return same, session.loss_scale, int(session.backend.state()["table_step"])


def test_an_overflow_on_one_rank_skips_the_step_on_all(tmp_path):
    for same, scale, steps in run_world(2, rank_overflows, the_store(), tmp_path):
        assert [step for step, is_same in enumerate(same) if is_same] == [7]
        assert scale == {"value": 32768.0, "good_steps": 2, "skipped": 1}
        assert steps == 9


def test_losses_of_micro_batches_add_up(tmp_path):
    losses = []

    def listen(loop: Trainer) -> None:
        without_checkpoints(loop)
        loop.callbacks.append(
            lambda kind, values: losses.append(values["loss"]) if kind == "epoch" else None
        )

    for way in ("torchrec", "parts"):
        fit(variant(the_store(), "plain", way, tmp_path / way), listen)
    torch.testing.assert_close(losses[:2], losses[2:], rtol=1e-5, atol=0)


def test_micro_batches_drop_different_elements():
    triples = np.tile(np.arange(6)[:, None], 3)
    batches = QueryBatches(TripleQueries(triples, ("tail",)), BatchPlan(6, accumulation=3))
    seeds = [batch.seed for batch in batches.epoch(0)]
    (whole_batch,) = QueryBatches(TripleQueries(triples, ("tail",)), BatchPlan(6)).epoch(0)
    assert len(set(seeds)) == 3 and seeds[0] == whole_batch.seed

"""Steps against all entities that wait for a sum: resumed, in float16, and where one overflows.

test_exact compares them with the dense oracle.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from training_runs import (
    config_of,
    fit,
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
from kge_torchrec.models.loss_scaling import LossScale
from kge_torchrec.training import assembly
from kge_torchrec.training.full_candidates import FullCandidates
from kge_torchrec.training.trainer import Trainer

WAYS = {
    "torchrec": {},
    "handrolled": {"entities__engine": "handrolled"},
    "fsdp": {"dense__wrapper": "fsdp"},
    "fsdp parts": {"dense__wrapper": "fsdp", "train__accumulation": 2,
                   "entities__engine": "handrolled"},
    "hybrid parts": {"dense__wrapper": "hybrid", "dense__options__replicas": 2,
                     "train__accumulation": 2, "entities__engine": "handrolled"},
}  # fmt: skip
CLIPPED = {"train__optimizer": "adagrad", "train__clip__norm": 0.1, "train__clip__value": 0.01,
           "model__scorer": "keci", "loss__relation_weight": 0.5}  # fmt: skip


def variant(store: Path, way: str, folder: Path | None = None, **more) -> Config:
    changes = {"negatives__regime": "1vsall", "train__batch_size": 22, "train__lr": 0.02,
               "train__optimizer": "adam", "train__epochs": 2, "loss__n3": 0.01}  # fmt: skip
    return config_of(store, folder, **changes | WAYS[way] | more)


@functools.cache
def the_store() -> Path:
    return tiny_store(shared_folder() / "store", entities=23, train=90, held_out=2).path


def rank_trains(store: Path, folder: Path, way: str, changes: dict) -> dict:
    return fit(variant(store, way, folder, **CLIPPED, **changes)).parameters


@pytest.mark.parametrize(
    "before, after",
    [
        (("fsdp parts", 2), ("handrolled", 1)),
        (("hybrid parts", 4), ("fsdp", 2)),
    ],
)
def test_run_resumes_in_the_middle_of_an_epoch(tmp_path, before, after):
    """Under another wrapper, engine, number of micro-batches and of ranks."""
    changes = {"checkpoint__every__steps": 3, "checkpoint__every__epochs": 0}
    (way, ranks), (next_way, next_ranks) = before, after
    run_world(ranks, rank_trains, the_store(), tmp_path, way, changes)
    drop_newest(tmp_path / "checkpoints")
    results = run_world(next_ranks, rank_trains, the_store(), tmp_path, next_way, changes)
    whole = run_world(1, rank_trains, the_store(), tmp_path / "whole", "torchrec", {})
    assert largest_difference(results[0], whole[0]) < 1e-5


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
        config = variant(store, "torchrec", folder / precision, train__precision=name)
        kind = torch.float32 if precision == "scaled" else torch.float16
        with patch.dict(assembly._DTYPES, fp16=kind):
            session = fit(config, without_checkpoints)
        results[precision] = session.parameters, session.loss_scale
    return results


def test_float16_ends_near_float32_and_scaling_changes_no_bit(tmp_path):
    first, *others = run_world(2, rank_trains_in, the_store(), tmp_path)
    (full, none), (half, _), (scaled, scale) = first.values()
    assert none == {} and scale == {"value": 65536.0, "good_steps": 10, "skipped": 0}
    assert largest_difference(full, scaled) == 0
    assert 0 < largest_difference(full, half) < 0.02
    assert all(largest_difference(half, other["fp16"][0]) == 0 for other in others)


def rank_overflows(store: Path, folder: Path) -> tuple:
    """A row's gradient is infinite on the last rank at the 8th step."""
    same, unscaled = [], FullCandidates.unscaled

    def spoilt(step: FullCandidates, scale: LossScale) -> bool:
        if rank() == dist.get_world_size() - 1:
            step._row_gradients[0][0, 0] = math.inf
        return unscaled(step, scale)

    def inject(loop: Trainer) -> None:
        without_checkpoints(loop)
        progress = loop.pipeline.progress

        def watched(batches):
            is_spoilt = loop.progress.global_step == 7
            before = parameters(loop.session)
            used = spoilt if is_spoilt else unscaled
            with patch.object(FullCandidates, "unscaled", used):
                loss = progress(batches)
            same.append(largest_difference(before, parameters(loop.session)) == 0)
            return loss

        loop.pipeline.progress = watched

    config = variant(store, "hybrid parts", folder, train__precision="fp16")
    session = fit(config, inject)
    return same, session.loss_scale, session.backend.table_step


def test_an_overflow_on_one_rank_skips_the_step_on_all(tmp_path):
    for same, scale, steps in run_world(2, rank_overflows, the_store(), tmp_path):
        assert [step for step, is_same in enumerate(same) if is_same] == [7]
        assert scale == {"value": 32768.0, "good_steps": 2, "skipped": 1}
        assert steps == 9


def test_micro_batches_drop_different_elements():
    triples = np.tile(np.arange(6)[:, None], 3)
    batches = QueryBatches(TripleQueries(triples, ("tail",)), BatchPlan(6, accumulation=3))
    seeds = [batch.seed for batch in batches.epoch(0)]
    (whole_batch,) = QueryBatches(TripleQueries(triples, ("tail",)), BatchPlan(6)).epoch(0)
    assert len(set(seeds)) == 3 and seeds[0] == whole_batch.seed

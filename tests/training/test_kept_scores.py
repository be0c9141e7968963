"""Scores that stay in memory during a step: those that fit into the memory of every rank."""

from __future__ import annotations

import pytest
import torch
from recorded_steps import CPU, ENTITIES, Recorder, objective_of
from worlds import run_world

from kge_torchrec.config import TrainConfig
from kge_torchrec.distributed.processes import processes
from kge_torchrec.environment import free_memory
from kge_torchrec.models.full_losses import KEPT_BYTES, FullSoftmax, kept_bytes
from kge_torchrec.training import full_candidates
from kge_torchrec.training.full_candidates import FullCandidates

GB = 10**9


@pytest.mark.parametrize("free, rows, dim, kept", [
    (0, 1000, 8, KEPT_BYTES), (GB, 1000, 8, KEPT_BYTES), (80 * GB, 0, 8, 20 * GB),
    (80 * GB, 2_500_000, 200, 18 * GB), (80 * GB, 86_000_000, 100, KEPT_BYTES),
])  # fmt: skip
def test_kept_scores_follow_the_free_memory(free, rows, dim, kept):
    assert kept_bytes(free, rows, dim) == kept


def test_free_memory_counts_what_torch_has_cached(monkeypatch):
    assert free_memory(CPU) == 0
    sizes = {"mem_get_info": (30, 80), "memory_reserved": 25, "memory_allocated": 5}
    for name, size in sizes.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, size=size: size)
    assert free_memory(torch.device("cuda")) == 50


def rank_chooses(gigabytes: list[int]) -> int:
    objective = objective_of(("complex", 6, {}), True)
    with processes("cpu") as ranks, pytest.MonkeyPatch.context() as patches:
        free = GB * gigabytes[ranks.rank]
        patches.setattr(full_candidates, "free_memory", lambda device: free)
        engine = Recorder(objective, torch.zeros(ENTITIES, objective.scorer.dim))
        step = FullCandidates(engine, FullSoftmax(ENTITIES), TrainConfig(), CPU)
    return step.full.kept_bytes


@pytest.mark.parametrize("gigabytes", [[40], [80, 40], [80, 60, 40, 60]])
def test_ranks_keep_what_fits_into_the_smallest_memory(gigabytes):
    for kept in run_world(len(gigabytes), rank_chooses, gigabytes):
        assert 9.9 * GB < kept <= 10 * GB

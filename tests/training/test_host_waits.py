"""A step on a GPU starts its work without waiting for the device."""

from __future__ import annotations

import pytest
import torch
from training_runs import config_of, tiny_store

from kge_torchrec.distributed.processes import processes
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session
from kge_torchrec.training.trainer import Trainer


@pytest.mark.gpu
@pytest.mark.parametrize(
    "keys",
    [{"train__pipeline": "loop"}, {"train__pipeline": "graph"}, {"negatives__regime": "1vsall"}],
)
def test_a_step_waits_for_nothing(tmp_path, keys):
    store = tiny_store(tmp_path / "store").path
    config = config_of(store, tmp_path / "run", device="cuda", train__batches="cpu", **keys)
    with processes("cuda") as ranks:
        session = Session(config, RunFolder(tmp_path / "run"), ranks)
        loop = Trainer(session, session.restore(), None)
        batches = loop.batches.epoch(0)
        for _ in range(3):  # the first ones set things up, or capture a graph
            loop.pipeline.progress(batches)
        torch.cuda.set_sync_debug_mode("error")
        try:
            loop.pipeline.progress(batches)
        finally:
            torch.cuda.set_sync_debug_mode("default")

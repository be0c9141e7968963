"""Steps on a GPU: they wait for nothing, and sum gradients as those of a CPU."""

from __future__ import annotations

import pytest
import torch
from training_runs import config_of, largest_difference, parameters, without_checkpoints

from kge_torchrec.distributed.processes import processes
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session
from kge_torchrec.training.trainer import Trainer


@pytest.mark.gpu
@pytest.mark.parametrize(
    "keys",
    [{"train__pipeline": "loop"}, {"train__pipeline": "graph"}, {"negatives__regime": "1vsall"}],
)
def test_a_step_waits_for_nothing(store, tmp_path, keys):
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


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adam", "rowwise_adagrad"])
def test_steps_on_sums_on_cuda_equal_those_on_the_cpu(store, tmp_path, optimizer):
    ends = []
    for device in ("cpu", "cuda"):
        config = config_of(
            store, tmp_path / device, device=device, train__optimizer=optimizer,
            train__optimizer_options__eps=1e-3, train__accumulation=3,
            train__clip={"norm": 0.03, "value": 0.004},
        )  # fmt: skip
        with processes(device) as ranks:
            session = Session(config, RunFolder(config.run.dir), ranks)
            loop = Trainer(session, session.restore(), None)
            without_checkpoints(loop)
            loop.run()
            ends.append({name: x.cpu() for name, x in parameters(session).items()})
    assert largest_difference(*ends) < 1e-4

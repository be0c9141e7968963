"""Clipping: its limits, and on a GPU the step of a CPU; test_exact has it on any ranks."""

from __future__ import annotations

import pytest
from training_runs import config_of, largest_difference, parameters, tiny_store, without_checkpoints

from kge_torchrec.config import ConfigError, TrainConfig
from kge_torchrec.distributed.processes import processes
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session
from kge_torchrec.training.trainer import Trainer


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adam", "rowwise_adagrad"])
def test_steps_on_sums_on_cuda_equal_those_on_the_cpu(tmp_path, optimizer):
    ends, store = [], tiny_store(tmp_path / "store").path
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


@pytest.mark.parametrize("key", ["norm", "value"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_limit_must_be_above_zero(key, value):
    with pytest.raises(ConfigError, match=rf"train.clip.{key} must be a number > 0"):
        TrainConfig(clip={key: value})

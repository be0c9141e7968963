"""entities.placement auto: one choice for all ranks, kept by the run; memory without a plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from disk_runs import disk_config, store_path
from training_runs import rank
from worlds import run_world

from kge_torchrec import api, resume, train
from kge_torchrec.config import ConfigError
from kge_torchrec.data.store import TripleStore
from kge_torchrec.distributed.processes import processes
from kge_torchrec.planning import run_plan
from kge_torchrec.planning.run_plan import plan_run
from kge_torchrec.training import runs
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.runs import start_run

AUTO = {"entities__placement": "auto", "entities__placement_options": {}, "run__resume": "auto"}


def rank_trains_by_auto(folder: Path, memory: list[int], **changes) -> str:
    """Train where the memory of each rank is short by that many bytes; return the config."""
    config = disk_config(folder, **{**AUTO, "train__epochs": 1, **changes})
    store = TripleStore.open(store_path())
    with processes("cpu") as ranks:
        in_memory = replace(config.entities, placement="memory")
        (limit,) = plan_run(replace(config, entities=in_memory), store, ranks).limits_of("main")
    enough = int(limit.need / 0.95) + 2
    with mock.patch.object(run_plan, "host_memory", lambda: enough - memory[rank()]):
        run = train(config)
    return f"{run.config.entities.placement} {run.config.entities.placement_options}"


@pytest.mark.parametrize("short", [0, 1])
@pytest.mark.first_tier("1")
def test_auto_is_decided_by_the_first_rank_for_all(tmp_path, short):
    memory = [4096 * short, 4096 * (1 - short)]
    chosen = run_world(2, rank_trains_by_auto, tmp_path / "run", memory)
    assert chosen[0] == chosen[1]
    assert chosen[0].startswith("disk {'parts': " if short else "memory {}")


@pytest.mark.slow
def test_a_run_that_auto_has_placed_stays_there(tmp_path, caplog, capsys):
    before = rank_trains_by_auto(tmp_path / "run", [4096])
    assert before.startswith("disk")
    assert "entities.placement auto chooses disk, with" in caplog.text
    assert "would need" in caplog.text and "entities.placement_options change it" in caplog.text
    caplog.clear()
    # the same command again, with more memory
    assert rank_trains_by_auto(tmp_path / "run", [0]) == before
    assert "auto chooses" not in caplog.text
    with pytest.raises(ConfigError, match=r"train.batch_size"):
        rank_trains_by_auto(tmp_path / "run", [0], train__batch_size=7)
    changes = {"entities.placement": "auto", "train.epochs": 2, "run.progress": True}
    run = resume(tmp_path / "run", changes)
    assert "auto chooses memory, where" in capsys.readouterr().err
    assert run.config.entities.placement == "memory"


def test_a_killed_run_does_not_choose_again(tmp_path, monkeypatch):
    def die(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "Session", die)
    with pytest.raises(KeyboardInterrupt):
        rank_trains_by_auto(tmp_path / "run", [4096])
    assert RunFolder(tmp_path / "run").load_config().entities.on_disk


def test_without_a_planner_auto_takes_memory_and_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(api, "has_torchrec", lambda: False)
    run = train(disk_config(tmp_path / "run", **AUTO, train__epochs=1, run__progress=False))
    assert run.config.entities.placement == "memory"
    assert "auto chooses memory, because TorchRec" in caplog.text


def test_the_engine_alone_takes_memory_and_says_so(tmp_path, caplog):
    folder = start_run(disk_config(tmp_path, **AUTO, train__epochs=1, run__progress=False))
    assert folder.load_config().entities.placement == "memory"
    assert "auto chooses memory, because there is no plan" in caplog.text


def test_a_plan_that_fails_ends_no_run(tmp_path, monkeypatch, caplog):
    def fail(*_):
        raise ValueError("no plan today")

    monkeypatch.setattr(run_plan, "setup_of_run", fail)
    run = train(disk_config(tmp_path / "run", **AUTO, train__epochs=1))
    assert run.config.entities.placement == "memory"
    assert "memory, because this run has no plan (no plan today)" in caplog.text

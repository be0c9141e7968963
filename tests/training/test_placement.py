"""Tables on disk: killed runs resume, errors lose nothing; test_exact trains with them."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from disk_runs import disk_config, trained_run
from grown_runs import tensors
from training_runs import (
    dies_after,
    fit,
    kernels_of_cuda,
    largest_difference,
    parameters,
    rank,
)
from worlds import WorldError, run_world

from kge_torchrec import extend, load_model, open_run, train
from kge_torchrec.config import ConfigError
from kge_torchrec.training.checkpoints import CheckpointError
from kge_torchrec.training.disk_table import DiskError
from kge_torchrec.training.trainer import Trainer

WEIGHT = "model.entities.embeddings.entity.weight"


@pytest.mark.parametrize("from_run", [False, True])
def test_parts_start_with_the_values_of_a_table_in_memory(tmp_path, from_run):
    source = {"model__init_from": str(trained_run())} if from_run else {}

    def start(name: str, **changes) -> dict:
        values = {}

        def stop(loop: Trainer) -> None:
            values.update(parameters(loop.session))
            loop.run = lambda: None

        fit(disk_config(tmp_path / name, **source, **changes), stop)
        return values

    in_memory = {"entities__placement": "memory", "entities__placement_options": {}}
    on_disk = start("disk")
    assert largest_difference(on_disk, start("memory", **in_memory)) == 0
    trained = tensors(trained_run())[WEIGHT]
    assert torch.equal(on_disk["entities"], trained) == from_run


def test_the_kernels_of_cuda_keep_their_state_in_parts(tmp_path):
    changes = {"train__optimizer": "rowwise_adagrad"}
    with kernels_of_cuda(True):
        one = fit(disk_config(tmp_path / "fused", **changes)).parameters
    other = fit(disk_config(tmp_path / "ours", **changes)).parameters
    assert largest_difference(one, other) < 1e-5


def rank_resumes(folder: Path, after: int | None, changes: dict) -> dict:
    config = disk_config(folder, **{"checkpoint__every__steps": 2, "train__epochs": 3, **changes})
    return fit(config, dies_after(after)).parameters


def rank_takes_over(folder: Path, changes: dict) -> None:
    """Write the checkpoint again as this run would, then train on."""
    config = disk_config(folder, **{"checkpoint__every__epochs": 1, **changes})
    fit(config, lambda loop: loop._save() if loop.progress.epoch else None)


def test_other_ranks_and_placements_take_over_between_epochs(tmp_path):
    before: dict = {}
    owners = [
        (2, {}),
        (1, {}),
        (4, {"entities__engine": "handrolled"}),
        (1, {"entities__placement": "memory", "entities__placement_options": {}}),
        (2, {"entities__placement_options": {"parts": 4, "buffer": 2}}),
    ]
    for epochs, (ranks, changes) in enumerate(owners):
        if before:  # without a step in between, it writes what it has read
            run_world(ranks, rank_takes_over, tmp_path, {**changes, "train__epochs": epochs})
            assert all(torch.equal(before[name], t) for name, t in table_of(tmp_path).items())
        settings = {**changes, "train__epochs": epochs + 1}
        run_world(ranks, rank_takes_over, tmp_path, settings)
        after = table_of(tmp_path)
        assert {name: len(t) for name, t in after.items()} == dict.fromkeys(after, 37)
        assert not before or not torch.equal(before[WEIGHT], after[WEIGHT])
        before = after


def table_of(run: Path) -> dict:
    """The rows and states of a run's newest checkpoint."""
    return {name: t for name, t in tensors(run).items() if "entities.embeddings" in name}


def test_within_an_epoch_ranks_and_parts_stay(tmp_path):
    with pytest.raises(WorldError, match="died with exit code -9"):
        run_world(2, rank_resumes, tmp_path / "run", 5, {})
    with pytest.raises(ConfigError, match=r"within epoch 1.*3 of them in memory, on 2 ranks"):
        rank_resumes(tmp_path / "run", None, {})
    other = {"entities__placement_options": {"parts": 5, "buffer": 3, "passes": 2}}
    with pytest.raises(WorldError, match="3 of them in memory, 2 passes, on 2 ranks"):
        run_world(2, rank_resumes, tmp_path / "run", None, other)
    run_world(2, rank_resumes, tmp_path / "run", None, {})


def test_there_is_one_file_for_each_tensor_and_the_run_leaves_none(tmp_path):
    names = []
    parts = tmp_path / "run" / "parts"
    look = lambda kind, values: names.append(sorted(file.name for file in parts.iterdir()))  # noqa: E731
    train(disk_config(tmp_path / "run", train__epochs=3), [look])
    table = "entities.embeddings.entity.weight"
    expected = [
        f"rank-00000-model.{table}.bin",
        f"rank-00000-optimizer.{table}.entity.momentum1.bin",
    ]
    assert names and all(found == expected for found in names)
    assert not parts.exists()


def test_answers_ranks_and_exports_read_the_parts(tmp_path):
    with open_run(trained_run()) as run:
        ranks, answers = run.evaluate("test"), run.predict("e1", "r1", k=5)
        rows = parameters(run.model)["entities"]
        run.export(tmp_path / "out")
    assert torch.equal(rows, tensors(trained_run())[WEIGHT])
    assert ranks == open_run(trained_run()).evaluate("test")
    model = load_model(tmp_path / "out")
    assert [a.label for a in model.predict("e1", "r1", k=5)] == [a.label for a in answers]


def test_an_extended_run_keeps_its_place(tmp_path):
    new = {"train": [("new", "r0", "e1"), ("e2", "r1", "new")]}
    with extend(trained_run(), new, tmp_path / "run", epochs=1) as run:
        assert run.config.entities.on_disk and len(run.predict("new", "r0", k=3)) == 3


def test_an_extended_run_moves_to_memory_to_freeze_old_rows(tmp_path):
    new, overrides = {"train": [("new", "r0", "e1")]}, {"entities.placement": "memory"}
    with pytest.raises(ConfigError, match=r"entities\.placement disk does not go with this"):
        extend(trained_run(), new, tmp_path / "run", epochs=1, freeze=True)
    made = extend(trained_run(), new, tmp_path / "run", epochs=1, freeze=True, overrides=overrides)
    before, after = (tensors(run)[WEIGHT] for run in (trained_run(), made.path))
    assert torch.equal(after[: len(before)], before)


def rank_fails(folder: Path) -> str:
    """The disk of rank 1 is full: both ranks hear of it."""

    def full(*_):
        raise OSError(errno.ENOSPC, "no space")

    with pytest.MonkeyPatch.context() as patched:
        if rank() == 1:
            patched.setattr(os, "posix_fallocate", full)
        try:
            rank_resumes(folder, None, {})
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


def test_all_ranks_hear_of_a_full_disk_of_one(tmp_path):
    first, second = run_world(2, rank_fails, tmp_path / "run")
    for text in (first, second):
        assert re.search(r"cannot be kept in .*parts: no space is left .* free on that disk", text)
    assert "rank 1: " in first and not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "parts").write_text("no folder")
    with pytest.raises(DiskError, match=r"cannot be kept in .*parts: a file of this name"):
        fit(disk_config(tmp_path / "run"))


def rank_opens(folder: Path) -> dict:
    with open_run(folder) as run:
        return parameters(run.model)


@pytest.mark.parametrize("ranks", [1, 3])
def test_rows_stay_on_disk_on_any_number_of_ranks(tmp_path, ranks):
    run_world(2, rank_resumes, tmp_path / "run", None, {})
    disk_config(tmp_path / "run").save(tmp_path / "run" / "config.yaml")
    expected = tensors(tmp_path / "run")[WEIGHT]
    for rows in run_world(ranks, rank_opens, tmp_path / "run"):
        assert torch.equal(rows["entities"], expected)


def rank_hears(folder: Path) -> str:
    try:
        with open_run(folder) as run:
            run.evaluate("test")
    except CheckpointError as error:
        return str(error)
    return "no error"


def test_all_ranks_hear_of_a_row_that_is_damaged_for_one(tmp_path):
    run = shutil.copytree(trained_run(), tmp_path / "run")
    for file in run.glob("checkpoints/*/rank-00000.safetensors"):
        content = bytearray(file.read_bytes())
        content[4096 + 5] ^= 1
        file.write_bytes(content)
    for text in run_world(2, rank_hears, run, timeout=60):
        assert "rank-00000.safetensors is damaged" in text


def test_the_run_says_where_candidates_come_from():
    notes = json.loads((trained_run() / "results.json").read_text())["notes"]
    assert any("3 of 5 parts of the table are in memory" in note for note in notes)

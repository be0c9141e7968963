"""Checkpoints on disk: any damage is found, and nothing in them is ever executed."""

from __future__ import annotations

import json
import pickle
import shutil
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from training_runs import config_of, fit, largest_difference, rank
from worlds import run_world

from kge_torchrec import api, load_model
from kge_torchrec.training.checkpoints import CheckpointError

KEYS = {"train__epochs": 1, "checkpoint__keep": 1, "train__optimizer": "adam"}


@pytest.fixture(scope="module")
def run(store, tmp_path_factory) -> Path:
    """A run of two ranks."""
    path = tmp_path_factory.mktemp("run")
    run_world(2, rank_trains, store, path)
    return path


def rank_trains(store: Path, run: Path) -> None:
    fit(config_of(store, run, **KEYS))


def restored(store: Path, run: Path) -> dict[str, torch.Tensor]:
    return fit(config_of(store, run, **KEYS)).parameters


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), which=st.integers(0, 2))
def test_flipped_bits_are_detected_or_harmless(store, run, tmp_path, where, bit, which):
    expected = restored(store, run)
    copy = tmp_path / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run, copy)
    file = sorted(next((copy / "checkpoints").iterdir()).iterdir())[which]
    content = bytearray(file.read_bytes())
    place = int(where * len(content))
    content[place] ^= 1 << bit
    file.write_bytes(content)
    try:
        results = restored(store, copy)
    except CheckpointError as error:
        assert "step-" in str(error)
    else:
        assert largest_difference(expected, results) == 0


def test_damaged_piece_is_named(store, run, tmp_path):
    shutil.copytree(run, tmp_path / "copy")
    (folder,) = (tmp_path / "copy" / "checkpoints").iterdir()
    file = folder / "rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"rank-00001.safetensors is damaged: the checksum"):
        restored(store, tmp_path / "copy")


def test_changed_number_in_the_manifest_is_noticed(store, run, tmp_path):
    shutil.copytree(run, tmp_path / "copy")
    (file,) = (tmp_path / "copy" / "checkpoints").glob("*/manifest.json")
    manifest = json.loads(file.read_text())
    manifest["progress"]["epoch"] += 1
    file.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"manifest.json is damaged"):
        restored(store, tmp_path / "copy")


@pytest.mark.parametrize(
    "change",
    [
        {"files": {"../../config.yaml": 1}},
        {"files": None},
        {"tensors": {"x": [["../../config.yaml", 0, 1, 0]]}},
        {"tensors": {"x": [["rank-00000.safetensors", "0", 1, 0]]}},
        {"tensors": {"x": None}},
        {"progress": {"epoch": 1, "evil": 2}},
    ],
)
def test_invalid_manifest_is_rejected(store, run, tmp_path, change):
    """Its checksum fits, as an attacker would write it."""
    shutil.copytree(run, tmp_path / "copy")
    (folder,) = (tmp_path / "copy" / "checkpoints").iterdir()
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["crc32"]
    manifest |= change
    manifest["crc32"] = zlib.crc32(json.dumps(manifest).encode())
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"manifest.json is not valid"):
        restored(store, tmp_path / "copy")


def test_any_program_reads_the_tensors(run):
    """By safetensors alone; the names say which rows they are."""
    (folder,) = (run / "checkpoints").iterdir()
    parts = [load_file(folder / f"rank-0000{rank}.safetensors") for rank in (0, 1)]
    table = "model.entities.embeddings.entity.weight"
    assert {name: len(part[name]) for part in parts for name in part if table in name} == {
        f"{table}@0": 19, f"{table}@19": 18}  # fmt: skip


def nothing_unpickles(monkeypatch) -> None:
    """Every way into pickle raises; torch's collectives keep theirs, which hold no file's bytes."""

    class Refused(pickle.Unpickler):
        def load(self):
            raise AssertionError("something was unpickled")

    def refuse(*_: object, **__: object):
        raise AssertionError("something was unpickled")

    for name in ("load", "loads"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(pickle, "Unpickler", Refused)
    monkeypatch.setattr(torch, "load", refuse)


def uses_everything(store: Path, run: Path) -> None:
    """Trains, resumes, evaluates, predicts, exports and loads the export."""
    api.train(config_of(store, run, **KEYS)).close()
    with api.resume(run, {"train.epochs": 2}) as opened:
        opened.evaluate()
        opened.predict(head="e1", relation="r0")
        opened.export(run / "export")
    load_model(run / "export").predict(head="e1", relation="r0")


def rank_unpickles_nothing(store: Path, folder: Path) -> int:
    uses_everything(store, folder / "first")  # numba keeps compiled code as pickles
    with pytest.MonkeyPatch.context() as patch:
        nothing_unpickles(patch)
        patch.setattr("kge_torchrec.distributed.processes._sendable", lambda error: error)
        uses_everything(store, folder / "again")
    return rank()


@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_of_a_file_is_unpickled(store, tmp_path, ranks):
    assert run_world(ranks, rank_unpickles_nothing, store, tmp_path) == [*range(ranks)]

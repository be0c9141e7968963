"""Rows that stay in the files of a checkpoint: they are whole, or the checkpoint is damaged."""

from __future__ import annotations

import json
import shutil
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from disk_runs import trained_run
from training_runs import parameters
from worlds import run_world

from kge_torchrec import open_run
from kge_torchrec.data.parts import PAGE
from kge_torchrec.training import mapped_rows, part_files
from kge_torchrec.training.checkpoint_index import Damaged
from kge_torchrec.training.checkpoints import CheckpointError
from kge_torchrec.training.mapped_rows import Run, can_map, map_rows
from kge_torchrec.training.part_buffer import WEIGHT


def test_mapped_rows_are_those_of_their_files(tmp_path):
    values = torch.rand(5 * 8 + 3, 512)
    runs = []
    for number, part in enumerate(values.split(8)):
        file = tmp_path / str(number)
        file.write_bytes(bytes(4096) + part.numpy().tobytes())
        runs.append(Run(file, 4096, 8 * number, len(part)))
    assert can_map(runs, 2048) and not can_map(runs, 2000)
    for start, stop in ((0, 43), (5, 20), (8, 16), (9, 42), (40, 43), (3, 3)):
        mapped = map_rows(runs, range(start, stop), 512)
        assert torch.equal(mapped, values[start:stop])
        mapped.zero_()  # changes no file
    assert torch.equal(map_rows(runs, range(43), 512), values)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the files that are mapped")
def test_maps_of_earlier_rows_are_given_back(tmp_path):
    (tmp_path / "rows").write_bytes(bytes(PAGE))
    runs = [Run(tmp_path / "rows", 0, 0, PAGE // 4)]
    for _ in range(3):
        mapped = map_rows(runs, range(PAGE // 4), 1)
    assert Path("/proc/self/maps").read_text().count(str(tmp_path)) == 1
    del mapped
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_rows_that_cannot_be_mapped_are_read(tmp_path, monkeypatch):
    with open_run(trained_run()) as run:
        mapped = parameters(run.model)["entities"]
    monkeypatch.setattr(mapped_rows, "can_map", lambda runs, row_bytes: False)
    with open_run(trained_run()) as run:
        assert torch.equal(parameters(run.model)["entities"], mapped)


@pytest.mark.parametrize("missing", range(4))
def test_rows_are_not_mapped_over_a_gap(tmp_path, missing):
    (tmp_path / "rows").write_bytes(bytes(4 * PAGE))
    rows = PAGE // 4
    runs = [Run(tmp_path / "rows", PAGE * n, rows * n, rows) for n in range(4) if n != missing]
    for start in (0, 1):
        with pytest.raises(Damaged, match=rf"lack rows .* from {start} to {4 * rows:,}"):
            map_rows(runs, range(start, 4 * rows), 1)
    present = range(0, rows) if missing else range(rows, 2 * rows)
    assert map_rows(runs, present, 1).shape == (rows, 1)


def changed_run(folder: Path, change: Callable[[dict], object]) -> Path:
    """Copy the trained run and change the index of its checkpoints; all checksums of it fit."""
    shutil.copytree(trained_run(), folder)
    for checkpoint in (folder / "checkpoints").iterdir():
        index, manifest = (
            json.loads((checkpoint / name).read_text()) for name in ("index.json", "manifest.json")
        )
        change(index["tensors"])
        text = json.dumps(index)
        (checkpoint / "index.json").write_text(text)
        manifest["files"]["index.json"] = len(text)
        manifest["crc32"]["index.json"] = zlib.crc32(text.encode())
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize(("piece", "maps"), [(0, True), (2, False), (-1, True)])
def test_a_checkpoint_that_lacks_rows_is_not_opened(tmp_path, monkeypatch, piece, maps):
    folder = changed_run(tmp_path / "run", lambda index: index[WEIGHT]["pieces"].pop(piece))
    if not maps:
        monkeypatch.setattr(mapped_rows, "can_map", lambda runs, row_bytes: False)
    with open_run(folder) as run, pytest.raises(CheckpointError, match=r"lacks? rows of .*0 to 37"):
        run.evaluate("test")


def test_a_checkpoint_without_the_table_is_not_opened(tmp_path):
    folder = changed_run(tmp_path / "run", lambda index: index.pop(WEIGHT))
    with (
        open_run(folder) as run,
        pytest.raises(CheckpointError, match=f"the checkpoint has no {WEIGHT}"),
    ):
        run.evaluate("test")


def test_a_checkpoint_without_rows_is_damaged(tmp_path):
    with pytest.raises(Damaged, match="the checkpoint has no table"):
        part_files.read_rows(tmp_path, {}, "table", range(3), torch.empty(3, 2))


def damaged_run(folder: Path, part: int, row: int) -> Path:
    """Copy the trained run and damage a row of a part in its checkpoints."""
    shutil.copytree(trained_run(), folder)
    for checkpoint in (folder / "checkpoints").iterdir():
        (file,) = checkpoint.glob(f"*part-{part:05d}.bin")
        content = bytearray(file.read_bytes())
        content[row * 2048] ^= 1
        file.write_bytes(content)
    return folder


def test_a_run_damaged_after_training_is_not_opened(tmp_path):
    with (
        open_run(damaged_run(tmp_path / "run", 1, 0)) as run,
        pytest.raises(CheckpointError, match=r"part-00001.bin is damaged"),
    ):
        run.evaluate("test")


def rank_opens(folder: Path) -> str:
    try:
        with open_run(folder) as run:
            run.evaluate("test")
    except CheckpointError as error:
        return str(error)
    return "no error"


def test_a_damaged_piece_of_two_ranks_is_found(tmp_path):
    """Part 2 has rows 16 to 23, and rank 1 has rows from 18 on."""
    for text in run_world(2, rank_opens, damaged_run(tmp_path / "run", 2, 7)):
        assert "part-00002.bin is damaged" in text and "rank 0: " not in text


def test_all_ranks_hear_of_a_part_that_is_damaged_for_one(tmp_path):
    first, second = run_world(2, rank_opens, damaged_run(tmp_path / "run", 1, 0), timeout=60)
    assert "part-00001.bin is damaged" in first
    assert "rank 0: " in second and "part-00001.bin is damaged" in second

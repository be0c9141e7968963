"""Table files: read by the libraries whose formats they are, and refused when they do not fit."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import safetensors.numpy
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from kge_torchrec.errors import ExportError
from kge_torchrec.export.table_files import FORMATS, open_table

TABLE = np.arange(15, dtype=np.float32).reshape(5, 3) - 7
LABELS = pa.array("abcde", pa.large_string())


def write(folder, name, table=TABLE):
    """The table in two chunks."""
    kind = FORMATS[name](*table.shape)
    with (folder / kind.name).open("wb") as file:
        file.writelines(kind.begin())
        for part in (slice(0, 2), slice(2, None)):
            file.writelines(kind.rows(table[part], LABELS[part]))
        file.writelines(kind.end())
    return folder / kind.name


@pytest.mark.parametrize("name", FORMATS)
def test_table_files_round_trip(tmp_path, name):
    table = open_table(write(tmp_path, name), name, *TABLE.shape)
    assert np.array_equal(table, TABLE) and table.dtype == np.float32
    assert isinstance(table, np.memmap) == (name in ("npy", "safetensors"))
    with pytest.raises(ValueError, match="read-only"):
        table[0] = 1


def test_numpy_reads_npy(tmp_path):
    mapped = np.load(write(tmp_path, "npy"), mmap_mode="r")
    assert isinstance(mapped, np.memmap) and np.array_equal(mapped, TABLE)


def test_safetensors_reads_its_file(tmp_path):
    with safe_open(write(tmp_path, "safetensors"), "pt") as file:
        assert list(file.keys()) == ["entities"]
        assert torch.equal(file.get_tensor("entities"), torch.from_numpy(TABLE))
        assert torch.equal(file.get_slice("entities")[1:3], torch.from_numpy(TABLE[1:3]))


@given(st.integers(1, 10**12), st.integers(1, 10**5))
def test_values_are_aligned_to_eight_bytes(count, dim):
    for name, multiple in (("safetensors", 8), ("npy", 64)):
        (header,) = FORMATS[name](count, dim).begin()
        assert len(header) % multiple == 0


OTHERS = {
    "shape": (TABLE[:, :2].copy(), r"shape \(5, 2\) instead of float32 \(5, 3\)"),
    "rows": (TABLE[:4], r"shape \(4, 3\)"),
    "type": (TABLE.astype(np.float64), "float64|F64"),
    "axes": (TABLE.reshape(-1), r"shape \(15,\)"),
}


@pytest.mark.parametrize("table, words", OTHERS.values(), ids=OTHERS)
def test_wrong_shape_is_rejected(tmp_path, table, words):
    np.save(tmp_path / "entities.npy", table)
    safetensors.numpy.save_file({"entities": table}, tmp_path / "entities.safetensors")
    for name in ("npy", "safetensors"):
        with pytest.raises(ExportError, match=words):
            open_table(tmp_path / FORMATS[name].name, name, *TABLE.shape)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("cut", [0, 3, -2])
def test_truncated_file_is_rejected(tmp_path, name, cut):
    file = write(tmp_path, name)
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(ExportError, match=file.name):
        open_table(file, name, *TABLE.shape)


def test_unexpected_tensor_is_rejected(tmp_path):
    file = tmp_path / "entities.safetensors"
    safetensors.numpy.save_file({"rows": TABLE}, file)
    with pytest.raises(ExportError, match="holds rows instead of only entities"):
        open_table(file, "safetensors", *TABLE.shape)
    safetensors.numpy.save_file({"entities": TABLE, "x": TABLE}, file)
    with pytest.raises(ExportError, match="entities, x instead of only entities"):
        open_table(file, "safetensors", *TABLE.shape)

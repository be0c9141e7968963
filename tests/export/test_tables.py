"""Tables and labels of an export: other libraries read them, and damaged ones are rejected."""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from kge_torchrec import prepare
from kge_torchrec.data.store import Vocabulary
from kge_torchrec.errors import ExportError
from kge_torchrec.export import table_files
from kge_torchrec.export.table_files import ESCAPES, Parquet, Safetensors, open_table, write_labels

TABLE = np.arange(15, dtype=np.float32).reshape(5, 3) - 7


def fill(file, into):
    """Writes the table in two chunks."""
    for first, stop in ((0, 2), (2, 5)):
        into.append(first, TABLE[first:stop])
    into.close()
    return file


def write(folder):
    return fill(folder / Safetensors.name, Safetensors(folder, *TABLE.shape))


def test_safetensors_round_trips_and_is_mapped(tmp_path):
    file = write(tmp_path)
    table = open_table(file, *TABLE.shape)
    assert isinstance(table, np.memmap) and np.array_equal(table, TABLE)
    with pytest.raises(ValueError, match="read-only"):
        table[0] = 1
    with safe_open(file, "pt") as opened:
        assert list(opened.keys()) == ["entities"]
        assert torch.equal(opened.get_tensor("entities"), torch.from_numpy(TABLE))
        assert torch.equal(opened.get_slice("entities")[1:3], torch.from_numpy(TABLE[1:3]))


TRIPLES = [
    ("user:a", "likes", "item:b"),
    ("user:a", "likes", "item:c"),
    ("user:d", "in", "place:e"),
]


@pytest.mark.parametrize("types", [None, "prefix", "several"])
def test_parquet_has_ids_labels_types_and_vectors(tmp_path, types):
    (tmp_path / "types").write_text("item:c\tx\nuser:a\ty\nitem:c\tw\n")
    data = {"types": str(tmp_path / "types") if types == "several" else types}
    store = prepare({"train": TRIPLES}, tmp_path / "store", {} if types is None else data)
    labels = store.entities.array.to_pylist()
    read = pq.read_table(fill(tmp_path / Parquet.name, Parquet(tmp_path, store, 3)))
    kinds = [] if types is None else ["type"]
    assert read.column_names == ["id", "label", *kinds, "vector"]
    assert read["id"].to_pylist() == [0, 1, 2, 3, 4] and read["label"].to_pylist() == labels
    if types == "prefix":
        assert read["type"].to_pylist() == [label.split(":")[0] for label in labels]
    elif types:
        of = {"item:c": ["w", "x"], "user:a": ["y"]}
        assert read["type"].to_pylist() == [of.get(label, []) for label in labels]
    assert np.array_equal(np.array(read["vector"].to_pylist(), np.float32), TABLE)


@settings(max_examples=20)
@given(st.integers(1, 10**12), st.integers(1, 10**5))
def test_values_are_aligned_to_eight_bytes(tmp_path_factory, count, dim):
    folder = tmp_path_factory.mktemp("header")
    Safetensors(folder, count, dim).close()
    assert (folder / Safetensors.name).stat().st_size % 8 == 0


OTHERS = {
    "shape": ({"entities": TABLE[:, :2].copy()}, r"shape \(5, 2\) instead of F32 \(5, 3\)"),
    "rows": ({"entities": TABLE[:4]}, r"shape \(4, 3\)"),
    "type": ({"entities": TABLE.astype(np.float64)}, "F64"),
    "axes": ({"entities": TABLE.reshape(-1)}, r"shape \(15,\)"),
    "name": ({"rows": TABLE}, "holds rows instead of only entities"),
    "more": ({"entities": TABLE, "x": TABLE}, "entities, x instead of only entities"),
}


@pytest.mark.parametrize("tensors, words", OTHERS.values(), ids=OTHERS)
def test_other_tensors_are_rejected(tmp_path, tensors, words):
    safetensors.numpy.save_file(tensors, tmp_path / "entities.safetensors")
    with pytest.raises(ExportError, match=words):
        open_table(tmp_path / "entities.safetensors", *TABLE.shape)


@pytest.mark.parametrize("cut", [0, 3, -2])
def test_truncated_table_is_rejected(tmp_path, cut):
    file = write(tmp_path)
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(ExportError, match=file.name):
        open_table(file, *TABLE.shape)


# Labels


CHARACTERS = st.characters(codec="utf-8", exclude_characters="\0")  # which no label has
WORDS = st.lists(st.text(st.one_of(st.sampled_from("\\nr\n\r\u2028 "), CHARACTERS)))


@settings(max_examples=40)
@given(WORDS)
def test_labels_round_trip(tmp_path_factory, words):
    file = tmp_path_factory.mktemp("labels") / "entities.txt"
    words = ["Österreich", "a\tb", '"quoted"@en', *words]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_files, "BLOCK", 2)
        write_labels(file, Vocabulary(pa.array(words, pa.large_string())))
    assert file.read_text("utf-8").startswith('Österreich\na\tb\n"quoted"@en\n')
    plain = {written: label for label, written in ESCAPES.items()}
    lines = file.read_bytes().decode().split("\n")[:-1]
    assert [re.sub(r"\\.", lambda match: plain[match[0]], line) for line in lines] == words
    assert file.read_bytes().count(b"\n") == len(words)
    assert b"\r" not in file.read_bytes()

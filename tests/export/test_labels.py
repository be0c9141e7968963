"""Label files return every label that was written."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kge_torchrec.data.store import Vocabulary
from kge_torchrec.errors import ExportError
from kge_torchrec.export import table_files as labels


def vocabulary(words) -> Vocabulary:
    return Vocabulary(pa.array(words, pa.large_string()), "entity")


def write(path, words):
    path.write_bytes(b"".join(labels.label_lines(vocabulary(words))))


WORDS = st.lists(
    st.text(st.one_of(st.sampled_from("\\nr\n\r\u2028 "), st.characters(codec="utf-8")))
)


@given(WORDS)
def test_labels_round_trip(tmp_path_factory, words):
    file = tmp_path_factory.mktemp("labels") / "entities.txt"
    write(file, words)
    assert labels.read_labels(file, "entity", len(words)).array.to_pylist() == words
    assert file.read_bytes().count(b"\n") == len(words)
    assert b"\r" not in file.read_bytes()


def test_plain_labels_are_lines_in_order_of_id(tmp_path, monkeypatch):
    monkeypatch.setattr(labels, "BLOCK", 2)
    words = ["Österreich", "New York", "a\tb", '"quoted"@en', "<x>"]
    write(tmp_path / "labels", words)
    assert (tmp_path / "labels").read_text("utf-8").split("\n") == [*words, ""]
    read = labels.read_labels(tmp_path / "labels", "entity", 5)
    assert read.ids(["<x>", "New York"]).tolist() == [4, 1]


@pytest.mark.parametrize(
    "data, words",
    [
        (b"a\nb\n", "should hold 3 lines"),
        (b"a\nb\nc", "should hold 3 lines"),
        (b"a\nb\nc\nd", "should hold 3 lines"),
        (b"", "should hold 3 lines"),
        (b"a\n\xff\nc\n", "not valid UTF-8"),
    ],
)
def test_damaged_file_is_rejected(tmp_path, data, words):
    (tmp_path / "entities.txt").write_bytes(data)
    with pytest.raises(ExportError, match=words):
        labels.read_labels(tmp_path / "entities.txt", "entity", 3)

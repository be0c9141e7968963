"""Texts that cannot be labels are refused."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kge_torchrec.data import datasets
from kge_torchrec.data.labels import LONGEST, fault_of, first_fault
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.readers import Reader
from kge_torchrec.data.readers.tables import open_named
from kge_torchrec.errors import DataError

TEXT = st.text(st.sampled_from("ab \t\u00a0\u3000\0é"), max_size=3) | st.text(max_size=3)


@given(labels=st.lists(TEXT | st.none()), start=st.integers(0, 9), length=st.integers(0, 9))
@example(labels=["\0", "a"], start=1, length=1)
@example(labels=["a", "\0"], start=1, length=1)
def test_first_invalid_label_is_found(labels, start, length):
    """In a slice too, whose bytes lie among those of others."""
    array = pa.array(labels, pa.large_string()).slice(start, length)
    bad = [
        label or ""
        for label in labels[start : start + length]
        if not label or label.isspace() or "\0" in label
    ]
    assert first_fault(array) == (fault_of(bad[0]) if bad else None)


def test_label_length_is_limited():
    assert fault_of("q" * LONGEST) is None
    assert "has 65,537 bytes, and a label at most 65,536" in fault_of("é" * (LONGEST // 2) + "q")
    assert first_fault(pa.array(["a", "q" * LONGEST], pa.large_string())) is None
    assert first_fault(pa.array(["a", "q" * (LONGEST + 1)], pa.large_string()))


class Blank(Reader):
    """Gives a label that is none."""

    def read(self, path):
        yield pa.record_batch([["a", "b"], ["r", "r"], ["c", " "]], ["head", "relation", "tail"])


def test_other_readers_reject_invalid_labels_too(tmp_path, monkeypatch):
    with pytest.raises(DataError, match="train: triple 1: the tail is white space alone"):
        prepare({"train": [("a", "r", "b"), ("a", "r", "\n")]}, tmp_path / "store")
    (tmp_path / "x.tsv").write_text("")
    monkeypatch.setattr("kge_torchrec.data.reading.make_reader", lambda *_: Blank())
    with pytest.raises(DataError, match="its reader: triple 1: the tail is white space alone"):
        prepare(tmp_path / "x.tsv", tmp_path / "store")


def test_labels_of_libraries_are_checked_too(tmp_path, monkeypatch):
    def opened(library, source, name, columns):
        batch = pa.record_batch([["a"], ["r"], ["b\0"]], ["head", "relation", "tail"])
        table = open_named(source, batch.schema.names, lambda used: [batch], columns)
        return [("train", table)]

    monkeypatch.setitem(datasets._LOADERS, "pykeen", ("json", opened))
    with pytest.raises(DataError, match="pykeen:x: triple 0: the tail holds a NUL byte"):
        prepare("pykeen:x", tmp_path / "store")

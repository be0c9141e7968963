"""Texts that cannot be labels are refused, and labels that are easily mistaken are pointed out."""

from __future__ import annotations

import re
import unicodedata

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kge_torchrec.data.datasets import Named
from kge_torchrec.data.labels import LONGEST, fault_of, first_fault, lookalikes, numbers
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.readers import Reader
from kge_torchrec.data.report import notes
from kge_torchrec.errors import DataError

TEXT = st.text(st.sampled_from("ab \t\u00a0\u3000\0é"), max_size=3) | st.text(max_size=3)


@given(labels=st.lists(TEXT | st.none()), start=st.integers(0, 9), length=st.integers(0, 9))
@example(labels=["\0", "a"], start=1, length=1)
@example(labels=["a", "\0"], start=1, length=1)
def test_first_invalid_label_is_found(labels, start, length):
    """In a slice too, whose bytes lie among those of others."""
    array = pa.array(labels, pa.large_string()).slice(start, length)
    bad = [
        i
        for i, label in enumerate(labels[start : start + length])
        if not label or label.isspace() or "\0" in label
    ]
    fault = first_fault(array)
    assert (fault and fault.row) == (bad[0] if bad else None)


def test_label_length_is_limited():
    assert fault_of("q" * LONGEST) is None
    assert "has 65,537 bytes, and a label at most 65,536" in fault_of("é" * (LONGEST // 2) + "q")
    assert first_fault(pa.array(["a", "q" * LONGEST], pa.large_string())) is None
    assert first_fault(pa.array(["a", "q" * (LONGEST + 1)], pa.large_string())).row == 1


class Blank(Reader):
    """Gives a label that is none."""

    def read(self, path, on_bytes=None):
        yield pa.record_batch([["a", "b"], ["r", "r"], ["c", " "]], ["head", "relation", "tail"])


def test_other_readers_reject_invalid_labels_too(tmp_path):
    with pytest.raises(DataError, match="train: triple 1: the tail is white space alone"):
        prepare({"train": [("a", "r", "b"), ("a", "r", "\n")]}, tmp_path / "store")
    (tmp_path / "x.tsv").write_text("")
    with pytest.raises(DataError, match="reader gave a triple whose tail is white space alone"):
        prepare(tmp_path / "x.tsv", tmp_path / "store", reader=Blank())


def test_labels_of_libraries_are_checked_too(tmp_path, monkeypatch):
    batch = pa.record_batch(
        [pa.array(column, pa.large_string()) for column in (["a"], ["r"], ["b\0"])],
        ["head", "relation", "tail"],
    )
    opened = lambda source, choice: Named(["train"], iter([("train", batch)]))  # noqa: E731
    monkeypatch.setattr("kge_torchrec.data.datasets.open_named", opened)
    with pytest.raises(DataError, match="the label of an entity holds a NUL byte"):
        prepare("pykeen:x", tmp_path / "store")


ALIKE = st.text("aeé\u0301 \u00a0\t", min_size=1, max_size=4)


@settings(deadline=None)
@given(st.lists(ALIKE.filter(str.strip), unique=True))
def test_lookalikes_match_a_slow_search(labels):
    groups: dict[str, set[str]] = {}
    for label in labels:
        groups.setdefault(unicodedata.normalize("NFC", label.strip()), set()).add(label)
    several = [group for group in groups.values() if len(group) > 1]
    results = lookalikes(pa.array(labels, pa.large_string()))
    if not several:
        assert results is None
        return
    assert results["labels"] == sum(map(len, several))
    assert all(set(example) in several for example in results["examples"])


def test_lookalikes_are_reported_with_an_example(tmp_path):
    rows = [("Bern", "in", "Europe"), ("Bern ", "in", "Asia"), ("Zug", " in", "Europe")]
    said = " ".join(notes(prepare({"train": rows}, tmp_path / "blanks")))
    assert "2 entities differ from another one only by blanks" in said
    assert "such as 'Bern' and 'Bern ': each is one of its own; if they mean the same, trim" in said
    assert "2 relations differ" in said
    rows = [("Caf\u00e9", "in", "Bern"), ("Cafe\u0301", "in", "Zug")]
    said = " ".join(notes(prepare({"train": rows}, tmp_path / "forms")))
    assert r"such as 'Caf\xe9' and 'Cafe\u0301'" in said  # which look the same on a screen


@given(st.lists(st.text("0123456789.eE+- x٣", min_size=1, max_size=6)))
def test_numbers_are_what_python_reads_as_decimal(labels):
    def is_number(text: str) -> bool:
        try:
            float(text)
        except ValueError:
            return False
        return re.fullmatch(r"[0-9.eE+-]+", text) is not None

    array = pa.array(["x", *labels], pa.large_string())
    assert numbers(array).tolist() == [False, *map(is_number, labels)]


def test_values_of_attributes_are_pointed_out_but_not_ids_that_are_numbers(tmp_path):
    people = [(f"p{i}", "knows", f"p{i + 1}") for i in range(9)]
    ages = [(f"p{i}", "age", str(20 + i)) for i in range(9)]
    heights = [(f"p{i}", "height", f"{1.5 + i / 100}") for i in range(4)]
    store = prepare({"train": [*people, *ages, *heights]}, tmp_path / "values")
    assert store.report["numbers"] == {
        "relations": ["age", "height"], "triples": 13, "example": "20",
    }  # fmt: skip
    (said,) = [note for note in notes(store) if "numbers are entities" in note]
    assert "13 triples of 'age', 'height' have a number as tail, such as '20'" in said
    ids = [(str(i), "knows", str(i + 15)) for i in range(20)]
    assert prepare({"train": ids}, tmp_path / "ids").report["numbers"] == {}
    # A relation that has a number now and then is none of attributes.
    few = [*people, ("p1", "knows", "1999")]
    assert prepare({"train": few}, tmp_path / "few").report["numbers"] == {}
    # Nor is one whose numbers are heads elsewhere, hence ids.
    linked = [*ages, *((str(20 + i), "next", f"p{i}") for i in range(9))]
    assert prepare({"train": linked}, tmp_path / "linked").report["numbers"] == {}

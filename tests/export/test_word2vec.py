"""word2vec text: numbers survive, labels become words or are refused."""

from __future__ import annotations

import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kge_torchrec.data.store import Vocabulary
from kge_torchrec.errors import ExportError
from kge_torchrec.export import table_files as word2vec
from kge_torchrec.export.table_files import open_table


def labels(words) -> pa.Array:
    return pa.array(words, pa.large_string())


def text(table: np.ndarray, words) -> bytes:
    file = word2vec.Word2vec(*table.shape)
    return b"".join([*file.begin(), *file.rows(table, labels(words))])


@given(arrays(np.float32, (3, 4), elements=st.floats(width=32, allow_nan=False)))
def test_values_round_trip_bitwise(tmp_path_factory, table):
    file = tmp_path_factory.mktemp("word2vec") / "entities.vec"
    file.write_bytes(text(table, ["a", '"b', "c'"]))
    assert np.array_equal(open_table(file, "word2vec", 3, 4).view(np.int32), table.view(np.int32))
    for line, row in zip(file.read_text().splitlines()[1:], table, strict=True):
        numbers = np.array([float(word) for word in line.split(" ")[1:]]).astype(np.float32)
        assert np.array_equal(numbers.view(np.int32), row.view(np.int32))


def test_word2vec_text_has_the_documented_form(monkeypatch):
    monkeypatch.setattr(word2vec, "_LINES", 2)
    table = np.array([[1, -0.5], [1e-5, 3], [0, 1e30]], np.float32)
    written = text(table, ["a", "b c", "d\n\u2003e"]).decode()
    lines = [line.split(" ") for line in written.splitlines()]
    assert lines[0] == ["3", "2"]
    assert [line[0] for line in lines[1:]] == ["a", "b_c", "d__e"]
    assert [[float(x) for x in line[1:]] for line in lines[1:]] == [[1, -0.5], [1e-5, 3], [0, 1e30]]


def test_sliced_labels_are_written():
    rows = np.zeros((2, 1), np.float32)
    assert b"".join(word2vec.Word2vec(2, 1).rows(rows, labels("abcd")[1:3])) == b"b 0\nc 0\n"


def test_whitespace_becomes_an_underscore():
    space = [c for c in map(chr, range(sys.maxunicode + 1)) if c.isspace()]
    rows = np.zeros((len(space), 1), np.float32)
    file = word2vec.Word2vec(len(space), 1)
    lines = b"".join(file.rows(rows, labels([f"a{c}b" for c in space]))).decode()
    assert lines.splitlines() == ["a_b 0"] * len(space)


@pytest.mark.parametrize(
    "words, named",
    [
        (["New_York", "x", "New York"], "'New_York' and 'New York' would both be 'New_York'"),
        (["a b", "a\tb"], r"'a b' and 'a\\tb' would both be 'a_b'"),
    ],
)
def test_labels_that_become_one_word_are_rejected(words, named):
    with pytest.raises(ExportError, match=f"the labels {named}.*npy or safetensors"):
        word2vec.Word2vec.check(Vocabulary(labels(words)))


def test_distinct_words_are_accepted():
    word2vec.Word2vec.check(Vocabulary(labels(["a b", "a_c", "b\tc", "ab"])))
    word2vec.Word2vec.check(Vocabulary(labels(["a_b", "ab"])))


@pytest.mark.parametrize(
    "damaged, words",
    [
        (b"2 3\na 1 2\nb 3 4\n", "does not begin with '2 2'"),
        (b"2 2\na 1 2\n", "holds 1 vectors instead of 2"),
        (b"2 2\na 1 2\nb 3 4\nc 5 6\n", "not a readable word2vec file"),
        (b"2 2\na 1 2\nb 3\n", "not a readable word2vec file"),
        (b"2 2\na 1 2\nb 3 x\n", "not a readable word2vec file"),
        (b"2 2\n", "not a readable word2vec file|holds 0 vectors"),
    ],
)
def test_damaged_file_is_rejected(tmp_path, damaged, words):
    (tmp_path / "entities.vec").write_bytes(damaged)
    with pytest.raises(ExportError, match=words):
        open_table(tmp_path / "entities.vec", "word2vec", 2, 2)

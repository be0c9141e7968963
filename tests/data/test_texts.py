"""Vectors of texts: what is read, what the encoder gets, and what is written."""

from __future__ import annotations

import gzip
import sys
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from kge_torchrec.cli import main
from kge_torchrec.data import vectors as texts
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.vectors import encode_texts, ids_of, open_vectors
from kge_torchrec.errors import DataError

WIDTH = 3


def vector_of(text: str) -> list[float]:
    return [float(len(text)), float(ord(text[0])), float(ord(text[-1]))]


class Encoder:
    """In place of sentence-transformers' model: it records its calls."""

    asked: ClassVar[list[tuple[int, int]]] = []  # number of texts, batch size

    def __init__(self, name: str, device: str | None = None):
        if name != "letters":
            raise OSError(f"{name} is not a local folder")
        self.device = device

    def encode(self, of: list[str], batch_size: int, show_progress_bar: bool) -> np.ndarray:
        assert not show_progress_bar
        self.asked.append((len(of), batch_size))
        return np.array([vector_of(text) for text in of], np.float64)


@pytest.fixture(autouse=True)
def encoder(monkeypatch):
    monkeypatch.setattr(Encoder, "asked", [])
    module = SimpleNamespace(SentenceTransformer=Encoder)
    monkeypatch.setitem(sys.modules, "sentence_transformers", module)


def rows_of(path) -> dict[str, list[float]]:
    vectors = open_vectors(path)
    rows = np.concatenate(list(vectors.rows()))
    return dict(zip(vectors.labels.to_pylist(), rows.tolist(), strict=True))


@pytest.mark.parametrize("name, opened", [("texts.tsv", open), ("texts.tsv.gz", gzip.open)])
def test_texts_of_a_file(tmp_path, monkeypatch, capsys, name, opened):
    monkeypatch.setattr(texts, "_TEXTS", 2)  # so that three are written in two parts
    with opened(tmp_path / name, "wb") as file:
        file.write("\ufeffa\tan ape\n\nü b\ttext\twith a tab\r\nc\tz\n".encode())
    out = tmp_path / "of texts.parquet"
    arguments = ["encode", str(tmp_path / name), "--encoder", "letters", "-o", str(out)]
    assert main([*arguments, "--batch-size", "7"]) == 0
    assert rows_of(out) == {
        "a": vector_of("an ape"), "ü b": vector_of("text\twith a tab"), "c": vector_of("z")
    }  # fmt: skip
    assert Encoder.asked == [(2, 7), (1, 7)]
    assert capsys.readouterr().out == f"{out}: 3 vectors of {WIDTH} numbers\n"


def test_entities_can_be_initialized_from_the_labels_of_a_store(tmp_path):
    (tmp_path / "train.tsv").write_text("New York\tin\tUSA\nRome\tin\tItaly\n")
    store = prepare(tmp_path, tmp_path / "s")
    path = tmp_path / "labels.parquet"
    assert encode_texts(store.path, path, "letters") == (4, WIDTH)
    assert rows_of(path)["New York"] == vector_of("New York")
    results = ids_of(open_vectors(path), TripleStore.open(store.path).entities.array)
    assert results.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "content, message",
    [
        (b"a\tx\nb\n", r"texts:2: should be a label, a tab and a text"),
        (b"a\tx\nb\t \n", r"texts:2: should be"),
        (b"\tx\n", r"texts:1: should be"),
        (b"a\tx\nb\ty\na\tz\n", r"texts:3: 'a' has a text already, in line 1"),
        (b"a\t\xff\n", r"texts:1: invalid UTF-8"),
        (b"\n\n", r"texts has no texts"),
    ],
)
def test_invalid_lines_are_named(tmp_path, content, message):
    (tmp_path / "texts").write_bytes(content)
    with pytest.raises(DataError, match=message):
        encode_texts(tmp_path / "texts", tmp_path / "out.parquet", "letters")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["texts"]


def test_other_invalid_inputs_are_rejected(tmp_path, monkeypatch):
    source, out = tmp_path / "texts", tmp_path / "out.parquet"
    source.write_text("a\tx\nb\ty\n")
    out.write_text("was there")
    for args, message in [
        ((tmp_path / "none", out, "letters"), "no such file of texts, and no store"),
        ((source, tmp_path / "out.npy", "letters"), "name it NAME.parquet"),
        ((source, out, "other"), "other: no model of sentence-transformers is there"),
        ((source, out, "letters", None, 0), "must be at least 1, not 0"),
    ]:
        with pytest.raises(DataError, match=message):
            encode_texts(*args)
    monkeypatch.setattr(Encoder, "encode", lambda *_, **__: np.array([[0.0], [np.nan]]))
    with pytest.raises(DataError, match="vector of 'b' holds NaN"):
        encode_texts(source, out, "letters")
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(DataError, match=r"pip install 'kge-torchrec\[text\]'"):
        encode_texts(source, out, "letters")
    assert out.read_text() == "was there"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.parquet", "texts"]

"""Data sets by name: countries, stand-ins of the libraries, and PyKEEN's own small ones."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pyarrow as pa
import pytest
import torch
from file_rows import labelled

from kge_torchrec.cli import main
from kge_torchrec.data import datasets
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.readers import tables
from kge_torchrec.data.store import TripleStore
from kge_torchrec.errors import DataError


def put(monkeypatch, name: str, **members) -> None:
    """A module of that name, and the packages above it."""
    parts = name.split(".")
    for stop in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:stop]), ModuleType(parts[stop - 1]))
    for member, value in members.items():
        setattr(sys.modules[name], member, value)


def test_countries_are_disjoint_splits_of_a_graph():
    rows = {
        split: [tuple(line.split("\t")) for line in path.read_text("utf-8").splitlines()]
        for split, path in datasets.embedded_files().items()
    }
    triples = [triple for part in rows.values() for triple in part]
    assert {split: len(part) for split, part in rows.items()} == {
        "train": 2265, "valid": 269, "test": 268,
    }  # fmt: skip
    assert {len(triple) for triple in triples} == {3} and len(set(triples)) == len(triples)


def test_countries_are_prepared_by_name_unless_a_file_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = prepare("countries", "whole", {"types": "in_continent"})
    assert store.report["sources"] == {s: ["countries"] for s in ("train", "valid", "test")}
    assert ("Abuja", "capital_of", "Nigeria") in labelled(store, "train")
    assert "in_continent" not in store.relations
    (tmp_path / "countries").mkdir()
    (tmp_path / "countries" / "train.tsv").write_text("a\tr\tb\n")
    assert prepare("countries", "own").num_entities == 2


def test_pykeen(tmp_path, monkeypatch, capsys):
    """Ids of any order become their labels; a data set may have no valid."""
    monkeypatch.setattr(tables, "BATCH_ROWS", 2)

    def get_dataset(dataset):
        assert dataset == "tiny"
        return SimpleNamespace(
            training=part((2, 0, 1), (1, 0, 0), (0, 1, 2)),
            validation=None,
            testing=part((1, 1, 0)),
            entity_to_id={"c": 2, "a": 0, "b": 1},
            relation_to_id={"s": 1, "r": 0},
        )

    def part(*rows):
        return SimpleNamespace(mapped_triples=torch.tensor(rows))

    put(monkeypatch, "pykeen.datasets", get_dataset=get_dataset)
    assert main(["prepare", "pykeen:tiny", "-o", str(tmp_path / "store")]) == 0
    store = TripleStore.open(tmp_path / "store")
    assert labelled(store, "train") == [("c", "r", "b"), ("b", "r", "a"), ("a", "s", "c")]
    assert labelled(store, "test") == [("b", "s", "a")] and len(store.valid) == 0
    assert store.report["sources"] == {"train": ["pykeen:tiny"], "test": ["pykeen:tiny"]}
    with pytest.raises(DataError, match="pykeen:other: pykeen cannot load it: AssertionError"):
        prepare("pykeen:other", tmp_path / "other")
    with pytest.raises(DataError, match="head=a: no column of this name"):
        prepare("pykeen:tiny", tmp_path / "other", {"columns": "head=a"})


class Streamed:
    """The part of Hugging Face's IterableDataset that the reader uses."""

    def __init__(self, **columns):
        self.table = pa.table(columns)

    def with_format(self, form):
        assert form == "arrow"
        return self

    def iter(self, batch_size):
        for start in range(0, len(self.table), 2):
            yield self.table.slice(start, 2)


def test_hugging_face(tmp_path, monkeypatch):
    train = Streamed(subject=["a", "b", "c"], predicate=["r"] * 3, object=["b", "c", "a"],
                     confidence=[0.5, 1.0, 2.0], note=[None] * 3)  # fmt: skip
    valid = Streamed(subject=["a"], predicate=["r"], object=["a"])
    requested = []

    def load_dataset(path, configuration, streaming):
        assert streaming
        requested.append((path, configuration))
        return {"train": train, "validation": valid, "extra": valid}

    put(monkeypatch, "datasets", load_dataset=load_dataset)
    store = prepare("hf:somebody/graph:english", tmp_path / "store")
    assert requested == [("somebody/graph", "english")]
    assert labelled(store, "train") == [("a", "r", "b"), ("b", "r", "c"), ("c", "r", "a")]
    assert store.weights().tolist() == [0.5, 1, 2] and labelled(store, "valid") == [("a", "r", "a")]
    turned = prepare(
        "hf:x", tmp_path / "turned", {"columns": "head=object,relation=predicate,tail=subject"}
    )
    assert labelled(turned, "train")[0] == ("b", "r", "a") and turned.weights() is None
    assert requested[-1] == ("x", None)
    train.table = train.table.drop_columns(["object", "note"])
    with pytest.raises(DataError, match=r"hf:x train: .* no column stands for the tail"):
        prepare("hf:x", tmp_path / "none")


def test_hugging_face_single_split_is_split(tmp_path, monkeypatch):
    rows = [(f"e{i % 9}", "r", f"e{i % 7}") for i in range(60)]
    head, relation, tail = zip(*rows, strict=True)
    only = {"train": Streamed(h=head, r=relation, t=tail)}
    put(monkeypatch, "datasets", load_dataset=lambda *_, **__: only)
    store = prepare("hf:x", tmp_path / "store", {"split.ratio": (0.8, 0.1, 0.1)})
    split = {"by": "random", "ratio": [0.8, 0.1, 0.1], "seed": 0}
    assert len(store.test) == 6 and store.report["split"] == split
    only["rest"] = only.pop("train")
    with pytest.raises(DataError, match="hf:x: no split for training among rest"):
        prepare("hf:x", tmp_path / "none")


def test_error_in_the_stream_is_reported(tmp_path, monkeypatch):
    class Lost(Streamed):
        def iter(self, batch_size):
            raise ConnectionError("gone")

    put(monkeypatch, "datasets", load_dataset=lambda *_, **__: {"train": Lost(h=[], r=[], t=[])})
    with pytest.raises(DataError, match=r"hf:x: datasets cannot load it: ConnectionError\('gone"):
        prepare("hf:x", tmp_path / "store")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("scheme, package", [("pykeen", "pykeen"), ("hf", "datasets")])
def test_missing_library_is_named(tmp_path, monkeypatch, scheme, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, datasets._LOADERS[scheme][0], None)
    said = rf"{scheme}:x: this takes the package {package}, .*pip install -e '.\[{scheme}\]'"
    with pytest.raises(DataError, match=said):
        prepare(f"{scheme}:x", tmp_path / "store")


def test_a_file_of_such_a_name_is_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hf:x.tsv").write_text("a\tr\tb\n")
    assert labelled(prepare("hf:x.tsv", "store"), "train") == [("a", "r", "b")]


@pytest.mark.parametrize("name, sizes", [("nations", (14, 55, 1592)), ("umls", (135, 46, 5216)),
                                         ("kinships", (104, 25, 8544))])  # fmt: skip
def test_those_that_pykeen_ships(tmp_path, name, sizes):
    pytest.importorskip("pykeen", reason="PyKEEN is not installed")
    store = prepare(f"pykeen:{name}", tmp_path / "store")
    assert (store.num_entities, store.num_relations, len(store.train)) == sizes

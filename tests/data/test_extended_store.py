"""A store of old triples and new ones: what is old keeps its ids and its place."""

from __future__ import annotations

import numpy as np
import pytest
from file_rows import labelled

from kge_torchrec.data.prepare import extend_store, prepare
from kge_torchrec.data.store import TripleStore
from kge_torchrec.errors import DataError, StoreError

OLD = {"train": [("a", "r", "b"), ("b", "s", "c")], "valid": [("a", "s", "c")],
       "test": [("c", "r", "a")]}  # fmt: skip


@pytest.fixture
def base(tmp_path) -> TripleStore:
    return prepare(OLD, tmp_path / "old")


def test_old_labels_and_triples_come_first(base, tmp_path):
    new = {"train": [("n", "r", "a"), ("b", "new", "n")], "test": [("n", "s", "m")]}
    store = extend_store(base, new, tmp_path / "new")
    labels = store.entities.array.to_pylist()
    assert labels[:3] == base.entities.array.to_pylist() and sorted(labels[3:]) == ["m", "n"]
    assert store.relations.array.to_pylist() == ["r", "s", "new"]
    for split in ("train", "valid", "test"):
        assert labelled(store, split) == OLD[split] + new.get(split, [])
    assert store.base == base.size
    assert base.base is None
    assert store.filter_index().answers("tail", store.entities.ids(["n"]), np.array([0])).all()[
        1
    ] == base.entities.ids(["a"])


def test_files_without_a_split_go_to_train(base, tmp_path):
    (tmp_path / "new.tsv").write_text("n\tr\ta\nn\tr\ta\na\tr\tb\nc\tr\ta\n")
    store = extend_store(base, tmp_path / "new.tsv", tmp_path / "new", progress=False)
    assert labelled(store, "train") == [*OLD["train"], ("n", "r", "a"), ("c", "r", "a")]
    assert store.report["duplicates"]["train"] == 2  # one of its own, one of the old ones
    assert store.report["shared"] == {"train-test": 1}  # c r a


def test_invalid_new_triples_are_reported(base, tmp_path):
    with pytest.raises(DataError, match="none of the triples is new"):
        extend_store(base, {"train": OLD["train"]}, tmp_path / "new")
    with pytest.raises(DataError, match="none of the triples is new"):
        extend_store(base, {"train": []}, tmp_path / "new")
    with pytest.raises(DataError, match=r"'new' .1 triples in test"):
        extend_store(base, {"test": [("a", "new", "b")]}, tmp_path / "new")
    with pytest.raises(StoreError, match="a store exists here"):
        extend_store(base, {"train": [("x", "r", "a")]}, base.path)
    assert not (tmp_path / "new").exists()
    assert labelled(base, "train") == OLD["train"]


@pytest.mark.parametrize("old, new, weights", [(3.0, None, [3, 3, 1]), (None, 0.5, [1, 1, 0.5]),
                                               (None, None, None)])  # fmt: skip
def test_triples_without_weight_have_weight_one(tmp_path, old, new, weights):
    def weighted(triples: list[tuple], weight: float | None) -> list[tuple]:
        return [(*triple, weight) if weight else triple for triple in triples]

    base = prepare({"train": weighted(OLD["train"], old)}, tmp_path / "old")
    more = {"train": weighted([("n", "r", "a")], new)}
    results = extend_store(base, more, tmp_path / "new").weights("train")
    assert (None if results is None else results.tolist()) == weights


def test_repeat_of_an_old_triple_leaves_its_weight(tmp_path):
    base = prepare({"train": [("a", "r", "b", 1.0), ("b", "r", "c", 2.0)]}, tmp_path / "old")
    new = [("a", "r", "b", 9.0), ("n", "r", "a", 3.0), ("n", "r", "a", 4.0)]
    store = extend_store(base, {"train": new}, tmp_path / "new")
    assert store.weights("train").tolist() == [1, 2, 4]
    assert store.report["duplicates"]["train"] == 2


def test_columns_of_new_files_are_read_by_the_given_names(base, tmp_path):
    (tmp_path / "new.csv").write_text("who,how,whom\nn,r,a\n")
    columns = "head=who,relation=how,tail=whom"
    source, target = tmp_path / "new.csv", tmp_path / "new"
    store = extend_store(base, source, target, {"columns": columns}, progress=False)
    assert labelled(store, "train") == [*OLD["train"], ("n", "r", "a")]

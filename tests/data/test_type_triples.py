"""Entity types from a relation, at prepare: taken out of the graph, or left in it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kge_torchrec.cli import main
from kge_torchrec.config import ConfigError
from kge_torchrec.data.prepare import extend_store, prepare
from kge_torchrec.data.report import notes
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.type_sources import RDF_TYPE
from kge_torchrec.data.types import EntityTypes
from kge_torchrec.errors import DataError

TRAIN = [("a", "knows", "b"), ("a", "is", "person"), ("b", "knows", "c"), ("b", "is", "person"),
         ("b", "is", "poet"), ("stranger", "is", "ghost"), ("c", "in", "d"),
         ("a", "is", "person")]  # fmt: skip
TEST = [("c", "knows", "a"), ("d", "is", "place")]


def folder_of(path, train=TRAIN, test=TEST, form="{}\t{}\t{}\n", suffix="tsv"):
    path.mkdir()
    for name, rows in (("train", train), ("test", test)):
        (path / f"{name}.{suffix}").write_text("".join(form.format(*row) for row in rows))
    return path


def types_of(store) -> dict[str, set[str]]:
    types = EntityTypes.find(None, store)
    names, results = types.names.to_pylist(), {}
    for entity, label in enumerate(store.entities.array.to_pylist()):
        own = types.types[types.indptr[entity] : types.indptr[entity + 1]]
        assert (np.diff(own) > 0).all()
        results[label] = {names[i] for i in own}
    return results


def test_triples_of_types_are_removed(tmp_path, monkeypatch, capsys):
    """A label that occurs only in them is no entity; the store counts them."""
    monkeypatch.setattr("kge_torchrec.data.readers.text_rows.BLOCK_BYTES", 40)
    source, out = folder_of(tmp_path / "data"), tmp_path / "store"
    assert main(["prepare", str(source), "-o", str(out), "--types", "is"]) == 0
    said = "note: types: 6 triples of is say 4 types of 3 entities, and were taken out"
    assert said in capsys.readouterr().out
    store = TripleStore.open(out)
    assert types_of(store) == {"a": {"person"}, "b": {"person", "poet"}, "c": set(), "d": {"place"}}
    assert (len(store.train), len(store.test), store.num_relations) == (3, 1, 2)
    assert store.report["types"]["ignored"] == 1
    assert isinstance(store.types()[1], np.memmap)


def test_triples_of_types_that_stay_say_types_by_train_alone(tmp_path):
    source = folder_of(tmp_path / "data")
    store = prepare(source, tmp_path / "store", {"types": "is", "type_triples": "keep"})
    assert (len(store.train), len(store.test)) == (7, 2)
    results = types_of(store)
    assert results["b"] == {"person", "poet"} and results["d"] == set() == results["person"]
    assert any("and stay in" in note for note in notes(store))


@pytest.mark.parametrize("use", ["drop", "keep"])
def test_extended_store_has_types_of_old_and_new_entities(tmp_path, use):
    source = folder_of(tmp_path / "data", test=[("c", "knows", "a")])
    base = prepare(source, tmp_path / "store", {"types": "is", "type_triples": use})
    first = [("e", "knows", "a"), ("e", "is", "place"), ("c", "is", "person"), ("x", "is", "y")]
    grown = extend_store(base, {"train": first}, tmp_path / "grown", progress=False)
    again = extend_store(grown, {"train": [("f", "in", "d")]}, tmp_path / "again", progress=False)
    expected = {"a": {"person"}, "b": {"person", "poet"}, "c": {"person"}, "e": {"place"}}
    for store in (grown, again):
        assert {entity: own for entity, own in types_of(store).items() if own} == expected | (
            {} if use == "drop" else {"stranger": {"ghost"}, "x": {"y"}}
        )
    whole = prepare_all(tmp_path / "whole", first, use)
    for key in ("relation", "triples", "use", "types", "entities", "ignored"):
        assert again.report["types"][key] == whole.report["types"][key]
    assert len(again.train) == len(whole.train) + 1


def prepare_all(path, new, use):
    source = folder_of(path, [*TRAIN, *new], [("c", "knows", "a")])
    return prepare(source, path / "store", {"types": "is", "type_triples": use})


def test_rdf_type_is_its_iri(tmp_path):
    train, form = [("a", "r", "b"), ("a", RDF_TYPE, "T")], "<{}> <{}> <{}> .\n"
    source = folder_of(tmp_path / "data", train, [("b", "r", "a")], form, "nt")
    store = prepare(source, tmp_path / "store", {"types": "rdf:type"})
    assert types_of(store) == {"a": {"T"}, "b": set()}


def test_missing_type_relation_is_reported(tmp_path):
    source = folder_of(tmp_path / "data")
    for use in ("drop", "keep"):
        with pytest.raises(DataError, match=r"there is no file 'know', .* did you mean 'knows'"):
            prepare(source, tmp_path / "store", {"types": "know", "type_triples": use})
    with pytest.raises(ConfigError, match=r"data.type_triples must be one of drop, keep"):
        prepare(source, tmp_path / "store", {"types": "is", "type_triples": "leave"})
    assert not (tmp_path / "store").exists()


def test_store_without_types_has_none(tmp_path):
    assert prepare(folder_of(tmp_path / "data"), tmp_path / "store").types() is None


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), max_size=60))
def test_pairs_become_a_table(pairs):
    entities, types = np.array([*pairs, (0, 0)], np.int64).T
    table = EntityTypes.of_pairs(np.arange(6), entities, types, 10)
    expected = sorted(set(pairs) | {(0, 0)})
    counts = np.bincount([e for e, _ in expected], minlength=10)
    assert np.diff(table.indptr).tolist() == counts.tolist()
    assert table.types.tolist() == [t for _, t in expected]

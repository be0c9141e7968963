"""Entity types from a relation, whose triples are taken out of the graph."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kge_torchrec.cli import main
from kge_torchrec.data.prepare import extend_store, prepare
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.store.attributes import Attributes
from kge_torchrec.data.type_sources import RDF_TYPE
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
    types = store.types()
    names, results = types.names.to_pylist(), {}
    for entity, label in enumerate(store.entities.array.to_pylist()):
        own = types.ids[types.indptr[entity] : types.indptr[entity + 1]]
        assert (np.diff(own) > 0).all()
        results[label] = {names[i] for i in own}
    return results


def test_triples_of_types_are_removed(tmp_path, monkeypatch, capsys):
    """A label that occurs only in them is no entity; the store counts them."""
    monkeypatch.setattr("kge_torchrec.data.readers.text_rows.BLOCK_BYTES", 40)
    source, out = folder_of(tmp_path / "data"), tmp_path / "store"
    assert main(["prepare", str(source), "-o", str(out), "--types", "is"]) == 0
    said = capsys.readouterr().out
    assert (
        "note: types: 3 entities have 3 types by is; 1 have none, such as 'c'; 1 have several, "
        "such as 'b'; so relations have no types of their ends"
    ) in said
    assert "note: types: 6 triples of is were taken out" in said
    store = TripleStore.open(out)
    assert types_of(store) == {"a": {"person"}, "b": {"person", "poet"}, "c": set(), "d": {"place"}}
    assert (len(store.train), len(store.test), store.num_relations) == (3, 1, 2)
    assert not store.size.typed
    assert isinstance(store.types()[1], np.memmap)


def test_a_relation_that_gives_each_entity_one_type_is_as_good_as_a_file(tmp_path):
    train = [("a", "r", "b"), ("a", "is", "user"), ("b", "is", "item"), ("b", "s", "a")]
    typed = prepare({"train": train}, tmp_path / "s", {"types": "is"})
    (tmp_path / "types.tsv").write_text("a\tuser\nb\titem\n")
    rows = {"train": [train[0], train[3]]}
    other = prepare(rows, tmp_path / "t", {"types": str(tmp_path / "types.tsv")})
    assert typed.size.typed and typed.size == other.size
    assert typed.entities.array.to_pylist() == other.entities.array.to_pylist() == ["b", "a"]
    assert typed.report["types"]["ends"] == other.report["types"]["ends"] == {
        "r": [["user", "item"]], "s": [["item", "user"]],
    }  # fmt: skip
    grown = extend_store(typed, {"train": [("c", "r", "b"), ("c", "is", "user")]}, tmp_path / "g")
    assert grown.size.typed and types_of(grown)["c"] == {"user"}
    for more, said in ((("c", "r", "b"), "1 entities have no type"),
                       (("b", "is", "user"), "such as 'b'")):  # fmt: skip
        with pytest.raises(DataError, match=said):
            extend_store(typed, {"train": [("a", "s", "b"), more]}, tmp_path / "h")


def test_extended_store_has_types_of_old_and_new_entities(tmp_path):
    source = folder_of(tmp_path / "data", test=[("c", "knows", "a")])
    base = prepare(source, tmp_path / "store", {"types": "is"})
    first = [("e", "knows", "a"), ("e", "is", "place"), ("c", "is", "person"), ("x", "is", "y")]
    grown = extend_store(base, {"train": first}, tmp_path / "grown", progress=False)
    again = extend_store(grown, {"train": [("f", "in", "d")]}, tmp_path / "again", progress=False)
    expected = {"a": {"person"}, "b": {"person", "poet"}, "c": {"person"}, "e": {"place"}}
    for store in (grown, again):
        assert {entity: own for entity, own in types_of(store).items() if own} == expected
    whole = folder_of(tmp_path / "whole", [*TRAIN, *first], [("c", "knows", "a")])
    whole = prepare(whole, tmp_path / "other", {"types": "is"})
    assert again.report["types"] == whole.report["types"]
    assert len(again.train) == len(whole.train) + 1


def test_rdf_type_is_its_iri(tmp_path):
    train, form = [("a", "r", "b"), ("a", RDF_TYPE, "T")], "<{}> <{}> <{}> .\n"
    source = folder_of(tmp_path / "data", train, [("b", "r", "a")], form, "nt")
    store = prepare(source, tmp_path / "store", {"types": "rdf:type"})
    assert types_of(store) == {"a": {"T"}, "b": set()}


def test_missing_type_relation_is_reported(tmp_path):
    source = folder_of(tmp_path / "data")
    with pytest.raises(DataError, match=r"there is no file 'know', .* did you mean 'knows'"):
        prepare(source, tmp_path / "store", {"types": "know"})
    assert not (tmp_path / "store").exists()


def test_store_without_types_has_none(tmp_path):
    assert prepare(folder_of(tmp_path / "data"), tmp_path / "store").types() is None


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), max_size=60))
def test_pairs_become_a_table(pairs):
    entities, types = np.array([*pairs, (0, 0)], np.int64).T
    table = Attributes.of_pairs(entities, pa.array(map(str, types), pa.large_string()), 10)
    expected = sorted(set(pairs) | {(0, 0)})
    counts = np.bincount([e for e, _ in expected], minlength=10)
    assert np.diff(table.indptr).tolist() == counts.tolist()
    assert [table.names[t].as_py() for t in table.ids] == [str(t) for _, t in expected]

"""Turtle, TriG, N-Quads, RDF/XML and JSON-LD, by pyoxigraph."""

from __future__ import annotations

import gzip
import sys

import pytest
from file_rows import read, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.readers import rdf
from kge_torchrec.errors import DataError

pyoxigraph = pytest.importorskip("pyoxigraph", reason="the extra rdf is not installed")

XML = """<?xml version="1.0"?>
<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#" xmlns:x="http://x/">
  <rdf:Description rdf:about="http://x/a">
    <x:r rdf:resource="http://x/b"/>
    <x:name>Ann</x:name>
  </rdf:Description>
  <rdf:Description rdf:about="http://x/b"><x:r rdf:nodeID="n"/></rdf:Description>
</rdf:RDF>
"""
JSON = """[{"@id": "http://x/a", "http://x/r": {"@id": "http://x/b"}, "http://x/name": "Ann"},
 {"@id": "http://x/b", "http://x/r": {"@id": "_:n"}}]"""
TURTLE = """@prefix : <http://x/> .
:a :r :b ; :name "Ann" .
:b :r _:n .
"""
QUADS = """<http://x/a> <http://x/r> <http://x/b> <http://x/g> .
<http://x/a> <http://x/name> "Ann" .
<http://x/b> <http://x/r> _:n <http://x/h> .
"""
FILES = {"x.ttl": TURTLE, "x.n3": TURTLE, "x.trig": TURTLE, "x.nq": QUADS, "x.rdf": XML,
         "x.owl": XML, "x.jsonld": JSON}  # fmt: skip
EXPECTED = [("http://x/a", "http://x/r", "http://x/b"), ("http://x/b", "http://x/r", "_:n")]


@pytest.mark.parametrize("name", FILES)
def test_every_format_has_the_same_triples(tmp_path, name, monkeypatch):
    monkeypatch.setattr(rdf, "BATCH_ROWS", 2)
    (tmp_path / name).write_text(FILES[name])
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(FILES[name].encode()))
    rows, source = read(tmp_path / name, literals="drop")
    assert rows == EXPECTED and source.literals.total() == 1
    every = rows_of(tmp_path / f"{name}.gz")
    assert sorted(every) == sorted([*EXPECTED, ("http://x/a", "http://x/name", '"Ann"')])


def test_prepare_drops_and_counts_literals(tmp_path):
    (tmp_path / "train.ttl").write_text(TURTLE)
    store = prepare(tmp_path, tmp_path / "store")
    assert store.report["literals"] == {"train": 1} and len(store.train) == 2


def test_blank_nodes_have_the_same_names_every_time(tmp_path):
    (tmp_path / "x.ttl").write_text("@prefix : <http://x/> .\n[] :r [ :r :a ] .\n[] :r :b .\n")
    once, again = rows_of(tmp_path / "x.ttl"), rows_of(tmp_path / "x.ttl")
    assert once == again
    names = {end for row in once for end in row[::2] if end.startswith("_:")}
    assert names == {"_:x.ttl#0", "_:x.ttl#1", "_:x.ttl#2"}


NAME = st.text(st.sampled_from("abcdefgh0123_"), min_size=1)


@settings(max_examples=30)
@given(st.lists(st.tuples(NAME, NAME, NAME, st.booleans()), min_size=1))
def test_labels_are_those_of_ntriples(tmp_path_factory, rows):
    """The same graph as N-Triples, which is Turtle too, by either reader."""
    folder = tmp_path_factory.mktemp("rdf")
    lines = [
        f"<http://x/{h}> <http://x/{r}> " + (f"_:b{t} ." if blank else f"<http://x/{t}> .")
        for h, r, t, blank in rows
    ]
    for name in ("x.nt", "x.ttl"):
        (folder / name).write_text("\n".join(lines))
    assert rows_of(folder / "x.nt") == rows_of(folder / "x.ttl")


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("x.ttl", "@prefix : <http://x/> .\n:a :r :b .\n:a :r .\n", ":3: not readable as Turtle"),
        ("x.ttl", "<a> <b> <c> .", ":1: not readable as Turtle"),
        ("x.ttl", "", ": empty file: no triples"),
        (
            "x.ttl",
            f"<http://a> <http://r> 'x', <http://c>, <http://{'q' * 70_000}> .",
            ": triple 3: the tail has 70,007 bytes",
        ),
        ("x.rdf", "<a", ": not readable as RDF/XML: "),
        ("x.jsonld", "{", ":1: not readable as JSON-LD"),
        ("x.jsonld", '{"@context": "https://schema.org/", "name": "x"}', "remote context"),
        ("x.ttl.gz", "no gzip", "cannot be read or decompressed"),
        ("x.ttl", "<http://a> <http://b> <<( <http://a> <http://b> <http://c> )>> .", "RDF-star"),
    ],
)
def test_errors_name_the_place(tmp_path, name, content, said):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as caught:
        rows_of(tmp_path / name)
    assert str(caught.value).startswith(str(tmp_path / name)) and said in str(caught.value)


@settings(max_examples=40)
@given(
    name=st.sampled_from(sorted(FILES)), place=st.floats(0, 1), length=st.integers(0, 30),
    junk=st.binary(max_size=8),
)  # fmt: skip
def test_any_bytes_are_triples_or_an_error(tmp_path_factory, name, place, length, junk):
    content = FILES[name].encode()
    start = int(place * len(content))
    path = tmp_path_factory.mktemp("junk") / name
    path.write_bytes(content[:start] + junk + content[start + length :])
    try:
        assert all(map(all, rows_of(path)))
    except DataError as error:
        assert str(error).startswith(str(path))


def test_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyoxigraph", None)
    (tmp_path / "x.ttl").write_text(TURTLE)
    with pytest.raises(DataError, match=r"takes the package pyoxigraph; install it .*\[rdf\]"):
        rows_of(tmp_path / "x.ttl")

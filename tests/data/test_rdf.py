"""N-Triples and N-Quads by lines; Turtle, TriG, RDF/XML and JSON-LD by pyoxigraph."""

from __future__ import annotations

import gzip
import sys

import pytest
from file_rows import fault_of, read, rows_of
from hypothesis import example, given, settings
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
TRIPLES = """<http://x/a> <http://x/r> <http://x/b> .
<http://x/a> <http://x/name> "Ann" .
<http://x/b> <http://x/r> _:n .
"""
QUADS = TRIPLES.replace("b> .", "b> <http://x/g> .").replace("n .", "n <http://x/h> .")
FILES = {"x.ttl": TURTLE, "x.n3": TURTLE, "x.trig": TURTLE, "x.nq": QUADS, "x.rdf": XML,
         "x.owl": XML, "x.jsonld": JSON, "x.nt": TRIPLES}  # fmt: skip
EXPECTED = [("http://x/a", "http://x/r", "http://x/b"), ("http://x/b", "http://x/r", "_:n")]


@pytest.mark.parametrize("name", FILES)
def test_every_format_has_the_same_triples(tmp_path, name, monkeypatch):
    monkeypatch.setattr(rdf, "BATCH_ROWS", 2)
    (tmp_path / name).write_text(FILES[name])
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(FILES[name].encode()))
    rows, source = read(tmp_path / name, literals="drop")
    assert sorted(rows) == EXPECTED and source.literals.total() == 1
    every = rows_of(tmp_path / f"{name}.gz")
    assert sorted(every) == sorted([*EXPECTED, ("http://x/a", "http://x/name", '"Ann"')])


def test_blank_nodes_have_the_same_names_every_time(tmp_path):
    (tmp_path / "x.ttl").write_text("@prefix : <http://x/> .\n[] :r [ :r :a ] .\n[] :r :b .\n")
    once, again = rows_of(tmp_path / "x.ttl"), rows_of(tmp_path / "x.ttl")
    assert once == again
    names = {end for row in once for end in row[::2] if end.startswith("_:")}
    assert names == {"_:x.ttl#0", "_:x.ttl#1", "_:x.ttl#2"}


# Lines of N-Triples, by either reader

ODD = """# a comment
<http://x/a> <http://x/r> <http://x/b> .

  <http://x/a>\t<http://x/r> "l\\"i. t" .  # more
_:n1 <http://x/r> "1"^^<http://x/int> .
<http://x/a><http://x/r>"é"@en-GB.
<http://x/a> <http://x/r> _:n.2 .
"""
ESCAPED = r"""<http://x/caf\u00e9> <http://x/r\u00E9> <http://x/\U0001F600\u007B> .
<http://x/café> <http://x/ré> <http://x/😀{> .
<http://x/café> <http://x/r> "l\u00e9\u0022\n\u000A\t"@fr .
<http://x/caf\u00e9> <http://x/r> "lé\"\u000a\n\u0009"@fr .
_:n <http://x/r> "x"^^<http://x/\u00e9> .
"""


def test_lines_with_any_gaps(tmp_path):
    (tmp_path / "x.nt").write_text(ODD, "utf-8")
    rows = [
        ("http://x/a", "http://x/r", "http://x/b"),
        ("http://x/a", "http://x/r", '"l\\"i. t"'),
        ("_:n1", "http://x/r", '"1"^^<http://x/int>'),
        ("http://x/a", "http://x/r", '"é"@en-gb'),
        ("http://x/a", "http://x/r", "_:n.2"),
    ]
    assert rows_of(tmp_path / "x.nt") == rows
    dropped, source = read(tmp_path / "x.nt", literals="drop")
    assert sorted(dropped) == sorted([rows[0], rows[4]]) and source.literals.total() == 3


@pytest.mark.parametrize("usual", [0, 5])
@pytest.mark.parametrize("block", [60, 1 << 20])
def test_blocks_of_unusual_lines_alone(tmp_path, monkeypatch, usual, block):
    monkeypatch.setattr("kge_torchrec.data.readers.text_rows.BLOCK_BYTES", block)
    (tmp_path / "x.nt").write_bytes(b"<a> <r> <b> .\n" * usual + b"<a>  <r>  <c> .\n" * 9)
    rows, _ = read(tmp_path / "x.nt", literals="drop")
    assert sorted(rows) == [("a", "r", "b")] * usual + [("a", "r", "c")] * 9


@pytest.mark.parametrize("block", [100, 1 << 20])
def test_escaped_labels_equal_unescaped_ones(tmp_path, monkeypatch, block):
    monkeypatch.setattr("kge_torchrec.data.readers.text_rows.BLOCK_BYTES", block)
    (tmp_path / "x.nt").write_text(ESCAPED, "utf-8")
    first = ("http://x/café", "http://x/ré", "http://x/😀{")
    second = ("http://x/café", "http://x/r", r'"lé\"\n\n\t"@fr')
    last = ("_:n", "http://x/r", '"x"^^<http://x/é>')
    assert rows_of(tmp_path / "x.nt") == [first, first, second, second, last]
    rows, source = read(tmp_path / "x.nt", literals="drop")
    assert rows == [first, first] and source.literals.total() == 3


NAME = st.text(st.sampled_from("abcdefgh0123_é😀"), min_size=1)
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\ufffe\uffff"))


@settings(max_examples=25)
@example(rows=[("a", "a", "a", "\x01\x7f\t")], escapes=[False] * 5, block=100)
@given(
    rows=st.lists(st.tuples(NAME, NAME, NAME, TEXT | st.booleans()), min_size=1),
    escapes=st.lists(st.booleans(), min_size=5), block=st.sampled_from([1000, 1 << 20]),
)  # fmt: skip
def test_any_triples_are_read_alike(tmp_path_factory, rows, escapes, block):
    """As N-Triples with any escapes, by either reader, and as Turtle, whose reader is another's."""
    folder, ways = tmp_path_factory.mktemp("rdf"), iter(escapes * 100_000)

    def written(text: str) -> str:
        must = '\\"\n\r\x01'
        return "".join(f"\\U{ord(c):08X}" if next(ways) or c in must else c for c in text)

    def line(h, r, t, other) -> str:
        ends = {True: f"_:b{ord(t[0])}", False: f"<http://x/{written(t)}>"}
        tail = ends[other] if isinstance(other, bool) else f'"{written(other)}"'
        return f"<http://x/{written(h)}> <http://x/{written(r)}> {tail} .\n"

    texts = ["".join(line(*row) for row in rows) for _ in range(2)]
    for name, text in zip(("x.nt", "x.ttl"), texts, strict=True):
        (folder / name).write_bytes(text.encode())
    every = rows_of(folder / "x.ttl")
    assert rows_of(folder / "x.nt") == every
    longest = max(map(len, texts[0].encode().split(b"\n")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kge_torchrec.data.readers.text_rows.BLOCK_BYTES", max(block, 2 * longest))
        kept, source = read(folder / "x.nt", literals="drop")
    assert sorted(kept) == sorted(row for row in every if not row[2].startswith('"'))
    assert source.literals.total() == len(every) - len(kept)


def test_invalid_escape_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("kge_torchrec.data.readers.text_rows.BLOCK_BYTES", 100)
    for term in (r"\u12", r"\uD800", r"\U00110000", r"\U0000dfff", r"\n", r"\x", "\\"):
        for line in (
            f"<http://{term}a> <r> <b> .",
            f"<a> <http://{term}a> <b> .",
            f"<a> <r> <{term}a> .",
        ):
            (tmp_path / "x.nt").write_text(f"# c\n<a> <b> <c> .\n\n{line}\n<a> <b> <c> .\n")
            fault = fault_of(tmp_path / "x.nt", literals="drop")
            assert fault.startswith(f"{tmp_path}/x.nt:4: not a line of RDF")


def test_ntriples_line_numbers_across_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("kge_torchrec.data.readers.text_rows.BLOCK_BYTES", 100)
    (tmp_path / "x.nt").write_bytes(b"<a> <b> <c> .\n\n" * 300 + b"oops\n")
    for literals, said in (("drop", "not a line of RDF"), ("keep", "not readable as N-Triples")):
        fault = fault_of(tmp_path / "x.nt", literals=literals)
        assert fault.startswith(f"{tmp_path}/x.nt:601: {said}")


# Errors


def test_errors_name_the_place(tmp_path):
    long = f"<http://a> <http://r> 'x', <http://c>, <http://{'q' * 70_000}> ."
    star = "<http://a> <http://b> <<( <http://a> <http://b> <http://c> )>> ."
    for name, content, said in (
        ("x.ttl", "@prefix : <http://x/> .\n:a :r :b .\n:a :r .\n", ":3: not readable as Turtle"),
        ("x.ttl", "<a> <b> <c> .", ":1: not readable as Turtle"),
        ("x.ttl", "", ": empty file: no triples"),
        ("x.ttl", long, ": triple 3: the tail has 70,007 bytes"),
        ("x.rdf", "<a", ": not readable as RDF/XML: "),
        ("x.jsonld", "{", ":1: not readable as JSON-LD"),
        ("x.jsonld", '{"@context": "https://schema.org/", "name": "x"}', "remote context"),
        ("x.ttl.gz", "no gzip", "cannot be read or decompressed"),
        ("x.ttl", star, "RDF-star"),
    ):
        (tmp_path / name).write_text(content)
        fault = fault_of(tmp_path / name)
        assert fault.startswith(str(tmp_path / name)) and said in fault


@settings(max_examples=25)
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
        prepare(tmp_path / "x.ttl", tmp_path / "store")

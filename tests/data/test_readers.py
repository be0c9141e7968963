import bz2
import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from file_rows import fault_of, read, rows_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kge_torchrec.data.readers import text_rows
from kge_torchrec.data.readers.files import find_sources
from kge_torchrec.errors import DataError

ROWS = [("a", "likes", "b"), ("b b", "likes", "ç"), ("東", "is in", '"q" x')]


def tsv(rows=ROWS, end="\n") -> bytes:
    return "".join("\t".join(row) + end for row in rows).encode()


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def zstd(content: bytes) -> bytes:
    return pa.compress(content, "zstd", asbytes=True)


@pytest.mark.parametrize("name", ["x.tsv", "x.txt", "x.TSV"])
def test_tab_separated(tmp_path, name):
    assert rows_of(write(tmp_path / name, tsv())) == ROWS


@pytest.mark.parametrize(
    "suffix, compress", [(".gz", gzip.compress), (".zst", zstd), (".bz2", bz2.compress)]
)
def test_compressed(tmp_path, suffix, compress):
    assert rows_of(write(tmp_path / f"x.tsv{suffix}", compress(tsv()))) == ROWS


def test_gzip_of_several_members(tmp_path):
    content = gzip.compress(tsv(ROWS[:1])) + gzip.compress(tsv(ROWS[1:]))
    assert rows_of(write(tmp_path / "x.tsv.gz", content)) == ROWS


def test_windows_line_ends_and_byte_order_mark(tmp_path):
    assert rows_of(write(tmp_path / "x.tsv", b"\xef\xbb\xbf" + tsv(end="\r\n"))) == ROWS


def test_last_line_without_end_and_blank_lines(tmp_path):
    content = b"\n" + tsv().replace(b"\n", b"\n\n").rstrip(b"\n")
    assert rows_of(write(tmp_path / "x.tsv", content)) == ROWS


def test_csv_with_quotes(tmp_path):
    content = b'a,likes,b\r\n"x, y","says ""hi""","two\nlines"\r\n'
    expected = [("a", "likes", "b"), ("x, y", 'says "hi"', "two\nlines")]
    assert rows_of(write(tmp_path / "x.csv", content)) == expected


def test_quotes_in_tsv_are_text(tmp_path):
    rows = [('"a', 'r"', '"'), ("'", 'r"', 'x"y"')]
    assert rows_of(write(tmp_path / "x.tsv", tsv(rows))) == rows
    rows = [("a", '""', '"b"')]
    assert rows_of(write(tmp_path / "x.tsv", tsv(rows)), quotes=False) == rows


def test_labels_that_look_like_nulls_or_numbers_stay_text(tmp_path):
    rows = [("NA", "null", "nan"), ("1", "2.0", "true"), ("007", " 0", "\\N")]
    assert rows_of(write(tmp_path / "x.tsv", tsv(rows)), has_header=False) == rows


def test_many_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(text_rows, "BLOCK_BYTES", 256)
    rows = [(f"e{i}", f"r{i % 7}", f"e{i * 31 % 501}") for i in range(500)]
    assert rows_of(write(tmp_path / "x.tsv", tsv(rows))) == rows
    assert rows_of(write(tmp_path / "x.tsv.gz", gzip.compress(tsv(rows)))) == rows


LABEL = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\t\n\r\ufeff\0"), min_size=1
).filter(str.strip)


@given(rows=st.lists(st.tuples(LABEL, LABEL, LABEL), min_size=1))
def test_any_label_survives_tsv_and_csv(tmp_path_factory, rows):
    directory = tmp_path_factory.mktemp("labels")
    assert rows_of(write(directory / "x.tsv", tsv(rows)), has_header=False, quotes=False) == rows
    quoted = "".join(
        ",".join('"' + label.replace('"', '""') + '"' for label in row) + "\n" for row in rows
    )
    assert rows_of(write(directory / "x.csv", quoted.encode()), has_header=False) == rows


def test_the_folder_of_a_run_is_not_read_as_triples(tmp_path):
    write(tmp_path / "plan.txt", tsv())
    assert find_sources(tmp_path)  # any other folder may have a file of this name
    write(tmp_path / "config.yaml", b"seed: 0")
    with pytest.raises(DataError, match="this is a run, not files of triples; name its folder"):
        find_sources(tmp_path)


# Faults are named by file and line.


@pytest.mark.parametrize("row, count", [(b"a\tb", 2), (b"a\tb\tc\td", 4), (b"a b c", 1), (b" ", 1)])
@pytest.mark.parametrize("line", [1, 2, 700])
def test_wrong_number_of_columns(tmp_path, monkeypatch, row, count, line):
    monkeypatch.setattr(text_rows, "BLOCK_BYTES", 512)
    rows = [b"a\tr\tb"] * 1000
    rows[line - 1] = row
    path = write(tmp_path / "x.tsv", b"\n".join(rows) + b"\n")
    message = fault_of(path)
    assert message.startswith(f"{path}:{line}: expected 3 columns separated by tabs")
    assert f"found {count}" in message


# Parquet


def parquet(path, columns) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize("names", ["head relation tail", "Subject predicate object", "x y z"])
def test_parquet(tmp_path, names):
    columns = dict(zip(names.split(), zip(*ROWS, strict=True), strict=True))
    assert rows_of(parquet(tmp_path / "x.parquet", columns)) == ROWS


def test_parquet_columns_found_by_name(tmp_path):
    columns = {"tail": ["b"], "weight": [0.5], "relation": ["r"], "head": ["a"], "type": ["t"]}
    assert rows_of(parquet(tmp_path / "x.parquet", columns)) == [("a", "r", "b", 0.5)]


def test_parquet_types(tmp_path):
    columns = {
        "h": pa.array([1, 2]),
        "r": pa.array(["r", "r"]).dictionary_encode(),
        "t": pa.array([b"x", b"y"]),
    }
    assert rows_of(parquet(tmp_path / "x.parquet", columns)) == [("1", "r", "x"), ("2", "r", "y")]


@pytest.mark.parametrize(
    "columns, message",
    [
        ({"h": ["a", None], "r": ["r", "r"], "t": ["b", "c"]}, "row 2: the head is empty"),
        ({"h": ["a", "b"], "r": ["r", "r"], "t": ["b", ""]}, "row 2: the tail is empty"),
        ({"h": ["a"], "r": ["r"]}, "no column stands for the tail"),
        ({"h": ["a"], "r": ["r"], "t": ["b"], "type": ["x"]}, "'r' and 'type' both stand for"),
        ({"h": [["a"]], "r": ["r"], "t": ["b"]}, "the head is no text"),
        ({"h": [b"a", b"\xff"], "r": ["r"] * 2, "t": ["b"] * 2}, "row 2: the head is not UTF-8"),
        ({"h": pa.array([], pa.string()), "r": pa.array([], pa.string()),
          "t": pa.array([], pa.string())}, "empty file"),
    ],
)  # fmt: skip
def test_bad_parquet(tmp_path, columns, message):
    path = parquet(tmp_path / "x.parquet", columns)
    fault = fault_of(path)
    assert fault.startswith(str(path)) and message in fault


def test_parquet_columns_of_one_name(tmp_path):
    for names in (["head", "relation", "tail", "tail"], ["x", "x", "y"]):
        columns = [pa.array(["a"])] * len(names)
        path = tmp_path / "x.parquet"
        pq.write_table(pa.table(columns, names), path)
        assert "both stand for the tail" in fault_of(
            path
        ) or "2 columns have the name 'x'" in fault_of(path)


# N-Triples


def test_ntriples(tmp_path):
    content = """# a comment
<http://x/a> <http://x/r> <http://x/b> .

  <http://x/a>\t<http://x/r> "l\\"i. t" .  # more
_:n1 <http://x/r> "1"^^<http://x/int> .
<http://x/a><http://x/r>"é"@en-GB.
<http://x/a> <http://x/r> _:n.2 .
"""
    assert rows_of(write(tmp_path / "x.nt", content.encode())) == [
        ("http://x/a", "http://x/r", "http://x/b"),
        ("http://x/a", "http://x/r", '"l\\"i. t"'),
        ("_:n1", "http://x/r", '"1"^^<http://x/int>'),
        ("http://x/a", "http://x/r", '"é"@en-gb'),
        ("http://x/a", "http://x/r", "_:n.2"),
    ]


ESCAPED = r"""<http://x/caf\u00e9> <http://x/r\u00E9> <http://x/\U0001F600\u007B> .
<http://x/café> <http://x/ré> <http://x/😀{> .
<http://x/café> <http://x/r> "l\u00e9\u0022\n\u000A\t"@fr .
<http://x/caf\u00e9> <http://x/r> "lé\"\u000a\n\u0009"@fr .
_:n <http://x/r> "x"^^<http://x/\u00e9> .
"""


@pytest.mark.parametrize("block", [100, 1 << 20])
def test_escaped_labels_equal_unescaped_ones(tmp_path, monkeypatch, block):
    monkeypatch.setattr("kge_torchrec.data.readers.text_rows.BLOCK_BYTES", block)
    path = write(tmp_path / "x.nt", ESCAPED.encode())
    first = ("http://x/café", "http://x/ré", "http://x/😀{")
    second = ("http://x/café", "http://x/r", r'"lé\"\n\n\t"@fr')
    last = ("_:n", "http://x/r", '"x"^^<http://x/é>')
    assert rows_of(path) == [first, first, second, second, last]
    rows, source = read(path, literals="drop")
    assert rows == [first, first] and source.literals.total() == 3


@settings(max_examples=25)
@example(text="\x01\x7f\t", name="a", escape=[False] * 5)
@given(
    text=st.text(st.characters(codec="utf-8", exclude_characters="\ufffe\uffff")),
    name=st.text("aé😀~", min_size=1), escape=st.lists(st.booleans(), min_size=5),
)  # fmt: skip
def test_any_text_is_one_label_with_any_escapes(tmp_path_factory, text, name, escape):
    """And that of the reader of Turtle, which takes N-Triples too."""

    def written(text: str, ways: list[bool]) -> str:
        pairs = zip(text, ways * len(text), strict=False)
        must = '\\"\n\r\x01'
        return "".join(f"\\U{ord(c):08X}" if way or c in must else c for c, way in pairs)

    pytest.importorskip("pyoxigraph")
    folder, other = tmp_path_factory.mktemp("nt"), [not way for way in escape]
    lines = [
        f'<http://{written(name, w)}> <http://r> "{written(text, w)}" .\n' for w in (escape, other)
    ]
    for suffix in ("nt", "ttl"):
        write(folder / f"x.{suffix}", "".join(lines).encode())
    rows = rows_of(folder / "x.nt")
    assert rows[0] == rows[1] and rows == rows_of(folder / "x.ttl")


@pytest.mark.parametrize(
    "term", [r"\u12", r"\uD800", r"\U00110000", r"\n", r"\x", r"\u0020", r"\u003E", "\\", r"\u005C"]
)
def test_invalid_escape_is_an_error(tmp_path, monkeypatch, term):
    monkeypatch.setattr("kge_torchrec.data.readers.text_rows.BLOCK_BYTES", 100)
    for line in (
        f"<http://{term}a> <r> <b> .",
        f"<a> <http://{term}a> <b> .",
        f"<a> <r> <{term}a> .",
    ):
        content = f"# c\n<a> <b> <c> .\n\n{line}\n<a> <b> <c> .\n"
        fault = fault_of(write(tmp_path / "x.nt", content.encode()), literals="drop")
        assert fault.startswith(f"{tmp_path}/x.nt:4: the escape '\\\\") and "of an IRI" in fault


def test_ntriples_line_numbers_across_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("kge_torchrec.data.readers.text_rows.BLOCK_BYTES", 100)
    path = write(tmp_path / "x.nt", b"<a> <b> <c> .\n\n" * 300 + b"oops\n")
    for literals, said in (("drop", "not a line of RDF"), ("keep", "not readable as N-Triples")):
        assert fault_of(path, literals=literals).startswith(f"{path}:601: {said}")

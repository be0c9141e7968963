"""Rows of text and Parquet files: any spelling has the same rows, in blocks of any size."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from file_rows import fault_of, read, rows_of
from hypothesis import example, given
from hypothesis import strategies as st

from kge_torchrec.data import COLUMNS
from kge_torchrec.data.labels import LONGEST, first_fault
from kge_torchrec.data.labels import fault_of as why_no_label
from kge_torchrec.data.readers import text_rows
from kge_torchrec.data.readers.files import find_sources
from kge_torchrec.errors import DataError

ROWS = [("a", "likes", "b"), ("b b", "likes", "ç"), ("東", "is in", '"q" x')]


def tsv(rows=ROWS, end="\n") -> bytes:
    return "".join("\t".join(row) + end for row in rows).encode()


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


SPELLINGS = {
    "x.tsv": tsv(),
    "x.txt": b"\xef\xbb\xbf" + tsv(end="\r\n"),  # as Windows writes it
    "x.TSV": b"\n" + tsv().replace(b"\n", b"\n\n").rstrip(b"\n"),  # blank lines
    "x.tsv.gz": gzip.compress(tsv(ROWS[:1])) + gzip.compress(tsv(ROWS[1:])),  # two members
    "x.tsv.zst": pa.compress(tsv(), "zstd", asbytes=True),
    "x.tsv.bz2": bz2.compress(tsv()),
    "x.csv": b'a,likes,b\r\nb b,likes,\xc3\xa7\r\n\xe6\x9d\xb1,is in,"""q"" x"\r\n',
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_has_the_same_rows(tmp_path, name):
    assert rows_of(write(tmp_path / name, SPELLINGS[name])) == ROWS


@pytest.mark.parametrize(
    "name, content, rows, options",
    [
        ("x.csv", b'a,r,b\r\n"x, y","says ""hi""","two\nlines"\r\n',
         [("a", "r", "b"), ("x, y", 'says "hi"', "two\nlines")], {}),
        ("x.tsv", b'"a\tr"\t"\n', [('"a', 'r"', '"')], {}),  # quotes between tabs are text
        ("x.tsv", b'a\t""\t"b"\n', [("a", '""', '"b"')], {"quotes": False}),
        ("x.tsv", b"NA\tnull\tnan\n1\t2.0\ttrue\n007\t 0\t\\N\n",
         [("NA", "null", "nan"), ("1", "2.0", "true"), ("007", " 0", "\\N")],
         {"has_header": False}),
        ("x.csv", b"a,r,b\n%c\n\n%d,e\nb,r,c\n", [("a", "r", "b"), ("b", "r", "c")],
         {"comments": "%"}),
    ],
)  # fmt: skip
def test_fields_are_the_text_that_is_there(tmp_path, name, content, rows, options):
    assert rows_of(write(tmp_path / name, content), **options) == rows


def test_many_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(text_rows, "BLOCK_BYTES", 256)
    rows = [(f"e{i}", f"r{i % 7}", f"e{i * 31 % 501}") for i in range(500)]
    assert rows_of(write(tmp_path / "x.tsv", tsv(rows))) == rows
    assert rows_of(write(tmp_path / "x.tsv.gz", gzip.compress(tsv(rows)))) == rows
    blanks = b"".join(b" " + b"   ".join(map(str.encode, row)) + b" \r\n" for row in rows)
    commented = blanks.replace(b"\n", b"\n# a b c\n")
    assert rows_of(write(tmp_path / "x.txt", commented), comments="#") == rows


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


@pytest.mark.parametrize("comments", ["", "#"])
def test_bytes_that_are_no_utf8_are_named_in_any_block(tmp_path, monkeypatch, comments):
    monkeypatch.setattr(text_rows, "BLOCK_BYTES", 512)
    rows = ["é\tr\tb".encode()] * 999
    rows[699] = "é\tr\t".encode() + b"\xff"
    path = write(tmp_path / "x.tsv", b"\n".join(rows))
    said = f"{path}:700: invalid UTF-8 (byte 0xff at position 6 of the line); convert"
    assert fault_of(path, comments=comments).startswith(said)


# Headers

HEADERS = [
    "head,relation,tail", "Subject,Predicate,Object", "source,type,target", " h , r , t ",
    "# s,p,o", "?s,?p,?o", "from,edge,to", "SRC,edge_type,dst", "node1,label,node2",
    "head_id,relation_id,tail_id", "e1,rel,e2",
]  # fmt: skip
FACTS = [(f"e{i % 7}", f"likes{i % 3}", f"e{i * 5 % 11}") for i in range(20)]


def said_of(path: Path, rows) -> tuple[list[tuple], str]:
    """The triples of a file with these rows, and what is said of it."""
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    read_rows, source = read(path)
    return read_rows, " ".join(said for _, said in source.notes)


@pytest.mark.parametrize("header", HEADERS)
def test_column_names_are_known_and_reported(tmp_path, header):
    fields = next(csv.reader(io.StringIO(header)))
    rows, said = said_of(tmp_path / "x.csv", [fields, *FACTS])
    assert rows == FACTS
    named = ", ".join(f"{role} {name!r}" for role, name in zip(COLUMNS, fields, strict=True))
    assert f"this line is read as a header: {named}; data.has_header false" in said
    rows, _ = said_of(tmp_path / "x.csv", [fields[::-1], *FACTS])
    assert rows == [row[::-1] for row in FACTS]


@pytest.mark.parametrize("first", [("head", "relation", "head"), FACTS[0], ("e1", "b c", "d")])
def test_labels_that_name_no_columns_form_a_triple(tmp_path, first):
    assert said_of(tmp_path / "x.csv", [first, *FACTS]) == ([first, *FACTS], "")


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
        *(({"h": "aaa", "r": "aaa", "t": "aaa", "confidence": [1.0, bad, 1.0]},
           "row 2: the weight ") for bad in (0.0, -1.0, float("nan"), float("inf"), None, 1e300)),
    ],
)  # fmt: skip
def test_bad_parquet(tmp_path, columns, message):
    path = parquet(tmp_path / "x.parquet", {name: [*own] for name, own in columns.items()})
    fault = fault_of(path)
    assert fault.startswith(str(path)) and message in fault


def test_parquet_columns_of_one_name(tmp_path):
    for names, said in (
        (["head", "relation", "tail", "tail"], "both stand for the tail"),
        (["x", "x", "y"], "2 columns have the name 'x'"),
    ):
        pq.write_table(pa.table([pa.array(["a"])] * len(names), names), tmp_path / "x.parquet")
        assert said in fault_of(tmp_path / "x.parquet")


# Texts that cannot be labels

TEXT = st.text(st.sampled_from("ab \t\u00a0\u3000\0é"), max_size=3) | st.text(max_size=3)


@given(labels=st.lists(TEXT | st.none()), start=st.integers(0, 9), length=st.integers(0, 9))
@example(labels=["\0", "a"], start=1, length=1)
@example(labels=["a", "\0"], start=1, length=1)
def test_first_invalid_label_is_found(labels, start, length):
    """In a slice too, whose bytes lie among those of others."""
    array = pa.array(labels, pa.large_string()).slice(start, length)
    bad = [
        label or ""
        for label in labels[start : start + length]
        if not label or label.isspace() or "\0" in label
    ]
    assert first_fault(array) == (why_no_label(bad[0]) if bad else None)


def test_label_length_is_limited():
    assert why_no_label("q" * LONGEST) is None
    assert "has 65,537 bytes, and a label at most 65,536" in why_no_label(
        "é" * (LONGEST // 2) + "q"
    )
    assert first_fault(pa.array(["a", "q" * LONGEST], pa.large_string())) is None
    assert first_fault(pa.array(["a", "q" * (LONGEST + 1)], pa.large_string()))

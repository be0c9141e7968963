"""Rows of text and Parquet files: any spelling has the same rows, in blocks of any size."""

from __future__ import annotations

import bz2
import csv
import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from file_rows import fault_of, read, rows_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kge_torchrec.data import COLUMNS
from kge_torchrec.data.labels import LONGEST, faulty
from kge_torchrec.data.labels import fault_of as why_no_label
from kge_torchrec.data.readers import text_rows
from kge_torchrec.data.readers.files import find_sources
from kge_torchrec.errors import DataError

ROWS = [("a", "likes", "b"), ("b b", "likes", "ç"), ("東", "is in", '"q" x')]


def tsv(rows=ROWS, end="\n") -> bytes:
    return "".join("\t".join(map(str, row)) + end for row in rows).encode()


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
    for size in range(60, 70):  # cuts the first lines inside a character
        monkeypatch.setattr(text_rows, "SAMPLE_BYTES", size)
        assert rows_of(write(tmp_path / "y.tsv", tsv([("é", "é", "é")] * 20))) == [("é",) * 3] * 20
    blanks = b"".join(b" " + b"   ".join(map(str.encode, row)) + b" \r\n" for row in rows)
    commented = blanks.replace(b"\n", b"\n# a b c\n")
    assert rows_of(write(tmp_path / "x.txt", commented), comments="#") == rows


def test_the_folder_of_a_run_is_not_read_as_triples(tmp_path):
    write(tmp_path / "plan.txt", tsv())
    assert find_sources(tmp_path)  # any other folder may have a file of this name
    write(tmp_path / "config.yaml", b"seed: 0")
    with pytest.raises(DataError, match="this is a prepared store or a run, not files of triples"):
        find_sources(tmp_path)


def test_wrong_number_of_columns(tmp_path, monkeypatch):
    monkeypatch.setattr(text_rows, "BLOCK_BYTES", 512)
    for line, row, count in (
        (1, b"a\tb", 2),
        (700, b"a\tb\tc\td", 4),
        (2, b"a b c", 1),
        (9, b" ", 1),
    ):
        rows = [b"a\tr\tb"] * 1000
        rows[line - 1] = row
        message = fault_of(path := write(tmp_path / "x.tsv", b"\n".join(rows) + b"\n"))
        assert message.startswith(f"{path}:{line}: expected 3 columns separated by tabs")
        assert f"found {count}" in message


def test_lines_are_counted_where_fields_have_line_ends(tmp_path):
    """Blank lines count, inside quotes too, and a comment inside quotes is none."""
    text = '\n# c\na,r,"x\n\n\ny"\n\nb,r,c\n'
    path = write(tmp_path / "x.csv", (text + "b,r\n").encode())
    assert fault_of(path, comments="#").startswith(f"{path}:9: expected 3 columns")
    path = write(tmp_path / "x.csv", (text + 'b,,"\n"\n').encode())
    assert fault_of(path, comments="#").startswith(f"{path}:10: the relation is empty")
    assert rows_of(write(path, text.encode()), comments="#")[0] == ("a", "r", "x\n\n\ny")


@pytest.mark.parametrize("comments", ["", "#"])
def test_bytes_that_are_no_utf8_are_named_in_any_block(tmp_path, monkeypatch, comments):
    monkeypatch.setattr(text_rows, "BLOCK_BYTES", 512)
    rows = ["é\tr\tb".encode()] * 999
    rows[699] = "é\tr\t".encode() + b"\xff"
    path = write(tmp_path / "x.tsv", b"\n".join(rows))
    said = f"{path}:700: invalid UTF-8 (byte 0xff at position 6 of the line); convert"
    assert fault_of(path, comments=comments).startswith(said)


# Headers


def said_of(path: Path, rows) -> tuple[list[tuple], str]:
    """The triples of a file with these rows, and what is said of it."""
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    read_rows, source = read(path)
    return read_rows, " ".join(said for _, said in source.notes)


HEADERS = [
    "head,relation,tail", "Subject,Predicate,Object", "source,type,target", " h , r , t ",
    "# s,p,o", "?s,?p,?o", "from,edge,to", "SRC,edge_type,dst", "node1,label,node2",
    "head_id,relation_id,tail_id", "e1,rel,e2",
]  # fmt: skip
FACTS = [(f"e{i % 7}", f"likes{i % 3}", f"e{i * 5 % 11}") for i in range(20)]


def test_column_names_are_known_and_reported(tmp_path):
    for header in HEADERS:
        fields = header.split(",")
        rows, said = said_of(tmp_path / "x.csv", [fields, *FACTS])
        assert rows == FACTS
        named = ", ".join(f"{role} {name!r}" for role, name in zip(COLUMNS, fields, strict=True))
        assert f"this line is read as a header: {named}; data.has_header false" in said
        rows, _ = said_of(tmp_path / "x.csv", [fields[::-1], *FACTS])
        assert rows == [row[::-1] for row in FACTS]
    for first in (("head", "relation", "head"), FACTS[0], ("e1", "b c", "d")):
        assert said_of(tmp_path / "x.csv", [first, *FACTS]) == ([first, *FACTS], "")


# Parquet


def parquet(path, columns) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def test_parquet_types(tmp_path):
    columns = {
        "h": pa.array([1, 2]),
        "r": pa.array(["r", "r"]).dictionary_encode(),
        "t": pa.array([b"x", b"y"]),
    }
    assert rows_of(parquet(tmp_path / "x.parquet", columns)) == [("1", "r", "x"), ("2", "r", "y")]


def test_bad_parquet(tmp_path):
    one = {"h": ["a"], "r": ["r"], "t": ["b"]}
    two = {"h": ["a", "b"], "r": ["r", "r"], "t": ["b", "c"]}
    none = dict.fromkeys("hrt", pa.array([], pa.string()))
    for columns, said in (
        (two | {"h": ["a", None]}, "row 2: the head is empty"),
        (two | {"t": ["b", ""]}, "row 2: the tail is empty"),
        (two | {"h": [b"a", b"\xff"]}, "row 2: the head is not UTF-8"),
        ({"h": ["a"], "r": ["r"]}, "no column stands for the tail"),
        (one | {"type": ["x"]}, "'r' and 'type' both stand for"),
        (one | {"h": [["a"]]}, "the head is no text"),
        (none, "empty file"),
        *((two | {"confidence": [1.0, bad]}, "row 2: the weight ")
          for bad in (0.0, -1.0, float("nan"), float("inf"), None, 1e300)),
    ):  # fmt: skip
        fault = fault_of(path := parquet(tmp_path / "x.parquet", columns))
        assert fault.startswith(str(path)) and said in fault


def test_parquet_columns_of_one_name(tmp_path):
    for names, said in (
        (["head", "relation", "tail", "tail"], "both stand for the tail"),
        (["x", "x", "y"], "2 columns have the name 'x'"),
    ):
        pq.write_table(pa.table([pa.array(["a"])] * len(names), names), tmp_path / "x.parquet")
        assert said in fault_of(tmp_path / "x.parquet")


# Weights


LABEL = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\t\n\r\ufeff\0"), min_size=1
).filter(str.strip)
WEIGHT = st.floats(2.0**-40, 2.0**40, width=32)
WEIGHTED = {"columns": "weight=3", "has_header": False}


@settings(max_examples=40)
@given(
    rows=st.lists(st.tuples(LABEL, LABEL, LABEL, WEIGHT), min_size=1),
    order=st.permutations(["head", "relation", "tail", "Confidence"]),
    block=st.sampled_from([64, 1 << 20]),
)
def test_any_weight_survives_every_format(tmp_path_factory, rows, order, block):
    """Bitwise, with any labels, in any order of columns."""
    folder, place = tmp_path_factory.mktemp("w"), ["head", "relation", "tail", "Confidence"]
    turned = [[row[place.index(name)] for name in order] for row in rows]
    quoted = [['"' + str(x).replace('"', '""') + '"' for x in row] for row in turned]
    files = [
        write(folder / "x.tsv", tsv([order, *turned])),
        write(folder / "x.csv", "".join(",".join(r) + "\n" for r in [order, *quoted]).encode()),
        folder / "x.parquet",
    ]
    columns = [pa.array(column) for column in zip(*turned, strict=True)]
    pq.write_table(pa.table(columns, list(order)), files[2])
    plain = write(folder / "y.tsv", tsv(rows))
    largest = max(len(str(r).encode()) * 2 for r in turned)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_rows, "BLOCK_BYTES", max(block, largest))
        for path in files:
            assert rows_of(path, quotes=path.suffix != ".tsv") == rows
        assert rows_of(plain, **WEIGHTED, quotes=False) == rows


def test_invalid_weight_is_named_by_its_line(tmp_path, monkeypatch):
    monkeypatch.setattr(text_rows, "BLOCK_BYTES", 512)
    for bad in ["0", "-1", "nan", "inf", "1e39", "1e-60", "", "x", "1,5", "0x1", "\u0663"]:
        line = {"0": 700, "-1": 1}.get(bad, 2)
        rows = [b"a\tr\tb\t0.5\n"] * 1000
        rows[line - 1] = f"a\tr\tb\t{bad}\n".encode()
        said = "-1 is negative, a signed" if bad == "-1" else "is no positive, finite number"
        path = write(tmp_path / "x.tsv", b"".join(rows))
        assert f":{line}: the weight {said}" in fault_of(path, **WEIGHTED)
    path = write(tmp_path / "y.tsv", b"h\tr\tt\tweight\n" + b"".join(rows))
    assert ":3: the weight " in fault_of(path)


# Texts that cannot be labels

TEXT = st.text(st.sampled_from("ab \t\u00a0\u3000\0é"), max_size=3) | st.text(max_size=3)


@given(labels=st.lists(TEXT), start=st.integers(0, 9), length=st.integers(0, 9))
@example(labels=["\0", "a"], start=1, length=1)
@example(labels=["a", "\0"], start=1, length=1)
@example(labels=["q" * LONGEST, "é" * (LONGEST // 2) + "q"], start=0, length=2)
def test_texts_that_are_no_labels_are_found(labels, start, length):
    """In a slice too, whose bytes lie among those of others."""
    array = pa.array(labels, pa.large_string()).slice(start, length)
    reasons = [why_no_label(label) for label in array.to_pylist()]
    assert faulty(array).to_pylist() == [reason is not None for reason in reasons]
    for label, reason in zip(array.to_pylist(), reasons, strict=True):
        size = len(label.encode())
        assert (reason is None) == (bool(label.strip()) and "\0" not in label and size <= LONGEST)

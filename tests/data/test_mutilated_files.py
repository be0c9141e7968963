"""Reading a file of any bytes returns triples or raises a DataError that names the place."""
# ruff: noqa: E501

import bz2
import gzip
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from file_rows import rows_of
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kge_torchrec.data.labels import LONGEST
from kge_torchrec.errors import DataError

# Such as a bad row that pyarrow cannot decode.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
ROWS = [(f"e{i}", f"r{i % 2}", f"e{i * 7 % 5}") for i in range(5)]
TSV = "".join("\t".join(row) + "\n" for row in ROWS).encode()
CSV = b'head,relation,tail\r\n"x, y","says ""hi""","two\nlines"\r\n' + TSV.replace(b"\t", b",")
NT = b"".join(b"<%b> <%b> <%b> .\n" % tuple(map(str.encode, row)) for row in ROWS)
NT += b'# c\n_:b <r> "l\\"x"@en .\n<a> <r> "1"^^<int> .\n'


def parquet_bytes(columns, **options) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink, **options)
    return sink.getvalue().to_pybytes()


def broken_text() -> pa.Array:
    """A column of strings that are no UTF-8, as other programs write them."""
    offsets, values = pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff")
    return pa.StringArray.from_buffers(2, offsets, values)


HEADS = [row[0] for row in ROWS]
PARQUET = parquet_bytes({"h": HEADS, "r": pa.array(HEADS).dictionary_encode(), "t": [b"x"] * 5})
OPENKE = {
    "train2id.txt": b"3\n0 1 0\n1 2 1\n2 0 0\n",
    "entity2id.txt": b"3\na\t0\nb\t1\nc\t2\n",
    "relation2id.txt": b"2\nr\t0\ns\t1\n",
}
LIBKGE = {
    "train.del": b"0\t0\t1\n1\t1\t2\n",
    "entity_ids.del": b"0\ta\n1\tb\n2\tc\n",
    "relation_ids.del": b"0\tr\n1\ts\n",
}
FOLDERS = [
    {"x.tsv": TSV},
    {"x.csv": CSV},
    {"x.nt": NT},
    {"x.parquet": PARQUET},
    OPENKE,
    LIBKGE,
    {"x.tsv.gz": gzip.compress(TSV)},
    {"x.csv.zst": pa.compress(CSV, "zstd", asbytes=True)},
    {"x.nt.bz2": bz2.compress(NT)},
]
TOKENS = [
    b"\r", b"\r\n", b"\n", b'"', b'""', b",", b"\t", b"\0", b"\1", b"\xff", b"\xef\xbb\xbf", b" ",
    b"\\u00e9", b"\\uD800", b"\\U0011", "e\u0301".encode(), "\u00a0".encode(), b"q" * 70_000,
    b"-1", b"9" * 20, b"9" * 5000, "²".encode(), "٣".encode(), "\u2028".encode(), b"<", b">",
    b"\\", b"_:", b".", b"#", b"head,relation,tail,weight\n", b"q" * 140_000,
]  # fmt: skip
LATIN1 = b"a\tr\tb\n" * 9 + b"a\tr\tcaf\xe9\n" + b"a\tr\tb\n" * 9
RANDOM = "".join(f"e{i * 7919 % 10007}\tr\te{i * 104729 % 10009}\n" for i in range(5000)).encode()
MUTATION = st.tuples(st.floats(0, 1), st.floats(0, 0.3), st.sampled_from(TOKENS) | st.binary())
# What is said of a file as a whole.
WHOLE = (
    "empty file|no triples|not a readable Parquet|cannot be read or decompressed|no column stands"
    "|there twice|no such file|: row \\d+: |: triple \\d+: |announces|its first line says"
    "|columns or none hold numbers|may hold its ids or its labels"
)


def mutilated(content: bytes, mutations) -> bytes:
    """Bytes replaced by others, at places and over lengths relative to what there is."""
    for place, length, token in mutations:
        start = int(place * len(content))
        content = content[:start] + token + content[start + int(length * len(content)) :]
    return content


def outcome(folder, files: dict[str, bytes], has_header=None) -> str:
    """Return the error of the triples of the first file; "" if they could be read."""
    for file in folder.iterdir():
        file.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    try:
        rows = rows_of(folder / next(iter(files)), has_header=has_header, literals="drop")
    except DataError as error:
        fault = str(error)
        assert fault.startswith(f"{folder}/")
        fault = fault.removeprefix(f"{folder}/")
        assert re.match(r"[\w.]+:\d+: ", fault) or re.search(WHOLE, fault), fault
        return fault
    labels = [label for row in rows for label in row]
    assert rows and all(isinstance(label, str) and label.strip() for label in labels)
    assert not any("\0" in label or len(label.encode()) > LONGEST for label in labels)
    return ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("mutilated")


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    files=st.sampled_from(FOLDERS),
    which=st.integers(0, 2),
    mutations=st.lists(MUTATION, min_size=1, max_size=3),
    has_header=st.sampled_from([None, True, False]),
)
@example(files=FOLDERS[1], which=0, mutations=[(0.0, 0.0, b"a\rb,r,c\n")], has_header=None)
def test_any_bytes_are_triples_or_an_error_with_its_place(
    folder, files, which, mutations, has_header
):
    name = list(files)[which % len(files)]
    outcome(folder, files | {name: mutilated(files[name], mutations)}, has_header)


@pytest.mark.parametrize(
    "files, said",
    [
        ({"x.tsv": b""}, "x.tsv: empty file"),
        ({"x.csv": b"\n\n"}, "x.csv: empty file"),
        ({"x.nt": b"\n\n"}, "x.nt: empty file"),
        ({"x.tsv.gz": gzip.compress(b"\n\n")}, "x.tsv.gz: empty file"),
        ({"x.tsv": b"\n\r\na\tr\tb\n\nx\ty\n"}, "x.tsv:5: expected 3 columns separated by tabs"),
        ({"x.csv": b'"a\nb",r,c\na,r\n'}, "x.csv:3: expected 3 columns separated by commas"),
        ({"x.csv": b'a,r,b\n"a,r,b\n'}, "x.csv:2: the quotes of this row are wrong"),
        ({"x.tsv.gz": gzip.compress(LATIN1)}, "x.tsv.gz:10: invalid UTF-8 (byte 0xe9 at position 8"),
        ({"x.nt": b'<a> <b> <c> .\n<a> <b> "\xff" .\n'}, "x.nt:2: invalid UTF-8"),
        ({"x.nt": b"<a> <b> <c> .\n<a>  <b> <\xff> .\n"}, "x.nt:2: invalid UTF-8"),
        ({"x.tsv": TSV + b"a\t\xff\n"}, "x.tsv:6: invalid UTF-8"),
        ({"x.txt": b"a r b\nc  s d\n\xff e\n"}, "x.txt:3: invalid UTF-8"),
        ({"x.tsv": TSV + b"a\tr\t\n"}, "x.tsv:6: the tail is empty"),
        ({"x.tsv": TSV + b"a\rb\tr\tc\n"}, "x.tsv:6: expected 3 columns separated by tabs (head, relation, tail), found 1"),
        ({"x.tsv.gz": gzip.compress(RANDOM)[:-2000]}, "x.tsv.gz: cannot be read or decompressed: "),
        ({"x.tsv.gz": TSV}, "x.tsv.gz: cannot be read or decompressed: "),
        ({"x.parquet": TSV}, "x.parquet: not a readable Parquet file"),
        *(({"x.nt": b"# c\n\n<a> <b> <c> .\r\n" + line + b"\n"}, "x.nt:4: not a line of RDF")
          for line in (b"<a> <b> <c>", b"a b c .", b"<a> _:b <c> .", b'<a> <b> "c .', b"x",
                       b'"a" <b> <c> .', b"<a> <b> <c> <d> .", b"<a> <b> <c> . x",
                       b"<a> <b> \x01 .", b"<a><b> <c> <d> .")),
        ({"x.csv": b"a,r,b\nc\rd,r\n"}, "x.csv:2: expected 3 columns separated by commas"),
        ({"x.csv": b'a,r,b\n\n"c","r","d\ne,r,f\n'}, "x.csv:2: the quotes of this row are wrong"),
        ({"x.csv": b'a,r,b\n\n"c","r","'}, "x.csv:3: the tail is empty"),
        ({"x.csv": b'"' + b"q" * 140_000}, "x.csv:1: the quotes of this row are wrong (field larger"),
        ({"x.tsv": b"head\trelation\ttail"}, "x.tsv:1: this line is read as a header, and no row follows"),
        ({"x.parquet": parquet_bytes({"h": ["a", "b"], "r": ["a", "b"], "t": broken_text()})},
         "x.parquet: row 2: the tail is not UTF-8"),
        ({"x.tsv": b"a\tr\tb\n" + b"a\tr\t" + b"q" * (33 << 20) + b"\n"},
         "x.tsv:2: the tail has 34,603,008 bytes"),
        ({"x.tsv": "a\tr\tb\nc\tr\t\u3000\u2028\n".encode()}, "x.tsv:2: the tail is white space"),
        ({"x.csv": b"a,r,b\nc\0,r,d\n"}, "x.csv:2: the head holds a NUL byte: 'c\\x00'"),
        ({"x.csv": b'"' + b"q" * 70_000 + b'",r,b\n'}, "x.csv:1: the head has 70,000 bytes"),
        ({"x.nt": b"# c\n<a> <r> <b> .\n<a\0> <r> <b> .\n"}, "x.nt:3: the head holds a NUL"),
        ({"x.nt": "<a> <r> <b> .\n\n<a> <r> <\u00a0> .\n".encode()}, "x.nt:3: the tail is white"),
        ({"x.parquet": parquet_bytes({"h": ["a", "b"], "r": ["a", "\t"], "t": ["a", "b"]})},
         "x.parquet: row 2: the relation is white space alone"),
        (LIBKGE | {"entity_ids.del": b"0\ta\n1\t \n2\tc\n"},
         "entity_ids.del:2: the label is white space alone"),
        (LIBKGE | {"train.del": b"\n"}, "train.del: empty file: no triples"),
        (LIBKGE | {"train.del": LIBKGE["train.del"] + "0\t٣\t1\n".encode()},
         "train.del:3: the relation '٣' is no id of"),
        (LIBKGE | {"entity_ids.del": b"\n"}, "entity_ids.del: empty file"),
        (LIBKGE | {"entity_ids.del": b"0\ta\n1\t\n"}, "entity_ids.del:2: the label is empty"),
        (LIBKGE | {"entity_ids.del": b"0\ta\rb\n"}, "entity_ids.del:2: expected 2 columns"),
        (LIBKGE | {"entity_ids.del": b"0\ta\n2\tb\n"},
         "train.del:2: the head '1' is no id of"),
        (LIBKGE | {"entity_ids.del": b"0\ta\n0\tb\n"},
         "entity_ids.del: the id '0' is there twice"),
        (OPENKE | {"train2id.txt": "²\n0 1 0\n".encode()}, "train2id.txt:1: expected 3 columns separated by blanks"),
        (OPENKE | {"train2id.txt": b"9" * 5000 + b"\n0 1 0\n"}, "train2id.txt:1: expected 3 columns separated by blanks"),
        (OPENKE | {"train2id.txt": b"1\n0 " + b"9" * 20 + b" 0\n"},
         "train2id.txt:2: the tail '99999999999999999999' is no id"),
        *((OPENKE | {name: content}, said) for name, content, said in (
            ("train2id.txt", b"2\n0 1 0\n", "train2id.txt: its first line says 2 rows, and 1 follow"),
            ("train2id.txt", b"2\n0 1 0\n0 3 0\n", "train2id.txt:3: the tail '3' is no id of"),
            ("train2id.txt", b"2\n0 1 0\n0 1 x\n", "train2id.txt:3: the relation 'x' is no id of"),
            ("train2id.txt", b"2\n0 1 0\n0 1\n", "train2id.txt:3: expected 3 columns"),
            ("entity2id.txt", b"2\na\t0\nb\t2\n", "train2id.txt:3: the head '1' is no id of"),
            ("entity2id.txt", b"2\na\t0\nb\tb\n", "entity2id.txt: both columns or none hold numbers"),
            ("train2id.txt", b"", "train2id.txt: empty file"),
        )),
    ],
)  # fmt: skip
def test_errors_name_the_place_and_the_fault(folder, files, said):
    assert outcome(folder, files).startswith(said)

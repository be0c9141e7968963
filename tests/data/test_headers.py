"""How the first line of a text file is read: as a header if it names the columns."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from file_rows import read

from kge_torchrec.cli import main
from kge_torchrec.data import COLUMNS
from kge_torchrec.data.prepare import prepare

HEADERS = [
    "head,relation,tail", "Subject,Predicate,Object", "source,type,target", " h , r , t ",
    "# s,p,o", "?s,?p,?o", "from,edge,to", "SRC,edge_type,dst", "node1,label,node2",
    "head_id,relation_id,tail_id", "e1,rel,e2",
]  # fmt: skip
FACTS = [(f"e{i % 7}", f"likes{i % 3}", f"e{i * 5 % 11}") for i in range(20)]


def said_of(path: Path, rows, **options) -> tuple[list[tuple], str]:
    """The triples of a file with these rows, and what is said of it."""
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    read_rows, source = read(path, **options)
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


def test_files_that_are_alike_have_one_note(tmp_path, capsys, caplog):
    folder = tmp_path / "data"
    folder.mkdir()
    said_of(folder / "train.csv", FACTS)
    said_of(folder / "test.csv", [("h", "r", "t"), *FACTS[:3]])
    said_of(folder / "valid.csv", [("h", "r", "t"), *FACTS[:3]])
    prepare(folder, tmp_path / "store")
    (logged,) = [line for line in caplog.messages if "read as" in line]
    assert logged == (
        f"{folder}/valid.csv:1 (1 more files alike): this line is read as a header: head 'h', "
        "relation 'r', tail 't'; data.has_header false reads it as a row, data.columns "
        "ROLE=COLUMN,... other columns"
    )
    capsys.readouterr()
    assert main(["prepare", str(folder), "-o", str(tmp_path / "other")]) == 0
    assert f"note: {logged}\n" in capsys.readouterr().out


def test_guessed_parquet_columns_are_reported(tmp_path, caplog):
    def note(*names: str) -> str:
        caplog.clear()
        columns = [pa.array(["a", "b"])] * len(names)
        pq.write_table(pa.table(columns, list(names)), tmp_path / "x.parquet")
        prepare(tmp_path / "x.parquet", tmp_path / "store", overwrite=True)
        return "".join(line for line in caplog.messages if "columns are read" in line)

    assert "read as head 'x', relation 'link', tail 'z'; data.columns " in note("x", "link", "z")
    assert note("head", "relation", "tail") == ""
    assert "; left out: 'since'; data.columns " in note("head", "relation", "tail", "since")
    # The name itself stands before a word that means it.
    assert "tail 'tail'; left out: 'object'" in note("head", "relation", "tail", "object")

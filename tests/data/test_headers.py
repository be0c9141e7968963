"""How the first line of a text file is read: as a header if it names the columns."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kge_torchrec.cli import main
from kge_torchrec.data import COLUMNS
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.readers import read_triples
from kge_torchrec.data.readers.columns import FirstLine

HEADERS = [
    "head,relation,tail", "Subject,Predicate,Object", "source,type,target", " h , r , t ",
    "# s,p,o", "?s,?p,?o", "from,edge,to", "SRC,edge_type,dst", "node1,label,node2",
    "head_id,relation_id,tail_id", "e1,rel,e2",
]  # fmt: skip
FACTS = [(f"e{i % 7}", f"likes{i % 3}", f"e{i * 5 % 11}") for i in range(20)]


def read(path: Path, rows, **options) -> tuple[list[tuple], list[FirstLine]]:
    """The triples of a file with these rows, and what is said of its first line."""
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    lines: list[FirstLine] = []
    batches = read_triples(path, on_first_line=lines.append, **options)
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()], lines


@pytest.mark.parametrize("header", HEADERS)
def test_column_names_are_known_and_reported(tmp_path, header):
    fields = next(csv.reader(io.StringIO(header)))
    rows, lines = read(tmp_path / "x.csv", [fields, *FACTS])
    assert rows == FACTS
    assert lines[0].columns == dict(zip(COLUMNS, fields, strict=True))
    rows, _ = read(tmp_path / "x.csv", [fields[::-1], *FACTS])
    assert rows == [row[::-1] for row in FACTS]


@pytest.mark.parametrize("first", [("Who", "How", "Whom"), ("head", "relation", "head"), FACTS[0]])
def test_labels_that_name_no_columns_form_a_triple(tmp_path, first):
    rows, lines = read(tmp_path / "x.csv", [first, *FACTS])
    assert rows == [first, *FACTS]
    assert lines[0].columns is None and lines[0].fields == list(first)


def test_caller_settings_precede_guesses(tmp_path):
    header, other = ("subject", "predicate", "object"), ("Who", "How", "Whom")
    rows, lines = read(tmp_path / "x.csv", [header, *FACTS], has_header=False)
    assert rows == [header, *FACTS] and lines == []
    rows, lines = read(tmp_path / "x.csv", [other, *FACTS], has_header=True)
    assert rows == FACTS and lines[0].columns == dict(zip(COLUMNS, other, strict=True))


def test_a_note_says_how_first_lines_were_read_and_what_changes_it(tmp_path, capsys, caplog):
    folder = tmp_path / "data"
    folder.mkdir()
    read(folder / "train.csv", FACTS)
    read(folder / "test.csv", FACTS[:3])
    read(folder / "valid.csv", [("h", "r", "t"), *FACTS[:3]])
    prepare(folder, tmp_path / "store")
    logged = [record.getMessage() for record in caplog.records if "read as" in record.getMessage()]
    train, valid = logged
    assert train == (
        f"{folder}/train.csv:1 (1 more files alike): this line is read as a triple: 'e0', "
        "'likes0', 'e0'; data.has_header true reads it as a header"
    )
    assert valid == (
        f"{folder}/valid.csv:1: this line is read as a header: head 'h', relation 'r', tail 't'; "
        "data.has_header false reads it as a triple; data.columns [HEAD, RELATION, TAIL] reads "
        "others"
    )
    capsys.readouterr()
    assert main(["prepare", str(folder), "-o", str(tmp_path / "other")]) == 0
    assert all(f"note: {note}\n" in capsys.readouterr().out for note in logged[:1])


@pytest.mark.parametrize("options, triples", [([], 20), (["--has_header", "false"], 21)])
def test_option_changes_the_header(tmp_path, capsys, options, triples):
    read(tmp_path / "x.csv", [("h", "r", "t"), *dict.fromkeys(FACTS)])
    command = ["prepare", str(tmp_path / "x.csv"), "-o", str(tmp_path / "store"),
               "--split.ratio", "[1, 0, 0]", *options]  # fmt: skip
    assert main(command) == 0
    assert f"train {triples}" in capsys.readouterr().out


def test_guessed_parquet_columns_are_reported(tmp_path, caplog):
    def note(*names: str) -> str:
        caplog.clear()
        columns = [pa.array(["a", "b"])] * len(names)
        pq.write_table(pa.table(columns, list(names)), tmp_path / "x.parquet")
        prepare(tmp_path / "x.parquet", tmp_path / "store", overwrite=True)
        return "".join(line for line in caplog.messages if "columns are read" in line)

    assert "read as head 'x', relation 'link', tail 'z'; data.columns [" in note("x", "link", "z")
    assert note("head", "relation", "tail") == ""
    assert "; left out: 'since'; data.columns [" in note("head", "relation", "tail", "since")
    # The name itself stands before a word that means it.
    assert "tail 'tail'; left out: 'object'" in note("head", "relation", "tail", "object")

"""How the first line of a text file is read: by the names of columns, and by what follows."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kge_torchrec.cli import main
from kge_torchrec.config import DataConfig
from kge_torchrec.data import COLUMNS
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.readers import read_triples
from kge_torchrec.data.readers.columns import ROWS, FirstLine, role
from kge_torchrec.training.run_data import data_notes

HEADERS = [
    "x_id,relation,y_id",
    ":START_ID,:TYPE,:END_ID",
    ":START_ID(Person-ID),:TYPE,:END_ID(Film)",
    "Head Entity,Relation,Tail Entity",
    "headEntity,relationType,tailEntity",
    "entity,attribute,value",
    "from_node,rel,to_node",
    "node1,label,node2",
    "?s,?p,?o",
    "Source Name,Edge-Type,Target Name",
    "lhs,rel,rhs",
    "entity_1_id,predicate_uri,entity_2_id",
]
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


PLAIN = st.text("abcdefgh", min_size=1, max_size=3).filter(lambda text: role(text) is None)
BODY = st.lists(st.tuples(PLAIN, PLAIN, PLAIN), min_size=1, max_size=30)
NAMES = {
    "head": ["head", "subject", "source", "from", "node1", "e1", "x", "entity", "start", "h"],
    "relation": ["relation", "predicate", "type", "label", "edge", "p", "attribute", "rel"],
    "tail": ["tail", "object", "target", "to", "node2", "e2", "y", "value", "end", "t"],
}
NAMED = st.tuples(*(st.sampled_from(NAMES[column]) for column in COLUMNS))


@st.composite
def spelled(draw) -> list[str]:
    """A header in one of the ways that people write names."""
    names, kind = draw(NAMED), draw(st.sampled_from(["", "_id", " Name", "-uri"]))
    style = draw(st.sampled_from([str.lower, str.upper, str.title, "# {}".format, " {} ".format]))
    return [style(name + kind) for name in names]


@settings(deadline=None, max_examples=30)
@given(header=spelled(), body=BODY, order=st.permutations(range(3)), repeated=st.integers(0, 3))
def test_names_above_labels_are_a_header(tmp_path_factory, header, body, order, repeated):
    """Also where one of the three, without a number, is a label too: "type" is often both."""
    path = tmp_path_factory.mktemp("h") / "x.csv"
    if repeated < 3 and not any(map(str.isdigit, header[repeated])):
        extra = ["a", "b", "c"]
        extra[repeated] = header[repeated]
        body = [*body, tuple(extra)]
    turn = lambda row: [row[place] for place in order]  # noqa: E731
    rows, lines = read(path, map(turn, [header, *body]))
    assert rows == body
    assert [line.columns for line in lines] == [dict(zip(turn(COLUMNS), turn(header), strict=True))]


@settings(deadline=None, max_examples=30)
@given(
    first=NAMED, body=BODY, place=st.integers(0, 30),
    again=st.sampled_from([(0, 1), (1, 2), (0, 2), (0, 1, 2)]), swapped=st.booleans(),
)  # fmt: skip
def test_names_that_are_labels_later_form_a_triple(
    tmp_path_factory, first, body, place, again, swapped
):
    """Two of the three, in whichever rows; entities in either column of entities."""
    path = tmp_path_factory.mktemp("h") / "x.csv"
    for column in again:
        row = ["a", "b", "c"]
        row[2 - column if swapped else column] = first[column]
        body = [*body[:place], tuple(row), *body[place:]]
    rows, lines = read(path, [first, *body])
    assert rows == [first, *body]
    assert lines[0].columns is None and set(lines[0].again) == {first[i] for i in again}


@settings(deadline=None, max_examples=30)
@given(body=BODY.filter(lambda rows: all(map(all, rows))))
def test_labels_that_name_no_columns_form_a_triple(tmp_path_factory, body):
    rows, lines = read(tmp_path_factory.mktemp("h") / "x.csv", body)
    assert rows == body and lines[0].columns is None and lines[0].fields == list(body[0])


def test_name_counts_only_in_columns_of_its_kind(tmp_path):
    """An entity of the relation's name says nothing of the relation, nor the other way round."""
    body = [("type", "source", "b"), ("a", "target", "type")]
    rows, lines = read(tmp_path / "x.csv", [("source", "type", "target"), *body])
    assert rows == body and lines[0].columns is not None


def test_numbered_name_that_is_a_label_once_forms_a_triple(tmp_path):
    facts = [("node1", "label", "node2"), ("node2", "likes", "node3")]
    assert read(tmp_path / "x.csv", facts)[0] == facts


def test_only_the_next_rows_count(tmp_path):
    """The size of a file changes neither the answer nor the time it takes."""
    first = ("source", "type", "target")
    body = [("a", "b", "c")] * (ROWS - 1)
    for last in (first, ("a", "b", "c")):
        rows, lines = read(tmp_path / "x.csv", [first, *body, ("a", "b", "c"), last])
        assert len(rows) == ROWS + 1 and lines[0].columns is not None
    rows, lines = read(tmp_path / "x.csv", [first, *body, first])
    assert len(rows) == ROWS + 1 and lines[0].columns is None and lines[0].rows == ROWS


def test_error_in_the_next_rows_names_its_own_place(tmp_path):
    (tmp_path / "x.tsv").write_bytes(b"head\trel\ttail\na\tr\tb\na\tr\na\t\xff\tb\n")
    with pytest.raises(ValueError, match=r"x.tsv:3: expected 3 tab-separated"):
        list(read_triples(tmp_path / "x.tsv"))


def test_caller_settings_precede_guesses(tmp_path):
    header = ("subject", "predicate", "object")
    rows, lines = read(tmp_path / "x.csv", [header, *FACTS], has_header=False)
    assert rows == [header, *FACTS] and lines == []
    again = [header, *FACTS, header]
    rows, lines = read(tmp_path / "x.csv", again, has_header=True)
    assert rows == again[1:] and lines[0].columns == dict(zip(COLUMNS, header, strict=True))


def test_each_caller_gets_one_note_and_how_to_change_it(tmp_path, capsys, caplog):
    folder = tmp_path / "data"
    folder.mkdir()
    read(folder / "train.csv", FACTS)
    read(folder / "test.csv", FACTS[:3])
    read(folder / "valid.csv", [HEADERS[0].split(","), *FACTS[:3]])
    store = prepare(folder, tmp_path / "store")
    logged = [record.getMessage() for record in caplog.records if "read as" in record.getMessage()]
    train, valid = logged
    assert train == (
        f"{folder}/train.csv:1 (1 more files alike): this line is read as a triple: 'e0', "
        "'likes0', 'e0'; has_header=True reads it as a header"
    )
    assert valid == (
        f"{folder}/valid.csv:1: this line is read as a header: head 'x_id', relation 'relation', "
        "tail 'y_id'; has_header=False reads it as a triple; "
        "columns=['HEAD', 'RELATION', 'TAIL'] reads others"
    )
    by_key = data_notes(DataConfig(path=str(folder)), store)
    assert "; --data.reader_options.has_header true reads it as a header" in by_key[0]
    triple = "; --data.reader_options.has_header false reads it as a triple; "
    assert triple + "--data.reader_options.columns" in by_key[1]
    of_store = data_notes(DataConfig(path=str(store.path)), store)
    assert [note.partition(";")[0] for note in of_store] == [n.partition(";")[0] for n in by_key]
    assert "has_header" not in " ".join(of_store)  # which would change nothing
    capsys.readouterr()
    assert main(["prepare", str(folder), "-o", str(tmp_path / "other")]) == 0
    said = capsys.readouterr().out
    assert "; --has-header reads it as a header\n" in said
    assert "; --no-has-header reads it as a triple; --columns HEAD,RELATION,TAIL reads" in said


@pytest.mark.parametrize(
    "options, triples",
    [([], 20), (["--no-has-header"], 21)],
)
def test_option_changes_the_header(tmp_path, capsys, options, triples):
    read(tmp_path / "x.csv", [HEADERS[0].split(","), *dict.fromkeys(FACTS)])
    command = ["prepare", str(tmp_path / "x.csv"), "-o", str(tmp_path / "store"), "--ratio", "1",
               "0", "0", *options]  # fmt: skip
    assert main(command) == 0
    assert f"train {triples}" in capsys.readouterr().out


def test_triple_unlike_all_others_is_reported(tmp_path, caplog):
    read(tmp_path / "x.csv", [("Who", "How", "Whom"), *FACTS])
    prepare(tmp_path / "x.csv", tmp_path / "store")
    assert "'Who', 'How', 'Whom', none of which occurs in the next 20 triples" in caplog.text
    caplog.clear()
    read(tmp_path / "x.csv", [("node1", "label", "node2"), ("node1", "label", "node3")])
    prepare(tmp_path / "x.csv", tmp_path / "other")
    assert "which could name columns, but 'node1' and 'label' are labels in later" in caplog.text


def test_guessed_parquet_columns_are_reported(tmp_path, caplog):
    def note(*names: str) -> str:
        caplog.clear()
        columns = [pa.array(["a", "b"])] * len(names)
        pq.write_table(pa.table(columns, list(names)), tmp_path / "x.parquet")
        prepare(tmp_path / "x.parquet", tmp_path / "store", overwrite=True)
        return "".join(line for line in caplog.messages if "columns are read" in line)

    assert "read as head 'x', relation 'link', tail 'z'; columns=" in note("x", "link", "z")
    assert note("head", "relation", "tail") == ""
    assert "; left out: 'since'; columns=" in note("head", "relation", "tail", "since")
    # The usual word stands before a less usual one.
    assert "tail 'object'; left out: 'value'" in note("subject", "predicate", "object", "value")

"""Batch inference: valid lines are answered, invalid lines are reported with their number."""

from __future__ import annotations

import errno
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kge_torchrec import files
from kge_torchrec.answers import bulk, output, sources
from kge_torchrec.answers.bulk import answer_file, score_file
from kge_torchrec.answers.queries import Choice
from kge_torchrec.errors import DataError

QUERIES = b"""head\trelation\ttail
e1\tr0\t?
?\tr1\te2
e1\tr0
e3\t?\te4

e1\tr0\te2
e11x\tr0\t?
e5\tr2\t?
?\tr9\te2
{1\tr0\t?
?\t?\te1
\xff\tr0\t?
e7\tr0\t?"""
GOOD = {2: ("e1", "r0", None), 3: (None, "r1", "e2"), 5: ("e3", None, "e4"), 9: ("e5", "r2", None),
        14: ("e7", "r0", None)}  # fmt: skip
BAD = {
    4: "expected 3 tab-separated columns, found 2: 'e1\\tr0'",
    7: "exactly one of head, relation and tail must be ?, 0 are missing",
    8: "unknown entity 'e11x'; did you mean 'e11'",
    10: "unknown relation 'r9'",
    11: "unknown entity '{1'",
    12: "exactly one of head, relation and tail must be ?, 2 are missing",
    13: "invalid UTF-8",
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "queries.tsv"
    path.write_bytes(QUERIES)
    return path


def check_problems(report):
    assert [problem.line for problem in report.problems] == sorted(BAD)
    for line, reason in report.problems:
        assert reason.startswith(BAD[line])


@pytest.mark.parametrize("batch, queries", [(4096, 512), (3, 1)])
def test_valid_lines_are_answered_in_order(run, file, tmp_path, monkeypatch, batch, queries):
    monkeypatch.setattr(sources, "BATCH", batch)
    monkeypatch.setattr(bulk, "QUERIES", queries)
    report = answer_file(run.model, file, Choice(4), tmp_path / "out.parquet", "parquet")
    assert report.answered == len(GOOD)
    check_problems(report)
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert report.rows == len(rows) == 4 * 4 + 3
    expected = []
    for line, query in GOOD.items():
        missing = ("head", "relation", "tail")[query.index(None)]
        for a in run.predict(*query, k=4):
            whole = [a.label if part is None else part for part in query]
            expected.append({"line": line, "asked": missing, "rank": a.rank, "head": whole[0],
                             "relation": whole[1], "tail": whole[2], "score": a.score,
                             "known": a.known})  # fmt: skip
    assert rows == expected


def test_every_format_holds_the_same_rows(run, file, tmp_path, capsys):
    for name in ("parquet", "json", "tsv", "table"):
        answer_file(run.model, file, Choice(3, run.model.known), tmp_path / name, name)
    rows = pq.read_table(tmp_path / "parquet").to_pylist()
    assert [json.loads(line) for line in (tmp_path / "json").read_text().splitlines()] == rows
    header, *lines = (line.split("\t") for line in (tmp_path / "tsv").read_text().splitlines())
    assert header == list(rows[0])
    for line, row in zip(lines, rows, strict=True):
        assert [*line[:6], float(line[6]), line[7]] == [*map(str, list(row.values())[:6]),
                                                        row["score"], ""]  # fmt: skip
    table = (tmp_path / "table").read_text().splitlines()
    assert len(table) == len(rows) + 1 and table[0].split() == header
    assert sorted(os.listdir(tmp_path)) == ["json", "parquet", "queries.tsv", "table", "tsv"]
    answer_file(run.model, file, Choice(3, run.model.known))
    assert capsys.readouterr().out == (tmp_path / "tsv").read_text()


def test_file_of_triples_is_scored(run, tmp_path):
    (tmp_path / "t").write_text("e1\tr0\te2\ne1\tr0\t?\ne3\tr9\te2\ne3\tr1\te3\n")
    for side in ("tail", "head"):
        report = score_file(run.model, tmp_path / "t", side, tmp_path / "out", "json")
        rows = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
        scores = run.score([("e1", "r0", "e2"), ("e3", "r1", "e3")], side)
        assert [row["score"] for row in rows] == scores and [row["line"] for row in rows] == [1, 4]
    assert [problem.line for problem in report.problems] == [2, 3]
    assert report.problems[0].reason == "head, relation and tail are all required, 1 are missing"


def test_a_full_disk_leaves_the_file_of_before(run, file, tmp_path, monkeypatch):
    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "out").write_text("of before")
    monkeypatch.setattr(files, "sync", full)
    with pytest.raises(OSError, match="No space left"):
        answer_file(run.model, file, Choice(), tmp_path / "out")
    assert (tmp_path / "out").read_text() == "of before"
    assert sorted(os.listdir(tmp_path)) == ["out", "queries.tsv"]


def test_labels_with_tabs_are_escaped(capsys):
    rows = pa.table({"label": ["a\tb\\c\n", None], "score": [1.5, 0.1], "rank": [3, 4]})
    with output.written("tsv", None) as write:
        assert write(rows) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["label\tscore\trank", "a\\tb\\\\c\\n\t1.5\t3", "\t0.1\t4"]


@pytest.mark.parametrize("text", ["", "\n \n", "head\trelation\ttail\n"])
def test_empty_query_file_is_rejected(model, tmp_path, text):
    (tmp_path / "q").write_text(text)
    with pytest.raises(DataError, match="q is empty: write lines of queries, such as"):
        answer_file(model, tmp_path / "q", Choice(), tmp_path / "out")
    assert os.listdir(tmp_path) == ["q"]

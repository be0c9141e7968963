"""Answers do not depend on the number of ranks, of which none holds all rows."""

from __future__ import annotations

import shutil

import pyarrow as pa
import pytest
from worlds import run_world

from kge_torchrec import api, load_model
from kge_torchrec.answers.bulk import answer_file
from kge_torchrec.answers.queries import Choice

FILE = "e1\tr0\t?\n?\tr1\te2\ne1\tr0\nnobody\tr0\t?\ne3\t?\te4\n"
FACTS = [("new", "r0", "e3"), ("new", "r1", "e5"), ("e7", "r2", "new"), ("also", "r0", "e3")]
HEADS, TAILS = ["e3", "e1", "e4", "e1"], ["e2", "e7", "e1", "e8"]


def answers(run, folder):
    """Answers of every kind, as lists of records, tables, numbers, and the report of a file."""
    folded = run.fold_in(FACTS)
    records = {
        "tails": run.predict("e1", "r0", k=7),
        "new heads": run.predict(relation="r1", tail="e2", known=False),
        "relations": run.predict("e1", tail="e2"),
        "all heads": run.predict(None, "r0", "e3", k=100, known=False),
        "new tails to recommend": run.recommend("e1", "r0", 6, exclude_known=True),
        "all tails to recommend": run.recommend("e3", "r2", 6, candidates="all"),
        "rare tails": run.recommend("e1", "r0", 9, novelty=0.3),
        "popular tails": run.recommend("e1", "r0", 9, novelty=-2.0),
        "nearest": run.nearest("e3", 5),
        "links": run.new_links("r1", 30),
        "links among seen": run.new_links("r1", 30, "seen"),
        "tails of a new head": folded.predict("new", "r0", k=9),
        "heads of a new tail": folded.predict(None, "r1", "new", 9, False),
        "new tails of a new head": folded.recommend("new", "r0", 9, exclude_known=True),
    }
    tables = [
        run.predict(HEADS, ["r0", "r1"] * 2, k=3),
        run.predict(relation="r2", tail=TAILS, k=3),
        run.predict(pa.table({"head": HEADS, "tail": TAILS}), k=3),
        folded.predict(["new", "also", "e4"], "r0", k=9),
    ]
    stats = run.evaluate(recommend=[1, 5], novelty=0.8) if isinstance(run, api.Run) else {}
    numbers = [*run.score([("e1", "r0", "e2"), ("e3", "r1", "e4")]),
               *stats.get("recommendation", {}).values()]  # fmt: skip
    report = answer_file(run.model, folder / "queries", Choice(4), folder / "out")
    return records, tables, numbers, report


def on_ranks(path, export, folder):
    """Return this rank's answers, errors of rank 0, curves, and answers of an export."""
    with api.open_run(path) as run:
        results, errors = answers(run, folder), []
        for work in (
            lambda: answer_file(run.model, folder / "queries", Choice(), folder / "none" / "out"),
            lambda: answer_file(run.model, folder / "nothing", Choice(), folder / "other"),
            lambda: run.predict(pa.table({"head": ["e1", "nobody"]}), "r0"),
        ):
            try:
                work()
            except (OSError, ValueError) as error:
                errors.append(f"{type(error).__name__}: {error}")
        curves = run.calibrate().curves
        assert run.predict("e1", "r0")[0].probability is not None
        whole = load_model(export)  # which has all rows on every rank
        single = whole.predict("e1", "r0", k=5), whole.score([("e1", "r0", "e2")])
    return results, errors, curves, single


def names(record):
    return [getattr(record, x, None) for x in ("rank", "head", "label", "tail", "known")]


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_answers_do_not_depend_on_number_of_ranks(trained, run, model, tmp_path, world_size):
    (tmp_path / "queries").write_text(FILE)
    records, tables, numbers, report = answers(run, tmp_path)
    written = (tmp_path / "out").read_text()
    path = shutil.copytree(run.path, tmp_path / "run")
    results = run_world(world_size, on_ranks, path, trained[1], tmp_path)
    for (its_records, its_tables, its_numbers, its_report), errors, curves, single in results:
        for name, expected in records.items():
            assert list(map(names, its_records[name])) == list(map(names, expected)), name
            scores = [record.score for record in expected]
            found = [x.score for x in its_records[name]]
            assert found == pytest.approx(scores, rel=1e-4, abs=1e-5), name
        for found, expected in zip(its_tables, tables, strict=True):
            assert found.drop_columns(["score"]) == expected.drop_columns(["score"])
            scores = expected["score"].to_pylist()
            assert found["score"].to_pylist() == pytest.approx(scores, rel=1e-4, abs=1e-5)
        assert its_numbers == pytest.approx(numbers, rel=1e-4)
        assert its_report == report and len(report.problems) == 2
        assert [error.partition(":")[0] for error in errors] == [
            "FileNotFoundError", "DataError", "DataError"
        ]  # fmt: skip
        assert "queries: row 1: unknown entity 'nobody'" in errors[2]
        assert curves == results[0][2]
        assert [a.label for a in single[0]] == [a.label for a in model.predict("e1", "r0", k=5)]
        assert single[1] == pytest.approx(model.score([("e1", "r0", "e2")]), rel=1e-4)
    columns = [
        [line.split("\t")[:6] for line in text.splitlines()]
        for text in (written, (tmp_path / "out").read_text())
    ]
    assert columns[0] == columns[1]

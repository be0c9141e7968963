"""Answers do not depend on the number of ranks, of which none holds all rows."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from worlds import run_world

from kge_torchrec import api, load_model
from kge_torchrec.answers.bulk import answer_file
from kge_torchrec.answers.queries import Choice

FILE = "e1\tr0\t?\n?\tr1\te2\ne1\tr0\nnobody\tr0\t?\ne3\t?\te4\n"


def answers(run, folder):
    """Answers of every kind, as lists of records that have labels and scores."""
    report = answer_file(run.model, folder / "queries", Choice(4), folder / "out")
    return (
        {
            "tails": run.predict("e1", "r0", k=7),
            "new heads": run.predict(relation="r1", tail="e2", known=False),
            "relations": run.predict("e1", tail="e2"),
            "all heads": run.predict(None, "r0", "e3", k=100, known=False),
            "new tails to recommend": run.recommend("e1", "r0", 6, exclude_known=True),
            "all tails to recommend": run.recommend("e3", "r2", 6, candidates="all"),
            "nearest": run.nearest("e3", 5),
            "links": run.new_links("r1", 30),
            "links among seen": run.new_links("r1", 30, "seen"),
        },
        {"scores": run.score([("e1", "r0", "e2"), ("e3", "r1", "e4")])},
        report,
    )


def on_ranks(path, export, folder):
    """Return this rank's answers, an error of rank 0, curves, and answers of an export."""
    with api.open_run(path) as run:
        results = answers(run, folder)
        errors = []
        for name, output in (
            ("queries", folder / "nowhere" / "out"),
            ("nothing", folder / "other"),
        ):
            try:
                answer_file(run.model, folder / name, Choice(), output)
            except (OSError, ValueError) as error:
                errors.append(type(error).__name__)
        try:
            import sklearn  # noqa: F401
        except ImportError:
            curves = None
        else:
            curves = run.calibrate().curves
            assert run.predict("e1", "r0")[0].probability is not None
        single = load_model(export).predict("e1", "r0", k=5)  # which has all rows
    return results, errors, curves, single


def names(record):
    return [getattr(record, x, None) for x in ("rank", "head", "label", "tail", "known")]


def test_answers_do_not_depend_on_number_of_ranks(trained, run, model, tmp_path):
    (tmp_path / "queries").write_text(FILE)
    lists, numbers, report = answers(run, tmp_path)
    written = (tmp_path / "out").read_text()
    path = shutil.copytree(run.path, tmp_path / "run")
    results = run_world(2, on_ranks, path, trained[1], Path(tmp_path))
    for (its_lists, its_numbers, its_report), errors, curves, single in results:
        for name, expected in lists.items():
            assert list(map(names, its_lists[name])) == list(map(names, expected)), name
            scores = [record.score for record in expected]
            assert [x.score for x in its_lists[name]] == pytest.approx(scores, rel=1e-4), name
        for name, expected in numbers.items():
            assert its_numbers[name] == pytest.approx(expected, rel=1e-4), name
        assert its_report == report and len(report.problems) == 2
        assert errors == ["FileNotFoundError", "DataError"]
        assert curves == results[0][2]
        assert [a.label for a in single] == [a.label for a in model.predict("e1", "r0", k=5)]
    columns = [
        [line.split("\t")[:6] for line in text.splitlines()]
        for text in (written, (tmp_path / "out").read_text())
    ]
    assert columns[0] == columns[1]

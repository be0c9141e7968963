"""The verbs that ask: what they print, where they write, what they refuse."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import asdict

import pytest
from tqdm import tqdm

from kge_torchrec import trained_model
from kge_torchrec.cli import main


@pytest.fixture
def say(capsys):
    """Runs a verb; returns its exit code, what it printed, and what it said on stderr."""

    def call(*arguments):
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return call


def as_json(out):
    return [json.loads(line) for line in out.splitlines()]


VERBS = {
    "predict --head e1 --relation r0": lambda run: run.predict("e1", "r0"),
    "predict --relation r0 --tail e1 --top 4 --new": lambda run: run.predict(
        None, "r0", "e1", 4, known=False
    ),
    "predict --head e1 --tail e2": lambda run: run.predict("e1", None, "e2"),
    "predict --relation r1": lambda run: run.new_links("r1"),
    "predict --relation r1 --candidates seen --top 2 --loops": lambda run: run.new_links(
        "r1", 2, "seen", loops=True
    ),
    "recommend --head e1 --relation r0 --top 4": lambda run: run.recommend("e1", "r0", 4),
    "recommend --head e1 --relation r0 --exclude-known --candidates all --novelty 3": (
        lambda run: run.recommend("e1", "r0", 10, True, "all", 3)
    ),
    "nearest e3 --top 4": lambda run: run.nearest("e3", 4),
}


@pytest.mark.parametrize("command", VERBS)
def test_verbs_print_the_answers_of_python(trained, run, say, command):
    expected = [asdict(answer) for answer in VERBS[command](run)]
    for row in expected:
        row.pop("probability", None)
    verb, *options = command.split()
    for folder in trained:  # the run and its export
        code, out, err = say(verb, folder, *options, "--format", "json")
        assert code == 0 and as_json(out) == expected
        assert ("candidates: " in err) == (verb == "recommend")
    code, out, err = say(verb, folder, *options)
    assert len(out.splitlines()) == len(expected) + 1 and out.split()[0] == "rank"
    assert ("score: cosine of the angle between the rows" in err) == (verb == "nearest")


def test_files_of_queries_and_triples_are_answered(trained, say, tmp_path):
    file = tmp_path / "questions"
    file.write_text("e1\tr0\t?\nnobody\tr0\t?\ne1\tr0\te2\n")
    for folder in trained:
        code, out, err = say("predict", folder, "--queries", file, "--top", 2, "--format", "tsv")
        assert code == 1 and len(out.splitlines()) == 3
        assert f"{file}:2: unknown entity 'nobody'" in err and f"{file}:3: exactly one" in err
        assert "2 of 3 lines not answered" in err
        code, out, err = say("score", folder, file, "--format", "json", "--side", "head")
        assert code == 1 and json.loads(out)["line"] == 3 and "2 of 3 lines" in err
    file.write_text("e1\tr0\te2\n")
    assert say("score", trained[0], file)[0] == 0


def test_calibrated_predictions_have_probabilities(trained, say, tmp_path):
    pytest.importorskip("sklearn", reason="calibrating needs scikit-learn")
    run = shutil.copytree(trained[0], tmp_path / "run")
    code, out, _ = say("calibrate", run)
    assert code == 0 and "expected calibration error" in out
    assert max(map(len, out.splitlines())) <= 80
    about = json.loads(say("calibrate", run, "--top", 3, "--format", "json")[1])
    assert about["top"] == 3 and about["test"]["queries"] > 30
    query = ("predict", run, "--head", "e1", "--relation", "r0")
    assert say(*query)[1].split()[:5] == ["rank", "label", "score", "known", "probability"]
    assert "probability" in as_json(say(*query, "--format", "json")[1])[0]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_tables_fit_the_terminal_width(monkeypatch):
    from kge_torchrec.answers.output import record_rows, written
    from kge_torchrec.answers.queries import Link

    monkeypatch.setenv("COLUMNS", "80")
    links = [Link(rank, "h" * 90, "located in", "t" * rank, -0.5, 0.25) for rank in (1, 70)]
    texts = {}
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr("sys.stdout", stream)
        with written("table", None) as write:
            write(record_rows(links, Link))
        texts[type(stream)] = stream.getvalue().splitlines()
    assert [len(line) for line in texts[Terminal]][1:] == [80, 80]
    assert all("hhh\u2026" in line and "located in" in line for line in texts[Terminal][1:])
    assert "h" * 90 in texts[io.StringIO][1] and "t" * 70 in texts[io.StringIO][2]


def test_progress_is_shown_on_a_terminal(trained, monkeypatch, tmp_path):
    """With bars that wait for no second."""
    run, shown = shutil.copytree(trained[0], tmp_path / "run"), Terminal()
    monkeypatch.setattr(trained_model, "tqdm", lambda **options: tqdm(**{**options, "delay": 0}))
    monkeypatch.setattr("sys.stderr", shown)
    assert main(["calibrate", str(run)]) == 0
    assert "test: heads" in shown.getvalue() and "valid: tails" in shown.getvalue()


def test_names_are_shown_beside_labels(trained, say, tmp_path):
    (tmp_path / "names.tsv").write_text("e1\tAnn\nr0\tknows\ne2\tBob\n")
    (tmp_path / "questions").write_text("e1\tr0\t?\n")
    names = "--names", tmp_path / "names.tsv"
    query = "predict", trained[0], "--head", "e1", "--relation", "r0", "--top", 40
    plain = [line.split("\t") for line in say(*query, "--format", "tsv")[1].splitlines()]
    named = [line.split("\t") for line in say(*query, *names, "--format", "tsv")[1].splitlines()]
    assert named[0][:3] == ["rank", "label", "name"]
    assert [[*row[:2], *row[3:]] for row in named] == plain
    assert {row[1]: row[2] for row in named if row[2]}.items() >= {"e2": "Bob"}.items()
    answers = as_json(say(*query, *names, "--format", "json")[1])
    assert {a["label"]: a["name"] for a in answers}["e2"] == "Bob"
    out = say("predict", trained[0], "--queries", tmp_path / "questions", *names)[1].splitlines()
    assert out[0].split()[3:9] == ["head", "head_name", "relation", "relation_name", "tail",
                                   "tail_name"]  # fmt: skip
    assert out[1].split()[3:7] == ["e1", "Ann", "r0", "knows"]
    code, _, err = say(*query, "--names", tmp_path / "none.tsv")
    assert code == 1 and "none.tsv" in err

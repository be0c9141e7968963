"""scripts/check_language.py finds each kind of fault, and passes legitimate uses."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def language():
    path = ROOT / "scripts" / "check_language.py"
    spec = importlib.util.spec_from_file_location("check_language", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# A use of each word to avoid, and a legitimate use of the same word.
USES = [
    ("a table of 4 bytes a row", "a row of the table holds 4 bytes per element"),
    ("counts once a step", "once a file is complete"),
    ("the slopes of scores", "gradients of scores"),
    ("test is told by train", "a message tells users what to do"),
    ("every rank is asked", "users ask a question"),
    ("from the same start", "training starts at step 0"),
    ("values are picked from the graph", "pick a scorer"),
    ("negatives that are suited", "a scorer that suits the graph"),
    ("gradients pulled into each row", "pull the branch"),
    ("the part along the normal", "ranks along with hosts"),
    ("on this rank alone", "only on this rank"),
    ("both run by turns", "RotatE turns a vector"),
    ("sent through memory", "shared memory"),
    ("the run goes on", "the search goes on all ranks"),
    ("a relation gives answers away", "a method gives the answer"),
    ("whoever reads it", "users read it"),
    ("so many rows", "so rows are many"),
    ("the catalogues of other libraries", "data sets of other libraries"),
    ("a message of another form", "another format"),
]


@pytest.mark.parametrize(("bad", "good"), USES, ids=[bad for bad, _ in USES])
def test_words_to_avoid_are_found_where_they_mean_that(language, bad, good):
    assert [finding.kind for finding in language.check_markdown(bad)] == ["word"]
    assert language.check_markdown(good) == []


def test_every_word_has_a_case(language):
    for pattern in language.WORDS:
        assert any(language.re.search(pattern, bad) for bad, _ in USES), pattern


LONG = "word " * 30 + "end."
PAGE = f"""\
# Page

{LONG}

| cell | {LONG} |
|---|---|

- item
- {LONG} Short.

one
two
three
four
five
six

```text
slopes, and {LONG}
```
`slopes` are code. {"word " * 29}end. Two sentences of {"word " * 10} here, and [a link](slopes.md).
"""


def test_long_sentences_and_paragraphs_are_found_outside_code(language):
    findings = language.check_markdown(PAGE)
    assert [(finding.line, finding.kind) for finding in findings] == [
        (3, "long sentence"),
        (5, "long sentence"),
        (9, "long sentence"),
        (11, "long paragraph"),
    ]
    wide = "word. " * 120
    assert [finding.kind for finding in language.check_markdown(wide)] == ["long paragraph"]


CODE = '''\
"""What this module does."""
from kge_torchrec.data.catalogues import load

def score(given):
    """Of a triple, told by train."""
    found = 1  # slopes of the scores
    return found

class OverAll:
    """So many losses."""
    def observe(self): ...
    def finish(self): ...

class Thread:
    """A thread that one may ``join``."""
    def join(self): ...
'''


def test_docstrings_comments_and_names_are_found_in_code(language):
    findings = language.check_python(CODE)
    assert [(finding.line, finding.kind, finding.text.split(":")[0]) for finding in findings] == [
        (1, "opening", "a docstring begins with 'What'"),
        (2, "name", "catalogues"),
        (4, "name", "given"),
        (5, "opening", "a docstring begins with 'Of'"),
        (5, "word", "'told'"),
        (6, "name", "found"),
        (6, "word", "'slopes'"),
        (10, "opening", "a docstring begins with 'So'"),
        (10, "word", "'So many'"),
        (11, "name", "observe"),
        (12, "name", "finish"),
    ]


MESSAGES = """\
from argparse import ArgumentParser

DESCRIPTION = "Reports whatever was found."

def run(value, log, path):
    ArgumentParser(description="Of a run").add_argument("--top", help="all else is kept")
    key(1, "Numbers a row.")
    print(f"training goes on in {path}", "told" if value else "the same start")
    log.warning("rank %d is asked" % value)
    if value:
        raise ValueError(f"{path}: {value} is settled; " + "`alone` is code")
    return {"told": "a value that nobody reads"}
"""


def test_bad_words_are_found_in_messages(language):
    findings = language.check_python(MESSAGES)
    assert {finding.kind for finding in findings} == {"message"}
    assert [(finding.line, finding.text.split(":")[0]) for finding in findings] == [
        (3, "'whatever'"),
        (6, "'all else'"),
        (7, "'Numbers a row'"),
        (8, "'goes on'"),
        (8, "'same start'"),
        (8, "'told'"),
        (9, "'asked'"),
        (11, "'settled'"),
    ]


def test_bad_words_are_found_in_comments_of_other_files(language, tmp_path):
    path = tmp_path / "Makefile"
    path.write_text("demo:  ## train, then ask what is told\n\techo asked\n# slopes\n")
    assert [(finding.line, finding.kind) for finding in language.findings_of(path)] == [
        (1, "word"),
        (3, "word"),
    ]


@pytest.mark.slow  # make lint runs it
def test_the_repository_passes(language, capsys):
    assert language.main() == 0, capsys.readouterr().out


def test_a_finding_in_any_path_fails_the_check(language, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(language, "ROOT", tmp_path)
    monkeypatch.setattr(language, "PATHS", ("package", "README.md"))
    (tmp_path / "package").mkdir()
    (tmp_path / "README.md").write_text("Train a model.\n")
    (tmp_path / "package" / "a.py").write_text("")
    assert language.main() == 0
    assert capsys.readouterr().out == "0 findings in package, README.md\n"
    (tmp_path / "package" / "a.py").write_text('print("told")\n')
    assert language.main() == 1
    assert "package/a.py:1: message: 'told'" in capsys.readouterr().out

"""Every verb says what is wrong with bad input: an exit code and a sentence, never a traceback.

``bad_inputs.tsv`` holds a case per line: exit code, command and the first line of the message,
which ends with an ellipsis where another library, or a version of Python, words the rest.
``bad_inputs.py`` makes the files that the commands name.  A new case needs the first two columns;
the failing test prints the third.
"""

from __future__ import annotations

import csv
import os
import shlex
from pathlib import Path

import pytest
from bad_inputs import make_world

from kge_torchrec import cli
from kge_torchrec.cli import main

pytestmark = pytest.mark.slow

with (Path(__file__).parent / "bad_inputs.tsv").open(encoding="utf-8", newline="") as _file:
    CASES = list(csv.reader(_file, delimiter="\t", quoting=csv.QUOTE_NONE))
VERBS = list(dict.fromkeys(command.partition(" ")[0] for _, command, _ in CASES))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world").resolve()
    before = Path.cwd()
    os.chdir(folder)
    try:
        make_world(folder)
        yield folder
    finally:
        os.chdir(before)


def outcome(command: str, capsys: pytest.CaptureFixture) -> tuple[str, str]:
    """Its exit code, and the first line of its message."""
    try:
        code = main(shlex.split(command))
    except SystemExit as end:  # argparse
        code = end.code
    except BaseException as error:  # what a user would see a traceback of
        code = repr(error)
    lines = capsys.readouterr().err.splitlines() or [""]
    message = next((line for line in lines if line.startswith("kge-torchrec")), lines[0])
    return str(code), message.replace(f"{Path.cwd()}/", "")


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb or "no verb")
def test_bad_input_is_rejected_with_a_message(world, capsys, verb):
    wrong, files = [], set(world.rglob("*"))
    for code, command, expected in CASES:
        if command.partition(" ")[0] != verb:
            continue
        actual, message = outcome(command, capsys)
        start = expected.removesuffix("…")
        alike = message.startswith(start) if start != expected else message == expected
        if (actual, alike) != (code, True):
            wrong.append(f"{actual}\t{command}\t{message}")
        made = set(world.rglob("*")) - files
        if made:
            wrong.append(f"{command} has made {sorted(str(x.relative_to(world)) for x in made)}")
            files |= made
    assert not wrong, "\n".join(wrong)


def test_table_has_300_cases_and_every_verb():
    assert len(CASES) >= 300 and all(code in "12" for code, _, _ in CASES)
    assert len({command for _, command, _ in CASES}) == len(CASES)
    assert set(cli.VERBS) <= set(VERBS)

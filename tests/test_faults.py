"""The table of deliberate faults fits the package: each text is there once, each test exists."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def faults():
    spec = importlib.util.spec_from_file_location("faults", ROOT / "scripts" / "faults.py")
    module = sys.modules["faults"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["faults"]


def test_each_fault_changes_one_place(faults):
    table = faults.read_table()
    assert len(table) == len({(fault.file, fault.text) for fault in table}) >= 100
    moved = {str(fault): faults.count(fault) for fault in table if faults.count(fault) != 1}
    assert not moved, "mend or drop these lines of scripts/faults.py"
    assert not [str(fault) for fault in table if fault.text == fault.replacement]


def test_tests_of_faults_exist(faults):
    named = {word for fault in faults.read_table() for word in fault.tests.split()}
    missing = [word for word in named if ".py" in word and not (ROOT / "tests" / word).exists()]
    assert not missing


@pytest.mark.slow
def test_runner_tells_noticed_missed_and_broken(faults, tmp_path):
    package, tests = tmp_path / "kge_torchrec", tmp_path / "tests"
    package.mkdir()
    tests.mkdir()
    (package / "__init__.py").touch()
    (package / "sums.py").write_text("def add(a, b):\n    return a + b  # or 1\n")
    (tests / "test_sums.py").write_text(
        "from kge_torchrec.sums import add\n\ndef test_add():\n    assert add(1, 2) == 3\n"
    )
    row = "[sums.py: test_sums.py]\na + b => a - b\nor 1 => or 2\nnot there => x\n"
    table = faults.read_table(f"{row}return a => return a @@ test_sums.py -k nothing\n")
    results = [faults.outcome(fault, tmp_path) for fault in table]
    assert results[:2] == ["noticed", "MISSED"]
    assert [result.partition(":")[0] for result in results[2:]] == ["broken", "broken"]
    assert faults.unchanged(table[0], tmp_path) == "passed"
    assert "a + b" in (package / "sums.py").read_text()

"""The programs of scripts/ on hardly any work: that they run, not what they find."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GRAPH = ROOT.parent / "shared" / "data" / "fb15k-237"
needs_graph = pytest.mark.skipif(not GRAPH.exists(), reason="FB15k-237 is not here")


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "scripts/bench.py prepare start-up --triples 3000 --repeats 1",
        pytest.param(f"scripts/bench.py training ranking --data {GRAPH} "
                     "--only distmult-shared-1024 --repeats 1", marks=needs_graph),
        "scripts/peers/floor.py",
        "scripts/check_plan.py --entities 120000 --worlds 1 --optimizers sgd",
        "-m pytest -q -m gpu tests/gpu",  # the tests of a card, in small sizes
    ],
    ids=lambda command: command.split()[0],
)  # fmt: skip
def test_script_runs(command):
    words = [sys.executable, *command.split()]
    environment = os.environ | {"KGE_GPU_TESTS": "cpu"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    # check_plan fails where memory is not as planned, which of small tables it need not be.
    assert done.returncode == 0 or "peak memory" in done.stdout, done.stdout + done.stderr

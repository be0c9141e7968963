"""The benchmarks of scripts/ on hardly any work: that they run, not what they find."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GRAPH = ROOT.parent / "shared" / "data" / "fb15k-237"
needs_graph = pytest.mark.skipif(not GRAPH.exists(), reason="FB15k-237 is not here")
SMALL = {
    "bench_full_candidates": "--entities 500 --dim 8 --batch-size 16 --steps 2",
    "bench_prepare": "--triples 3000 --repeats 1 --directory {folder}",
    "bench_scale": "--sizes 1000 3000 --steps 2 --repeats 1",
    "bench_ranking": "{graph} --repeats 1",
    "bench": "training --data {graph} --only distmult-shared-1024 --repeats 1",
    "check_plan": "--entities 120000 --worlds 1 --optimizers sgd",
    "make_zipf_graph": "--entities 300 --relations 5 --triples 2000 {folder}/graph",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=needs_graph) if "{graph}" in SMALL[name] else name
        for name in SMALL
    ],
)  # fmt: skip
def test_benchmark_runs_and_prints_results(tmp_path, name):
    arguments = SMALL[name].format(folder=tmp_path, graph=GRAPH).split()
    command = [sys.executable, str(ROOT / "scripts" / f"{name}.py"), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
    # check_plan fails where memory is not as planned, which of small tables it need not be.
    is_whole = done.returncode == 0 or "peak memory" in done.stdout
    assert is_whole, done.stderr[-3000:]
    assert done.stdout or list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_server_is_measured(tmp_path):
    kge = [sys.executable, "-m", "kge_torchrec"]
    train = ["train", "demo", "--train.epochs=1", f"--run.dir={tmp_path / 'run'}"]
    subprocess.run([*kge, *train], cwd=ROOT, check=True, capture_output=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    serving = [*kge, "serve", str(tmp_path / "run"), "--port", port]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    alone = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(serving, cwd=ROOT, env=alone, **pipe) as server:
        assert server.stdout is not None
        assert any(port in line for line in server.stdout)
        query = "/predict?head=Austria&relation=borders"
        few = ["--clients", "2", "--requests", "3", "--half-sent", "3", "--wait", "0.1"]
        script = [sys.executable, str(ROOT / "scripts" / "bench_server.py")]
        done = subprocess.run([*script, "--port", port, "--query", query, *few],
                              cwd=ROOT, capture_output=True, text=True)  # fmt: skip
        server.terminate()
    assert "replies {200: 6}" in done.stdout, done.stdout + done.stderr


def test_every_benchmark_has_a_test():
    benches = {path.stem for path in (ROOT / "scripts").glob("bench*.py")}
    assert benches <= {*SMALL, "bench_server"}

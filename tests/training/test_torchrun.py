"""The real thing: torchrun with the verb train, and with scripts/train.py, in two processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from training_runs import config_of

from kge_torchrec import api

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {"the verb": ["-m", "kge_torchrec", "train"], "the script": ["scripts/train.py"]}


def torchrun(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    return subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_two_processes_match_one(tmp_path, program):
    keys = {"train__epochs": 3, "train__batch_size": 256, "model__dim": 16}
    one = api.train(config_of("countries", tmp_path / "one", **keys))
    config_of("countries", tmp_path / "two", **keys).save(tmp_path / "config.yaml")
    ended = torchrun(*PROGRAMS[program], str(tmp_path / "config.yaml"))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("run folder: ") == 1
    two = json.loads((tmp_path / "two" / "results.json").read_text())
    assert two["train"]["world_size"] == 2
    for side in ("head", "tail", "both"):
        for kind, values in one.results["test"][side].items():
            assert two["test"][side][kind]["mrr"] == pytest.approx(values["mrr"], abs=1e-4)


GROUPS = """
import time
from kge_torchrec.distributed.processes import processes

for number in range(3):
    with processes("cpu") as ranks:
        assert ranks.gather((number, ranks.rank)) == [(number, 0), (number, 1)]
    time.sleep(0.7 * ranks.rank)  # so that rank 0 looks for the address of rank 1 too early
"""


@pytest.mark.slow
def test_consecutive_groups_do_not_mix(tmp_path):
    """torchrun's store keeps what groups have written into it, when they are gone."""
    (tmp_path / "groups.py").write_text(GROUPS)
    ended = torchrun(str(tmp_path / "groups.py"))
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_bad_input_ends_all_processes_with_one_error(tmp_path, program):
    (tmp_path / "train.tsv").write_text("a\tr\tb\na\tb\n")
    run = tmp_path / "run"
    config = tmp_path / "config.yaml"
    config.write_text(f"data: {{path: {tmp_path}}}\nrun: {{dir: {run}, progress: false}}\n")
    ended = torchrun(*PROGRAMS[program], str(config))
    assert ended.returncode != 0
    assert len(re.findall("^(kge-torchrec|train.py): ", ended.stderr, re.MULTILINE)) == 1
    assert "train.tsv:2" in ended.stderr
    ours = ended.stderr.split("torch/distributed")[0]  # torchrun adds its own report
    assert "Traceback" not in ours
    assert not run.exists()

"""scripts/check_gpu.py, where there is no GPU: its parts are listed, and run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "check_gpu.py"
sys.path.append(str(ROOT / "scripts"))

import check_gpu  # noqa: E402
from gpu_checks import PARTS  # noqa: E402
from gpu_checks.report import Report  # noqa: E402


def run(*arguments: str) -> subprocess.CompletedProcess:
    """The command, with every GPU hidden."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_missing_gpu_is_reported(tmp_path):
    result = run("tables", "--json", str(tmp_path / "found.json"))
    assert result.returncode == 2
    assert "finds no CUDA device: nothing was checked" in result.stderr
    assert result.stdout == ""
    assert not (tmp_path / "found.json").exists()


def test_list_names_every_part_within_ten_minutes(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--list"])
    assert check_gpu.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(PARTS)
    assert sum(part.seconds for part in PARTS.values()) <= 570
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "nothing"])
    with pytest.raises(SystemExit):
        check_gpu.main()
    assert "no part nothing; there are machine" in capsys.readouterr().err


def test_a_part_passes_on_a_cpu(tmp_path):
    torch.set_num_threads(1)
    with (tmp_path / "lines").open("w") as lines:
        PARTS["bags"].run(Report("bags", "cpu", tmp_path, lines, None, None))
    verdicts = {
        json.loads(line)["verdict"] for line in (tmp_path / "lines").read_text().splitlines()
    }
    assert "PASS" in verdicts and "FAIL" not in verdicts


@pytest.mark.slow
def test_every_part_passes_on_a_cpu(tmp_path):
    result = run("--device", "cpu", "--json", str(tmp_path / "found.json"))
    assert result.returncode == 0, result.stdout + result.stderr
    content = json.loads((tmp_path / "found.json").read_text())
    assert [part["part"] for part in content["parts"]] == list(PARTS)
    assert content["counts"]["FAIL"] == 0
    assert content["counts"]["PASS"] > 100

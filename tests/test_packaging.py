"""Contents of an installed package: every module, the embedded graph, published configs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of what a package is built from: building leaves folders behind."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("kge_torchrec", "configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def run(*command: object, cwd: Path) -> str:
    """Standard output; fails with the rest."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=kept, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_wheel_is_complete_and_trains_outside_the_checkout(source, tmp_path):
    """The environment is new, has the wheel and borrows the large packages."""
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps",
        "-w", tmp_path, source, cwd=tmp_path)  # fmt: skip
    (wheel,) = tmp_path.glob("kge_torchrec-*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    for folder, home in (("kge_torchrec", Path()), ("configs", Path("kge_torchrec"))):
        kept = [path for path in (source / folder).rglob("*") if path.is_file()]
        names = [str(home / path.relative_to(source)) for path in kept]
        assert kept and [name for name in names if name not in inside] == []
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    borrowed = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages / "borrowed.pth").write_text("\n".join(borrowed))
    bin = tmp_path / "venv" / "bin"
    install = ["install", "-q", "--no-index", "--no-deps", "--ignore-installed", wheel]
    run(sys.executable, "-m", "pip", "--python", bin / "python", *install, cwd=tmp_path)
    demo = ["train", "demo", "--train.epochs", "2", "--run.dir", "mine"]
    assert "run folder: mine" in run(bin / "kge-torchrec", *demo, cwd=tmp_path)
    assert (tmp_path / "mine" / "results.json").is_file()
    run(bin / "kge-torchrec", "report", "mine", cwd=tmp_path)  # a template is in the wheel
    assert "<h2>Examples</h2>" in (tmp_path / "mine" / "report.html").read_text("utf-8")
    where = run(bin / "python", "-c", "import kge_torchrec; print(kge_torchrec.__file__)",
                cwd=tmp_path)  # fmt: skip
    assert Path(where.strip()).is_relative_to(packages)

"""A process that compiles kernels and one that reads them from the cache compute the same bits."""

from __future__ import annotations

import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import kernel_starts
import pytest
from numba.core.dispatcher import Dispatcher

import kge_torchrec
from kge_torchrec.kernels.jit import BlockKernel, KernelCache, _globals_of

ROOT = Path(__file__).resolve().parents[2]


def outputs(names: list[str], folder: Path, root: Path = ROOT) -> dict[str, str]:
    """Hashes by name, of a new process."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1",
                   "PYTHONPATH": str(root)}  # fmt: skip
    command = [sys.executable, str(ROOT / "tests" / "kernel_starts.py"), *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def same_on_both_starts(names: list[str], folder: Path) -> None:
    first = outputs(names, folder)
    files = {file: file.stat().st_mtime_ns for file in folder.rglob("*.kernel")}
    assert files
    assert outputs(names, folder) == first
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*.kernel")} == files


@pytest.mark.slow
def test_first_and_later_starts_compute_the_same(tmp_path):
    same_on_both_starts(kernel_starts.SOME, tmp_path)


@pytest.mark.slow
def test_every_kernel_computes_the_same_on_later_starts(tmp_path):
    """Every kernel, and a training by each family; a cache that was filled in another order too."""
    same_on_both_starts(kernel_starts.ALL, tmp_path / "one")
    backwards = outputs(kernel_starts.ALL[::-1], tmp_path / "other")
    assert outputs(kernel_starts.ALL, tmp_path / "one") == backwards


@pytest.mark.slow
def test_changed_helper_recompiles_kernels_of_other_files(tmp_path):
    shutil.copytree(
        ROOT / "kge_torchrec", tmp_path / "kge_torchrec",
        ignore=shutil.ignore_patterns("__pycache__"),
    )  # fmt: skip
    before = outputs(["pairs dot", "sums"], tmp_path / "cache", tmp_path)
    file = tmp_path / "kge_torchrec" / "kernels" / "pair_formulas.py"
    text = file.read_text()
    assert text.count("return w * x\n") == 1
    file.write_text(text.replace("return w * x\n", "return -w * x\n"))
    after = outputs(["pairs dot", "sums"], tmp_path / "cache", tmp_path)
    assert after["sums"] == before["sums"] and after["pairs dot"] != before["pairs dot"]


def compiled_objects():
    """The kernels and helpers of the package, by name."""
    objects = {}
    for module in pkgutil.walk_packages(kge_torchrec.__path__, "kge_torchrec."):
        if module.name.endswith("__main__") or "export" in module.name.split(".")[1:2]:
            continue
        text = Path(module.module_finder.path, module.name.rpartition(".")[2]).with_suffix(".py")
        if text.exists() and re.search(r"kernels\.(jit|blocks) import", text.read_text()):
            for name, value in vars(import_module(module.name)).items():
                if isinstance(value, BlockKernel):
                    objects[f"{module.name}.{name}"] = value._run
                elif isinstance(value, Dispatcher):
                    objects[f"{module.name}.{name}"] = value
    return objects


def test_kernels_call_only_helpers():
    """A kernel that another one calls would be in two machine codes, of which either might run."""
    result, waiting = compiled_objects(), []
    assert len(result) > 60
    for name, value in result.items():
        is_kernel = isinstance(value._cache, KernelCache)
        assert is_kernel != bool(value.targetoptions.get("forceinline")), name
        waiting.append((name, value.py_func))
    for name, function in waiting:
        called = [v for _, v in _globals_of(function) if isinstance(v, Dispatcher)]
        assert all(v.targetoptions.get("forceinline") for v in called), name


def test_only_the_kernels_package_compiles_with_numba():
    package = Path(kge_torchrec.__file__).parent
    users = [
        file.relative_to(package).as_posix()
        for file in package.rglob("*.py")
        if re.search(r"\bn?jit\(|@(numba\.)?n?jit\b|\bvectorize\(", file.read_text())
    ]
    assert [user for user in users if user.split("/")[0] != "kernels"] == []

"""A process that compiles kernels and one that reads them from the cache compute the same bits."""

from __future__ import annotations

import inspect
import os
import pkgutil
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from numba.core.dispatcher import Dispatcher

import kge_torchrec
from kge_torchrec.kernels.jit import KernelCache, _sources
from kge_torchrec.kernels.parallel import BlockKernel

TRAINING = """
import hashlib, sys, kge_torchrec
config = {"seed": 5, "threads": 1, "device": "cpu", "model.scorer": sys.argv[2], "model.dim": 72,
          "train.epochs": 2, "train.batch_size": 256, "negatives.count": 24, "train.lr": 0.05,
          "run.progress": False, "run.dir": sys.argv[1] + "/run"}
with kge_torchrec.train(config) as run:
    folder = run.export(sys.argv[1] + "/export")
print(hashlib.sha256((folder / "entities.safetensors").read_bytes()).hexdigest())
"""


@pytest.mark.slow
def test_first_and_later_starts_compute_the_same(tmp_path):
    cache, hashes, written = tmp_path / "cache", [], []
    for name in ("first", "second"):
        command = [sys.executable, "-c", TRAINING, str(tmp_path / name), "complex"]
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        hashes.append(done.stdout.splitlines()[-1])
        written.append({file: file.stat().st_mtime_ns for file in cache.rglob("*.kernel")})
    assert written[0] and written[0] == written[1]
    assert hashes[0] == hashes[1]


def compiled_objects() -> dict[str, Dispatcher]:
    """The kernels and helpers of the package, by name."""
    objects = {}
    for module in pkgutil.walk_packages(kge_torchrec.__path__, "kge_torchrec."):
        file = Path(module.module_finder.path, module.name.rpartition(".")[2]).with_suffix(".py")
        if file.exists() and re.search(r"kernels\.(jit|parallel) import", file.read_text()):
            for name, value in vars(import_module(module.name)).items():
                if isinstance(value, BlockKernel | Dispatcher):
                    objects[f"{module.name}.{name}"] = getattr(value, "_run", value)
    return objects


def used_by(function) -> list:
    """The globals and closure variables that a function reads."""
    read = inspect.getclosurevars(function)
    return [*read.globals.values(), *read.nonlocals.values()]


def test_kernels_call_only_helpers():
    """A kernel that another one calls would be in two machine codes, of which either might run."""
    functions = compiled_objects()
    assert len(functions) > 40
    for name, value in functions.items():
        is_kernel = isinstance(value._cache, KernelCache)
        assert is_kernel != bool(value.targetoptions.get("forceinline")), name
        called = [v for v in used_by(value.py_func) if isinstance(v, Dispatcher)]
        assert all(v.targetoptions.get("forceinline") for v in called), name


def test_names_of_cached_kernels_hold_no_addresses():
    """An address differs in each process, so that no later start would find the file."""
    for module in {value.__module__ for value in compiled_objects().values()}:
        assert not [part for part in _sources(module) if " at 0x" in part], module

"""The cache of compiled kernels: when a kernel is compiled, what bad caches do, what they hold."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from numba.core.dispatcher import Dispatcher

import kge_torchrec
from kge_torchrec.kernels import jit
from kge_torchrec.kernels.parallel import BlockKernel

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "__init__.py": "",
    "factors.py": "FACTOR = 2.0\n",
    "inner.py": """
from kge_torchrec.kernels.jit import helper

@helper
def scaled(x):
    return 3.0 * x
""",
    "outer.py": """
from kge_torchrec.kernels.jit import kernel
from toy_kernels.factors import FACTOR
from toy_kernels.inner import scaled

@kernel
def run(x):
    return scaled(x) * FACTOR
""",
}


class Toy:
    """A kernel, a helper that it calls, and a constant that it reads, in a file each."""

    def __init__(self, folder: Path):
        self.package, self.cache = folder / "toy_kernels", folder / "cache"
        self.package.mkdir()
        for name, text in FILES.items():
            (self.package / name).write_text(text)

    def start(self, x: float = 5.0) -> float:
        """Return the result of the kernel in a new process."""
        for name in [name for name in sys.modules if name.startswith("toy_kernels")]:
            del sys.modules[name]
        for function in (jit.folder, jit._sources, jit._say_once):
            function.cache_clear()
        importlib.invalidate_caches()
        self.kernel = importlib.import_module("toy_kernels.outer").run
        return self.kernel(x)

    @property
    def is_compiled(self) -> bool:
        """Return whether the last start compiled the kernel."""
        return not self.kernel.stats.cache_hits

    def replace(self, file: str, old: str, new: str) -> None:
        path = self.package / file
        path.write_text(path.read_text().replace(old, new))

    @property
    def files(self) -> list[Path]:
        return sorted(self.cache.rglob("*.kernel"))


@pytest.fixture
def toy(tmp_path, monkeypatch):
    made = Toy(tmp_path)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(made.cache))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(tmp_path)
    yield made
    for function in (jit.folder, jit._sources, jit._say_once):
        function.cache_clear()


def test_kernel_is_compiled_once(toy, caplog):
    caplog.set_level(logging.INFO)
    assert toy.start() == 30 and toy.is_compiled
    assert [r.getMessage() for r in caplog.records] == ["compiling kernels, once per machine"]
    caplog.clear()
    assert toy.start() == 30 and not toy.is_compiled
    assert caplog.records == [] and len(toy.files) == 1
    toy.kernel(5)  # of other types: processes that compile both at once write different files
    assert len(toy.files) == 2


@pytest.mark.parametrize(
    "file, old, new, result",
    [("outer.py", "scaled(x) *", "scaled(x) +", 17), ("inner.py", "3.0", "4.0", 40),
     ("factors.py", "2.0", "7.0", 105)],
)  # fmt: skip
def test_kernel_is_compiled_again_after_a_change(toy, file, old, new, result):
    toy.start()
    toy.replace(file, old, new)
    assert toy.start() == result and toy.is_compiled
    toy.replace(file, new, old)  # two versions share the folder
    assert toy.start() == 30 and not toy.is_compiled


@pytest.mark.parametrize("damage", [
    lambda content: content[:20],
    lambda content: content[:-2000] + bytes([content[-2000] ^ 1]) + content[-1999:],
])  # fmt: skip
def test_damaged_file_is_compiled_again(toy, damage):
    toy.start()
    (file,) = toy.files
    content = file.read_bytes()
    file.write_bytes(damage(content))
    assert toy.start() == 30 and toy.is_compiled
    assert toy.start() == 30 and not toy.is_compiled


def started(code: str, *paths: Path, **environment: str) -> tuple[str, list[str]]:
    """The output of a new process, and its lines on stderr."""
    kept = {
        key: value for key, value in os.environ.items() if key not in ("XDG_CACHE_HOME", "RANK")
    }
    path = os.pathsep.join(map(str, paths))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=paths[0], capture_output=True, text=True, check=False,
        env=kept | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"} | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr.splitlines()


RUN = "from toy_kernels.outer import run; print(run(5.0), run(5))"


def test_full_disk_disables_only_the_cache(toy, tmp_path):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"
    out, lines = started(f"{limit}; {RUN}", tmp_path, ROOT)
    assert out == "30.0 30.0"
    (line,) = lines
    assert line.startswith("kernels are compiled at every start: ") and str(toy.cache) in line
    assert list(toy.cache.rglob("*")) == [toy.cache / "kge_torchrec"]


@pytest.mark.slow
def test_without_a_writable_folder_there_is_no_cache(toy, tmp_path):
    """A package and a home that cannot be written."""
    copy = tmp_path / "copy"
    shutil.copytree(
        ROOT / "kge_torchrec", copy / "kge_torchrec", ignore=shutil.ignore_patterns("__pycache__")
    )
    (copy / "kge_torchrec" / "__pycache__").touch()  # root may write into any folder, into no file
    out, lines = started(RUN, tmp_path, copy, HOME=os.devnull, NUMBA_CACHE_DIR="")
    assert out == "30.0 30.0"
    (line,) = lines
    assert "no folder can be written" in line and "NUMBA_CACHE_DIR" in line
    home = tmp_path / "home"
    assert started(RUN, tmp_path, copy, HOME=str(home), NUMBA_CACHE_DIR="") == ("30.0 30.0", [])
    assert len(list(home.rglob("*.kernel"))) == 2


# The kernels of the package


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
            for name, value in vars(importlib.import_module(module.name)).items():
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
        is_kernel = isinstance(value._cache, jit.KernelCache)
        assert is_kernel != bool(value.targetoptions.get("forceinline")), name
        called = [v for v in used_by(value.py_func) if isinstance(v, Dispatcher)]
        assert all(v.targetoptions.get("forceinline") for v in called), name


def test_names_of_cached_kernels_hold_no_addresses():
    """An address differs in each process, so that no later start would find the file."""
    for module in {value.__module__ for value in compiled_objects().values()}:
        assert not [part for part in jit._sources(module) if " at 0x" in part], module

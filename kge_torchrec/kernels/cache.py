"""Compiled kernels on disk: a file per kernel and signature, named by everything it depends on.

The name of a file is a hash of the source files and constants that the kernel uses, the versions of
Python, numba and LLVM, the processor, and the types of the arguments. So a file is never out of
date, and two versions of the package can share a folder. The first 32 bytes of a file are a hash
of the rest. A file that cannot be read is compiled again; a file that cannot be written is
reported once, and the program continues without it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core.caching import _Cache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

log = logging.getLogger(__name__)

_PACKAGE = __name__.partition(".")[0]
_DIGEST = 32  # bytes
_UNUSED_DAYS = 30  # after which a file of another version is removed


class KernelCache(_Cache):
    """The compiled forms of one kernel, with the interface that numba's dispatcher calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self._enabled = function, True

    @property
    def cache_path(self) -> str | None:
        path = folder()
        return None if path is None else str(path)

    def enable(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    def flush(self) -> None:
        """Do nothing: a file is never out of date."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the compiled form, or None where it must be compiled."""
        target_context.refresh()
        place = self._place(sig, target_context.codegen())
        compiled = None if place is None else _read(place, target_context)
        if compiled is None:
            _say_once("compiling kernels, once per machine", logging.INFO)
        return compiled

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write a compiled form to disk; report once if that fails."""
        place = self._place(sig, data.codegen)
        if place is None or data.library.has_dynamic_globals:
            return
        content = dumps(data._reduce())
        try:
            _write(place, hashlib.sha256(content).digest() + content)
        except OSError as error:
            _say_once(f"kernels are compiled at every start: {place.parent}: {error.strerror}")
            return
        _remove_unused(place)

    def _place(self, sig: Any, codegen: Any) -> Path | None:
        """Return the file of a signature; None without a folder or without source files."""
        where = folder() if self._enabled else None
        if where is None:
            return None
        try:
            source = fingerprint(self._function)
        except OSError as error:
            _say_once(f"kernels are compiled at every start: no source file: {error}")
            return None
        key = hashlib.sha256(repr((source, str(sig), codegen.magic_tuple())).encode()).hexdigest()
        module = self._function.__module__.removeprefix(f"{_PACKAGE}.")
        return where / f"{module}.{self._function.__qualname__}-{key[:32]}.kernel"


@cache
def folder() -> Path | None:
    """Return the first folder for compiled kernels that can be written; None if there is none.

    NUMBA_CACHE_DIR comes first, then the package's own folder, then the user's cache.
    """
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    users = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser(os.path.join("~", ".cache"))
    own = Path(__file__).parents[1] / "__pycache__"
    places = [Path(chosen, _PACKAGE)] if chosen else []
    for place in (*places, own / "kernels", Path(users, _PACKAGE, "kernels")):
        try:
            place.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=place).close()
        except OSError:
            continue
        return place
    _say_once(
        "kernels are compiled at every start: no folder can be written, neither "
        f"{own} nor {users}. Set NUMBA_CACHE_DIR to a writable folder."
    )
    return None


def fingerprint(function: Callable[..., Any]) -> str:
    """Return a hash of the sources and constants from which a function is compiled.

    It covers the source files of the function and of all functions of this package that it uses,
    directly or not, and the constants that they read.

    Raises:
        OSError: a source file cannot be read.
    """
    visited: set[Any] = set()
    parts = {f"file {_file_hash(str(file))}" for file in _OWN_FILES} | {repr(_VERSIONS)}
    waiting = [_python_function(function)]
    while waiting:
        current = waiting.pop()
        if current in visited:
            continue
        visited.add(current)
        parts.add(f"file {_file_hash(current.__code__.co_filename)}")
        for name, value in _globals_of(current):
            value = _python_function(value)
            if isinstance(value, FunctionType):
                if value.__module__.partition(".")[0] == function.__module__.partition(".")[0]:
                    waiting.append(value)
            elif isinstance(value, ModuleType):
                if value.__name__.partition(".")[0] == _PACKAGE and value.__file__:
                    parts.add(f"file {_file_hash(value.__file__)}")
            elif isinstance(value, bool | int | float | str | tuple | np.generic):
                parts.add(f"{name} = {value!r}")
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()


_OWN_FILES = [Path(__file__).with_name(name) for name in ("cache.py", "jit.py")]
_VERSIONS = (sys.version_info[:3], numba.__version__, llvmlite.__version__, np.__version__)


def _python_function(value: Any) -> Any:
    """Return the Python function behind a dispatcher or an intrinsic of numba."""
    return getattr(value, "py_func", getattr(value, "_defn", value))


def _globals_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the globals and closure variables that a function reads, by name."""
    waiting: list[CodeType] = [function.__code__]
    while waiting:
        code = waiting.pop()
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        for name in code.co_names:
            if name in function.__globals__:
                yield name, function.__globals__[name]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield name, cell.cell_contents


@cache
def _file_hash(file: str) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _read(place: Path, target_context: Any) -> Any:
    """Return a compiled form from its file; None where the file is missing or damaged."""
    try:
        content = place.read_bytes()
    except OSError:
        return None
    digest, content = content[:_DIGEST], content[_DIGEST:]
    if hashlib.sha256(content).digest() != digest:
        return None
    return CompileResult._rebuild(target_context, *pickle.loads(content))


def _write(place: Path, content: bytes) -> None:
    """Write a file as a whole or not at all."""
    partial = place.with_name(f".{place.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(place)
    finally:
        partial.unlink(missing_ok=True)


def _remove_unused(place: Path) -> None:
    """Remove old files of the same kernel, from other versions of its source."""
    name, oldest = place.name.rpartition("-")[0], time.time() - _UNUSED_DAYS * 86400
    for file in place.parent.glob(f"{name}-*.kernel"):
        try:
            if file != place and file.stat().st_mtime < oldest:
                file.unlink()
        except OSError:  # another process was faster
            continue


@cache
def _say_once(message: str, level: int = logging.WARNING) -> None:
    """Log a message once per process, on the first rank."""
    if os.environ.get("RANK", "0") == "0":
        log.log(level, message)

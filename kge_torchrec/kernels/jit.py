"""Decorators that compile functions with numba, and compiled code on disk.

    @helper  called by kernels only; its code becomes a part of each kernel that calls it
    @kernel  called from Python, on one thread; ``parallel.block_kernel`` takes several

A helper may take other fastmath flags than the kernel that calls it: each instruction keeps the
flags of the function it was written in.

The compiled code of a kernel and signature is a file, named by a hash of what it is made from, so a
file is never out of date and versions of the package can share a folder. numba's own cache keeps an
index of a kernel's files instead, in which one of two processes that compile at once can find the
other's code. A file begins with a hash of the rest; a damaged one is compiled again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from numba import njit
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.dispatcher import Dispatcher
from numba.core.serialize import dumps

log = logging.getLogger(__name__)

# Fastmath flags of LLVM. A sum may run in vector lanes; a product may be fused with a sum; both.
SUMS = frozenset({"reassoc", "nsz"})
FUSED = frozenset({"contract"})
FUSED_SUMS = SUMS | FUSED
EXACT: frozenset[str] = frozenset()

_PACKAGE = Path(__file__).parents[1]
_VERSIONS = sys.version_info[:3], numba.__version__, llvmlite.__version__, np.__version__
_DIGEST = 32  # bytes


def helper(function: Callable[..., Any] | None = None, *, fastmath: frozenset[str] = EXACT) -> Any:
    """Compile a function that only kernels call.

    LLVM inlines it into every caller. Otherwise each caller would hold a copy of its own, and the
    copy that runs would depend on which kernel was loaded first: a process that compiles and a
    process that reads the cache would compute different last digits.
    """
    if function is None:
        return partial(helper, fastmath=fastmath)
    return _compiled(
        function, fastmath, forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True
    )


def kernel(
    function: Callable[..., Any] | None = None,
    *,
    fastmath: frozenset[str] = EXACT,
    parallel: bool = False,
) -> Any:
    """Compile a function that Python calls, and keep the result on disk.

    No other kernel may call it (see ``helper``). With ``parallel``, ``prange`` uses threads.
    """
    if function is None:
        return partial(kernel, fastmath=fastmath, parallel=parallel)
    compiled = _compiled(function, fastmath, parallel=parallel, no_cfunc_wrapper=True)
    compiled._cache = KernelCache(function)
    return compiled


def _compiled(function: Callable[..., Any], fastmath: frozenset[str], **options: Any) -> Any:
    """Return numba's dispatcher, with every flag set: numba takes a missing one from the caller."""
    flags = set(fastmath) or False
    return njit(nogil=True, error_model="numpy", fastmath=flags, **options)(function)


class KernelCache(NullCache):
    """The compiled forms of one kernel, a file each, as numba's dispatcher calls them."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._module, self._name = function.__module__, function.__qualname__

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the compiled form, or None where it must be compiled."""
        target_context.refresh()
        place = self._place(sig, target_context.codegen())
        try:
            content = b"" if place is None else place.read_bytes()
        except OSError:
            content = b""
        if hashlib.sha256(content[_DIGEST:]).digest() == content[:_DIGEST]:
            return CompileResult._rebuild(target_context, *pickle.loads(content[_DIGEST:]))
        _say_once("compiling kernels, once per machine", logging.INFO)
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write a compiled form to disk, as a whole or not at all; report once if that fails."""
        place = self._place(sig, data.codegen)
        if place is None or data.library.has_dynamic_globals:
            return
        content = dumps(data._reduce())
        unfinished = place.with_name(f".{place.name}.{os.getpid()}.partial")
        try:
            unfinished.write_bytes(hashlib.sha256(content).digest() + content)
            unfinished.replace(place)
        except OSError as error:
            _say_once(f"kernels are compiled at every start: {place.parent}: {error.strerror}")
        finally:
            unfinished.unlink(missing_ok=True)

    def _place(self, sig: Any, codegen: Any) -> Path | None:
        """Return the file of a signature; None without a folder or without source files."""
        where = folder()
        if where is None:
            return None
        try:
            sources = _sources(self._module)
        except OSError as error:
            _say_once(f"kernels are compiled at every start: no source file: {error}")
            return None
        made_from = *sorted(sources), _VERSIONS, str(sig), codegen.magic_tuple()
        key = hashlib.sha256(repr(made_from).encode()).hexdigest()
        module = self._module.removeprefix(f"{_PACKAGE.name}.")
        return where / f"{module}.{self._name}-{key[:32]}.kernel"


@cache
def _sources(module: str) -> frozenset[str]:
    """Return what a module's kernels are made from: hashes of files, and constants."""
    parts: set[str] = set()
    for name, value in vars(sys.modules[module]).items():
        if isinstance(value, Dispatcher) and value.__module__ != module:
            parts |= _sources(value.__module__)
        elif _is_constant(value) and name[:2] != "__":
            parts.add(f"{name} = {value!r}")
    for file in (vars(sys.modules[module]).get("__file__") or "", *_ALL_USE):
        parts.add(hashlib.sha256(Path(file).read_bytes()).hexdigest())
    return frozenset(parts)


def _is_constant(value: Any) -> bool:
    """Whether a value's text is the same in each process, unlike that of a function."""
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return isinstance(value, bool | int | float | str | np.generic)


_ALL_USE = __file__, str(Path(__file__).with_name("parallel.py"))  # the files that make kernels


@cache
def folder() -> Path | None:
    """Return the first folder for compiled kernels that can be written; None if there is none.

    NUMBA_CACHE_DIR comes first, then the package's own folder, then the user's cache.
    """
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    users = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser(os.path.join("~", ".cache"))
    own = _PACKAGE / "__pycache__"
    places = [Path(chosen, _PACKAGE.name)] if chosen else []
    for place in (*places, own / "kernels", Path(users, _PACKAGE.name, "kernels")):
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


@cache
def _say_once(message: str, level: int = logging.WARNING) -> None:
    """Log a message once per process, on the first rank."""
    if os.environ.get("RANK", "0") == "0":
        log.log(level, message)

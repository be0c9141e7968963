"""Decorators that compile functions with numba, threads of kernels, and compiled code on disk.

    @helper           called by kernels only; its code becomes a part of each kernel that calls it
    @kernel           called from Python, on one thread
    @block_kernel(16) called from Python, over blocks of 16 items on several threads

A helper may take other fastmath flags than the kernel that calls it. Each instruction keeps the
flags of the function it was written in.

A block kernel has one machine code for one thread and for several. numba compiles a parallel loop
together with its body, several times over: seconds per kernel, and a second machine code whose last
digits may differ. Here one parallel loop serves all kernels (``_share``). It calls a kernel's body
by its address, and so does a process of one thread. The arguments of a body lie in a struct on the
caller's stack. All calls follow numba's calling convention, so that exceptions travel as usual.

The compiled code of a kernel and signature is a file. Its name is a hash of the source files and
constants that the kernel uses, the versions of Python, numba and LLVM, the processor, and the types
of the arguments. So a file is never out of date, and two versions of the package can share a
folder. The first 32 bytes of a file are a hash of the rest. A file that cannot be read is compiled
again; a file that cannot be written is reported once, and the program continues without it.
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
from functools import cache, partial
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import llvmlite
import numba
import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.core.caching import _Cache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps
from numba.extending import intrinsic

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
    parts = {f"file {_file_hash(__file__)}", repr(_VERSIONS)}
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


# Fastmath flags of LLVM. A sum may run in vector lanes; a product may be fused with a sum; both.
SUMS = frozenset({"reassoc", "nsz"})
FUSED = frozenset({"contract"})
FUSED_SUMS = SUMS | FUSED
EXACT: frozenset[str] = frozenset()

# Work below this many elements is done before a second thread wakes.
SERIAL_ELEMENTS = 1 << 17


def helper(function: Callable[..., Any] | None = None, *, fastmath: frozenset[str] = EXACT) -> Any:
    """Compile a function that only kernels call.

    LLVM inlines it into every caller. Otherwise each caller would hold a copy of its own, and the
    copy that runs would depend on which kernel was loaded first: a process that compiles and a
    process that reads the cache would compute different last digits.

    Args:
        function: The function; None where the decorator has arguments.
        fastmath: Flags of LLVM for its instructions.
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

    No other kernel may call it (see ``helper``).

    Args:
        function: The function; None where the decorator has arguments.
        fastmath: Flags of LLVM for its instructions.
        parallel: Whether ``prange`` uses several threads.
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


_BODY = types.int64, types.int64, types.int64  # start, stop, address of the arguments
_SHARE = types.int64, types.int64, types.int64, types.int64  # as ``_share``


def block_kernel(block: int, *, fastmath: frozenset[str] = EXACT) -> Callable[..., BlockKernel]:
    """Compile ``function(start, stop, *args)``, which handles the items from start to stop.

    Args:
        block: Items that a thread takes at once.
        fastmath: Flags of LLVM for the function's instructions.

    Returns:
        A decorator.
    """
    return partial(BlockKernel, block=block, fastmath=fastmath)


def named_kernel(
    name: str, function: Callable[..., Any], block: int, *, fastmath: frozenset[str] = EXACT
) -> BlockKernel:
    """Compile a function that was made for one choice, such as an optimizer, under its own name.

    The function reads the choice from its closure, so that a run compiles what it uses and no more.
    numba makes symbols from names: two functions of one name would be taken for each other.
    """
    function.__name__ = function.__qualname__ = name
    return BlockKernel(function, block, fastmath)


class BlockKernel:
    """A kernel over a number of items, on as many threads as the work is worth."""

    def __init__(self, function: Callable[..., Any], block: int, fastmath: frozenset[str]) -> None:
        body, self._block = helper(function, fastmath=fastmath), block

        def run(share: int, count: int, *args: Any) -> None:
            # numba itself passes the typing context
            _run(body, share, count, block, args)  # type: ignore[call-arg]

        run.__module__ = function.__module__
        run.__name__ = run.__qualname__ = f"{function.__qualname__}_in_blocks"  # see named_kernel
        self._run = kernel(run)

    def __call__(self, count: int, work: int, *args: Any) -> None:
        """Run the kernel on the items from 0 to count.

        Args:
            count: Number of items.
            work: Elements that are read or written, from which the number of threads follows.
            args: The arguments after start and stop.
        """
        import torch  # imported late: reading triples does not need it

        most = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]  # set when loaded
        threads = min(torch.get_num_threads(), most, -(-count // self._block))
        if threads <= 1 or work < SERIAL_ELEMENTS:
            # A process of one thread never touches numba's threads: starting them slows torch's
            # operators down by a third.
            self._run(0, count, *args)
            return
        numba.set_num_threads(threads)
        self._run(_address_of_share(), count, *args)


@cache
def _address_of_share() -> int:
    """Return the address of ``_share``; loading it starts numba's threads."""
    _share.compile(_SHARE)
    compiled = _share.overloads[_SHARE]
    return compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)


@kernel(parallel=True)
def _share(body: int, args: int, count: int, block: int) -> None:
    """Share the items from 0 to count among numba's threads, a block at a time."""
    for number in prange((count + block - 1) // block):
        start = np.int64(number) * block  # prange counts in uint64
        _call(body, start, min(start + block, count), args)  # type: ignore[call-arg]


@intrinsic
def _call(typing_context: Any, body: Any, start: Any, stop: Any, args: Any) -> Any:
    """Call a body by its address."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        _call_address(context, builder, values[0], _BODY, values[1:])
        return context.get_dummy_value()

    return types.none(types.int64, *_BODY), generate


@intrinsic
def _run(typing_context: Any, body: Any, share: Any, count: Any, block: Any, args: Any) -> Any:
    """Run a body on the items from 0 to count, by ``share`` if that is an address, not 0."""
    body_type = body.get_call_type(typing_context, (types.int64, types.int64, *args.types), {})

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        share, count, block, packed = values[1:]
        fields = cgutils.unpack_tuple(builder, packed, len(args.types))
        struct = ir.LiteralStructType([value.type for value in fields])
        memory = cgutils.alloca_once(builder, struct)
        for place, value in enumerate(fields):
            builder.store(value, cgutils.gep_inbounds(builder, memory, 0, place))
        function = _with_packed_arguments(context, builder, body, body_type, struct)
        word = ir.IntType(64)
        addresses = builder.ptrtoint(function, word), builder.ptrtoint(memory, word)
        with builder.if_else(builder.icmp_unsigned("==", share, word(0))) as (serial, parallel):
            with serial:
                _call_address(context, builder, addresses[0], _BODY, [word(0), count, addresses[1]])
            with parallel:
                _call_address(context, builder, share, _SHARE, [*addresses, count, block])
        return context.get_dummy_value()

    return types.none(body, types.int64, types.int64, types.int64, args), generate


def _with_packed_arguments(
    context: Any, builder: ir.IRBuilder, body: Any, body_type: Any, struct: ir.LiteralStructType
) -> ir.Function:
    """Return a function (start, stop, address) that calls a body with the arguments there."""
    convention = context.call_conv
    form = convention.get_function_type(types.none, _BODY)
    function = ir.Function(builder.module, form, f"{builder.function.name}.packed")
    function.linkage = "internal"
    function.attributes.add("noinline")
    convention.decorate_function(function, ["start", "stop", "address"], _BODY)
    inner = ir.IRBuilder(function.append_basic_block("entry"))
    start, stop, address = convention.get_arguments(function)
    memory = inner.inttoptr(address, struct.as_pointer())
    loaded = inner.load(memory)
    fields = [
        _borrowed(context, inner, kind, inner.extract_value(loaded, place))
        for place, kind in enumerate(body_type.args[2:])
    ]
    context.get_function(body, body_type)(inner, [start, stop, *fields])
    convention.return_value(inner, context.get_dummy_value())
    return function


def _borrowed(context: Any, builder: ir.IRBuilder, kind: Any, value: Any) -> Any:
    """Return an argument without its reference count, if it is an array.

    The caller holds the array. Every row of it that a body looks at would count references, and
    threads would wait for each other's counts: two were slower than one.
    """
    if not isinstance(kind, types.Array):
        return value
    array = context.make_array(kind)(context, builder, value)
    array.meminfo = cgutils.get_null_value(array.meminfo.type)
    return array._getvalue()


def _call_address(
    context: Any, builder: ir.IRBuilder, address: Any, kinds: Any, values: Any
) -> None:
    """Call a function without result by its address; pass its exception on."""
    convention = context.call_conv
    kind = convention.get_function_type(types.none, kinds)
    function = builder.inttoptr(address, kind.as_pointer())
    status, _ = convention.call_function(builder, function, types.none, kinds, values)
    with cgutils.if_unlikely(builder, status.is_error):
        convention.return_status_propagate(builder, status)

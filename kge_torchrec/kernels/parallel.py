"""Threads of kernels: the same machine code serves one thread and several.

    @block_kernel(16)  called from Python, over blocks of 16 items on several threads

numba compiles a parallel loop together with its body, several times over: seconds per kernel, and a
second machine code whose last digits may differ. Here one parallel loop (``_share``) calls the body
of every kernel by its address, and so does a process of one thread. A body's arguments lie in a
struct on the caller's stack; calls follow numba's convention, so exceptions travel as usual.

Brings: Python's threads take 0.1 to 0.2 ms to wake per call; a kernel of 0.38 ms takes 0.33 to 0.46
ms on two of them and 0.21 ms here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from kge_torchrec.kernels.jit import EXACT, helper, kernel

SERIAL_ELEMENTS = 1 << 17  # work below this many elements is done before a second thread wakes

_BODY = types.int64, types.int64, types.int64  # start, stop, address of the arguments
_SHARE = types.int64, types.int64, types.int64, types.int64  # as ``_share``


def block_kernel(
    block: int, *, name: str | None = None, fastmath: frozenset[str] = EXACT
) -> Callable[..., BlockKernel]:
    """Compile ``function(start, stop, *args)``, which handles the items from start to stop.

    Args:
        block: Items that a thread takes at once.
        name: A name for a function that reads a choice from its closure, such as an optimizer, so
            that a run compiles what it uses. numba takes functions of one name for each other.
        fastmath: Flags of LLVM for the function's instructions.
    """
    return partial(BlockKernel, block=block, name=name, fastmath=fastmath)


class BlockKernel:
    """A kernel over a number of items, on as many threads as the work is worth."""

    def __init__(
        self, function: Callable[..., Any], block: int, name: str | None, fastmath: frozenset[str]
    ) -> None:
        if name is not None:
            function.__name__ = function.__qualname__ = name
        body, self._block = helper(function, fastmath=fastmath), block

        def run(share: int, count: int, *args: Any) -> None:
            # numba itself passes the typing context
            _run(body, share, count, block, args)  # type: ignore[call-arg]

        run.__module__ = function.__module__
        run.__name__ = run.__qualname__ = f"{function.__qualname__}_in_blocks"  # see block_kernel
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

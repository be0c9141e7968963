"""Writing pieces of tensors into the file of a rank, from this process or from a forked one.

A child shares the memory of its parent until one of them changes a page, so a fork takes
milliseconds and needs memory only for pages that training changes before they are written.  The
child calls nothing but zlib, numpy and the system: locks and threads of torch do not survive a
fork.  It ends with its parent, and holds none of the parent's files, sockets or locks.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import signal
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.errors import first_line
from kge_torchrec.training.checkpoint_index import bytes_of
from kge_torchrec.training.checkpoint_storage import Piece

Answer = dict[str, Any]  # {"crc32", "seconds", "extra"}, or {"nan": name}, or {"error": text}
_BLOCK = 1 << 20  # bytes that stay in the cache of a core while they are checked and written
_EXPONENT_BITS = {torch.float16: 5, torch.bfloat16: 8, torch.float32: 8, torch.float64: 11}
_SAMPLES = 8  # of the memory of a child
_DEATH_SIGNAL, _DONT_NEED, _COLLAPSE = 1, 4, 25  # PR_SET_PDEATHSIG, MADV_DONTNEED, MADV_COLLAPSE
_HUGE, _JOINED_PER_SECOND = 2 << 20, 256 << 20  # bytes; where memory is free it is 2 GiB

log = logging.getLogger(__name__)


class Block(NamedTuple):
    """A piece as it is written."""

    name: str
    start: int  # first byte in the file
    numbers: memoryview | Tensor  # a tensor is copied to main memory when its turn comes
    exponent_bits: int  # 0: not floating point
    word: int  # bytes per element


class _NotFinite(Exception):
    """A tensor has NaN or infinity; the argument is its name."""


# Pieces


def blocks(pieces: Sequence[Piece]) -> list[Block]:
    """Return pieces as they are written, without a copy."""
    return [_block(piece, piece.values) for piece in pieces]


def _block(piece: Piece, numbers: memoryview | Tensor) -> Block:
    dtype = piece.values.dtype
    bits = _EXPONENT_BITS.get(dtype, 0)
    return Block(piece.name, piece.start, numbers, bits, dtype.itemsize)


def copied_blocks(pieces: Sequence[Piece]) -> list[Block]:
    """Return pieces with copies of their values in main memory, pinned for those of a GPU."""
    copies = []
    for piece in pieces:
        values, on_cuda = piece.values, piece.values.device.type == "cuda"
        copy = _empty(values, pinned=on_cuda)
        copies.append(copy.copy_(values, non_blocking=on_cuda))
    if any(piece.values.device.type == "cuda" for piece in pieces):
        torch.cuda.synchronize()
    return [_block(p, bytes_of(copy)) for p, copy in zip(pieces, copies, strict=True)]


def _empty(values: Tensor, pinned: bool) -> Tensor:
    if pinned:
        with suppress(RuntimeError):  # not that much memory can be pinned
            return torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return torch.empty(values.shape, dtype=values.dtype)


def fork_safe_blocks(pieces: Sequence[Piece]) -> list[Block]:
    """Return pieces whose values a fork keeps as they are.

    Memory that is shared with other processes or with a file is copied: a child would see changes
    in it.
    """
    shared, results = _shared_memory(), []
    for piece in pieces:
        numbers = bytes_of(piece.values)
        first = _address(numbers)
        if any(low < first + len(numbers) and first < high for low, high in shared):
            numbers = memoryview(bytes(numbers))
        results.append(_block(piece, numbers))
    return results


def _shared_memory() -> list[tuple[int, int]]:
    """Return the addresses of this process that are mapped from files or shared."""
    results = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        place, access, _, _, inode, *_ = line.split(None, 5)
        if access[3] == "s" or inode != "0":
            low, _, high = place.partition("-")
            results.append((int(low, 16), int(high, 16)))
    return results


def _address(numbers: Any) -> int:
    return np.frombuffer(numbers, np.uint8).ctypes.data if len(numbers) else 0


# Writing


def answer_of(write: Callable[[], list[int]]) -> Answer:
    """Return the checksums, seconds and extra memory of writing, or why it failed."""
    start = time.perf_counter()
    try:
        checksums = write()
    except _NotFinite as error:
        return {"nan": str(error)}
    except Exception as error:
        return {"error": first_line(error)}
    return {"crc32": checksums, "seconds": time.perf_counter() - start, "extra": 0}


def write_blocks(
    path: Path,
    parts: Sequence[Block],
    each: Callable[..., Any] = map,
    after: Callable[[Block, int], object] = lambda block, handle: None,
    ends: threading.Event | None = None,
) -> list[int]:
    """Write blocks into a new file; return their checksums.

    Args:
        path: The file.
        parts: What to write.
        each: Applies a function to every block.
        after: Called after each block, with the handle of the file.
        ends: Ends writing with an error when it is set.

    Raises:
        _NotFinite: A block has NaN or infinity.
        OSError: The file cannot be written.
    """
    with path.open("wb") as file:
        handle = file.fileno()

        def write(block: Block) -> int:
            if ends is not None and ends.is_set():
                raise InterruptedError("training ended")
            checksum = _write(block, handle)
            after(block, handle)
            return checksum

        checksums = list(each(write, parts))
        os.fsync(handle)
    return checksums


def _write(block: Block, handle: int) -> int:
    numbers = block.numbers if isinstance(block.numbers, memoryview) else bytes_of(block.numbers)
    checksum = 0
    for first in range(0, len(numbers), _BLOCK):
        some = numbers[first : first + _BLOCK]
        if block.exponent_bits and not _is_finite(some, block):
            raise _NotFinite(block.name.removeprefix("engine."))
        checksum = zlib.crc32(some, checksum)
        start = block.start + first
        while some:
            written = os.pwrite(handle, some, start)
            some, start = some[written:], start + written
    return checksum


def _is_finite(numbers: memoryview, block: Block) -> bool:
    """Return whether no number has the largest exponent, which NaN and infinity have."""
    without_sign = np.frombuffer(numbers, f"u{block.word}") << 1
    largest = int(without_sign.max()) >> (8 * block.word - block.exponent_bits)
    return largest < (1 << block.exponent_bits) - 1


# A forked process


def forked(work: Callable[[], Answer], sender: int) -> int:
    """Fork a process that sends the answer of ``work`` through a pipe; return its number."""
    parent, (prctl, _) = os.getpid(), _system_calls()
    with _signals_blocked(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # this child needs no other thread
        child = os.fork()
        if child:
            return child
        try:  # signals stay blocked here
            gc.disable()
            prctl(_DEATH_SIGNAL, signal.SIGKILL)
            if os.getppid() == parent:
                _close_files(but=sender)
                with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
                    file.write("1000")  # where memory ends, this process ends, not training
                text = json.dumps(work()).encode()
                while text:
                    text = text[os.write(sender, text) :]
        finally:
            os._exit(0)


@cache  # looked up before the fork: a lock of the loader might be held in the child
def _system_calls() -> tuple[Any, Any]:
    """Return prctl and madvise of the C library."""
    library = ctypes.CDLL(None)
    return library.prctl, library.madvise


@contextmanager
def _signals_blocked() -> Iterator[None]:
    numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _close_files(but: int) -> None:
    """Close all files and sockets but one, and let the standard streams lead nowhere."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) != but:
            with suppress(OSError):
                os.close(int(name))
    while os.open(os.devnull, os.O_RDWR) < 2:
        pass


def child_answer(path: Path, held: list[Block]) -> Answer:
    """Write blocks in a forked process, which frees each block afterwards."""
    extra, count, every = 0, 0, max(1, len(held) // _SAMPLES)
    frees = not _overlap(held)

    def release(block: Block, handle: int) -> None:
        nonlocal extra, count
        count += 1
        if len(block.numbers) < _BLOCK:
            return
        if count % every == 0:
            extra = max(extra, _private_bytes())
        os.fdatasync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)  # room for pages of training
        if frees:
            _free(block.numbers)

    answer = answer_of(lambda: write_blocks(path, held, after=release))
    return {**answer, "extra": max(extra, _private_bytes())}


def _overlap(held: Sequence[Block]) -> bool:
    """Return whether two blocks have memory in common, as those of one tensor with two names."""
    ranges = sorted(places_of(held))
    return any(a + size > b for (a, size), (b, _) in pairwise(ranges))


def _private_bytes() -> int:
    """Return the memory of this process that it shares with no other process; 0 if unknown."""
    file = Path("/proc/self/smaps_rollup")
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


def _free(numbers: Any) -> None:
    """Free whole pages of a forked process, so that training changes them without a copy."""
    page, first = os.sysconf("SC_PAGE_SIZE"), _address(numbers)
    low, high = -(-first // page) * page, (first + len(numbers)) // page * page
    if low < high:
        _, madvise = _system_calls()
        madvise(ctypes.c_void_p(low), ctypes.c_size_t(high - low), _DONT_NEED)


def places_of(held: Sequence[Block]) -> list[tuple[int, int]]:
    """Return the address and the bytes of blocks."""
    return [(_address(block.numbers), len(block.numbers)) for block in held]


def join_huge_pages(places: Sequence[tuple[int, int]]) -> None:
    """Join the huge pages again that training has split since a fork, as long as it is quick.

    The kernel splits a huge page that a child shares when it changes, and does not join it soon.
    Lookups of rows in small pages take longer.
    """
    policy = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not policy.is_file() or "[never]" in policy.read_text(encoding="utf-8"):
        return
    _, madvise = _system_calls()
    for first, size in places:
        low, high = -(-first // _HUGE) * _HUGE, (first + size) // _HUGE * _HUGE
        begun = time.perf_counter()
        if low < high and madvise(ctypes.c_void_p(low), ctypes.c_size_t(high - low), _COLLAPSE):
            return  # an older kernel, or no whole pages are free
        if time.perf_counter() - begun > max(size, _HUGE) / _JOINED_PER_SECOND:
            return  # the kernel has to move other pages first


def exit_code(child: int) -> int:
    """Wait for a forked process; return its exit code, negative for a signal."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except ChildProcessError:  # somebody else has waited for it
        return 0

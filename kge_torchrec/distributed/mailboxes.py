"""Messages between the processes of one host through shared memory.

Every process has a mailbox that only it writes: progress counters, an entry for each of the latest
messages, and room for their bytes.  Messages are collective and numbered: message n of a process
holds a (possibly empty) part for every process.  A process writes a message without waiting, and
all processes read messages in order.  Room is reused after all processes have read it.

The memory is anonymous (memfd).  It has no name that a killed process could leave behind, and the
size of /dev/shm does not limit it.  Other processes map it as /proc/PID/fd/FD, which the kernel
allows within one user and PID namespace.  A random token verifies that it is the right file.

Each progress counter is a word with a single writer and only grows.  Stores have release semantics
and loads acquire semantics, on any processor: a process that reads a word sees everything that its
writer wrote before ``publish``.

Shapes: W processes.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.typing import signature
from numba.extending import intrinsic

from kge_torchrec.distributed.processes import RankGone
from kge_torchrec.kernels.jit import kernel

_PUBLISHED, _CONSUMED, _LEFT, _TOKEN = 0, 8, 16, 24  # indices of words, one cache line each
_ENTRIES = 32  # index of the first word of the entries
_KEPT = 256  # number of entries: the largest number of unread messages
_LINE = 64  # bytes; messages start at multiples of it
_PAGE = 4096
LEAST_ROOM = 1 << 20  # bytes for messages in a new mailbox


class Mailboxes:
    """The mailboxes of W processes, as seen by process ``rank``.  Collective.

    Args:
        rank, size: This process and W.
        exchange: Sends this process's text and returns the texts of all processes, in order of
            rank.  Collective.
        timeout: Seconds to wait for a message.

    Raises:
        OSError: A process cannot map the memory of another one.  Raised on every process.
    """

    def __init__(
        self, rank: int, size: int, exchange: Callable[[str], list[str]], timeout: float
    ) -> None:
        self.rank, self.size, self._timeout = rank, size, timeout
        self._entry = 1 + 2 * size  # words: size of the room, then start and length of each part
        self._room_at = -(-8 * (_ENTRIES + _KEPT * self._entry) // _PAGE) * _PAGE
        self._next = 0  # number of the next message
        self._consumed = 0  # number of messages that this process has read
        self._room, self._under_way = LEAST_ROOM, deque[tuple[int, int, int]]()
        self._boxes: list[_Box] = []
        self._places: list[str] = []  # process and host of each rank
        self._alive: list[int | None] = []  # pidfd of each other process, readable after its end
        self._meet(exchange)

    def _meet(self, exchange: Callable[[str], list[str]]) -> None:
        own: _Box | None = None
        address = problem = ""
        try:
            own = self._create()
            address = f"{os.getpid()} {own.file} {own.words[_TOKEN]}"
        except OSError as error:
            problem = str(error)
        addresses = exchange(address)
        try:
            if own is not None and all(addresses):
                for process, text in enumerate(addresses):
                    mine = process == self.rank
                    self._places.append(f"process {text.split()[0]} on {socket.gethostname()}")
                    self._boxes.append(own if mine else self._open(*map(int, text.split())))
                    self._alive.append(None if mine else os.pidfd_open(int(text.split()[0])))
        except OSError as error:
            problem = str(error)
        problems = [f"rank {rank}: {text}" for rank, text in enumerate(exchange(problem)) if text]
        if problems:
            self.close()
            raise OSError(errno.ENOTSUP, problems[0])

    def _create(self) -> _Box:
        if not (hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")):
            raise OSError(errno.ENOTSUP, "this system has no memfd_create or pidfd_open")
        file = os.memfd_create("kge_torchrec", os.MFD_CLOEXEC)
        os.ftruncate(file, self._room_at + self._room)
        box = _Box(file, self._room_at, self._room)
        box.words[_TOKEN] = secrets.randbits(62)
        return box

    def _open(self, process: int, file: int, token: int) -> _Box:
        opened = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(opened).st_size != self._room_at + LEAST_ROOM:
            os.close(opened)
            raise OSError(errno.ESRCH, f"process {process} is another one here")
        box = _Box(opened, self._room_at, LEAST_ROOM)
        if box.words[_TOKEN] != token:
            os.close(opened)
            raise OSError(errno.ESRCH, f"process {process} is another one here")
        return box

    def close(self) -> None:
        """Mark this process as gone for the others, and release the memory."""
        if self.rank < len(self._boxes):
            publish(self._boxes[self.rank].words, _LEFT, 1)
        boxes, self._boxes = self._boxes, []
        alive, self._alive = self._alive, []
        for file in [*(box.file for box in boxes), *alive]:
            if file is not None:
                os.close(file)

    # Messages

    def leave(self, parts: Sequence[np.ndarray], receive: Callable[[], object]) -> int:
        """Write the next message.

        Args:
            parts: A uint8 array for each process.  An object that occurs several times is written
                once.
            receive: Reads the messages that are available.  Called if all entries are in use, so
                that this process does not wait for others while they wait for it.

        Returns:
            The number of the message, the same in every process.

        Raises:
            RankGone: A process is gone or does not read its messages in time.
            OSError: There is no memory for the message.
        """
        distinct = {id(part): part for part in parts}
        needed = sum(_lines(part.size) for part in distinct.values())
        self._wait_for_entry(receive)
        at = self._room_for(max(needed, _LINE))
        number, box = self._next, self._boxes[self.rank]
        entry = self._entry_of(box, number)
        entry[0] = self._room
        places = {}
        for key, part in distinct.items():
            places[key] = at
            box.data[at : at + part.size] = part
            at += _lines(part.size)
        entry[1::2] = [places[id(part)] for part in parts]
        entry[2::2] = [part.size for part in parts]
        self._next += 1
        publish(box.words, _PUBLISHED, self._next)
        return number

    def is_there(self, number: int) -> bool:
        """Return whether every process has written message ``number``."""
        return all(read(box.words, _PUBLISHED) > number for box in self._boxes)

    def part(self, number: int, source: int) -> np.ndarray:
        """Wait for message ``number`` of process ``source`` and return this process's part.

        Returns:
            A view, valid until ``consumed(number)``.

        Raises:
            RankGone: The process is gone or did not write the message in time.
        """
        box = self._boxes[source]
        self._wait(source, _PUBLISHED, number + 1)
        entry = self._entry_of(box, number)
        at, size = (int(word) for word in entry[1 + 2 * self.rank : 3 + 2 * self.rank])
        box.map(int(entry[0]))
        return box.data[at : at + size]

    def consumed(self, number: int) -> None:
        """Report that this process has read message ``number`` and all earlier ones."""
        self._consumed = number + 1
        publish(self._boxes[self.rank].words, _CONSUMED, self._consumed)

    def _entry_of(self, box: _Box, number: int) -> np.ndarray:
        start = _ENTRIES + number % _KEPT * self._entry
        return box.words[start : start + self._entry]

    # Room

    def _room_for(self, needed: int) -> int:
        """Return the start of ``needed`` free bytes; grow the mailbox if there are too few.

        It does not wait for readers, because they may be waiting for this process elsewhere.
        """
        done, start = self._consumed_by_all(), 0
        while self._under_way and self._under_way[0][0] < done:
            self._under_way.popleft()
        for taken, end in sorted(span[1:] for span in self._under_way):
            if start + needed <= taken:
                break
            start = end
        if start + needed > self._room:
            self._grow(start + needed)
        self._under_way.append((self._next, start, start + needed))
        return start

    def _grow(self, needed: int) -> None:
        """Grow to the next power of two.  Pages that are never written take no memory."""
        room, box = 1 << (needed - 1).bit_length(), self._boxes[self.rank]
        os.ftruncate(box.file, self._room_at + room)
        box.map(room)
        self._room = room

    def _consumed_by_all(self) -> int:
        return min(read(box.words, _CONSUMED) for box in self._boxes)

    def _wait_for_entry(self, receive: Callable[[], object]) -> None:
        """Wait until the oldest entry may be overwritten."""
        while self._next - self._consumed_by_all() >= _KEPT:
            oldest = self._next - _KEPT
            for process in range(self.size):
                self._wait(process, _PUBLISHED, oldest + 1)
            receive()
            for process in range(self.size):
                self._wait(process, _CONSUMED, oldest + 1)

    # Waiting

    def _wait(self, process: int, word: int, value: int) -> None:
        words, slept, started = self._boxes[process].words, False, time.monotonic()
        while not wait_for(words, word, value, slept):
            self._check(process, word, value, started)
            slept = True

    def _check(self, process: int, word: int, value: int, started: float | None) -> None:
        """Raise RankGone if the process has ended or left, or the timeout has passed."""
        box, alive = self._boxes[process], self._alive[process]
        ended = alive is not None and bool(select.select([alive], [], [], 0)[0])
        if (ended or read(box.words, _LEFT)) and read(box.words, word) < value:
            raise RankGone(process, self._places[process], timed_out=False)
        if started is not None and time.monotonic() - started > self._timeout:
            raise RankGone(process, self._places[process], timed_out=True)


class _Box:
    """The mailbox of one process, mapped."""

    def __init__(self, file: int, room_at: int, room: int) -> None:
        self.file, self._room_at, self._room = file, room_at, 0
        self.map(room)

    def map(self, room: int) -> None:
        """Map the file with at least ``room`` bytes for messages, which the file must have."""
        if room > self._room:  # messages from before the mailbox grew name a smaller room
            memory = mmap.mmap(self.file, self._room_at + room)
            self.words = np.frombuffer(memory, np.int64, self._room_at // 8)
            self.data = np.frombuffer(memory, np.uint8, room, self._room_at)
            self._room = room


def _lines(size: int) -> int:
    return -(-size // _LINE) * _LINE


_WORD = 8  # bytes


def _address(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
    data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
    return builder.gep(data, [arguments[1]])


def _load(typing_context: Any, words: Any, index: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        address = _address(context, builder, signature, arguments)
        return builder.load_atomic(address, "acquire", _WORD)

    return types.int64(words, types.int64), generate


def _store(typing_context: Any, words: Any, index: Any, value: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        address = _address(context, builder, signature, arguments)
        builder.store_atomic(arguments[2], address, "release", _WORD)
        return context.get_dummy_value()

    return types.void(words, types.int64, types.int64), generate


_load_acquire: Any = intrinsic(_load)
_store_release: Any = intrinsic(_store)
_sched_yield: Any = types.ExternalFunction("sched_yield", signature(types.int32))
_usleep: Any = types.ExternalFunction("usleep", signature(types.int32, types.uint32))

# Number of checks while spinning, then while yielding (a few milliseconds on an idle core), then
# while sleeping (about 20 ms).
_SPINS, _YIELDS, _NAPS = 2_000, 10_000, 30
_FIRST_NAP, _LONGEST_NAP = 50, 1_000  # microseconds


@kernel
def publish(words: np.ndarray, index: int, value: int) -> None:
    """Set words[index] to value, with release semantics."""
    _store_release(words, index, value)


@kernel
def read(words: np.ndarray, index: int) -> int:
    """Return words[index], with acquire semantics."""
    return _load_acquire(words, index)


@kernel
def wait_for(words: np.ndarray, index: int, value: int, slept: bool) -> bool:
    """Wait until words[index] >= value.

    It spins, then yields the core to other processes, then sleeps, because waking a sleeping core
    is slow.

    Args:
        words: int64 words in shared memory.
        index: The word to wait for.
        value: The value to reach.
        slept: Whether an earlier call for this value already slept; then it sleeps at once.

    Returns:
        True as soon as the word has reached the value, False after about 20 ms.
    """
    if not slept:
        for _ in range(_SPINS):
            if _load_acquire(words, index) >= value:
                return True
        for _ in range(_YIELDS):
            if _load_acquire(words, index) >= value:
                return True
            _sched_yield()
    nap = _LONGEST_NAP if slept else _FIRST_NAP
    for _ in range(_NAPS):
        if _load_acquire(words, index) >= value:
            return True
        _usleep(nap)
        nap = min(nap * 2, _LONGEST_NAP)
    return _load_acquire(words, index) >= value

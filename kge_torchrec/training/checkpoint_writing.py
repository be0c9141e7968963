"""Write pieces of tensors into the file of a rank, and check and copy them on the way."""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.errors import first_line
from kge_torchrec.training.checkpoint_index import bytes_of
from kge_torchrec.training.checkpoint_storage import Piece

Answer = dict[str, Any]  # {"crc32", "seconds"}, or {"nan": name}, or {"error": text}
_BLOCK = 1 << 20  # bytes that stay in the cache of a core while they are checked and written
_EXPONENT_BITS = {torch.float16: 5, torch.bfloat16: 8, torch.float32: 8, torch.float64: 11}


class _NotFinite(Exception):
    """A tensor has NaN or infinity; the argument is its name."""


def copies_of(pieces: Sequence[Piece]) -> list[Piece]:
    """Return pieces with copies of their values in main memory, pinned for those of a GPU."""
    copies = []
    for piece in pieces:
        values, on_cuda = piece.values, piece.values.device.type == "cuda"
        copy = _empty(values, pinned=on_cuda)
        copies.append(piece._replace(values=copy.copy_(values, non_blocking=on_cuda)))
    if any(piece.values.device.type == "cuda" for piece in pieces):
        torch.cuda.synchronize()
    return copies


def _empty(values: Tensor, pinned: bool) -> Tensor:
    if pinned:
        with suppress(RuntimeError):  # not that much memory can be pinned
            return torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return torch.empty(values.shape, dtype=values.dtype)


def answer_of(write: Callable[[], list[int]]) -> Answer:
    """Return the checksums and seconds of writing, or why it failed."""
    start = time.perf_counter()
    try:
        checksums = write()
    except _NotFinite as error:
        return {"nan": str(error)}
    except Exception as error:
        return {"error": first_line(error)}
    return {"crc32": checksums, "seconds": time.perf_counter() - start}


def write_pieces(
    path: Path,
    pieces: Sequence[Piece],
    each: Callable[..., Any] = map,
    ends: threading.Event | None = None,
) -> list[int]:
    """Write pieces into a new file; return their checksums.

    Args:
        path: The file.
        pieces: What to write.
        each: Applies a function to every piece.
        ends: Ends writing with an error when it is set.

    Raises:
        _NotFinite: A piece has NaN or infinity.
        OSError: The file cannot be written.
    """
    with path.open("wb") as file:
        handle = file.fileno()

        def write(piece: Piece) -> int:
            if ends is not None and ends.is_set():
                raise InterruptedError("training ended")
            return _write(piece, handle)

        checksums = list(each(write, pieces))
        os.fsync(handle)
    return checksums


def _write(piece: Piece, handle: int) -> int:
    numbers, dtype = bytes_of(piece.values), piece.values.dtype
    checksum = 0
    for first in range(0, len(numbers), _BLOCK):
        some = numbers[first : first + _BLOCK]
        if dtype in _EXPONENT_BITS and not _is_finite(some, dtype):
            raise _NotFinite(piece.name.removeprefix("engine."))
        checksum = zlib.crc32(some, checksum)
        start = piece.start + first
        while some:
            written = os.pwrite(handle, some, start)
            some, start = some[written:], start + written
    return checksum


def _is_finite(numbers: memoryview, dtype: torch.dtype) -> bool:
    """Return whether no number has the largest exponent, which NaN and infinity have."""
    word, bits = dtype.itemsize, _EXPONENT_BITS[dtype]
    without_sign = np.frombuffer(numbers, f"u{word}") << 1
    largest = int(without_sign.max()) >> (8 * word - bits)
    return largest < (1 << bits) - 1

"""What a checkpoint's index says of its tensors, and reading them by it; needs torch alone.

    {"tensors": {name: {"dtype", "size", "pieces": [{"offset", "size", "file", "start", "crc32"}]}}}

Every piece has a checksum, which is compared before any of its numbers is used, so that damage is
found without reading a byte twice or a byte that nobody asked for.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from kge_torchrec.errors import KGEError

T = TypeVar("T")
Index = dict[str, Any]  # as JSON has it

_THREADS = 4  # pieces under way at once: memory for as many, and disks like several requests


class Damaged(KGEError, RuntimeError):
    """A checkpoint does not hold what it should; the message says what and where."""


def dtype_of(entry: dict[str, Any]) -> torch.dtype:
    """Of a tensor of the index.  Raises ValueError for what is none."""
    dtype = getattr(torch, entry["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{entry['dtype']} is no type of numbers")
    return dtype


def pieces_of(entry: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a tensor of the index.  Raises ValueError for one that is not in the checkpoint."""
    for piece in entry["pieces"]:
        if Path(piece["file"]).name != piece["file"]:
            raise ValueError(f"{piece['file']} is no file of the checkpoint")
    return entry["pieces"]


def read_piece(folder: Path, name: str, dtype: torch.dtype, piece: dict[str, Any]) -> Tensor:
    """The numbers of a piece of the tensor ``name``.

    Raises Damaged for one that is cut short, and one whose numbers are not those that were written.
    """
    numbers = bytearray(prod(piece["size"]) * dtype.itemsize)
    with (folder / piece["file"]).open("rb") as file:
        file.seek(piece["start"])
        read = file.readinto(numbers)
    if read != len(numbers) or zlib.crc32(numbers) != piece["crc32"]:
        raise Damaged(
            f"{piece['file']} is damaged: the checksum of {name} at {piece['offset']} does not "
            "match"
        )
    if not numbers:
        return torch.empty(piece["size"], dtype=dtype)
    return torch.frombuffer(numbers, dtype=dtype).view(piece["size"])


def read_whole(folder: Path, index: Index, tensors: dict[str, Tensor]) -> None:
    """Fills tensors in, by name, each with all of its pieces: what one rank alone needs.

    Takes the memory of a few pieces besides.  Raises Damaged for tensors that the checkpoint does
    not have as they are, and as ``read_piece``.
    """
    work = []
    for name, tensor in tensors.items():
        if name not in index:
            raise Damaged(f"it has no {name}")
        try:
            entry = index[name]
            dtype, pieces, size = dtype_of(entry), pieces_of(entry), list(entry["size"])
            held = sum(prod(piece["size"]) for piece in pieces)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Damaged(f"its index makes no sense of {name} ({error!r})") from error
        if size != list(tensor.shape) or held != tensor.numel():
            raise Damaged(f"{name} has the size {size} instead of {list(tensor.shape)}")
        work += [(tensor.detach(), name, dtype, piece) for piece in pieces]

    def read(target: Tensor, name: str, dtype: torch.dtype, piece: dict[str, Any]) -> None:
        for dim, (start, length) in enumerate(zip(piece["offset"], piece["size"], strict=True)):
            target = target.narrow(dim, start, length)
        target.copy_(read_piece(folder, name, dtype, piece))

    in_threads(read, *zip(*work, strict=True))


def is_finite(values: Tensor) -> bool:
    """Whether no number is NaN or infinity."""
    if not values.is_floating_point() or values.numel() == 0:
        return True
    return all(bound.isfinite() for bound in values.aminmax())  # a NaN is both


def first_line(error: BaseException) -> str:
    """What an error says, in a line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def in_threads(work: Callable[..., T], *items: Iterable[Any]) -> list[T]:
    """``map``, several at once: reading, writing and checksums leave Python's lock."""
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(work, *items))

"""The index of a checkpoint, and reading tensors with it.  It needs only torch.

    {"tensors": {name: {"dtype", "size", "pieces": [{"offset", "size", "file", "start", "crc32"}]}}}

Every piece has a checksum, which is verified before its values are used.  Damage is therefore found
without extra reads.
"""

from __future__ import annotations

import io
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
Index = dict[str, Any]  # the value of "tensors"

_THREADS = 4  # pieces in memory at the same time; disks are faster with several requests


class Damaged(KGEError, RuntimeError):
    """A checkpoint is damaged or incomplete; the message says what and where."""


class NonFiniteParameters(KGEError, RuntimeError):
    """A parameter or its optimizer state has NaN or infinity; the message says which."""

    on_every_rank = True


def not_finite(name: str, rank: int) -> NonFiniteParameters:
    """Return the error for a tensor of a checkpoint that has NaN or infinity."""
    return NonFiniteParameters(
        f"{name} holds NaN or infinity (rank {rank}); training stops, the last good checkpoint is "
        "kept. A smaller train.lr or model.init_scale, or train.clip.norm, usually helps."
    )


def entry_of(index: Index, name: str) -> dict[str, Any]:
    """Return the entry of a tensor.

    Raises:
        Damaged: The checkpoint does not have the tensor.
    """
    if name not in index:
        raise Damaged(f"the checkpoint has no {name}")
    return index[name]


def dtype_of(entry: dict[str, Any]) -> torch.dtype:
    """Return the dtype of a tensor of the index.

    Raises:
        ValueError: The entry does not name a dtype.
    """
    dtype = getattr(torch, entry["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{entry['dtype']} is no dtype")
    return dtype


def pieces_of(entry: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pieces of a tensor of the index.

    Raises:
        ValueError: A piece names a file outside the checkpoint.
    """
    for piece in entry["pieces"]:
        if Path(piece["file"]).name != piece["file"]:
            raise ValueError(f"{piece['file']} is outside the checkpoint")
    return entry["pieces"]


def read_piece(folder: Path, name: str, dtype: torch.dtype, piece: dict[str, Any]) -> Tensor:
    """Read a piece of the tensor ``name``.

    Args:
        folder: The checkpoint.
        name: Name of the tensor, for messages.
        dtype: Its dtype.
        piece: The piece's entry in the index.

    Raises:
        Damaged: The piece is cut short or its checksum does not match.
    """
    values = torch.empty(piece["size"], dtype=dtype)
    with (folder / piece["file"]).open("rb") as file:
        read_into(values, file, name, piece)
    return values


def read_into(into: Tensor, file: io.BufferedReader, name: str, piece: dict[str, Any]) -> None:
    """Fill a tensor with a piece of the tensor ``name``, without a copy.

    Args:
        into: The tensor to fill, contiguous on the CPU, of the size and dtype of the piece.
        file: The piece's file.
        name: Name of the tensor, for messages.
        piece: The piece's entry in the index.

    Raises:
        Damaged: The piece is cut short or its checksum does not match.
    """
    numbers = bytes_of(into)
    file.seek(piece["start"])
    if file.readinto(numbers) != len(numbers) or zlib.crc32(numbers) != piece["crc32"]:
        raise Damaged(
            f"{Path(file.name).name} is damaged: the checksum of {name} at {piece['offset']} does "
            "not match"
        )


def read_whole(folder: Path, index: Index, tensors: dict[str, Tensor]) -> None:
    """Fill whole tensors in place, on one rank, with memory for a few pieces.

    Args:
        folder: The checkpoint.
        index: Its index.
        tensors: The tensors to fill, by name.

    Raises:
        Damaged: The checkpoint does not have a tensor with this shape, or a piece is damaged.
    """
    work = []
    for name, tensor in tensors.items():
        entry = entry_of(index, name)
        try:
            dtype, pieces, size = dtype_of(entry), pieces_of(entry), list(entry["size"])
            held = sum(prod(piece["size"]) for piece in pieces)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Damaged(f"the index entry of {name} is not valid ({error!r})") from error
        if size != list(tensor.shape) or held != tensor.numel():
            raise Damaged(f"{name} has the size {size} instead of {list(tensor.shape)}")
        work += [(tensor.detach(), name, dtype, piece) for piece in pieces]

    def read(target: Tensor, name: str, dtype: torch.dtype, piece: dict[str, Any]) -> None:
        for dim, (start, length) in enumerate(zip(piece["offset"], piece["size"], strict=True)):
            target = target.narrow(dim, start, length)
        target.copy_(read_piece(folder, name, dtype, piece))

    in_threads(read, *zip(*work, strict=True))


def pieces_with(index: Index, name: str, rows: range) -> list[dict[str, Any]]:
    """Return the pieces of a tensor (N, ...) that hold some of its rows, in order.

    Raises:
        Damaged: The checkpoint does not have the tensor.
    """
    pieces = [
        piece
        for piece in pieces_of(entry_of(index, name))
        if piece["offset"][0] < rows.stop and piece["offset"][0] + piece["size"][0] > rows.start
    ]
    return sorted(pieces, key=lambda piece: piece["offset"][0])


def read_rows(folder: Path, index: Index, name: str, rows: range, into: Tensor) -> None:
    """Fill ``into`` with rows of a tensor (N, ...), on one rank, piece by piece.

    Raises:
        Damaged: The checkpoint does not have the rows, or a piece is damaged.
    """
    filled = 0
    for piece in pieces_with(index, name, rows):
        values = read_piece(folder, name, dtype_of(index[name]), piece)
        start = piece["offset"][0]
        low, high = max(start, rows.start), min(start + len(values), rows.stop)
        into[low - rows.start : high - rows.start] = values[low - start : high - start]
        filled += high - low
    if filled != len(rows):
        raise Damaged(f"the checkpoint lacks rows of {name} from {rows.start:,} to {rows.stop:,}")


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the values of a tensor as bytes; of a contiguous one on the CPU, its own memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def is_finite(values: Tensor) -> bool:
    """Return whether no element is NaN or infinite."""
    if not values.is_floating_point() or values.numel() == 0:
        return True
    return all(bound.isfinite() for bound in values.aminmax())  # with a NaN, both bounds are NaN


def in_threads(work: Callable[..., T], *items: Iterable[Any]) -> list[T]:
    """Apply ``map`` in threads.  Reading, writing and checksums release the GIL."""
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(work, *items))

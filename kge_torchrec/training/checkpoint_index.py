"""The folder of a checkpoint, its index, and reading tensors with it.  It needs only torch.

The folder is made under a hidden name and renamed when complete.  It has the tensors
(``checkpoint_storage``), the run's ``progress.json``, a ``manifest.json`` with the size of every
file and the checksums of the JSON files, and an ``index.json``:

    {"tensors": {name: {"dtype", "size", "pieces": [{"offset", "size", "file", "start", "crc32"}]}}}

Every piece has a checksum, which is verified before its values are used.  Damage is therefore found
without extra reads.
"""

from __future__ import annotations

import io
import json
import shutil
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from kge_torchrec import files
from kge_torchrec.errors import KGEError
from kge_torchrec.training.state import TrainState

T = TypeVar("T")
Index = dict[str, Any]  # the value of "tensors"

FORMAT_VERSION = 1
MANIFEST, _PROGRESS, _INDEX = "manifest.json", "progress.json", "index.json"
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

    def has_some(piece: dict[str, Any]) -> bool:
        first, count = piece["offset"][0], piece["size"][0]
        return max(first, rows.start) < min(first + count, rows.stop)

    pieces = filter(has_some, pieces_of(entry_of(index, name)))
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


def make_empty(folder: Path) -> None:
    """Make an empty folder for a checkpoint, and remove unfinished checkpoints of killed runs."""
    for leftover in folder.parent.glob(".partial-*"):
        shutil.rmtree(leftover)
    folder.mkdir(parents=True)


def finish(partial: Path, target: Path, index: Index | None, progress: TrainState) -> None:
    """Write the JSON files of a checkpoint and rename it from ``partial`` to ``target``."""
    texts = {
        _INDEX: json.dumps({"tensors": index}),
        _PROGRESS: json.dumps(progress.to_dict(), indent=1),
    }
    for name, text in texts.items():
        (partial / name).write_text(text, encoding="utf-8")
    manifest = {
        "format": FORMAT_VERSION,
        "torch": torch.__version__,
        "files": {p.name: p.stat().st_size for p in sorted(partial.iterdir())},
        "crc32": {name: zlib.crc32(text.encode()) for name, text in texts.items()},
    }
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for name in (*texts, MANIFEST):  # the tensors are already synced
        files.sync(partial / name)
    files.put_in_place(partial, target)  # replaces a checkpoint of this step from before a resume


def open_checkpoint(path: Path) -> tuple[Index, TrainState]:
    """Read the index and the progress of a checkpoint.

    It verifies all files except the contents of the tensors.

    Raises:
        Damaged: A file is missing or does not match the manifest.
        OSError: A file cannot be read.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        version, files = manifest["format"], dict(manifest["files"])
        checksums = dict(manifest["crc32"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{MANIFEST} is not valid ({error})") from error
    if version != FORMAT_VERSION:
        raise Damaged(f"the checkpoint has format {version}; the only known is {FORMAT_VERSION}")
    for name, size in files.items():
        actual = (path / name).stat().st_size if (path / name).is_file() else None
        if actual != size:
            has = "is missing" if actual is None else f"has {actual:,} bytes instead of {size:,}"
            raise Damaged(f"{name} {has}")
    index, progress = (_read_json(path / n, checksums.get(n, -1)) for n in (_INDEX, _PROGRESS))
    try:
        return index["tensors"], TrainState(**progress)
    except TypeError as error:
        raise Damaged(f"{_PROGRESS} is not valid ({error})") from error


def _read_json(file: Path, checksum: int) -> Any:
    """Read a JSON file and verify its checksum.

    Raises:
        Damaged: The checksum does not match or the file is not JSON.
    """
    content = file.read_bytes()
    if zlib.crc32(content) != checksum:
        raise Damaged(f"{file.name} is damaged: its checksum does not match")
    try:
        return json.loads(content)
    except ValueError as error:
        raise Damaged(f"{file.name} is not valid ({error})") from error

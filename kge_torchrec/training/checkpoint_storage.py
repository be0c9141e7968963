"""Storage of the tensors of a checkpoint: raw values in one file per rank, and a JSON index.

torch.distributed.checkpoint plans which rank writes and reads which piece of each tensor.  Its own
format has a pickled index, and loading a pickle can run code.  In this format each rank writes its
pieces one after another into one file (``checkpoint_writing``), and the index locates them
(``checkpoint_index``).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import (
    LoadPlan,
    LoadPlanner,
    Metadata,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from kge_torchrec.embeddings.chunks import in_chunks
from kge_torchrec.errors import KGEError, first_line
from kge_torchrec.training.checkpoint_index import (
    Damaged,
    Index,
    dtype_of,
    in_threads,
    pieces_of,
    read_piece,
)

T = TypeVar("T")
Place = tuple[str, torch.Size | None]  # name of a tensor and offset of one of its pieces
_NUMBER = "number"  # of a piece among those of its rank, until its checksum is known


class RankFailed(KGEError, RuntimeError):
    """A rank could not write or read its pieces; the message says which rank and why."""


class Piece(NamedTuple):
    """A piece of a tensor that this rank writes."""

    name: str  # of the tensor
    start: int  # first byte in the file of this rank
    values: Tensor


@dataclass(frozen=True)
class SavingPlan:
    """The pieces of a checkpoint that this rank writes, and the index of all pieces."""

    file: str  # name of its file
    pieces: list[Piece]
    index: Index | None  # of all ranks, on rank 0; see ``with_checksums``

    @property
    def size(self) -> int:
        """The bytes that this rank writes."""
        return sum(piece.values.nbytes for piece in self.pieces)


def plan_saving(state: dict[str, Any], single_rank: bool) -> SavingPlan:
    """Plan which rank writes which piece of each tensor.  Collective.

    Args:
        state: Nested dictionaries of tensors.
        single_rank: Whether there is only one rank.

    Raises:
        RankFailed: A rank has something else than tensors.
    """
    planned = PlannedWriter()
    with _plain_failures():
        dcp.save(in_chunks(state), storage_writer=planned, no_dist=single_rank)
    return SavingPlan(planned.file, planned.pieces, planned.index)


def with_checksums(index: Index, checksums: dict[str, list[int]]) -> Index:
    """Return the index of a plan with the checksums of its pieces, given by file."""

    def complete(piece: dict[str, Any]) -> dict[str, Any]:
        if _NUMBER not in piece:  # of a file that was there before
            return piece
        place = {key: value for key, value in piece.items() if key != _NUMBER}
        return {**place, "crc32": checksums[piece["file"]][piece[_NUMBER]]}

    return {
        name: {**entry, "pieces": list(map(complete, entry["pieces"]))}
        for name, entry in index.items()
    }


def load(state: dict[str, Any], folder: Path, index: Index, single_rank: bool) -> None:
    """Fill the tensors of ``state`` in place, from a checkpoint of any number of ranks.

    Collective.

    Args:
        state: Nested dictionaries of tensors.
        folder: The checkpoint.
        index: Its index.
        single_rank: Whether there is only one rank.

    Raises:
        RankFailed: A rank could not read.
    """
    reader = RawReader(folder, index)
    with _plain_failures():
        dcp.load(in_chunks(state), storage_reader=reader, no_dist=single_rank)


@contextmanager
def _plain_failures() -> Iterator[None]:
    """Turn torch's CheckpointException into RankFailed for the first rank that failed.

    CheckpointException is a BaseException, which ``except Exception`` would not catch.  torch's
    warnings about a checkpoint of a single process are suppressed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            yield
        except CheckpointException as error:
            if not error.failures:
                raise RankFailed(str(error)) from error
            rank, (failure, _) = min(error.failures.items())
            raise RankFailed(f"rank {rank}: {first_line(failure)}") from error


class PlannedWriter(StorageWriter):
    """Writes nothing.  After saving, it has the pieces of this rank, and on rank 0 the index."""

    def __init__(self) -> None:
        super().__init__()
        self.file, self.pieces = "", list[Piece]()
        self.index: Index | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer is used once."""

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(p, storage_data=f"rank-{rank:05d}.bin") for rank, p in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Take the pieces of a plan.  Results have {"file", "start", "number"} as storage data."""
        self.file, results, end = plan.storage_data, [], 0
        for number, item in enumerate(plan.items):
            size = _bytes_of(item)
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)  # _bytes_of rejects other objects
            self.pieces.append(Piece(item.index.fqn, end, tensor.detach()))
            place = {"file": self.file, "start": end, _NUMBER: number}
            results.append(WriteResult(item.index, size, place))
            end += size
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the index, on rank 0."""
        places = {_key(r.index): r.storage_data for rank_results in results for r in rank_results}
        self.index = {
            name: _entry(name, stored, places)
            for name, stored in metadata.state_dict_metadata.items()
        }

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class RawReader(StorageReader):
    """Reads the pieces of an index from ``folder``.

    Raises:
        Damaged: The index is invalid, or a piece is cut short or does not match its checksum.
    """

    def __init__(self, folder: Path, index: Index):
        super().__init__()
        self.folder, self.index = folder, index
        self._places: dict[Place, dict[str, Any]] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a reader reads one checkpoint."""

    def read_metadata(self) -> Metadata:
        try:
            stored = {name: self._tensor(name, entry) for name, entry in self.index.items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Damaged(f"the index is not valid ({error!r})") from error
        return Metadata({**stored})

    def _tensor(self, name: str, entry: dict[str, Any]) -> TensorStorageMetadata:
        dtype, chunks = dtype_of(entry), []
        for piece in pieces_of(entry):
            chunk = ChunkStorageMetadata(torch.Size(piece["offset"]), torch.Size(piece["size"]))
            self._places[name, chunk.offsets] = piece
            chunks.append(chunk)
        return TensorStorageMetadata(TensorProperties(dtype), torch.Size(entry["size"]), chunks)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Do nothing: ``read_metadata`` does the setup."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        def read(item: ReadItem) -> None:
            piece = self._piece(item.storage_index)
            for dim, (start, length) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                piece = piece.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(piece)
            planner.commit_tensor(item, target)

        in_threads(read, plan.items)
        return _done(None)

    def _piece(self, index: MetadataIndex) -> Tensor:
        dtype = dtype_of(self.index[index.fqn])
        return read_piece(self.folder, index.fqn, dtype, self._places[_key(index)])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _key(index: MetadataIndex) -> Place:
    return index.fqn, index.offset


def _entry(
    name: str,
    stored: TensorStorageMetadata | BytesStorageMetadata,
    places: dict[Place, dict[str, Any]],
) -> dict[str, Any]:
    """Return the entry of a tensor in the index."""
    assert isinstance(stored, TensorStorageMetadata)  # _bytes_of rejects other objects
    return {
        "dtype": str(stored.properties.dtype).removeprefix("torch."),
        "size": list(stored.size),
        "pieces": [
            {"offset": list(c.offsets), "size": list(c.sizes), **places[name, c.offsets]}
            for c in stored.chunks
        ],
    }


def _bytes_of(item: WriteItem) -> int:
    if item.tensor_data is None:
        raise TypeError(f"{item.index.fqn} is no tensor; a checkpoint holds only tensors")
    return prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _done(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future

"""DTensors that describe sharded tensors in a checkpoint: sharded by rows, in bounded chunks.

torch.distributed.checkpoint reads each saved chunk as a whole, on every rank that needs a part of
it.  Bounded chunks keep the memory for reading close to the size of the table.  TorchRec describes
its shards like ``row_sharded``, so a checkpoint does not depend on the backend or on the sizes of
the shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

CHUNK_BYTES = 64 << 20


def in_chunks(state: Any, chunk_bytes: int = CHUNK_BYTES) -> Any:
    """Cut the row-sharded tensors of a nested state into chunks of consecutive rows.

    The chunks are views, so loading into them loads into the tensors.  Names and shapes do not
    change.

    Args:
        state: Nested dictionaries of tensors.
        chunk_bytes: Largest chunk in bytes, unless one row is larger.
    """
    if isinstance(state, dict):
        return {name: in_chunks(value, chunk_bytes) for name, value in state.items()}
    # Compare names: TorchRec has its own copy of torch's class.
    if isinstance(state, DTensor) and type(state.to_local()).__name__ == "LocalShardsWrapper":
        return _cut(state, chunk_bytes)
    return state


def row_chunks(rows: Tensor, chunk_bytes: int = CHUNK_BYTES) -> tuple[Tensor, ...]:
    """Return views of consecutive rows (n, ...), in chunks of some bytes unless a row is larger."""
    return rows.split(max(1, chunk_bytes // max(1, rows[:1].nbytes)))


def _cut(tensor: DTensor, chunk_bytes: int) -> DTensor:
    local: Any = tensor.to_local()  # a LocalShardsWrapper, torch's or TorchRec's
    pieces, offsets = [], []
    for shard, offset in zip(local.local_shards(), local.local_offsets(), strict=True):
        start = offset[0]
        for piece in row_chunks(shard, chunk_bytes):  # an empty shard stays one piece
            pieces.append(piece)
            offsets.append((start, *offset[1:]))
            start += len(piece)
    return DTensor.from_local(
        LocalShardsWrapper(pieces, offsets),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def row_sharded(pieces: Sequence[tuple[Tensor, int]], num_rows: int, ranks: Any) -> DTensor:
    """Describe this rank's rows as shards of a tensor (num_rows, ...).

    The result is a view, so loading into it writes into the pieces.

    Args:
        pieces: Each (n, ...), and the index of its first row in the whole tensor; n may be 0.
        num_rows: Rows of the whole tensor.
        ranks: The ranks that hold the tensor, a group or a DeviceMesh.
    """
    first = pieces[0][0]
    rest, inner = first.shape[1:], (0,) * (first.dim() - 1)
    # An empty shard gets the offset after the last row: a checkpoint treats pieces with the same
    # offset as copies of each other.
    is_mesh = isinstance(ranks, DeviceMesh)
    mesh = ranks if is_mesh else DeviceMesh.from_group(ranks, first.device.type)
    held = [piece for piece in pieces if len(piece[0])] or [(first, num_rows)]
    return DTensor.from_local(
        LocalShardsWrapper(
            local_shards=[local for local, _ in held],
            local_offsets=[(offset, *inner) for _, offset in held],
        ),
        mesh,
        [Shard(0)],
        run_check=False,
        shape=torch.Size((num_rows, *rest)),
        stride=first.stride() if first.dim() == 1 else (first.shape[1], 1),
    )

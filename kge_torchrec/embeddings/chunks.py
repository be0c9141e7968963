"""DTensors that describe sharded tensors in a checkpoint: sharded by rows, in bounded chunks.

torch.distributed.checkpoint reads each saved chunk as a whole, on every rank that needs a part of
it.  Bounded chunks keep the memory for reading close to the size of the table.  TorchRec describes
its shards like ``row_sharded``, so a checkpoint does not depend on the backend or on the sizes of
the shards.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
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


def _cut(tensor: DTensor, chunk_bytes: int) -> DTensor:
    local: Any = tensor.to_local()  # a LocalShardsWrapper, torch's or TorchRec's
    pieces, offsets = [], []
    for shard, offset in zip(local.local_shards(), local.local_offsets(), strict=True):
        rows = max(1, chunk_bytes // max(1, shard[:1].nbytes))
        for start in range(0, max(1, len(shard)), rows):  # an empty shard stays one piece
            pieces.append(shard[start : start + rows])
            offsets.append((offset[0] + start, *offset[1:]))
    return DTensor.from_local(
        LocalShardsWrapper(pieces, offsets),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def row_sharded(local: Tensor, first_row: int, num_rows: int, group: dist.ProcessGroup) -> DTensor:
    """Describe this rank's rows as a shard of a tensor (num_rows, ...).

    The result is a view, so loading into it writes into ``local``.

    Args:
        local: (n, ...); n may be 0 and may differ by rank.
        first_row: Index of ``local[0]`` in the whole tensor.
        num_rows: Rows of the whole tensor.
        group: The ranks that hold the tensor.
    """
    shape = torch.Size((num_rows, *local.shape[1:]))
    stride = local.stride() if local.dim() == 1 else (local.shape[1], 1)
    # An empty shard gets the offset after the last row: a checkpoint treats pieces with the same
    # offset as copies of each other.
    offset = (first_row if len(local) else num_rows,) + (0,) * (local.dim() - 1)
    return DTensor.from_local(
        LocalShardsWrapper(local_shards=[local], local_offsets=[offset]),
        DeviceMesh.from_group(group, local.device.type),
        [Shard(0)],
        run_check=False,
        shape=shape,
        stride=stride,
    )

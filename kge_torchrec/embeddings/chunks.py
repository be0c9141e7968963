"""The form that sharded tensors have in a checkpoint: by rows, in chunks.

torch.distributed.checkpoint reads every saved chunk whole, on each rank that needs some of it: in
chunks of a bounded size, reading never holds much more than the table.  TorchRec describes its
shards in the same way as ``row_sharded``, so a checkpoint does not depend on the backend, and
shards of any sizes can be saved and loaded into any others.
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
    """A nested state whose row-sharded tensors are views cut into runs of rows.

    Loading into the views loads into the tensors.  Names and shapes stay as they are.
    """
    if isinstance(state, dict):
        return {name: in_chunks(value, chunk_bytes) for name, value in state.items()}
    # by name: TorchRec has a copy of torch's class
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
    """This rank's rows (n, ...) of a tensor (num_rows, ...), as a view: loading writes into them.

    first_row is the row of the whole tensor that ``local[0]`` is.  n may be 0 and differ by rank.
    """
    shape = torch.Size((num_rows, *local.shape[1:]))
    stride = local.stride() if local.dim() == 1 else (local.shape[1], 1)
    # No rows lie behind the last one: a checkpoint takes pieces of equal offset for copies.
    offset = (first_row if len(local) else num_rows,) + (0,) * (local.dim() - 1)
    return DTensor.from_local(
        LocalShardsWrapper(local_shards=[local], local_offsets=[offset]),
        DeviceMesh.from_group(group, local.device.type),
        [Shard(0)],
        run_check=False,
        shape=shape,
        stride=stride,
    )

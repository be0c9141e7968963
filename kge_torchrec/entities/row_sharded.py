"""A tensor that is split by rows over the ranks, in the form that distributed checkpoints take.

TorchRec describes its shards in the same way, so a checkpoint does not depend on the engine, and
shards of any sizes can be saved and loaded into any others.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper


def row_sharded(local: Tensor, first_row: int, num_rows: int, group: dist.ProcessGroup) -> DTensor:
    """This rank's rows (n, ...) of a tensor (num_rows, ...), as a view: loading writes into them.

    first_row is the row of the whole tensor that ``local[0]`` is.  n may be 0 and differ by rank.
    """
    shape = (num_rows, *local.shape[1:])
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

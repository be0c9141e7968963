"""Large shards in pieces, so that reading a checkpoint never holds much more than its table.

torch.distributed.checkpoint reads every saved piece whole, on each rank that needs some of it.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

PIECE_BYTES = 64 << 20


def in_pieces(state: Any, piece_bytes: int = PIECE_BYTES) -> Any:
    """A nested state whose row-sharded tensors are views cut into runs of rows.

    Loading into the views loads into the tensors.  Names and shapes stay as they are.
    """
    if isinstance(state, dict):
        return {name: in_pieces(value, piece_bytes) for name, value in state.items()}
    # by name: TorchRec has a copy of torch's class
    if isinstance(state, DTensor) and type(state.to_local()).__name__ == "LocalShardsWrapper":
        return _cut(state, piece_bytes)
    return state


def _cut(tensor: DTensor, piece_bytes: int) -> DTensor:
    local = tensor.to_local()
    pieces, offsets = [], []
    for shard, offset in zip(local.local_shards(), local.local_offsets(), strict=True):
        rows = max(1, piece_bytes // max(1, shard[:1].nbytes))
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

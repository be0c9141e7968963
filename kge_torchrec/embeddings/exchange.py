"""Formats in which rows and gradients travel between ranks: entities.exchange.dtype.

fp16 and bf16 send two bytes per number.  int8 sends one byte per number and eight per row, for its
range: FBGEMM's rows of 8 bits.  Ranks round once; sums, rows of the table and optimizer state stay
float32.  TorchRec's own exchanges on CUDA use the same formats (``QCommsConfig``).

Shapes: M rows, D elements per row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_SIXTEEN = {"fp16": torch.float16, "bf16": torch.bfloat16}
_RANGE = 8  # bytes of a row's scale and offset
_ALIGNED = 4  # to whose multiples FBGEMM fills rows on CUDA
# Gradients are means over a batch: fp16 has no numbers for the smallest, and FBGEMM adds 1e-8 to a
# row's range.
GRADIENT_SCALE, _SCALED = 2.0**10, ("fp16", "int8")
_TAG = 1  # of messages between two ranks
_LARGEST = torch.finfo(torch.float16).max


def travel_bytes(dtype: str, rows: Any, numbers: Any) -> Any:
    """Return the bytes of rows with some numbers in all, on their way."""
    if dtype == "int8":
        return numbers + _RANGE * rows
    return numbers * (2 if dtype in _SIXTEEN else 4)


def packed(rows: Tensor, dtype: str, gradients: bool = False) -> Tensor:
    """Return rows (M, D) float32 as the bytes that travel, (M, bytes) uint8."""
    if dtype == "int8" and (missing := -rows.shape[1] % _ALIGNED):
        rows = torch.nn.functional.pad(rows, (0, missing))
    if not len(rows):
        return rows.new_empty(0, int(travel_bytes(dtype, 1, rows.shape[1])), dtype=torch.uint8)
    if gradients and dtype in _SCALED:
        rows = rows * GRADIENT_SCALE
    if dtype == "int8":
        return torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(rows.contiguous())
    if dtype == "fp16":
        rows = rows.clamp(-_LARGEST, _LARGEST)
    return rows.to(_SIXTEEN[dtype]).contiguous().view(torch.uint8)


def unpacked(data: Tensor, dtype: str, columns: int, gradients: bool = False) -> Tensor:
    """Return the rows (M, D) float32 of D columns that bytes (M, bytes) stand for."""
    if not len(data):
        return data.new_empty(0, columns, dtype=torch.float32)
    if dtype == "int8":
        rows = torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(data)[:, :columns]
    else:
        rows = data.view(_SIXTEEN[dtype]).float()
    return rows.div_(GRADIENT_SCALE) if gradients and dtype in _SCALED else rows


def exchanged(
    rows: Tensor,
    send: list[int],
    receive: list[int],
    group: dist.ProcessGroup,
    dtype: str = "fp32",
    gradients: bool = False,
) -> Tensor:
    """Send rows to their ranks and return those that arrive; a single rank's are the same.

    Collective.

    Args:
        rows: (sum of ``send``, D) float32, grouped by destination.
        send: (W,) rows to each rank.
        receive: (W,) rows from each rank.
        group: The ranks.
        dtype: fp32, fp16, bf16 or int8.
        gradients: Whether the rows are gradients.

    Returns:
        (sum of ``receive``, D) float32, grouped by source.
    """
    if len(send) == 1:
        return rows
    data = rows if dtype == "fp32" else packed(rows, dtype, gradients)
    arrived = data.new_empty(sum(receive), *data.shape[1:])
    if dist.get_backend(group) == "gloo":
        _pass_both_ways(arrived, data, receive, send, group)
    else:
        dist.all_to_all_single(arrived, data, receive, send, group=group)
    return arrived if dtype == "fp32" else unpacked(arrived, dtype, rows.shape[1], gradients)


def _pass_both_ways(
    arrived: Tensor,
    data: Tensor,
    receive: list[int],
    send: list[int],
    group: dist.ProcessGroup,
) -> None:
    """Do what ``all_to_all_single`` does, with both directions of a link at once.  Collective.

    gloo's all-to-all sends before it receives.  Then the note of a rank that it can receive waits
    behind its own rows, and two ranks send one after the other.  Here every rank receives first.
    """
    own, size = dist.get_rank(group), dist.get_world_size(group)
    backend: Any = group._get_backend(data.device)
    places, parts = arrived.split(receive), data.split(send)
    places[own].copy_(parts[own])
    others = [(own + step) % size for step in range(1, size)]
    works = [
        dist.irecv(places[rank], group=group, group_src=rank, tag=_TAG)
        for rank in reversed(others)
        if receive[rank]
    ]
    works += [
        dist.isend(parts[rank], group=group, group_dst=rank, tag=_TAG)
        for rank in others
        if send[rank]
    ]
    for work in works:
        assert work is not None  # this rank is in the group
        work.wait(backend.options._timeout)  # otherwise that of connecting

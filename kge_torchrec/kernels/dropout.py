"""Dropout, drawn on a CPU where it is applied: each number is read once and written once.

torch draws one number after another there, which takes longer than the product it is drawn for,
and keeps a mask for backward.  Here the draw is a hash of a key and of the number's place, so that
backward draws it again.  The key comes from torch's generator, one a call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.kernels.blocks import block_kernel
from kge_torchrec.kernels.jit import helper

_CHUNK = 1 << 14  # numbers
_U = np.uint32


@torch.library.custom_op("kge_torchrec::dropped", mutates_args=(), device_types="cpu")
def dropped(values: Tensor, share: float, key: int) -> Tensor:
    """Numbers (...) float32, each 0 with probability ``share``, else divided by 1 - ``share``.

    key: of 62 bits; which numbers are dropped depends on it and on their places alone.
    """
    values = values.detach().contiguous()
    out = torch.empty_like(values)
    least = min(round(share * 2**32), 2**32 - 1)
    arguments = (
        values.view(-1).numpy(), out.view(-1).numpy(), _U(least),
        np.float32(1 / (1 - share)), _U(key & 0xFFFFFFFF), _U(key >> 32),
    )  # fmt: skip
    _drop(values.numel(), values.numel(), *arguments)
    return out


dropped.register_fake(lambda values, share, key: torch.empty_like(values).contiguous())


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.share, ctx.key = inputs


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    """Gradients are dropped where values were: the draw is the same hash."""
    return dropped(grad, ctx.share, ctx.key), None, None


dropped.register_autograd(_backward, setup_context=_keep)


@block_kernel(_CHUNK)
def _drop(
    start: int,
    stop: int,
    values: np.ndarray,
    out: np.ndarray,
    least: np.uint32,
    scale: np.float32,
    low: np.uint32,
    high: np.uint32,
) -> None:
    for place in range(start, stop):
        drawn = mixed(_U(mixed(_U(_U(place) + low)) ^ high))
        out[place] = values[place] * (scale if drawn >= least else np.float32(0))


@helper
def mixed(bits: np.uint32) -> np.uint32:
    """A bijection whose every bit depends on every bit (the constants are Wellons', lowbias32)."""
    bits = _U(bits ^ (bits >> _U(16)))
    bits = _U(bits * _U(0x7FEB352D))
    bits = _U(bits ^ (bits >> _U(15)))
    bits = _U(bits * _U(0x846CA68B))
    return _U(bits ^ (bits >> _U(16)))

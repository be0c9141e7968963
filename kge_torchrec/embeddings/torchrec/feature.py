"""The ids of a batch as the input of TorchRec's lookup.

Shapes: M ids.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from kge_torchrec.data import ENTITY

# Bags per lookup, by device type.  The rows are the same with any number of bags, but FBGEMM's CUDA
# kernels give each bag one thread or one warp, so one bag would be walked by a single one.  The
# number is the same on all ranks and in all steps: otherwise TorchRec takes batches for batches of
# variable size and sends them in a slower way.
LOOKUP_BAGS = {"cpu": 1, "cuda": 4096}


def feature_for(device_type: str) -> Callable[[Tensor], KeyedJaggedTensor]:
    """Return ``as_feature`` with the number of bags for a type of device."""
    return partial(as_feature, bags=LOOKUP_BAGS[device_type])


def as_feature(ids: Tensor, bags: int = 1) -> KeyedJaggedTensor:
    """Return entity ids as the input of the lookup, spread evenly over bags.

    The rows come back as ``collection(...)[ENTITY].values()``, (M, D), in the order of the ids.

    Args:
        ids: (M,) int64; M may be 0.
        bags: Number of bags, see ``LOOKUP_BAGS``.
    """
    count = ids.numel()
    if bags == 1:
        lengths, offsets = torch.tensor([count]), torch.tensor([0, count])
    else:
        lengths, offsets = _evenly(count, bags, ids.device)
    return KeyedJaggedTensor(
        keys=[ENTITY],
        values=ids,
        lengths=lengths,
        offsets=offsets,
        stride=bags,
        # Otherwise TorchRec copies them from the device, and waits.
        length_per_key=[count],
        offset_per_key=[0, count],
    )


@lru_cache(maxsize=4)  # batches of one size have them in common; a GPU would start 5 kernels
def _evenly(count: int, bags: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return lengths (bags,) and offsets (bags + 1,) of bags that share ``count`` ids evenly."""
    lengths = torch.full((bags,), count // bags, dtype=torch.int64, device=device)
    lengths[: count % bags] += 1
    offsets = lengths.new_zeros(bags + 1)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return lengths, offsets

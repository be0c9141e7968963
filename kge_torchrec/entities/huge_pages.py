"""Main memory for tables, on 2-MiB pages where the kernel has them.

Touched rows lie scattered over gigabytes: with small pages finding a row's address takes as long as
reading it.  Only tables and their state lie like this: torch's own switch for huge pages
(THP_MEM_ALLOC_ENABLE) also aligns the temporaries of a step to 2 MiB, which glibc then cannot fit
into the holes that earlier ones left, and a rank was seen to grow by half a gigabyte.
"""

from __future__ import annotations

import contextlib
import mmap
from math import prod

import torch
from torch import Tensor


def zeros_on_huge_pages(
    *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Tensor:
    """Zeros; on the CPU their memory is taken as it is first touched."""
    size = prod(shape) * dtype.itemsize
    on_linux = hasattr(mmap, "MADV_HUGEPAGE")
    if not size or not on_linux or torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)

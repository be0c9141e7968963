"""Random streams of batches: the shuffle of an epoch, and the numbers that candidates come from.

Both are functions of a position: the i-th value needs no value before it.  A CPU computes them by
numba and numpy, CUDA by one Triton kernel each, or in plain torch where Triton cannot compile.

Shapes: M positions, C chunks, K numbers per chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.kernels.library import arrays, has_triton, operator
from kge_torchrec.kernels.random_formulas import (
    numbers_formula,
    numpy_numbers,
    permute_array,
    shuffle_formula,
)


def _shuffle(positions: Tensor, keys: list[int], half: int, size: int) -> Tensor:
    images = positions.clone(memory_format=torch.contiguous_format)
    (values,) = arrays(images)
    words = np.array(keys, np.int64).view(np.uint64)
    permute_array(values.view(np.uint64), words, np.uint64(half), np.uint64(size))
    return images


def _shuffle_on_cuda(positions: Tensor, keys: list[int], half: int, size: int) -> Tensor:
    if not has_triton():
        return shuffle_formula(positions, keys, half, size)
    from kge_torchrec.kernels import triton_streams

    return triton_streams.shuffled(positions, keys, half, size)


def _numbers(key: list[int], counter: list[int], chunks: int, count: int, like: Tensor) -> Tensor:
    words = np.array(key, np.int64).view(np.uint64)
    return torch.from_numpy(numpy_numbers(words, counter, chunks, count).copy())


def _numbers_on_cuda(
    key: list[int], counter: list[int], chunks: int, count: int, like: Tensor
) -> Tensor:
    if not has_triton():
        return numbers_formula(key, counter, chunks, count, like)
    from kge_torchrec.kernels import triton_streams

    return triton_streams.numbers(key, counter, chunks, count, like)


_shuffled = operator(
    "shuffled",
    _shuffle,
    lambda positions, keys, half, size: torch.empty_like(positions),
    cuda=_shuffle_on_cuda,
)
_philox_numbers = operator(
    "philox_numbers",
    _numbers,
    lambda key, counter, chunks, count, like: like.new_empty(chunks, count, dtype=torch.float64),
    cuda=_numbers_on_cuda,
)


def shuffled(positions: Tensor, keys: Sequence[int], half: int, size: int) -> Tensor:
    """Return the images of positions under the permutation of ``EpochShuffle``.

    Args:
        positions: (M,) int64 in [0, size).
        keys: One number of 64 bits per round, as signed integers.
        half: Half the bits of the network.
        size: Number of positions that are permuted.

    Returns:
        (M,) int64.
    """
    return _shuffled(positions, list(keys), half, size)


def philox_numbers(
    key: Sequence[int], counter: Sequence[int], chunks: int, count: int, like: Tensor
) -> Tensor:
    """Return random numbers in [0, 1) by Philox 4x64-10 (Salmon et al. 2011), as numpy does.

    Args:
        key: Two words, as signed integers.
        counter: Four words, as signed integers; the first value has the next counter.
        chunks: C.
        count: K; each chunk starts at a counter of its own.
        like: A tensor on the device of the numbers.

    Returns:
        (C, K) float64.
    """
    return _philox_numbers(list(key), list(counter), chunks, count, like)

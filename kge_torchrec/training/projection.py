"""Projections of vectors to another width, for ``model.init_options.width``.

    random  a random matrix with orthonormal columns (rows, if the width grows), scaled so that
            vectors keep their length on average
    pca     the first principal components of the vectors of the graph's entities, after
            subtracting their mean

Shapes: W elements of a vector before, D afterwards, m vectors at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from kge_torchrec.config import ConfigError

_STREAM = 0x1417  # separates the random stream from others with the same seed


class Projection(NamedTuple):
    """A linear map of vectors (m, W) to (m, D), after subtracting a mean, if there is one."""

    matrix: np.ndarray  # (W, D) float32
    mean: np.ndarray | None = None  # (W,) float32

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        return (rows if self.mean is None else rows - self.mean) @ self.matrix


def orthonormal(seed: int, width: int, wanted: int) -> Projection:
    """Return a random projection, a function of the seed."""
    stream = np.random.Generator(np.random.SFC64([seed, _STREAM]))
    longer, shorter = max(width, wanted), min(width, wanted)
    matrix, upper = np.linalg.qr(stream.standard_normal((longer, shorter)))
    matrix *= np.sign(np.diag(upper))  # makes the distribution uniform (Mezzadri 2007)
    matrix = matrix if width == longer else matrix.T
    return Projection((matrix * max(1.0, width / wanted) ** 0.5).astype(np.float32))


def principal(vectors: Iterable[np.ndarray], width: int, wanted: int) -> Projection:
    """Return the projection of some vectors (m, W), ... onto their first principal components.

    Raises:
        ConfigError: There are fewer components than that.
    """
    if width < wanted:
        raise ConfigError(
            f"model.init_options.width pca: vectors of dim {width} have no {wanted} principal "
            "components; use random"
        )
    total, squares, count = np.zeros(width), np.zeros((width, width)), 0
    for some in vectors:
        rows = some.astype(np.float64)
        total, squares, count = total + rows.sum(0), squares + rows.T @ rows, count + len(rows)
    mean = total / count
    _, components = np.linalg.eigh(squares / count - np.outer(mean, mean))
    components = components[:, ::-1][:, :wanted]
    components *= np.sign(components[np.abs(components).argmax(0), np.arange(wanted)])
    return Projection(components.astype(np.float32), mean.astype(np.float32))

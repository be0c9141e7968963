"""Rows as hypercomplex numbers, and their products, in loops."""

from __future__ import annotations

import numpy as np

# Units that multiply to the third: e1 e2 = e3 and so on, cyclically; the other way round minus.
QUATERNIONS = [(1, 2, 3)]
OCTONIONS = [(1, 2, 3), (1, 4, 5), (1, 7, 6), (2, 4, 6), (2, 5, 7), (3, 4, 7), (3, 6, 5)]


def numbers(row):
    """(re, im, re, im, ...) as complex numbers."""
    return [complex(row[i], row[i + 1]) for i in range(0, len(row), 2)]


def times(x, y, triples):
    """Product of two hypercomplex numbers of 1 + n units."""
    out = [x[0] * y[i] + x[i] * y[0] for i in range(len(x))]
    out[0] = x[0] * y[0] - sum(a * b for a, b in zip(x[1:], y[1:], strict=True))
    for triple in triples:
        for turn in range(3):
            i, j, k = (triple[(turn + step) % 3] for step in range(3))
            out[k] += x[i] * y[j] - x[j] * y[i]
    return np.array(out)


def groups(size, *rows):
    """The numbers of size components of several rows, side by side."""
    return zip(*(row.reshape(-1, size) for row in rows), strict=True)

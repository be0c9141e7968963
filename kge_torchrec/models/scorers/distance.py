"""Distances between all pairs of rows that keep their digits.

The product form of the Euclidean distance loses digits where distances are small, and ranking
would then disagree with the scores of single triples.

Shapes: C chunks, b queries, K rows, D numbers a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

_EXACT = "donot_use_mm_for_euclid_dist"


def euclidean(query: Tensor, rows: Tensor) -> Tensor:
    """(C, b, D), (C, K, D) -> (C, b, K)"""
    return torch.cdist(query, rows, p=2.0, compute_mode=_EXACT)


def manhattan(query: Tensor, rows: Tensor) -> Tensor:
    """(C, b, D), (C, K, D) -> (C, b, K)"""
    return torch.cdist(query, rows, p=1.0)

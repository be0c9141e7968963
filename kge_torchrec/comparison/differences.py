"""How far the parameters of two sessions lie apart.

Shapes: N entities, D numbers per entity.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kge_torchrec.training.session import Session

CHUNK_NUMBERS = 1 << 22  # of the table that are compared at once: 16 MiB of each


@torch.no_grad()
def largest_differences(one: Session, other: Session) -> dict[str, float]:
    """{"entities", "dense"}: the largest absolute difference between parameters.

    NaN where either has one.  Collective; no rank holds more than a part of the table.
    """
    return {"entities": _of_tables(one, other), "dense": _of_dense(one, other)}


def _of_tables(one: Session, other: Session) -> float:
    first, second = one.engine.shard(), other.engine.shard()
    device, largest = first.rows.device, torch.zeros((), device=first.rows.device)
    step = max(1, CHUNK_NUMBERS // first.dim)
    for start in range(0, first.num_entities, step):
        ids = torch.arange(start, min(start + step, first.num_entities), device=device)
        largest = torch.maximum(largest, _largest(first.fetch(ids), second.fetch(ids)))
    return float(largest)


def _of_dense(one: Session, other: Session) -> float:
    with one.whole_scorer() as ours, other.whole_scorer() as others:
        values = dict(others.named_parameters())
        pairs = [(mine, values[name]) for name, mine in ours.named_parameters()]
        largest = [_largest(mine, theirs) for mine, theirs in pairs if mine.numel()]
    return float(torch.stack(largest).max()) if largest else 0.0


def _largest(one: Tensor, other: Tensor) -> Tensor:
    return (one.float() - other.float()).abs().max()


def measured_steps(last: int) -> list[int]:
    """0, 1, 2, 5, 10, 20, 50, ... and the last step."""
    found, unit = {0, last}, 1
    while unit < last:
        found.update(step for step in (unit, 2 * unit, 5 * unit) if step < last)
        unit *= 10
    return sorted(found)

"""What scoring a batch costs: the real objective is run and every operation watched.

So any scorer and loss is counted as it is, not by a formula that resembles it.  It runs on the meta
device, where nothing is computed and no memory taken, in the blocks of the device planned for.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from kge_torchrec.models.objective import Objective
from kge_torchrec.models.ops import planning_for
from kge_torchrec.planning.watch_operations import Cost, WatchOperations
from kge_torchrec.planning.workload import RankBatch, Workload

# A chunk of more triples than this is watched at half the size and at this one and extended in a
# straight line: some scorers work through it piece by piece, which would take seconds to watch.
_LARGEST = 1024


def objective_cost(workload: Workload, batch: RankBatch, is_cuda: bool) -> Cost:
    """Of one rank's batch, the gradient of the looked-up rows aside."""
    negatives, objective = workload.config.negatives, workload.objective

    def at(chunks: int, triples: int) -> Cost:
        key = (chunks, triples, is_cuda)
        if key not in workload.costs:
            with planning_for("cuda" if is_cuda else "cpu"):
                workload.costs[key] = _watch(
                    objective, chunks, triples, negatives.count, negatives.filtered
                )
        return workload.costs[key]

    chunks, triples = batch.chunks, batch.triples
    if not chunks * triples:
        return Cost(0, 0, 0, 0, 0)
    if chunks > 2:  # chunks are independent of each other
        one, two = at(1, min(triples, _LARGEST)), at(2, min(triples, _LARGEST))
        cost = one.extended(two, chunks - 1)
        return cost if triples <= _LARGEST else _scaled(cost, triples / _LARGEST)
    if triples <= _LARGEST:
        return at(chunks, triples)
    half = _LARGEST // 2
    return at(chunks, half).extended(at(chunks, _LARGEST), (triples - half) / half)


def _scaled(cost: Cost, factor: float) -> Cost:
    return Cost(*(value * factor for value in vars(cost).values()))


def _watch(objective: Objective, chunks: int, triples: int, count: int, filtered: bool) -> Cost:
    dim, sides = objective.scorer.dim, len(objective.sides)
    with torch.device("meta"):
        ids = torch.zeros(2 * chunks * triples + sides * chunks * count, dtype=torch.int64)
        mask = torch.zeros((chunks, triples, count) if filtered else 0, dtype=torch.bool)
        rows = torch.zeros(1, dim, requires_grad=True)
        batch = SimpleNamespace(
            entities=ids,
            relation=torch.zeros(chunks, triples, dtype=torch.int64),
            weight=torch.zeros(chunks, triples),
            known_head=mask,
            known_tail=mask,
            deduplicated=True,
        )
    with WatchOperations() as watcher:
        objective(rows, batch).backward()
    for parameter in objective.parameters():
        parameter.grad = None
    return watcher.cost

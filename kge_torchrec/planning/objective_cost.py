"""What scoring a batch costs: the real objective is run and every operation watched.

So any scorer and loss is counted as it is, not by a formula that resembles it.  For GPUs it runs on
the meta device, where nothing is computed and no memory taken; for CPUs, unless the parameters are
large, on zeros, because some scorers work in smaller pieces there.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from kge_torchrec.models.objective import Objective
from kge_torchrec.planning.workload import RankBatch, Workload

# A chunk of more triples than this is watched at half the size and at this one and extended in a
# straight line: some scorers work through it piece by piece, which would take seconds to watch.
_LARGEST = 1024
_MOST_NUMBERS = 1 << 24  # of dense parameters that are made to plan for a CPU


@dataclass(frozen=True)
class Cost:
    """Of one forward and backward of the objective."""

    peak_bytes: float  # most bytes of activations and gradients alive at once
    largest_bytes: float  # of one tensor among them
    flops: float  # of matrix products and distances
    moved_bytes: float  # read and written by all other operations
    operations: float

    def extended(self, larger: Cost, factor: float) -> Cost:
        """On the line through this and a larger cost, ``factor`` times as far as that one."""
        pairs = zip(vars(self).values(), vars(larger).values(), strict=True)
        return Cost(*(one + factor * (two - one) for one, two in pairs))


def objective_cost(workload: Workload, batch: RankBatch, is_cuda: bool) -> Cost:
    """Of one rank's batch, the gradient of the looked-up rows aside."""
    negatives = workload.config.negatives
    on_meta = is_cuda or workload.dense_parameters > _MOST_NUMBERS
    objective = workload.objective("meta" if on_meta else "cpu")

    def at(chunks: int, triples: int) -> Cost:
        key = (chunks, triples, on_meta)
        if key not in workload.costs:
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
    with next(objective.parameters()).device:
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
    with torch.random.fork_rng(devices=[]), _Watcher() as watcher:  # dropout draws
        objective(rows, batch).backward()
    for parameter in objective.parameters():
        parameter.grad = None
    return Cost(watcher.peak, watcher.largest, watcher.flops, watcher.moved, watcher.operations)


class _Watcher(TorchDispatchMode):
    """Counts the bytes alive, the work and the bytes moved of all operations inside."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = self.largest = self.flops = self.moved = self.operations = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = operation(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = {_key(tensor) for tensor in tensors}
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        for tensor in made:
            if _key(tensor) not in known:
                self._born(tensor)
        if operation.is_view:
            return out
        self.operations += 1
        work = _work(operation, args, kwargs, out)
        if work:
            self.flops += work
        else:
            self.moved += sum(t.numel() * t.element_size() for t in tensors + made)
        return out

    def _born(self, tensor: Tensor) -> None:
        storage, key = tensor.untyped_storage(), _key(tensor)
        if key in self._seen:
            return
        self._seen.add(key)
        self.alive += storage.nbytes()
        self.peak = max(self.peak, self.alive)
        self.largest = max(self.largest, storage.nbytes())
        weakref.finalize(storage, self._gone, key, storage.nbytes())

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.alive -= size


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _work(operation, args, kwargs, out) -> int:
    """Floating-point operations of what is limited by arithmetic; 0 for what moves bytes."""
    packet = operation.overloadpacket
    if packet in flop_registry:
        return flop_registry[packet](*args, **kwargs, out_val=out)
    if packet is torch.ops.aten._cdist_forward:  # subtract, square or absolute value, add
        return 3 * prod(out.shape) * args[0].shape[-1]
    if packet is torch.ops.aten._cdist_backward:  # once for each side
        return 6 * prod(args[0].shape) * args[1].shape[-1]
    return 0

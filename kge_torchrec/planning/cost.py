"""The cost of scoring a micro-batch: memory, arithmetic and operations.

The real objective runs on the meta device, in the blocks of the device that is planned for, so the
costs of any scorer and loss are counted, not estimated by a formula.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from kge_torchrec.config import Config
from kge_torchrec.data import SIDES, Side
from kge_torchrec.kernels.operators import planning_for
from kge_torchrec.models.over_all import (
    BLOCK_BYTES,
    BinaryCrossEntropyOverAll,
    BlockAnswers,
    OverAll,
    SoftmaxOverAll,
    block_height,
    kept_bytes,
)
from kge_torchrec.training.assembly import build_objective

# Larger sizes are extrapolated, since some scorers work through a batch piece by piece, which would
# take seconds to run.
_LARGEST, _SMALL = 1024, 64  # triples per chunk
_QUERIES = 512  # queries against all entities, on a CPU


@dataclass(frozen=True)
class Cost:
    """Counts of one run of an objective."""

    peak_bytes: float = 0  # most bytes of activations and gradients alive at once
    flops: float = 0  # of matrix products and distances
    moved_bytes: float = 0  # read and written by all other operations
    operations: float = 0

    def extended(self, larger: Cost, factor: float) -> Cost:
        """Return the cost on the line through this and a larger one, ``factor`` times as far."""
        pairs = zip(vars(self).values(), vars(larger).values(), strict=True)
        return Cost(*(one + factor * (two - one) for one, two in pairs))


class Costs:
    """The costs of a scorer and a loss on a kind of device. Each size is counted once.

    Args:
        config: The config of the run.
        relations: Number of relations.
        is_cuda: Whether its kernels are those of a GPU.
        device: "meta" counts without computing.
    """

    def __init__(self, config: Config, relations: int, is_cuda: bool, device: str = "meta") -> None:
        self.config, self.is_cuda, self.device = config, is_cuda, torch.device(device)
        self._counted: dict[object, Cost] = {}
        # Costs of every regime are counted on batches of triples.
        sampled = replace(config, negatives=replace(config.negatives, regime="sampled"))
        with self.device:
            self.objective = build_objective(sampled, relations)
        self.objective.precision = torch.float32  # meta has no autocast; float32 is larger
        # Elements of relations and of the scorer's other parameters.
        self.dense_numbers = sum(parameter.numel() for parameter in self.objective.parameters())

    def of_batch(self, chunks: int, triples: int, candidates: dict[Side, int]) -> Cost:
        """Return the cost of C chunks of b triples, without the gradient of the looked-up rows."""

        def at(chunks: int, triples: int) -> Cost:
            key = (chunks, triples, *candidates.items())
            return self._count(key, lambda: self._batch(chunks, triples, candidates))

        if not chunks * triples:
            return Cost()
        if chunks > 2:  # chunks are independent of each other
            one, two = (_extended(partial(at, n), triples, _LARGEST) for n in (1, 2))
            return one.extended(two, chunks - 1)
        return _extended(partial(at, chunks), triples, _LARGEST)

    def of_all(self, rows: int, queries: int, free: int = 0) -> Cost:
        """Return the cost of Q queries against all rows of a rank, forward and backward.

        The bytes alive are those of one block of rows, the gradients of all rows, and the scores
        where these are kept. Softmax computes scores twice where it does not keep them, which adds
        a third to the three products per score. ``free`` bytes of a GPU's memory are beside the
        table.
        """
        most = BLOCK_BYTES["cuda" if self.is_cuda else "cpu"]
        height = min(rows, block_height(queries, most))

        def at(queries: int) -> Cost:
            return self._count((queries, height), lambda: self._block(queries, height))

        # A GPU's blocks are large, so there are few.
        block = at(queries) if self.is_cuda else _extended(at, queries, _QUERIES)
        dim = self.config.model.dim
        assert dim is not None
        kept = 4 * rows * queries <= kept_bytes(free, rows, dim)
        other_bytes = 4 * (rows - height) * (dim + (queries if kept else 0))
        twice = not kept and self.config.loss.name == "softmax"
        times = rows / height * (4 / 3 if twice else 1)
        work = (block.flops, block.moved_bytes, block.operations)
        return Cost(block.peak_bytes + other_bytes, *(times * x for x in work))

    def _count(self, key: object, prepare: Callable[[], Callable[[], None]]) -> Cost:
        """Return what is counted in the function that ``prepare`` returns."""
        if key not in self._counted:
            with planning_for("cuda" if self.is_cuda else "cpu"):
                run = prepare()
                with OperationCounter() as counter:
                    run()
            self._counted[key] = Cost(
                counter.peak, counter.flops, counter.moved, counter.operations
            )
        return self._counted[key]

    def _batch(self, chunks: int, triples: int, candidates: dict[Side, int]) -> Callable[[], None]:
        """Return a function that runs forward and backward of C chunks of b triples."""
        objective = self.objective
        counts = [triples, triples, *candidates.values()]  # per chunk: heads, tails, candidates
        with self.device:
            known = {
                side: torch.zeros((chunks, triples, candidates.get(side, 0)), dtype=torch.bool)
                for side in SIDES
            }
            if not self.config.negatives.masks_candidates:
                known = dict.fromkeys(SIDES, torch.zeros(0, dtype=torch.bool))
            rows = torch.zeros(1, objective.scorer.row_dim, requires_grad=True)
            batch = SimpleNamespace(
                entities=torch.zeros(chunks * sum(counts), dtype=torch.int64),
                relation=torch.zeros(chunks, triples, dtype=torch.int64),
                weight=torch.zeros(chunks, triples),
                known_head=known["head"],
                known_tail=known["tail"],
                sizes=[chunks * count for count in counts],
                log_expected=torch.zeros(0),
                bags=None,  # their sums take little of a step
                deduplicated=True,
            )

        def run() -> None:
            objective(rows, batch).backward()
            for parameter in objective.parameters():
                parameter.grad = None

        return run

    def _block(self, queries: int, height: int) -> Callable[[], None]:
        """Return a function that runs Q queries against some rows, none of which is an answer."""
        objective = self.objective
        scorer = objective.scorer
        name = self.config.loss.name
        kind = SoftmaxOverAll if name == "softmax" else BinaryCrossEntropyOverAll
        loss = kind(height, getattr(self.config.loss.options_in("options"), "label_smoothing", 0.0))
        sides: tuple[Side, ...] = ("tail",) if scorer.reciprocal else objective.sides
        ends = [queries * i // len(sides) for i in range(len(sides) + 1)]
        counts = [end - start for start, end in pairwise(ends)]
        with self.device:
            anchors = [torch.zeros(1, n, scorer.row_dim, requires_grad=True) for n in counts]
            relations = [torch.zeros(1, n, dtype=torch.int64) for n in counts]
            rows = torch.zeros(height, scorer.row_dim, requires_grad=True)
            places = torch.zeros(height, dtype=torch.int64)
        inputs = [rows, *anchors, *(p for p in objective.parameters() if p.requires_grad)]

        def run() -> None:
            encoded = [scorer.encode(*x) for x in zip(anchors, relations, sides, strict=True)]
            entities = scorer.entity(rows)[None]
            compare = scorer.row_comparison.matrix
            scores = [compare(query, entities, exact=False) for query in encoded]
            gradients = [x.detach() for x in scores]
            for x in gradients:
                _overwrite_by_gradients(loss, x[0])
            gradients_of = torch.autograd.grad(scores, inputs, gradients, allow_unused=True)
            row_gradients = gradients_of[0].index_select(0, places)  # without those of fetched rows
            del row_gradients

        return run


def _extended(at: Callable[[int], Cost], size: int, largest: int) -> Cost:
    """Return the cost of a size; beyond the largest, on the line through that and its half.

    HousE takes 100,000 operations on a CPU for 1,024 triples, as it works piece by piece; where a
    small batch shows that, the line is that through small sizes.
    """
    for half in (_SMALL // 2, largest // 2):
        if size <= 2 * half:
            return at(size)
        one, two = at(half), at(2 * half)
        if two.operations > one.operations:
            break
    return one.extended(two, (size - half) / half)


def _overwrite_by_gradients(loss: OverAll, scores: Tensor) -> None:
    """Turn scores (Q, m) into the loss's gradients, as if no answer were among them."""
    none = scores.new_zeros(0, dtype=torch.int64)
    counts = scores.new_zeros(len(scores), dtype=torch.int64)
    answers = BlockAnswers(none, none, scores.new_zeros(0), counts)
    statistics = loss.partial_statistics(scores, answers)
    loss.backward(scores, statistics, answers, scores.new_ones(len(scores)))


class OperationCounter(TorchDispatchMode):
    """Counts the bytes alive, the arithmetic and the bytes moved of all operations in its block."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = self.flops = self.moved = self.operations = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self,
        operation: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = operation(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = {_storage_key(tensor) for tensor in tensors}
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        for tensor in made:
            if _storage_key(tensor) not in known:
                self._add(tensor)
        if operation.is_view:
            return out
        self.operations += 1
        flops = _flops(operation, args, kwargs, out)
        self.flops += flops
        if not flops:
            self.moved += sum(t.numel() * t.element_size() for t in tensors + made)
        return out

    def _add(self, tensor: Tensor) -> None:
        storage, key = tensor.untyped_storage(), _storage_key(tensor)
        if key in self._seen:
            return
        self._seen.add(key)
        self.alive += storage.nbytes()
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._remove, key, storage.nbytes())

    def _remove(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.alive -= size


def _storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _flops(operation: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Return the flops of an operation that arithmetic limits; 0 for one that moves bytes."""
    packet, aten = operation.overloadpacket, torch.ops.aten
    if packet in flop_registry:
        return flop_registry[packet](*args, **kwargs, out_val=out)
    # Subtract, square or absolute value, add; in gradients once for each side.
    name = operation.name()
    if packet == aten._cdist_forward or name == "kge_torchrec::pair_scores":
        return 3 * prod(out.shape) * args[0].shape[-1]
    if packet == aten._cdist_backward:
        return 6 * prod(args[0].shape) * args[1].shape[-1]
    if name in ("kge_torchrec::pair_query_gradients", "kge_torchrec::pair_row_gradients"):
        return 6 * prod(args[4].shape) * args[0].shape[-1]
    return 0

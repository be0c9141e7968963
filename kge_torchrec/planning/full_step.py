"""A step against all entities, in sizes: what ``training.full_candidates`` holds and sends.

Letters besides those of ``workload``: Q queries of a step, the same on every rank; n rows of a
rank; F rows that every rank fetches, the queries' anchors.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.config.registry import resolve
from kge_torchrec.embeddings.torchrec.planner import TableForm
from kge_torchrec.models.full_losses import (
    KEPT_BYTES,
    BlockAnswers,
    FullBinaryCrossEntropy,
    FullLoss,
    FullSoftmax,
    block_bytes_of,
    keeps_scores,
    score_blocks,
)
from kge_torchrec.models.model import Objective
from kge_torchrec.models.ops import planning_for
from kge_torchrec.models.scorers import Side
from kge_torchrec.models.scorers.queries import QueryScorer
from kge_torchrec.planning.communication import Traffic, no_traffic
from kge_torchrec.planning.cost import (
    sending_seconds,
    starting_seconds,
    table_optimizer_seconds,
    work_seconds,
)
from kge_torchrec.planning.devices import Cluster, Ring
from kge_torchrec.planning.layout import DenseLayout
from kge_torchrec.planning.operations import Cost, WatchOperations
from kge_torchrec.planning.workload import Workload

# More queries than this are a straight line on a CPU, where some scorers take them one by one; a
# GPU's blocks are large, so that there are few of them to watch.
_QUERIES = 512
_COLLECTIVES = 4  # anchors, what the losses saw, gradients of anchors, dense gradients


def queries_of(workload: Workload) -> int:
    """Q: a triple asks for both of its sides, unless an epoch passes through queries."""
    of_triples = workload.config.negatives.examples == "triples"
    return workload.batch_size * (len(workload.sides) if of_triples else 1)


def fetched_of(workload: Workload) -> int:
    """F: anchors, and answers if relations are predicted or whole triples are penalised."""
    loss = workload.config.loss
    of_triples = any(resolve("regularizer", name).takes_triples for name in loss.regularizers)
    return queries_of(workload) * (2 if loss.relation_weight or of_triples else 1)


def _of_micro_batch(workload: Workload, count: int) -> int:
    """The share of a step's queries, or of what goes with each, in its largest micro-batch."""
    return -(-count // workload.config.train.accumulation)


def full_cost(workload: Workload, rows: int, is_cuda: bool) -> Cost:
    """Of n rows against the queries of a micro-batch, forward and backward.

    Bytes alive are those of one block of rows, but for scores and gradients of rows that are kept;
    all else is of all blocks.  Where softmax does not keep scores it computes them twice, which
    adds a third to the three products of each.
    """
    queries = _of_micro_batch(workload, queries_of(workload))
    if not rows:
        return Cost(0, 0, 0, 0, 0)
    device = "cuda" if is_cuda else "cpu"
    height = len(score_blocks(rows, queries, block_bytes_of(device))[0])
    block = _of_block(workload, queries, height, is_cuda)
    kept = keeps_scores(rows, queries, KEPT_BYTES)
    others = 4 * (rows - height) * (queries + workload.dim) if kept else 0
    twice = not kept and workload.config.loss.name == "softmax"
    times = rows / height * (4 / 3 if twice else 1)
    work = (block.flops, block.moved_bytes, block.operations)
    return Cost(block.peak_bytes + others, block.largest_bytes, *(times * x for x in work))


def fetched_bytes(workload: Workload) -> int:
    """Fetched rows, their gradients, sums of those that live here, and their places."""
    return _of_micro_batch(workload, fetched_of(workload)) * (4 * 3 * workload.dim + 8 * 3)


def held_bytes(workload: Workload, rows: int) -> int:
    """Gradients of n rows that step only when those of all rows are known."""
    return 4 * rows * workload.dim if workload.config.train.needs_whole_gradient else 0


def dense_sum_bytes(workload: Workload, layout: DenseLayout) -> int:
    """Whole gradients of sharded parameters; where they are sent, once more."""
    copies = 2 if layout.splits > 1 else 1
    return 4 * copies * workload.dense_parameters if layout.is_sharded else 0


def batch_bytes(workload: Workload) -> int:
    """Anchors, relations and answers of all queries, at least one each."""
    return 8 * 4 * queries_of(workload)


def full_traffic(workload: Workload, cluster: Cluster) -> Traffic:
    """Of a step: anchors' rows and gradients, summed over ranks; three numbers a query."""
    traffic, ranks = no_traffic(cluster), cluster.world_size
    ring = Ring(cluster, np.arange(ranks))
    for kind, size in (
        ("rows", 4 * fetched_of(workload) * workload.dim),
        ("gradients", 4 * fetched_of(workload) * workload.dim),
    ):
        ring.all_reduce(size, traffic.within[kind], traffic.between[kind])
    layout, dense = DenseLayout.of(workload.config.dense, cluster), workload.dense_parameters
    layout.send_whole(dense, cluster, traffic.within["dense"], traffic.between["dense"])
    seen = 8 * 3 * queries_of(workload) * (ranks - 1)
    ring.send(seen, traffic.within["rows"], traffic.between["rows"])
    return traffic


def full_step_time(
    workload: Workload,
    cluster: Cluster,
    form: TableForm,
    rows: int,
    columns: float,
    cost: Cost,
    traffic: Traffic,
) -> dict[str, float]:
    """Seconds of each part of a step, of a rank with n rows; a model as in ``step_time``.

    cost: of a micro-batch.
    """
    micro_batches = workload.config.train.accumulation
    return {
        "scoring": micro_batches * work_seconds(workload, cluster, cost),
        "table optimizer": table_optimizer_seconds(cluster, form, rows, columns),
        **starting_seconds(cluster, cost, micro_batches, _COLLECTIVES),
        **sending_seconds(cluster, traffic),
    }


def _of_block(workload: Workload, queries: int, height: int, is_cuda: bool) -> Cost:
    """Of m rows against Q queries."""

    def at(queries: int) -> Cost:
        key = ("full", queries, height, is_cuda)
        if key not in workload.costs:
            with planning_for("cuda" if is_cuda else "cpu"):
                workload.costs[key] = _watch(workload.objective, _loss(workload), queries, height)
        return workload.costs[key]

    if is_cuda or queries <= _QUERIES:
        return at(queries)
    half = _QUERIES // 2
    return at(half).extended(at(_QUERIES), (queries - half) / (_QUERIES - half))


def _loss(workload: Workload) -> FullLoss:
    loss = FullSoftmax if workload.config.loss.name == "softmax" else FullBinaryCrossEntropy
    options = workload.config.loss.loss_options()
    return loss(workload.num_entities, getattr(options, "label_smoothing", 0.0))


def _watch(objective: Objective, loss: FullLoss, queries: int, height: int) -> Cost:
    scorer = cast(QueryScorer, objective.scorer)  # training against all entities takes no other
    parameters = [p for p in objective.parameters() if p.requires_grad]
    sides: tuple[Side, ...] = ("tail",) if scorer.reciprocal else objective.sides
    counts = [queries * (i + 1) // len(sides) - queries * i // len(sides)
              for i in range(len(sides))]  # fmt: skip
    with torch.device("meta"):
        anchors = [torch.zeros(1, count, scorer.dim, requires_grad=True) for count in counts]
        relations = [torch.zeros(1, count, dtype=torch.int64) for count in counts]
        rows = torch.zeros(height, scorer.dim, requires_grad=True)
        places = torch.zeros(height, dtype=torch.int64)
    with WatchOperations() as watch:
        encoded = [scorer.encode_query(*x) for x in zip(anchors, relations, sides, strict=True)]
        entities = scorer.entity(rows)[None]
        scores = [scorer.similarity_in_training(query, entities) for query in encoded]
        slopes = [x.detach() for x in scores]
        for x in slopes:
            _to_slopes(loss, x[0])
        inputs = [rows, *anchors, *parameters]
        found = torch.autograd.grad(scores, inputs, slopes, allow_unused=True)
        of_rows = found[0].index_select(0, places)  # without those of fetched rows
        del of_rows
    return watch.cost


def _to_slopes(loss: FullLoss, scores: Tensor) -> None:
    """Overwrites scores (Q, m) by the loss's gradients, as if no answer were among them."""
    nowhere = scores.new_zeros(0, dtype=torch.int64)
    answers = BlockAnswers(nowhere, nowhere, scores.new_zeros(0))
    loss.finish(scores, loss.observe(scores, answers), answers, scores.new_ones(len(scores)))

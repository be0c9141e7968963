"""Forward and backward of queries against all entities, over this rank's rows.

``full_candidates`` explains the parts.

The random numbers of dropout depend on the step and, within it, on the encoded queries (the same on
every rank), on a cell of entities or on a cell of queries.  They do not depend on how the rows are
split over the ranks.

Shapes: Q queries, F gathered rows (one per query, repeats included), n rows on this rank, m rows of
a block, D elements per row, N entities.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from kge_torchrec.data.batches.queries import QueryBatch
from kge_torchrec.distributed.processes import world_size
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.embeddings.row_gradients import RowGradients
from kge_torchrec.models.full_losses import (
    BlockAnswers,
    FullLoss,
    keeps_bfloat16,
    keeps_scores,
    score_blocks,
)
from kge_torchrec.models.model import Objective, relation_prediction
from kge_torchrec.models.scorers.queries import QueryScorer
from kge_torchrec.training.query_shards import GatheredRows, QueryShard
from kge_torchrec.training.step import seed_generators

CELL = 256  # entities or queries that share a random stream, independent of ranks
_QUERIES, _RELATIONS, _ROWS, _TRIPLES = 0, 2, 3, 4  # purposes of random streams


@dataclass
class FullObjective:
    """The objective over all entities, and what the queries of a step share.

    Attributes:
        objective: Scorer and penalties.
        loss: The loss in closed form over all entities.
        device: Device of this rank.
        kept_bytes: Scores of a rank's rows up to this size stay in memory.
        block_bytes: Size of a block of scores.
        casts: Whether autocast computes the scores.
        scale: The loss scale.
        parameters: The whole dense parameters.
        sums: This rank's terms of their gradients.
    """

    objective: Objective
    loss: FullLoss
    device: torch.device
    kept_bytes: int
    block_bytes: int
    casts: bool
    scale: float = 1.0
    parameters: list[nn.Parameter] = field(default_factory=list)
    sums: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        objective, layers = self.objective, (nn.Dropout, nn.Dropout2d)
        self.scorer = cast(QueryScorer, objective.scorer)  # the config rejects other scorers
        self.draws = any(isinstance(m, layers) and m.p > 0 for m in objective.modules())
        # A GPU prefers few large operations; only random streams need cells.
        self.joins_cells = self.device.type == "cuda" and not self.draws
        self.drops_entities = objective.entity_dropout.p > 0
        self.penalizes, self.relation_weight = objective.penalizes, objective.relation_weight
        self.penalizes_entities = bool(objective.regularizers.on_entities)
        self.penalizes_triples = bool(objective.regularizers.on_triples)


class _Block(NamedTuple):
    """A block of rows with its scores.  Lists have one entry per query shard."""

    places: range  # positions of its rows in the shard
    rows: Tensor  # (m, D)
    scores: list[Tensor]  # (1, q, m), with their graph
    answers: list[BlockAnswers]
    statistics: Tensor | None  # (3, Q) of this block; None after the reduction over all blocks


class QueryPass:
    """Forward and backward of the queries that are scored together.  Collective.

    Exhaust ``row_gradients`` before you call ``loss``.

    Args:
        full: The objective, which takes the gradients of dense parameters.
        batch: The queries, the same on every rank.
        shard: This rank's rows.
    """

    def __init__(self, full: FullObjective, batch: QueryBatch, shard: EntityShard):
        self.full, self.batch, self.shard = full, batch, shard
        self.objective, self.scorer = full.objective, full.scorer
        self.weight = batch.weight * full.scale  # makes the loss a mean over the step's queries
        self.world = world_size()
        self.rank = dist.get_rank() if self.world > 1 else 0
        self.query_shards = [QueryShard(queries, shard) for queries in batch.queries_by_side]
        self.queries = sum(len(x.relation) for x in self.query_shards)
        with_answers = bool(full.relation_weight) or full.penalizes_triples
        self.gathered = GatheredRows(batch.queries_by_side, shard, with_answers)
        with torch.enable_grad(), self._drawing(_QUERIES):
            for query_shard, anchors in zip(self.query_shards, self.gathered.anchors, strict=True):
                if full.drops_entities:
                    anchors = self.objective.entity_dropout(anchors)
                query_shard.encode_query(self.scorer, anchors)
        unit_weight = torch.full((), self.weight, device=shard.rows.device)
        self.weights = [  # (q,) of each query shard
            unit_weight.expand(len(x.relation)) if x.weight is None else x.weight * self.weight
            for x in self.query_shards
        ]
        self.block_statistics: list[Tensor] = []  # (3, Q) of each scored block
        self.statistics: Tensor | None = None  # (3, Q) of all blocks of all ranks
        self.own_terms = torch.zeros((), device=shard.rows.device)  # of the loss, on this rank only

    def row_gradients(self) -> Iterator[RowGradients]:
        """Yield the complete gradients of all n rows, each row once."""
        full, loss = self.full, self.full.loss
        size = len(self.shard.rows), self.queries
        edges = np.concatenate([x.edges() for x in self.query_shards])
        blocks = _cut(score_blocks(*size, full.block_bytes), edges)
        if keeps_scores(*size, full.kept_bytes):
            scored = [self._forward(places) for places in blocks]
            self._reduce()
            finished = []
            while scored:
                block = scored.pop(0)  # frees its scores after this iteration
                finished.append((block.places, self._backward(block)))
            self.gathered.add(self._backward_of_queries())
            for places, grad in finished:
                yield self.gathered.completed(places, grad)
            return
        if loss.normalizes:  # needs statistics of all blocks first, so scores twice
            for places in blocks:
                self._forward(places, graph=False)
            self._reduce()
        for places in blocks:
            yield self.gathered.hold_back(places, self._backward(self._forward(places)))
        if self.statistics is None:
            self._reduce()
        self.gathered.add(self._backward_of_queries())
        yield self.gathered.gradients()

    def loss(self) -> Tensor:
        """Return the unscaled loss.  Its mean over the ranks is the global loss.

        Every rank knows the loss in closed form, and only its own part of all other terms.
        """
        assert self.statistics is not None  # row_gradients was exhausted
        losses = self.full.loss.loss(self.statistics)
        weights = [x.weight for x in self.query_shards if x.weight is not None]
        if weights:
            losses = losses * torch.cat(weights)
        scaled = losses.sum() * self.weight + self.own_terms * self.world
        return (scaled / self.full.scale).float()

    def _forward(self, places: range, graph: bool = True) -> _Block:
        """Score a block of rows, with the graph for gradients if ``graph``.

        Scores are in float32 unless the loss has kernels for bfloat16.
        """
        full, loss = self.full, self.full.loss
        with torch.set_grad_enabled(graph):
            rows = self.shard.rows[places.start : places.stop].detach().float()
            rows = rows.requires_grad_(graph)
            dropped = rows * self._row_factors(places) if full.drops_entities else rows
            entities = self.scorer.entity(dropped)
            with self.objective.autocast(full.device) if full.casts else nullcontext():
                scores = [x.scores(self.scorer, entities, places) for x in self.query_shards]
            for i, x in enumerate(scores):
                if x.dtype != torch.float32 and not keeps_bfloat16(loss, x[0]):
                    scores[i] = x.float()
        answers = [query_shard.answers(places) for query_shard in self.query_shards]
        statistics = None
        if self.statistics is None:
            each = zip(scores, answers, strict=True)
            statistics = torch.cat([loss.partial_statistics(x.detach()[0], a) for x, a in each], 1)
            self.block_statistics.append(statistics)
        return _Block(places, rows, scores, answers, statistics)

    def _row_factors(self, places: range) -> Tensor:
        """Return the factors (m, D) of entity dropout, with a random stream per cell."""
        first, stop = (self.shard.first_row + place for place in (places.start, places.stop))
        cells = range(first // CELL, -(-stop // CELL))
        factors = torch.ones(len(cells) * CELL, self.shard.dim, device=self.shard.rows.device)
        for number, cell in enumerate(cells):
            with self._drawing(_ROWS, cell):
                part = slice(number * CELL, (number + 1) * CELL)
                factors[part] = self.objective.entity_dropout(factors[part])
        before = first - cells.start * CELL
        return factors[before : before + len(places)]

    def _reduce(self) -> None:
        """Reduce the partial statistics over blocks and ranks, with one collective."""
        loss = self.full.loss
        own = loss.reduce(torch.stack(self.block_statistics)) if self.block_statistics else None
        if self.world == 1:
            self.statistics = own
            return
        size, device = (3, self.queries), self.shard.rows.device
        # Send float64: a rank without rows does not know the dtype of the statistics.
        sent = torch.zeros(size, dtype=torch.float64, device=device)
        if own is not None:
            sent.copy_(own)
        elif loss.normalizes:
            sent[0] = -torch.inf
        all_statistics = sent.new_empty(self.world, *size)
        dist.all_gather(list(all_statistics.unbind()), sent)
        statistics = loss.reduce(all_statistics)
        self.statistics = statistics if own is None else statistics.to(own.dtype)

    def _backward(self, block: _Block) -> Tensor:
        """Return the gradients (m, D) of a block's rows; add up those of queries and parameters."""
        # Gradients overwrite the scores, which are not needed any more, not even by their graph.
        # ``data`` hides this from autograd.
        gradients = [scores.data for scores in block.scores]
        statistics = block.statistics if self.statistics is None else self.statistics
        assert statistics is not None  # blocks have none only after the reduction
        parts = statistics.split([x.shape[1] for x in gradients], 1)
        for x, *rest in zip(gradients, parts, block.answers, self.weights, strict=True):
            self.full.loss.backward(x[0], *rest)
        encoded = [x for query_shard in self.query_shards for x in query_shard.encoded]
        row_gradients, encoded_gradients = self._differentiate(
            block.scores, gradients, [block.rows, *encoded]
        )
        _add(
            [x for query_shard in self.query_shards for x in query_shard.gradients],
            encoded_gradients,
        )
        if self.full.penalizes_entities:
            self._add_penalty(block, row_gradients)
        return row_gradients

    def _add_penalty(self, block: _Block, row_gradients: Tensor) -> None:
        """Add the gradients of penalties on anchors and answers in this block to the rows."""
        each = zip(self.query_shards, block.answers, strict=True)
        penalized = [query_shard.penalized(block.places, answers) for query_shard, answers in each]
        place, weight = (torch.cat(parts) for parts in zip(*penalized, strict=True))
        with torch.enable_grad():
            rows = block.rows.detach().index_select(0, place).requires_grad_()
            total = (self.objective.penalty_of_entities(rows) * weight).sum() * self.weight
        row_gradients.index_add_(0, place, *torch.autograd.grad(total, rows))
        self.own_terms = self.own_terms + total.detach()

    def _backward_of_queries(self) -> Tensor:
        """Return the gradients (F, D) of gathered rows, from encoded queries and own terms."""
        outputs = [x for query_shard in self.query_shards for x in query_shard.graph]
        gradients = [x for query_shard in self.query_shards for x in query_shard.gradients]
        if self.full.penalizes or self.full.relation_weight:
            with torch.enable_grad():
                total = self._terms_of_own_queries()
            self.own_terms = self.own_terms + total.detach()
            outputs.append(total)
            gradients.append(torch.ones_like(total))
        grad, _ = self._differentiate(outputs, gradients, [self.gathered.rows])
        return grad

    def _terms_of_own_queries(self) -> Tensor:
        """Return the loss terms per query for this rank's share of the queries.

        These are penalties on relations and on whole triples, and relation prediction.
        """
        total = self.gathered.rows.new_zeros(())
        for number, query_shard in enumerate(self.query_shards):
            count, size = len(query_shard.relation), CELL
            if self.full.joins_cells:
                size = max(1, -(-count // self.world))
            for start in range(self.rank * size, count, self.world * size):
                total = total + self._terms_of_cell(number, slice(start, start + size))
        return total * self.weight

    def _terms_of_cell(self, number: int, cell: slice) -> Tensor:
        """Return these loss terms for a cell of queries of one query shard."""
        query_shard, objective = self.query_shards[number], self.objective
        relation, side, weight = query_shard.relation[cell], query_shard.side, query_shard.weight
        own = self.gathered.rows.new_ones(()) if weight is None else weight[cell]
        total = self.gathered.rows.new_zeros(())
        if self.full.penalizes:
            total = total + (objective.penalty_of_relations(relation, side) * own).sum()
        if self.gathered.answers[number] is None:
            return total
        anchor, answer = (x[number][cell] for x in (self.gathered.anchors, self.gathered.answers))
        if self.full.penalizes_triples:
            triples = anchor[None], relation[None], answer[None], side
            with self._drawing(_TRIPLES, number, cell.start):
                triple_penalties = objective.regularizers.of_triples(self.scorer, *triples)
            total = total + (triple_penalties * own).sum()
        if self.full.relation_weight:
            with self._drawing(_RELATIONS, number, cell.start):
                anchor, answer = (objective.entity_dropout(x) for x in (anchor, answer))
                relation_loss = relation_prediction(
                    self.scorer, anchor[None], relation[None], answer[None], side
                )
            total = total + self.full.relation_weight * (relation_loss * own).sum()
        return total

    def _differentiate(
        self, outputs: list[Tensor], gradients: list[Tensor], inputs: list[Tensor]
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Return the gradients of inputs; add up those of dense parameters.

        Returns:
            The gradient of the first input, zeros if it has none, and of the others, or None.
        """
        pairs = [(x, g) for x, g in zip(outputs, gradients, strict=True) if x.requires_grad]
        leaves = [*inputs, *self.full.parameters]
        results: Sequence[Tensor | None] = [None] * len(leaves)
        if pairs:  # there are none for rows that are no candidates
            results = torch.autograd.grad(
                [x for x, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True
            )
        _add(self.full.sums, results[len(inputs) :])
        first = torch.zeros_like(inputs[0]) if results[0] is None else results[0]
        return first, results[1 : len(inputs)]

    @contextmanager
    def _drawing(self, *place: int) -> Iterator[None]:
        """Make dropout inside the context a function of the batch's seed and a place.

        The result is the same on every rank, and when scores are computed a second time.
        """
        if not self.full.draws:
            yield
            return
        devices = [self.full.device] if self.full.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            seed_generators(self.batch.seed, *place)
            yield


def _cut(blocks: list[range], places: np.ndarray) -> list[range]:
    """Split blocks of rows at some positions."""
    last = blocks[-1].stop if blocks else 0
    edges = np.unique([0, *(block.stop for block in blocks), *places.clip(0, last)])
    return [range(a, b) for a, b in itertools.pairwise(edges.tolist())]


def _add(sums: list[Tensor], terms: Sequence[Tensor | None]) -> None:
    """Add each term to its sum in place; None means 0."""
    for total, term in zip(sums, terms, strict=True):
        if term is not None:
            total += term

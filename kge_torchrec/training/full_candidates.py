"""Training steps with all entities as candidates, over a row-wise sharded table.

Every rank scores its own rows for all queries of the step:

    gather    owners send the rows of the anchors to every rank; every rank encodes the queries
    forward   score this rank's rows block by block
    loss      reduce the partial statistics of blocks and ranks
    backward  turn the gradients of each block of scores into those of its rows and of the queries
    reduce    sum the gradients of gathered rows and of dense parameters over the ranks
    update    every row has a gradient and steps in every step

Scores stay in memory between forward and backward if they fit, otherwise they are computed twice.
The random numbers of dropout depend on the step and on a cell of entities or of queries, not on how
the rows are split over the ranks.

Shapes: Q queries, F gathered rows (one per query, repeats included), n rows on this rank, m rows of
a block, D elements per row, N entities.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from kge_torchrec.config import TrainConfig
from kge_torchrec.data.batches.queries import QueryBatch
from kge_torchrec.data.features import Features
from kge_torchrec.distributed.processes import reduced, world_size
from kge_torchrec.embeddings.backend import EmbeddingBackend, EntityShard
from kge_torchrec.embeddings.feature_rows import EntityVectors, FeatureBags
from kge_torchrec.embeddings.row_gradients import RowGradients
from kge_torchrec.environment import free_memory, products_in_bf16, rounds_as_it_multiplies
from kge_torchrec.models.loss_scaling import LossScale
from kge_torchrec.models.model import relation_prediction
from kge_torchrec.models.over_all import (
    BLOCK_BYTES,
    BlockAnswers,
    OverAll,
    block_height,
    kept_bytes,
)
from kge_torchrec.training.query_shards import GatheredRows, QueryShard, directed
from kge_torchrec.training.step import Step, seed_generators, unscale

CELL = 256  # entities or queries that share a random stream, independent of ranks
_QUERIES, _RELATIONS, _ROWS, _TRIPLES = 0, 2, 3, 4  # purposes of random streams


class FullCandidates(Step):
    """A step that trains batches of queries against all entities.  Collective.

    Entities with features are scored by their vectors, which every rank sums once per step.

    Attributes:
        kept_bytes: Scores of a rank's rows up to this size stay in memory.
        block_bytes: Size of a block of scores.
        casts: Whether autocast computes the scores.
        draws: Whether there is dropout.
    """

    def __init__(
        self,
        backend: EmbeddingBackend,
        loss: OverAll,
        train: TrainConfig,
        device: torch.device,
        features: Features | None = None,
    ):
        super().__init__(backend, train, device)
        shard = backend.shard()
        self.loss, self.objective = loss, backend.unwrapped_model.objective
        self._bags = None if features is None else FeatureBags(features, shard)
        precision, layers = self.objective.precision, (nn.Dropout, nn.Dropout2d)
        # Otherwise autocast converts whole operands and also rounds scores and gradients.
        rounds = device.type == "cpu" and rounds_as_it_multiplies()
        self._rounds_products = precision == torch.bfloat16 and rounds
        self.casts = precision != torch.float32 and not self._rounds_products
        kept = torch.tensor(kept_bytes(free_memory(device), *shard.rows.shape), device=device)
        self.kept_bytes = int(reduced(kept, dist.ReduceOp.MIN))  # of all ranks
        self.block_bytes = BLOCK_BYTES[device.type]
        self.draws = any(isinstance(m, layers) and m.p > 0 for m in self.objective.modules())
        # The gradients of all n rows, in blocks (m, D) of consecutive rows.
        self._row_gradients: list[Tensor] = []

    def forward_backward(self, batches: Iterator[QueryBatch]) -> Tensor:
        shard = self.backend.shard()
        scale = 1.0 if self.scale is None else self.scale.value
        losses, vectors, blocks = [], None, list[Tensor]()
        rounding = products_in_bf16() if self._rounds_products else nullcontext()
        with rounding, self.backend.dense.gathered():  # the whole dense parameters
            parameters = [p for p in self.objective.parameters() if p.requires_grad]
            sums = [torch.zeros_like(p) for p in parameters]
            if self._bags is not None:
                vectors = EntityVectors(self._bags, shard)
                shard = vectors.shard
            for _ in range(self.train.accumulation):
                batch = next(batches)
                if not batch.queries_by_side:
                    continue
                queries = QueryPass(self, batch, shard, scale, parameters, sums)
                added = queries.row_gradients()
                losses.append(queries.loss())
                if not blocks:
                    blocks = added
                    continue
                total = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
                for part, block in zip(total.split([*map(len, added)]), added, strict=True):
                    part += block
                blocks = [total]
            if not blocks:  # there are no queries, or no rows
                blocks = [torch.zeros_like(shard.rows, dtype=torch.float32)]
            if vectors is not None:
                blocks = vectors.row_gradients(torch.cat(blocks))
        self.backend.dense.set_gradients(sums)
        self._row_gradients = blocks
        return torch.stack(losses).sum() if losses else blocks[0].new_zeros(())

    def unscaled(self, scale: LossScale) -> bool:
        factor = unscale(scale, self.backend, self._row_gradients)
        if factor is None:
            return False
        for block in self._row_gradients:
            block.mul_(factor)
        return True

    def row_gradients(self) -> list[Tensor]:
        pending, blocks = self.backend.pending, self._row_gradients
        if pending is not None and pending.frozen is not None:
            parts = pending.frozen.split([*map(len, blocks)])
            for block, frozen in zip(blocks, parts, strict=True):
                block[frozen] = 0  # does not count in the norm
        return blocks

    def update(self) -> None:
        blocks, self._row_gradients = self._row_gradients, []
        height = max(1, self.block_bytes // (4 * blocks[0].shape[1]))
        pieces = [piece for block in blocks for piece in block.split(height)]
        ids = torch.arange(sum(map(len, pieces)), device=pieces[0].device)
        places = ids.split([*map(len, pieces)])
        self.backend.table.step_rows(
            RowGradients(rows, grad, None, True) for rows, grad in zip(places, pieces, strict=True)
        )
        self.backend.optimizer.step()


class _Block(NamedTuple):
    """A block of rows with its scores.  Lists have one entry per query shard."""

    places: range  # positions of its rows in the shard
    rows: Tensor  # (m, D)
    scores: list[Tensor]  # (1, q, m), with their graph
    answers: list[BlockAnswers]


class QueryPass:
    """Forward and backward of queries that are scored together: ``row_gradients``, then ``loss``.

    Collective.  ``sums`` are this rank's terms of the gradients of the whole dense ``parameters``,
    to which those of the queries are added.
    """

    def __init__(
        self,
        step: FullCandidates,
        batch: QueryBatch,
        shard: EntityShard,
        scale: float,
        parameters: Sequence[nn.Parameter],
        sums: list[Tensor],
    ):
        self.step, self.batch, self.shard = step, batch, shard
        self.scale, self.parameters, self.sums = scale, parameters, sums
        self.objective = step.objective
        self.drops_rows = self.objective.entity_dropout.p > 0
        self.scorer = self.objective.scorer
        self.weight = batch.weight * scale  # makes the loss a mean over the step's queries
        self.world = world_size()
        self.rank = dist.get_rank() if self.world > 1 else 0
        sides = directed(batch.queries_by_side, self.scorer)
        self.query_shards = [QueryShard(queries, shard) for queries in sides]
        self.queries = sum(len(x.relation) for x in self.query_shards)
        on_triples = bool(self.objective.regularizers.on_triples)
        with_answers = on_triples or bool(self.objective.relation_weight)
        self.gathered = GatheredRows(sides, shard, with_answers)
        with torch.enable_grad(), self._drawing(_QUERIES):
            for query_shard, anchors in zip(self.query_shards, self.gathered.anchors, strict=True):
                if self.drops_rows:
                    anchors = self.objective.entity_dropout(anchors)
                query_shard.encode(self.scorer, anchors)
        unit_weight = torch.full((), self.weight, device=shard.rows.device)
        self.weights = [  # (q,) of each query shard
            unit_weight.expand(len(x.relation)) if x.weight is None else x.weight * self.weight
            for x in self.query_shards
        ]
        self.block_statistics: list[Tensor] = []  # (3, Q) of each scored block
        self.statistics: Tensor | None = None  # (3, Q) of all blocks of all ranks
        self.own_terms = torch.zeros((), device=shard.rows.device)  # of the loss, on this rank only

    def row_gradients(self) -> list[Tensor]:
        """Return the gradients (m, D) of all n rows, in blocks of consecutive rows."""
        rows, step = len(self.shard.rows), self.step
        starts = range(0, rows, block_height(self.queries, step.block_bytes))
        edges = np.concatenate([x.edges() for x in self.query_shards]).clip(0, rows)
        cuts = np.unique([*starts, rows, *edges]).tolist()
        blocks = [range(*ends) for ends in itertools.pairwise(cuts)]
        keeps, scored = 4 * rows * self.queries <= step.kept_bytes, []
        if keeps or step.loss.normalizes:
            for places in blocks:
                block = self._forward(places, graph=keeps)
                if keeps:
                    scored.append(block)
                del block  # frees its scores
            self._reduce()
        gradients = []
        for places in blocks:  # a block's scores are freed before those of the next one
            gradients.append(self._backward(scored.pop(0) if keeps else self._forward(places)))
        if self.statistics is None:
            self._reduce()
        self.gathered.add_gradients(self._backward_of_queries(), gradients)
        return gradients

    def loss(self) -> Tensor:
        """Return the unscaled loss.  Its mean over the ranks is the global loss.

        Every rank knows the loss in closed form, and only its own part of all other terms.
        """
        assert self.statistics is not None  # row_gradients was called
        losses = self.step.loss.loss(self.statistics)
        weights = [x.weight for x in self.query_shards if x.weight is not None]
        if weights:
            losses = losses * torch.cat(weights)
        scaled = losses.sum() * self.weight + self.own_terms * self.world
        return (scaled / self.scale).float()

    def _forward(self, places: range, graph: bool = True) -> _Block:
        """Score a block of rows, with the graph for gradients if ``graph``.

        Scores are in float32 unless the loss has kernels for bfloat16.
        """
        loss = self.step.loss
        with torch.set_grad_enabled(graph):
            rows = self.shard.rows[places.start : places.stop].detach().float()
            rows = rows.requires_grad_(graph)
            dropped = rows * self._row_factors(places) if self.drops_rows else rows
            entities = self.scorer.entity(dropped)
            with self.objective.autocast(rows.device) if self.step.casts else nullcontext():
                scores = [x.scores(self.scorer, entities, places) for x in self.query_shards]
            for i, x in enumerate(scores):
                if not loss.accepts(x[0]):
                    scores[i] = x.float()
        answers = [query_shard.answers(places) for query_shard in self.query_shards]
        if self.statistics is None:
            each = zip(scores, answers, strict=True)
            statistics = [loss.partial_statistics(x.detach()[0], a) for x, a in each]
            self.block_statistics.append(torch.cat(statistics, 1))
        return _Block(places, rows, scores, answers)

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
        loss = self.step.loss
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
        # Those of this block, scored last, are enough for a loss that does not normalize.
        statistics = self.block_statistics[-1] if self.statistics is None else self.statistics
        parts = statistics.split([x.shape[1] for x in gradients], 1)
        for x, *rest in zip(gradients, parts, block.answers, self.weights, strict=True):
            self.step.loss.backward(x[0], *rest)
        encoded = [x for query_shard in self.query_shards for x in query_shard.encoded]
        leaves = [block.rows, *encoded]
        row_gradients, of_encoded = self._differentiate(block.scores, gradients, leaves)
        _add([x for shard in self.query_shards for x in shard.gradients], of_encoded)
        if self.objective.regularizers.on_entities:  # on the anchors and answers in this block
            each = zip(self.query_shards, block.answers, strict=True)
            penalized = [shard.penalized(block.places, answers) for shard, answers in each]
            place, weight = (torch.cat(parts) for parts in zip(*penalized, strict=True))
            with torch.enable_grad():
                rows = block.rows.detach().index_select(0, place).requires_grad_()
                penalty = self.objective.regularizers.of_entities(self.scorer, rows)
                total = (penalty * weight).sum() * self.weight
            row_gradients.index_add_(0, place, *torch.autograd.grad(total, rows))
            self.own_terms = self.own_terms + total.detach()
        return row_gradients

    def _backward_of_queries(self) -> Tensor:
        """Return the gradients (F, D) of gathered rows, from encoded queries and own terms."""
        outputs = [x for query_shard in self.query_shards for x in query_shard.graph]
        gradients = [x for query_shard in self.query_shards for x in query_shard.gradients]
        if self.objective.regularizers or self.objective.relation_weight:
            with torch.enable_grad():
                total = self._terms_of_own_queries() * self.weight
            self.own_terms = self.own_terms + total.detach()
            outputs.append(total)
            gradients.append(torch.ones_like(total))
        grad, _ = self._differentiate(outputs, gradients, [self.gathered.rows])
        return grad

    def _terms_of_own_queries(self) -> Tensor:
        """Return the loss terms per query for this rank's share of the queries.

        These are penalties on relations and on whole triples, and relation prediction.
        """
        objective, total = self.objective, self.gathered.rows.new_zeros(())
        regularizers, scorer = objective.regularizers, self.scorer
        for number, shard in enumerate(self.query_shards):
            count, side = len(shard.relation), shard.side
            # Only what is drawn needs cells; few large operations are faster.
            size = CELL if self.step.draws else max(1, -(-count // self.world))
            anchors, answers = self.gathered.anchors[number], self.gathered.answers[number]
            for start in range(self.rank * size, count, self.world * size):
                cell = slice(start, start + size)
                relation, terms = shard.relation[cell], []  # (q,) each
                if regularizers.on_relations:
                    terms.append(regularizers.of_relations(scorer, relation, side))
                if answers is not None:
                    triples = anchors[cell][None], relation[None], answers[cell][None]
                    if regularizers.on_triples:
                        with self._drawing(_TRIPLES, number, start):
                            terms.append(regularizers.of_triples(scorer, *triples, side)[0])
                    if objective.relation_weight:
                        with self._drawing(_RELATIONS, number, start):
                            anchor, answer = map(objective.entity_dropout, triples[::2])
                            inputs = scorer, anchor, relation[None], answer, side
                            losses = relation_prediction(*inputs)[0]
                        terms.append(objective.relation_weight * losses)
                weight = 1.0 if shard.weight is None else shard.weight[cell]
                for term in terms:
                    total = total + (term * weight).sum()
        return total

    def _differentiate(
        self, outputs: list[Tensor], gradients: list[Tensor], inputs: list[Tensor]
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Return the gradients of inputs; add up those of dense parameters.

        Returns:
            The gradient of the first input, zeros if it has none, and of the others, or None.
        """
        pairs = [(x, g) for x, g in zip(outputs, gradients, strict=True) if x.requires_grad]
        leaves = [*inputs, *self.parameters]
        results: Sequence[Tensor | None] = [None] * len(leaves)
        if pairs:  # there are none for rows that are no candidates
            results = torch.autograd.grad(
                [x for x, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True
            )
        _add(self.sums, results[len(inputs) :])
        first = torch.zeros_like(inputs[0]) if results[0] is None else results[0]
        return first, results[1 : len(inputs)]

    @contextmanager
    def _drawing(self, *place: int) -> Iterator[None]:
        """Make dropout inside the context a function of the batch's seed and a place.

        The result is the same on every rank, and when scores are computed a second time.
        """
        if not self.step.draws:
            yield
            return
        device = self.shard.rows.device
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            seed_generators(self.batch.seed, *place)
            yield


def _add(sums: list[Tensor], terms: Sequence[Tensor | None]) -> None:
    """Add each term to its sum in place; None means 0."""
    for total, term in zip(sums, terms, strict=True):
        if term is not None:
            total += term

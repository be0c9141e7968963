"""Training steps with all entities as candidates, over a row-wise sharded table.

Every rank scores its own rows for all queries of the step:

    fetch   owners send the rows of the anchors to every rank; every rank encodes the queries
    start   score this rank's rows block by block; reduce the loss's partial statistics over ranks
    finish  turn every block of scores into gradients of its rows and of the queries
    reduce  sum the gradients of fetched rows and of dense parameters over the ranks

Scores stay in memory between start and finish if they fit, and are computed twice otherwise.  No
rank ever holds the whole table or the full score matrix.  Rows step as soon as their gradient is
complete; fetched rows, which get gradients from every block, step last.  If a step has several
micro-batches, is clipped, or may be skipped, each rank first sums the gradients of all its rows,
which takes as much memory as the rows.

Every row is a candidate, so every row has a gradient and steps in every step.

Random numbers of dropout belong to the step and, within it, to the encoded queries (the same on
every rank), to a cell of entities or to a cell of queries.  They do not depend on which rows a rank
holds.

Shapes: Q queries, F fetched rows (one per query, repeats included), n rows on this rank, m rows of
a block, D elements per row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kge_torchrec.config import TrainConfig
from kge_torchrec.data.batches.queries import QueryBatch
from kge_torchrec.distributed.processes import world_size
from kge_torchrec.embeddings.backend import EmbeddingBackend, EntityShard
from kge_torchrec.embeddings.pending import RowGradients
from kge_torchrec.environment import products_in_bf16, rounds_as_it_multiplies
from kge_torchrec.models.full_losses import (
    KEPT_BYTES,
    BlockAnswers,
    FullLoss,
    block_bytes_of,
    keeps_bfloat16,
    keeps_scores,
    score_blocks,
)
from kge_torchrec.models.model import relation_prediction
from kge_torchrec.models.scorers.queries import QueryScorer
from kge_torchrec.training.gradients import StepGradient
from kge_torchrec.training.query_shards import GatheredRows, QueryShard, directed
from kge_torchrec.training.step import seed_generators

CELL = 256  # entities or queries that share a random stream, independent of ranks
_FOLDED, _PAIRS, _RELATIONS, _ROWS, _TRIPLES = range(5)  # purposes of random streams


class FullCandidates:
    """A pipeline that trains batches of queries against all entities.  Collective.

    Args:
        backend: Table, scorer and optimizers.
        loss: The loss over all candidates.
        train: The ``train`` section of the config.
        device: Device of this rank.
        kept_bytes: If the scores of a rank's rows take at most this size, scores and gradients of
            rows stay in memory during the step.
        block_bytes: Size of a block of scores in bytes; None: chosen for the device.
    """

    def __init__(
        self,
        backend: EmbeddingBackend,
        loss: FullLoss,
        train: TrainConfig,
        device: torch.device,
        kept_bytes: int = KEPT_BYTES,
        block_bytes: int | None = None,
    ):
        self.backend, self.loss, self.device = backend, loss, device
        self.kept_bytes = kept_bytes
        self.block_bytes = block_bytes or block_bytes_of(device.type)
        self.objective = backend.unwrapped_model.objective
        self.scorer = cast(QueryScorer, self.objective.scorer)  # the config rejects other scorers
        self.gradient, self.accumulation = StepGradient(backend, train), train.accumulation
        self.holds = train.needs_whole_gradient
        layers = (nn.Dropout, nn.Dropout2d)
        in_bf16 = self.objective.precision == torch.bfloat16
        # Otherwise autocast converts whole operands and also rounds scores and gradients.
        self._rounds_products = in_bf16 and device.type == "cpu" and rounds_as_it_multiplies()
        self._draws = any(isinstance(m, layers) and m.p > 0 for m in self.objective.modules())
        self.drops_pairs = self.scorer.drops_pairs

    def progress(self, batches: Iterator[QueryBatch]) -> Tensor:
        """Train one step; return its loss, detached."""
        parts = [next(batches) for _ in range(self.accumulation)]
        with products_in_bf16() if self._rounds_products else nullcontext():
            return self._train(parts)

    def _train(self, parts: list[QueryBatch]) -> Tensor:
        self.backend.optimizer.zero_grad()  # also passes the learning rate to the table
        shard = self.backend.shard()
        held = HeldGradients(shard) if self.holds else None
        take = self.backend.step_rows if held is None else held.add
        with self.backend.dense.gathered():
            dense = _Dense(self.objective)
            asked = [part for part in parts if part.asked]  # the same on all ranks
            losses = [self._backward(part, shard, dense, take) for part in asked]
        self.backend.dense.set_gradients(dense.sums)
        largest = max(part.queries for part in parts)
        if held is None or self._step_held(held, self.blocks(shard, largest)):
            self.backend.optimizer.step()
        return torch.stack(losses).sum()

    def _backward(
        self,
        batch: QueryBatch,
        shard: EntityShard,
        dense: _Dense,
        take: Callable[[Iterator[RowGradients]], None],
    ) -> Tensor:
        """Run the backward of a batch and return its loss.

        It passes the gradients of rows to ``take`` and adds those of dense parameters to ``dense``.
        """
        backward = _Backward(self, batch, shard, dense)
        take(backward.row_gradients())
        return backward.loss_value()

    def _step_held(self, held: HeldGradients, blocks: list[range]) -> bool:
        """Step the rows block by block with the held gradients.

        Returns:
            False if a gradient overflowed, so that the step is skipped.
        """
        factor = self.gradient.unscale([held.sums])
        if factor is None:
            return False
        if factor != 1:
            held.sums.mul_(factor)
        if self.backend.pending is not None and self.backend.pending.frozen is not None:
            held.sums[self.backend.pending.frozen] = 0  # does not count in the norm
        self.gradient.clip(held.sums)
        self.backend.step_rows(held.of(block) for block in blocks)
        return True

    @contextmanager
    def drawing(self, seed: int, *place: int) -> Iterator[None]:
        """Make dropout inside the context a function of seed and place.

        The result is the same on every rank, and when scores are computed a second time.
        """
        if not self._draws:
            yield
            return
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            seed_generators(seed, *place)
            yield

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context for computing scores, which is empty if only products are rounded."""
        return nullcontext() if self._rounds_products else self.objective.autocast(self.device)

    def keeps(self, shard: EntityShard, queries: int) -> bool:
        """Return whether all scores of a shard's rows for Q queries stay in memory."""
        return keeps_scores(len(shard.rows), queries, self.kept_bytes)

    def blocks(self, shard: EntityShard, queries: int) -> list[range]:
        """Split the rows of a shard into blocks for Q queries.

        With dropout of pairs, blocks are the cells of the random streams.
        """
        if not self.drops_pairs:
            return score_blocks(len(shard.rows), queries, self.block_bytes)
        start, stop = shard.row_range
        edges = [start, *range(start - start % CELL + CELL, stop, CELL), stop]
        return [range(a - start, b - start) for a, b in itertools.pairwise(edges) if a < b]


class _Block(NamedTuple):
    """A block of rows with its scores.  Lists have one entry per query shard."""

    places: range  # positions of its rows in the shard
    rows: Tensor  # (m, D)
    scores: list[Tensor]  # (1, q, m), with their graph
    seen: Tensor | None  # (3, Q) partial statistics; None after the reduction over all blocks
    answers: list[BlockAnswers]


class _Dense:
    """The objective's whole parameters, and sums of this rank's terms of their gradients."""

    def __init__(self, objective: nn.Module):
        self.parameters = [p for p in objective.parameters() if p.requires_grad]
        self.sums = [torch.zeros_like(p) for p in self.parameters]


class _Backward:
    """The backward of one batch.  Exhaust ``row_gradients`` before reading other results."""

    def __init__(
        self, trainer: FullCandidates, batch: QueryBatch, shard: EntityShard, dense: _Dense
    ):
        self.trainer, self.batch, self.shard = trainer, batch, shard
        self.loss, self.scorer = trainer.loss, trainer.scorer
        self.objective = trainer.objective
        self.regularizers = trainer.objective.regularizers
        self.entity_dropout = trainer.objective.entity_dropout
        self.scale = trainer.gradient.loss_factor
        self.weight = batch.weight * self.scale  # makes the loss a mean over the step's queries
        self.world = world_size()
        self.rank = dist.get_rank() if self.world > 1 else 0
        asked = directed(batch.asked, self.scorer)
        self.query_shards = [QueryShard(part, shard) for part in asked]
        with_answers = bool(self._relation_weight) or self.regularizers.any_of_triples
        self.fetched = GatheredRows(asked, shard, with_answers)
        with torch.enable_grad(), trainer.drawing(batch.seed, _FOLDED):
            for query_shard, anchors in zip(self.query_shards, self.fetched.anchors, strict=True):
                query_shard.encode_query(self.scorer, self.entity_dropout(anchors))
        self.seen: list[Tensor] = []  # (3, Q) partial statistics of each scored block
        self.joined: Tensor | None = None  # (3, Q) statistics of all blocks of all ranks
        self.auxiliary = torch.zeros((), device=shard.rows.device)  # this rank's other loss terms
        self.dense = dense

    def row_gradients(self) -> Iterator[RowGradients]:
        """Yield the complete gradients of all n rows, each row once."""
        blocks = self.trainer.blocks(self.shard, self.batch.queries)
        if self.trainer.keeps(self.shard, self.batch.queries):
            yield from self._of_kept([self._start(places) for places in blocks])
            return
        if self.loss.normalizes:  # needs statistics of all blocks first, so scores twice
            for places in blocks:
                self._start(places, graph=False)
            self._join()
        for places in blocks:
            yield self.fetched.hold_back(places, self._finish(self._start(places)))
        if self.joined is None:
            self._join()
        self.fetched.add(self._backward_of_queries())
        yield self.fetched.gradients()

    def _of_kept(self, blocks: list[_Block]) -> Iterator[RowGradients]:
        """Yield the gradients of rows whose scores are all in memory.

        The gradients of all rows are kept as well, so fetched rows need no separate part.
        """
        self._join()
        finished = []
        while blocks:
            block = blocks.pop(0)  # frees its scores after this iteration
            finished.append((block.places, self._finish(block)))
        self.fetched.add(self._backward_of_queries())
        for places, of_rows in finished:
            yield self.fetched.completed(places, of_rows)

    def loss_value(self) -> Tensor:
        """Return the unscaled loss.  Its mean over the ranks is the global loss.

        Every rank knows the loss over all candidates, and only its own part of the other terms.
        """
        assert self.joined is not None  # row_gradients was exhausted
        values = self.loss.values(self.joined)
        weights = [x.weight for x in self.query_shards if x.weight is not None]
        if weights:
            values = values * torch.cat(weights)
        scaled = values.sum() * self.weight + self.auxiliary * self.world
        return (scaled / self.scale).float()

    @property
    def _relation_weight(self) -> float:
        return self.trainer.objective.relation_weight

    def _start(self, places: range, graph: bool = True) -> _Block:
        """Score a block of rows, with the graph for gradients if ``graph``."""
        with torch.set_grad_enabled(graph):
            rows = self.shard.rows[places.start : places.stop].detach().float()
            rows = rows.requires_grad_(graph)
            scores = self._scores(places, self.scorer.entity(self._dropped(places, rows)))
        answers = [query_shard.answers(places) for query_shard in self.query_shards]
        if self.joined is not None:
            return _Block(places, rows, scores, None, answers)
        values = [x.detach()[0] for x in scores]
        each = [self.loss.observe(x, a) for x, a in zip(values, answers, strict=True)]
        self.seen.append(torch.cat(each, 1))
        return _Block(places, rows, scores, self.seen[-1], answers)

    def _dropped(self, places: range, rows: Tensor) -> Tensor:
        """Apply entity dropout to a block's rows (m, D), with a random stream per cell."""
        if not self.entity_dropout.drops:
            return rows
        first, stop = (self.shard.first_row + place for place in (places.start, places.stop))
        cells = range(first // CELL, -(-stop // CELL))
        factors = rows.new_ones(len(cells) * CELL, rows.shape[1])
        for number, cell in enumerate(cells):
            with self.trainer.drawing(self.batch.seed, _ROWS, cell):
                part = slice(number * CELL, (number + 1) * CELL)
                factors[part] = self.entity_dropout(factors[part])
        before = first - cells.start * CELL
        return rows * factors[before : before + len(rows)]

    def _scores(self, places: range, entities: Tensor) -> list[Tensor]:
        """Score a block's rows.

        Args:
            places: Positions of the rows in the shard.
            entities: (m, D), from ``Scorer.entity``.

        Returns:
            (1, q, m) for each query shard, in float32 unless the loss has kernels for bfloat16.
            Gradients later overwrite the scores.
        """
        with self.trainer.autocast():
            scores = self._products(places, entities)
        return [x if keeps_bfloat16(self.loss, x[0]) else x.float() for x in scores]

    def _products(self, places: range, entities: Tensor) -> list[Tensor]:
        if not self.trainer.drops_pairs:
            return [query_shard.scores(self.scorer, entities) for query_shard in self.query_shards]
        # Draw for the whole cell, including its rows on other ranks.
        cell, before = divmod(self.shard.first_row + places.start, CELL)
        after = CELL - before - len(places)
        entities = nn.functional.pad(entities, (0, 0, before, after))
        own = slice(before, before + len(places))
        with self.trainer.drawing(self.batch.seed, _PAIRS, cell):
            scores = [
                query_shard.scores(self.scorer, entities) for query_shard in self.query_shards
            ]
        return [x[..., own].clone() for x in scores]  # views must not be overwritten

    def _join(self) -> None:
        """Reduce the partial statistics over blocks and ranks, with one collective."""
        own = self.loss.join(torch.stack(self.seen)) if self.seen else None
        if self.world == 1:
            self.joined = own
            return
        size, device = (3, self.batch.queries), self.shard.rows.device
        # Send float64: a rank without rows does not know the dtype of the statistics.
        sent = torch.zeros(size, dtype=torch.float64, device=device)
        if own is not None:
            sent.copy_(own)
        elif self.loss.normalizes:
            sent[0] = -torch.inf
        every = sent.new_empty(self.world, *size)
        dist.all_gather(list(every.unbind()), sent)
        joined = self.loss.join(every)
        self.joined = joined if own is None else joined.to(own.dtype)

    def _finish(self, block: _Block) -> Tensor:
        """Return the gradients (m, D) of a block's rows; add up those of queries and parameters."""
        # Gradients overwrite the scores, which are not needed any more, not even by their graph.
        # ``data`` hides this from autograd.
        slopes = [scores.data for scores in block.scores]
        seen = block.seen if self.joined is None else self.joined
        assert seen is not None  # blocks without statistics are scored only after the reduction
        parts = seen.split([x.shape[1] for x in slopes], 1)
        for x, part, answers, of_shard in zip(
            slopes, parts, block.answers, self.query_shards, strict=True
        ):
            self.loss.finish(x[0], part, answers, of_shard.weights(self.weight))
        encoded = [x for query_shard in self.query_shards for x in query_shard.encoded]
        (of_rows,), of_encoded = self._differentiate(block.scores, slopes, [block.rows], encoded)
        sums = [x for query_shard in self.query_shards for x in query_shard.gradients]
        _add(sums, of_encoded)
        self._add_penalty(block, of_rows)
        return of_rows

    def _add_penalty(self, block: _Block, of_rows: Tensor) -> None:
        """Add the gradients of penalties on anchors and answers in this block to the rows."""
        if not self.regularizers.any_of_entities:
            return
        each = zip(self.query_shards, block.answers, strict=True)
        touched = [of_shard.touched(block.places, answers) for of_shard, answers in each]
        place, weight = (torch.cat(parts) for parts in zip(*touched, strict=True))
        with torch.enable_grad():
            rows = block.rows.detach().index_select(0, place).requires_grad_()
            total = (self.objective.penalty_of_entities(rows) * weight).sum() * self.weight
        of_rows.index_add_(0, place, *torch.autograd.grad(total, rows))
        self.auxiliary = self.auxiliary + total.detach()

    def _backward_of_queries(self) -> Tensor:
        """Return the gradients (F, D) of fetched rows, from encoded queries and per-query terms."""
        outputs = [x for query_shard in self.query_shards for x in query_shard.graph]
        slopes = [x for query_shard in self.query_shards for x in query_shard.gradients]
        with torch.enable_grad():
            rest = self._of_own_queries()
        if rest is not None:
            self.auxiliary = self.auxiliary + rest.detach()
            outputs.append(rest)
            slopes.append(torch.ones_like(rest))
        (grad,), _ = self._differentiate(outputs, slopes, [self.fetched.rows], [])
        return grad

    def _of_own_queries(self) -> Tensor | None:
        """Return the loss terms per query for this rank's share of the queries, or None.

        These are penalties on relations and on whole triples, and relation prediction.
        """
        if not (self.objective.penalizes or self._relation_weight):
            return None
        total = self.fetched.rows.new_zeros(())
        for number, query_shard in enumerate(self.query_shards):
            for start in range(self.rank * CELL, len(query_shard.relation), self.world * CELL):
                total = total + self._of_cell(number, slice(start, start + CELL))
        return total * self.weight

    def _of_cell(self, number: int, cell: slice) -> Tensor:
        """Return these loss terms for a cell of queries of one query shard."""
        relation, side = self.query_shards[number].relation[cell], self.query_shards[number].side
        weight = self.query_shards[number].weight
        own = self.fetched.rows.new_ones(()) if weight is None else weight[cell]
        total = self.fetched.rows.new_zeros(())
        if self.objective.penalizes:
            total = total + (self.objective.penalty_of_relations(relation, side) * own).sum()
        if self.fetched.answers[number] is None:
            return total
        anchor, answer = (x[number][cell] for x in (self.fetched.anchors, self.fetched.answers))
        triples = anchor[None], relation[None], answer[None], side
        if self.regularizers.any_of_triples:
            with self.trainer.drawing(self.batch.seed, _TRIPLES, number, cell.start):
                of_triples = self.regularizers.of_triples(self.scorer, *triples)
            total = total + (of_triples * own).sum()
        if self._relation_weight:
            with self.trainer.drawing(self.batch.seed, _RELATIONS, number, cell.start):
                anchor, answer = (self.entity_dropout(x) for x in (anchor, answer))
                relation_loss = relation_prediction(
                    self.scorer, anchor[None], relation[None], answer[None], side
                )
            total = total + self._relation_weight * (relation_loss * own).sum()
        return total

    def _differentiate(
        self, outputs: list[Tensor], slopes: list[Tensor], first: list[Tensor], then: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the gradients of ``first`` and ``then``; add up those of dense parameters.

        ``first`` gets zeros if it has no gradient, and ``then`` gets None.
        """
        pairs = [(x, s) for x, s in zip(outputs, slopes, strict=True) if x.requires_grad]
        inputs = [*first, *then, *self.dense.parameters]
        found = torch.autograd.grad(
            [x for x, _ in pairs], inputs, [s for _, s in pairs], allow_unused=True
        )
        stop = len(first) + len(then)
        _add(self.dense.sums, found[stop:])
        of_first = [
            torch.zeros_like(x) if grad is None else grad
            for x, grad in zip(first, found[: len(first)], strict=True)
        ]
        return of_first, list(found[len(first) : stop])


class HeldGradients:
    """Sums of the gradients of all rows of a shard.

    Attributes:
        sums: (n, D) float32.
    """

    def __init__(self, shard: EntityShard):
        self.sums = torch.zeros_like(shard.rows, dtype=torch.float32)

    def add(self, gradients: Iterable[RowGradients]) -> None:
        """Add gradients in parts.  Within a part, each row occurs once."""
        for part in gradients:
            self.sums.index_add_(0, part.ids, part.grad)

    def of(self, places: range) -> RowGradients:
        """Return the sums of a range of rows."""
        ids = torch.arange(places.start, places.stop, device=self.sums.device)
        return RowGradients(ids, self.sums[places.start : places.stop], None, True)


def _add(sums: list[Tensor], terms: Sequence[Tensor | None]) -> None:
    """Add each term to its sum in place; None means 0."""
    for total, term in zip(sums, terms, strict=True):
        if term is not None:
            total += term

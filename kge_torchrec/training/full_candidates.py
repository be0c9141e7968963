"""Steps whose candidates are all entities, over a table that is split by rows over the ranks.

Every rank scores its own rows for all queries of the step:

    fetch   rows of the anchors come from their owners to every rank; queries are encoded once
    start   scores of the own rows, block by block; what the loss saw is joined over all ranks
    finish  every block of scores becomes gradients: of its rows, and of the queries
    home    gradients of fetched rows and of dense parameters are summed over the ranks

Scores stay in memory from start to finish where they fit, and are computed again where they do not:
no rank ever holds all rows or all scores of a large table.  Rows step as soon as their gradient is
known; fetched ones, which get some from every block, step last.  Where a step is the sum of several
micro-batches, is clipped, or may be skipped, each rank holds the sum of all gradients of its rows
until all are known: once more the memory of its rows.

All entities are candidates, so every row has a gradient in every step, and all rows step.

Dropout draws for a step, and within it for the encoded queries (which every rank encodes alike),
for a cell of entities or for a cell of queries: never for what a rank happens to hold.

Shapes: Q queries, F fetched rows (one a query, repeats included), n rows on this rank, m rows of a
block, D numbers a row.
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

CELL = 256  # entities, or queries, that are drawn for together, whichever rank has them
_FOLDED, _PAIRS, _RELATIONS, _ROWS, _TRIPLES = range(5)  # what is drawn for


class FullCandidates:
    """Trains batches of queries against all entities.  Collective.

    kept_bytes: scores of a rank's rows up to this size are kept, and so are the gradients of its
    rows; block_bytes: size of the blocks of scores.
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
        self.scorer = cast(QueryScorer, self.objective.scorer)  # the config takes no other
        self.gradient, self.accumulation = StepGradient(backend, train), train.accumulation
        self.holds = train.needs_whole_gradient
        layers = (nn.Dropout, nn.Dropout2d)
        in_bf16 = self.objective.precision == torch.bfloat16
        # Elsewhere autocast converts whole factors first, and scores and gradients are rounded too.
        self._rounds_products = in_bf16 and device.type == "cpu" and rounds_as_it_multiplies()
        self._draws = any(isinstance(m, layers) and m.p > 0 for m in self.objective.modules())
        self.drops_pairs = self.scorer.drops_pairs

    def progress(self, batches: Iterator[QueryBatch]) -> Tensor:
        """Trains one step; returns its loss, detached."""
        parts = [next(batches) for _ in range(self.accumulation)]
        with products_in_bf16() if self._rounds_products else nullcontext():
            return self._train(parts)

    def _train(self, parts: list[QueryBatch]) -> Tensor:
        self.backend.optimizer.zero_grad()  # also tells the table its learning rate
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
        """Gives gradients of rows to ``take``, adds those of dense parameters; returns the loss."""
        backward = _Backward(self, batch, shard, dense)
        take(backward.row_gradients())
        return backward.loss_value()

    def _step_held(self, held: HeldGradients, blocks: list[range]) -> bool:
        """Steps the rows, block by block, by what is held; False if a gradient overflowed."""
        factor = self.gradient.unscale([held.sums])
        if factor is None:
            return False
        if factor != 1:
            held.sums.mul_(factor)
        if self.backend.pending is not None and self.backend.pending.frozen is not None:
            held.sums[self.backend.pending.frozen] = 0  # no part of the norm
        self.gradient.clip(held.sums)
        self.backend.step_rows(held.of(block) for block in blocks)
        return True

    @contextmanager
    def drawing(self, seed: int, *place: int) -> Iterator[None]:
        """Dropout as a function of seed and place: on any rank, and when computed again."""
        if not self._draws:
            yield
            return
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            seed_generators(seed, *place)
            yield

    def autocast(self) -> AbstractContextManager[object]:
        """In which scores are computed; not where the products alone are rounded."""
        return nullcontext() if self._rounds_products else self.objective.autocast(self.device)

    def keeps(self, shard: EntityShard, queries: int) -> bool:
        """Whether the scores of a shard's rows for Q queries are all kept."""
        return keeps_scores(len(shard.rows), queries, self.kept_bytes)

    def blocks(self, shard: EntityShard, queries: int) -> list[range]:
        """The rows of a shard in blocks for Q queries; cells where their pairs are drawn for."""
        if not self.drops_pairs:
            return score_blocks(len(shard.rows), queries, self.block_bytes)
        start, stop = shard.row_range
        edges = [start, *range(start - start % CELL + CELL, stop, CELL), stop]
        return [range(a - start, b - start) for a, b in itertools.pairwise(edges) if a < b]


class _Block(NamedTuple):
    """A block of rows, scored; lists have an entry per query shard."""

    places: range  # of its rows in the shard
    rows: Tensor  # (m, D)
    scores: list[Tensor]  # (1, q, m), with their graph
    seen: Tensor | None  # (3, Q) of this block, of all query shards; None if all blocks' is known
    answers: list[BlockAnswers]


class _Dense:
    """The objective's parameters, whole, and sums of this rank's terms of their gradients."""

    def __init__(self, objective: nn.Module):
        self.parameters = [p for p in objective.parameters() if p.requires_grad]
        self.sums = [torch.zeros_like(p) for p in self.parameters]


class _Backward:
    """Of one batch; ``row_gradients`` has to be used up before the other results are there."""

    def __init__(
        self, trainer: FullCandidates, batch: QueryBatch, shard: EntityShard, dense: _Dense
    ):
        self.trainer, self.batch, self.shard = trainer, batch, shard
        self.loss, self.scorer = trainer.loss, trainer.scorer
        self.objective = trainer.objective
        self.regularizers = trainer.objective.regularizers
        self.entity_dropout = trainer.objective.entity_dropout
        self.scale = trainer.gradient.loss_factor
        self.weight = batch.weight * self.scale  # the loss is the mean over the step's queries
        self.world = world_size()
        self.rank = dist.get_rank() if self.world > 1 else 0
        asked = directed(batch.asked, self.scorer)
        self.query_shards = [QueryShard(part, shard) for part in asked]
        with_answers = bool(self._relation_weight) or self.regularizers.any_of_triples
        self.fetched = GatheredRows(asked, shard, with_answers)
        with torch.enable_grad(), trainer.drawing(batch.seed, _FOLDED):
            for query_shard, anchors in zip(self.query_shards, self.fetched.anchors, strict=True):
                query_shard.encode_query(self.scorer, self.entity_dropout(anchors))
        self.seen: list[Tensor] = []  # (3, Q) of each block that has been started
        self.joined: Tensor | None = None  # (3, Q) of all blocks of all ranks
        self.auxiliary = torch.zeros((), device=shard.rows.device)  # this rank's part
        self.dense = dense

    def row_gradients(self) -> Iterator[RowGradients]:
        """Gradients of all n rows, each row once, summed over everything that it takes part in."""
        blocks = self.trainer.blocks(self.shard, self.batch.queries)
        if self.trainer.keeps(self.shard, self.batch.queries):
            yield from self._of_kept([self._start(places) for places in blocks])
            return
        if self.loss.normalizes:  # scores are computed twice
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
        """The same of rows whose scores are all there: no row has to step later than others."""
        self._join()
        finished = []
        while blocks:
            block = blocks.pop(0)  # its scores are not needed any more
            finished.append((block.places, self._finish(block)))
        self.fetched.add(self._backward_of_queries())
        for places, of_rows in finished:
            yield self.fetched.completed(places, of_rows)

    def loss_value(self) -> Tensor:
        """The loss, unscaled; its mean over the ranks is the global one.

        Every rank knows the loss of all candidates, and its own part of all else.
        """
        assert self.joined is not None  # row_gradients has been used up
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
        """Scores a block of rows; with ``graph`` to be differentiated."""
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
        """A block's rows (m, D) as candidates, after dropout, which draws for cells of entities."""
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
        """(1, q, m) of each query shard against a block's rows as the scorer takes them, (m, D).

        In float32, whatever their products are computed in, unless the loss has kernels for them:
        they become gradients where they are.
        """
        with self.trainer.autocast():
            scores = self._products(places, entities)
        return [x if keeps_bfloat16(self.loss, x[0]) else x.float() for x in scores]

    def _products(self, places: range, entities: Tensor) -> list[Tensor]:
        if not self.trainer.drops_pairs:
            return [query_shard.scores(self.scorer, entities) for query_shard in self.query_shards]
        # The cell as a whole is drawn for, also the rows of it that other ranks hold.
        cell, before = divmod(self.shard.first_row + places.start, CELL)
        after = CELL - before - len(places)
        entities = nn.functional.pad(entities, (0, 0, before, after))
        own = slice(before, before + len(places))
        with self.trainer.drawing(self.batch.seed, _PAIRS, cell):
            scores = [
                query_shard.scores(self.scorer, entities) for query_shard in self.query_shards
            ]
        return [x[..., own].clone() for x in scores]  # a view could not be overwritten

    def _join(self) -> None:
        """Makes of what this rank has seen what all have seen, by one collective."""
        own = self.loss.join(torch.stack(self.seen)) if self.seen else None
        if self.world == 1:
            self.joined = own
            return
        size, device = (3, self.batch.queries), self.shard.rows.device
        # Float64 for all: a rank without rows cannot know the type that the loss takes.
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
        """(m, D) gradients of a block's rows; those of queries and parameters are added up."""
        # Scores are overwritten: nothing needs them any more, not even their own graph, which
        # would refuse it to be done to a view.
        slopes = [scores.data for scores in block.scores]
        seen = block.seen if self.joined is None else self.joined
        assert seen is not None  # a block that saw nothing was scored after the joining
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
        """Of anchors and answers, each by its owner: adds its gradient to that of the rows."""
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
        """(F, D) from the encoded queries to the fetched rows; also what only queries are in."""
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
        """What only a query and its answer are in, of this rank's share of the queries.

        Penalties on relations and on whole triples, and the prediction of relations.
        """
        if not (self.objective.penalizes or self._relation_weight):
            return None
        total = self.fetched.rows.new_zeros(())
        for number, query_shard in enumerate(self.query_shards):
            for start in range(self.rank * CELL, len(query_shard.relation), self.world * CELL):
                total = total + self._of_cell(number, slice(start, start + CELL))
        return total * self.weight

    def _of_cell(self, number: int, cell: slice) -> Tensor:
        """The same of a cell of queries of one query shard."""
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
        """Gradients of ``first`` and ``then``; those of the dense parameters are added up."""
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

    sums: (n, D) float32.
    """

    def __init__(self, shard: EntityShard):
        self.sums = torch.zeros_like(shard.rows, dtype=torch.float32)

    def add(self, gradients: Iterable[RowGradients]) -> None:
        """Adds those of some rows, no row twice in a part."""
        for part in gradients:
            self.sums.index_add_(0, part.ids, part.grad)

    def of(self, places: range) -> RowGradients:
        """Those of a run of rows."""
        ids = torch.arange(places.start, places.stop, device=self.sums.device)
        return RowGradients(ids, self.sums[places.start : places.stop], None, True)


def _add(sums: list[Tensor], terms: Sequence[Tensor | None]) -> None:
    """Adds each term to its sum in place; None is 0."""
    for total, term in zip(sums, terms, strict=True):
        if term is not None:
            total += term

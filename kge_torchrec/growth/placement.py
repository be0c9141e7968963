"""Placing new entities: rows that fit their own triples, everything else fixed bit for bit.

A new row starts at the mean of what its triples ask for: the mean row of the entities that are
seen in the same place of the same relation.  A few passes over the triples that touch new rows
then minimise the run's own loss (and regularizers) over these rows alone, with candidates drawn
uniformly, by Adam (Kingma and Ba 2015) with a rate that falls linearly to 0.  Rows of new relations
and of their inverses take part.  Where new entities come in several blocks, each block trains its
own rows and those of the new relations in its triples; at the end the new relations train once more
on all of their triples, all entities fixed.

In training an entity is also a candidate of all the queries that it does not answer.  Without those
new rows would score too high everywhere and stand before old answers, so some of the new rows are
candidates of some old queries in each step, weighted as often as an epoch would have them there.
No table is stepped: it takes memory and time of the new rows, their triples and a sample of old
queries.  Every rank computes the same: rows of others are fetched from whoever holds them.

Shapes: N entities, R relations, D numbers per entity, m rows of a block of new entities, T triples
that touch it, K candidates, q old queries a step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import softplus

from kge_torchrec.config import Config, GraphSize
from kge_torchrec.data import ENTITY, SIDES, Side
from kge_torchrec.data.batches import BatchPlan, Candidates
from kge_torchrec.data.batches.triples import Batch, TripleBatches
from kge_torchrec.data.negatives import UniformSampler
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.models.triple_objective import TripleObjective
from kge_torchrec.training.growth import old_rows
from kge_torchrec.training.session import Session

BLOCK_ROWS = 1 << 16  # placed together
PASSES, LEAST_STEPS = 10, 200  # over the triples of a block; more passes where they are few
CANDIDATES = 1024  # of every batch and side, where training takes all entities
OLD_TRIPLES = 1 << 13  # whose queries new rows are candidates of
OLD_BATCH = 1 << 9  # of them a step, and as many of the block's rows
BATCH = 1024  # triples
RATE = 0.1  # of Adam, as a share of the root mean square of the numbers of old rows
_SAMPLE = 1 << 20  # old triples that the start looks at
_STREAM = 0x91ACE  # keeps these draws apart from others of the same seed


@dataclass(frozen=True)
class Placement:
    """What placing did: rows of entities and relations (inverses included), triples, seconds."""

    entities: int
    relation_rows: int
    triples: int
    seconds: float


def place(session: Session, old: GraphSize) -> Placement:
    """Moves the rows of new entities and relations in a session.  Collective.

    session: of the extended store, with the parameters of its first checkpoint.
    old: counts of the graph before.
    """
    started, triples = time.perf_counter(), 0
    placer = _Placer(session, old)
    every = session.store.num_entities
    blocks = [(a, min(a + BLOCK_ROWS, every)) for a in range(old.entities, every, BLOCK_ROWS)]
    for first, stop in blocks:
        placer.start(first, stop)
    for first, stop in blocks:
        triples += placer.place(first, stop)
    if len(blocks) != 1 and placer.relations:
        of_relations = placer.place(every, every)
        triples = triples or of_relations
    return Placement(
        session.store.num_entities - old.entities,
        sum(int((~rows).sum()) for rows in placer.relations.values()),
        triples,
        time.perf_counter() - started,
    )


class _Placer:
    """What all blocks have in common.

    relations: of parameters with rows of new relations, by name, which rows are old, (rows,) bool.
    """

    def __init__(self, session: Session, old: GraphSize):
        self.session, self.old, self.store = session, old, session.store
        self.shard: EntityShard = session.backend.shard()
        self.device = self.shard.rows.device
        config = session.config
        self.objective = _objective(config, session)
        parameters = dict(self.objective.named_parameters())
        every = old_rows(parameters, config.model, old.relations, self.store.num_relations)
        self.relations = {n: rows.to(self.device) for n, rows in every.items() if not rows.all()}
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in self.relations)
        self.trained = [(parameters[name], rows) for name, rows in self.relations.items()]
        self.places = self._places()
        negatives = config.negatives
        # What training estimates of all entities is estimated here as well.
        self.estimates_all = negatives.is_full or negatives.log_q
        self.candidates = CANDIDATES if negatives.is_full else negatives.count
        self.old_queries = list(self._old_queries())

    def start(self, first: int, stop: int) -> None:
        """Puts the rows [first, stop) of new entities where training of them starts."""
        ids = torch.arange(first, stop, device=self.device)
        triples = self._touching(first, stop)
        self._write(ids, self._start(self.shard.fetch(ids), triples, first))

    def place(self, first: int, stop: int) -> int:
        """Moves the rows [first, stop) of new entities, and new relations; returns T.

        Without rows: the new relations alone, by all of their triples.
        """
        triples = self._touching(first, stop)
        if not len(triples):
            return 0
        ids = torch.arange(first, stop, device=self.device)
        block = nn.Parameter(self.shard.fetch(ids))
        groups = [{"params": [block], "base": RATE * self._scale()}]
        for parameter, rows in self.trained:
            groups.append(
                {"params": [parameter], "base": RATE * _root_mean_square(parameter[rows])}
            )
        self._minimise(block, first, groups, triples)
        self._write(ids, block.detach())
        return len(triples)

    def _write(self, ids: Tensor, rows: Tensor) -> None:
        """Puts the rows of some entities into this rank's part of the table."""
        here = self.shard.holds(ids)
        self.shard.rows[ids[here] - self.shard.first_row] = rows[here].to(self.shard.rows)

    def _minimise(self, block: Tensor, first: int, groups: list[dict], triples: np.ndarray) -> None:
        optimizer = torch.optim.Adam(groups, lr=0.0)
        seed, sides = self.session.config.seed, self.objective.sides
        log_q = self._is_softmax and self.estimates_all
        sampler = UniformSampler(self.store.num_entities)
        candidates = Candidates(sampler, self.candidates, log_q=log_q)
        batches = TripleBatches(triples, BatchPlan(BATCH, seed, tuple(sides), candidates))
        passes = max(PASSES, -(-LEAST_STEPS // batches.steps_per_epoch))
        steps = passes * batches.steps_per_epoch
        drawing = torch.Generator().manual_seed(seed)
        share = self.old.triples / len(triples)  # old queries for each new one
        for step, batch in enumerate(self._batches(batches, passes)):
            for group in optimizer.param_groups:
                group["lr"] = group["base"] * (1 - step / steps)
            optimizer.zero_grad()
            loss = self.objective(self._rows(batch, block, first), batch)
            for queries in self.old_queries if len(block) else ():
                loss = loss + share / len(sides) * self._as_candidates(block, queries, drawing)
            loss.backward()
            for parameter, rows in self.trained:
                if parameter.grad is not None:
                    parameter.grad[rows] = 0  # and Adam, which has no state of them, stands still
            optimizer.step()

    @property
    def _is_softmax(self) -> bool:
        return self.session.config.loss.name == "softmax"

    def _as_candidates(self, block: Tensor, of: _OldQueries, drawing: torch.Generator) -> Tensor:
        """What being a candidate of an old query costs all rows of the block, in expectation.

        By the run's loss of a query; of softmax with the sum over its other candidates as it is.
        """
        entities, every = self.store.num_entities, len(block)
        some = torch.randperm(len(of.relation), generator=drawing)[:OLD_BATCH].to(self.device)
        rows = torch.randperm(every, generator=drawing)[:OLD_BATCH].to(self.device)
        scores = self.objective.scorer.score_candidates(
            of.anchor[None, some], of.relation[None, some], block[None, rows], of.side
        )
        chance = 1.0 if self.estimates_all else self.candidates / entities  # of being one
        if self._is_softmax:
            added = softplus(scores - of.log_sum[None, some, None]).sum(-1).mean()
            return added * chance * every / len(rows)
        loss = self.objective.loss(of.positive[None, some], scores, torch.ones_like(scores) > 0)
        chosen = self.session.config.loss
        if chosen.name == "bce" and chosen.loss_options().reduction == "sum":
            return loss.mean() * chance * every / len(rows)
        return loss.mean() * every / entities  # the mean over candidates

    @torch.no_grad()
    def _old_queries(self) -> Iterator[_OldQueries]:
        """Of some old triples, for each side."""
        count, seed = self.old.triples, self.session.config.seed
        stream = np.random.Generator(np.random.SFC64([seed, _STREAM]))
        picked = np.sort(stream.choice(count, min(count, OLD_TRIPLES), replace=False))
        head, relation, tail = torch.from_numpy(
            np.ascontiguousarray(np.asarray(self.store.train[picked], np.int64).T)
        ).to(self.device)
        drawn = torch.from_numpy(stream.integers(self.old.entities, size=self.candidates))
        others = self.shard.fetch(drawn.to(self.device))
        missing = math.log(self.store.num_entities / len(drawn)) if self.estimates_all else 0.0
        for side in self.objective.sides:
            ids = (head, tail) if side == "tail" else (tail, head)
            anchor, target = (self.shard.fetch(x) for x in ids)
            positive, log_sum = [], []
            for part in torch.arange(len(relation), device=self.device).split(BATCH):
                rows = anchor[None, part], relation[None, part], target[None, part], others[None]
                own, negative = self.objective.scorer.score_contrast(*rows, side)
                positive.append(own[0])
                log_sum.append(torch.logaddexp(own[0], negative[0].logsumexp(-1) + missing))
            yield _OldQueries(side, anchor, relation, torch.cat(positive), torch.cat(log_sum))

    def _batches(self, batches: TripleBatches, passes: int) -> Iterator[Batch]:
        for number in range(passes):
            for batch in batches.epoch(number):
                yield batch.to(self.device)

    def _rows(self, batch: Batch, block: Tensor, first: int) -> Tensor:
        """(U, D) of a batch: those of the block to differentiate by, all others as they are."""
        ids = batch.ids[ENTITY].values()
        rows = self.shard.fetch(ids)
        own = ((ids >= first) & (ids < first + len(block))).nonzero().squeeze(1)
        return rows.index_copy(0, own, block[ids[own] - first])

    def _touching(self, first: int, stop: int) -> np.ndarray:
        """The new training triples (T, 3) that train a block.

        Those of its entities; of the first block, which comes before all others, also those of new
        relations between old entities.  Without rows: all of new relations.
        """
        triples = np.asarray(self.store.train[self.old.triples :], np.int64)
        ends, is_new = triples[:, 0::2], triples[:, 1] >= self.old.relations
        if first == stop:
            return triples[is_new]
        wanted = ((ends >= first) & (ends < stop)).any(1)
        if first == self.old.entities:
            wanted |= is_new & (ends < first).all(1)
        return triples[wanted]

    def _start(self, drawn: Tensor, triples: np.ndarray, first: int) -> Tensor:
        """(m, D): the mean row of the places that each entity is seen in; as drawn where unknown.

        drawn: (m, D).
        """
        sums, counts = torch.zeros_like(drawn), drawn.new_zeros(len(drawn), 1)
        for side, means in self.places.items():
            ids, relations = torch.from_numpy(triples[:, [0 if side == "head" else 2, 1]].T)
            known = (ids >= first) & (ids < first + len(drawn)) & means.seen[relations]
            own = (ids[known] - first).to(self.device)
            sums.index_add_(0, own, means.rows[relations[known]])
            counts.index_add_(0, own, counts.new_ones(len(own), 1))
        return torch.where(counts > 0, sums / counts.clamp_min(1), drawn)

    def _places(self) -> dict[Side, _Means]:
        """Of every side, the mean rows of the entities that old triples have there, by relation."""
        count = self.old.triples
        every = max(1, -(-count // _SAMPLE))
        triples = np.asarray(self.store.train[:count:every], np.int64)
        relations = torch.from_numpy(triples[:, 1].copy())
        found: dict[Side, _Means] = {}
        for side in SIDES:
            ids = torch.from_numpy(triples[:, 0 if side == "head" else 2].copy())
            here = self.shard.holds(ids)
            local = (ids[here] - self.shard.first_row).to(self.device).split(BLOCK_ROWS)
            own = relations[here].to(self.device).split(BLOCK_ROWS)
            sums = torch.zeros(self.store.num_relations, self.shard.dim, device=self.device)
            for places, of_relation in zip(local, own, strict=True):
                sums.index_add_(0, of_relation, self.shard.rows[places].float())
            if self.session.processes.world_size > 1:
                dist.all_reduce(sums)
            counts = torch.bincount(relations, minlength=self.store.num_relations)
            means = sums / counts.clamp_min(1)[:, None].to(self.device)
            found[side] = _Means(means, counts > 0)
        return found

    def _scale(self) -> float:
        """The root mean square of the numbers of some old rows."""
        ids = np.linspace(0, self.old.entities - 1, min(self.old.entities, 4096)).astype(np.int64)
        return _root_mean_square(self.shard.fetch(torch.from_numpy(ids).to(self.device)))


@dataclass(frozen=True)
class _OldQueries:
    """Queries of a side that new entities do not answer."""

    side: Side
    anchor: Tensor  # (S, D)
    relation: Tensor  # (S,)
    positive: Tensor  # (S,) the scores of their answers
    log_sum: Tensor  # (S,) of the exponentials of answer and candidates


@dataclass(frozen=True)
class _Means:
    """Rows by relation, and which relations they are known of."""

    rows: Tensor  # (R, D)
    seen: Tensor  # (R,) bool


def _objective(config: Config, session: Session) -> TripleObjective:
    """The run's loss of triples with drawn candidates; nothing is dropped."""
    from kge_torchrec.training.assembly import (  # loads TorchRec
        build_loss,
        build_regularizers,
        sides_of,
    )

    return TripleObjective(
        session.scorer,
        build_loss(config.loss),
        sides_of(config.negatives.sides),
        build_regularizers(config.loss),
        config.loss.relation_weight,
    ).eval()


def _root_mean_square(numbers: Tensor) -> float:
    return float(numbers.detach().square().mean().sqrt())

"""Places new entities: fits their rows to their own triples, with all other parameters fixed.

A new row starts at the mean row of its positions: for each of its triples, the mean row of the
entities that old triples have on the same side of the same relation. A few passes over the triples
that contain new rows then minimize the run's own loss and regularizers with respect to these rows.
Candidates are drawn uniformly. The optimizer is Adam (Kingma and Ba 2015) with a linearly decaying
learning rate. Rows of new relations and of their inverses are trained as well.

New entities are trained in blocks, each with the new relations in its triples. With several blocks,
the new relations are finally trained once more on all of their triples, with all entities fixed.

In training, an entity is also a candidate of all queries that it does not answer. Without these
queries new rows would score too high and rank before old answers. Each step therefore uses some new
rows as candidates of some old queries, weighted to match their frequency in an epoch.

No step runs over the whole table. Memory and time depend on the new rows, their triples and a
sample of old queries. Every rank computes the same, and fetches rows from the ranks that own them.

Shapes: N entities, R relations, D elements per row, m rows of a block of new entities, T triples
that contain its rows, K candidates, q old queries per step, S sampled old queries, U unique ids.
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
from kge_torchrec.models.scorers.base import Scorer
from kge_torchrec.models.triple_objective import TripleObjective
from kge_torchrec.trained_model import TrainedModel
from kge_torchrec.training.old_rows import old_rows

BLOCK_ROWS = 1 << 16  # rows per block
PASSES, LEAST_STEPS = 10, 200  # per block; few triples get more passes to reach the least steps
CANDIDATES = 1024  # per batch and side, if training uses all entities as candidates
OLD_TRIPLES = 1 << 13  # sampled old triples whose queries get new rows as candidates
OLD_BATCH = 1 << 9  # old queries per step and side, and rows of the block scored with them
BATCH = 1024  # triples per batch
RATE = 0.1  # Adam's initial learning rate, relative to the root mean square of old rows
_SAMPLE = 1 << 20  # about how many old triples the mean rows are computed from
_STREAM = 0x91ACE  # separates these random draws from others with the same seed


@dataclass(frozen=True)
class Placement:
    """The result of placing.

    Attributes:
        entities: The number of placed entities.
        relation_rows: The number of placed relation rows, inverses included.
        triples: The number of triples that the rows were fitted to.
        seconds: The duration.
    """

    entities: int
    relation_rows: int
    triples: int
    seconds: float


def place(model: TrainedModel, config: Config, old: GraphSize) -> Placement:
    """Place the rows of new entities and relations in a model. Collective.

    Args:
        model: The model of the first checkpoint of the extended run, with the extended store.
        config: The config of the extended run, with a number for every key that may be null.
        old: Counts of the graph before it was extended.
    """
    started, triples = time.perf_counter(), 0
    placer = _Placer(model, config, old)
    num_entities = model.num_entities
    blocks = [
        (a, min(a + BLOCK_ROWS, num_entities))
        for a in range(old.entities, num_entities, BLOCK_ROWS)
    ]
    for first, stop in blocks:
        placer.start(first, stop)
    for first, stop in blocks:
        triples += placer.place(first, stop)
    if len(blocks) != 1 and placer.relations:
        relation_triples = placer.place(num_entities, num_entities)
        triples = triples or relation_triples
    return Placement(
        num_entities - old.entities,
        sum(int((~rows).sum()) for rows in placer.relations.values()),
        triples,
        time.perf_counter() - started,
    )


class _Placer:
    """The state that all blocks share.

    Attributes:
        relations: For each parameter with rows of new relations, which rows are old: (rows,) bool.
    """

    def __init__(self, model: TrainedModel, config: Config, old: GraphSize):
        self.model, self.config, self.old = model, config, old
        self.store, self.shard = model.known("placing"), model.shard
        self.device = self.shard.device
        self.objective = _objective(config, model.scorer)
        parameters = dict(self.objective.named_parameters())
        old_relations = old_rows(parameters, config.model, old.relations, self.store.num_relations)
        self.relations = {
            n: rows.to(self.device) for n, rows in old_relations.items() if not rows.all()
        }
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in self.relations)
        self.trained = [(parameters[name], rows) for name, rows in self.relations.items()]
        self.places = self._places()
        negatives = config.negatives
        # If training estimates the loss over all entities, so does the placement.
        self.estimates_all = negatives.is_full or negatives.log_q
        self.candidates = CANDIDATES if negatives.is_full else negatives.count
        self.old_queries = list(self._old_queries())

    def start(self, first: int, stop: int) -> None:
        """Initialize the rows [first, stop) of new entities."""
        ids = torch.arange(first, stop, device=self.device)
        triples = self._touching(first, stop)
        self._write(ids, self._start(self.shard.fetch(ids), triples, first))

    def place(self, first: int, stop: int) -> int:
        """Train the rows [first, stop) of new entities and their new relations; return T.

        With an empty range, train only the new relations on all of their triples.
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
        self._minimize(block, first, groups, triples)
        self._write(ids, block.detach())
        return len(triples)

    def _write(self, ids: Tensor, rows: Tensor) -> None:
        """Write rows of entities into this rank's part of the table."""
        here, own = self.shard.holds(ids), self.shard.rows
        places = (ids[here] - self.shard.first_row).to(own.device)
        own[places] = rows[here].to(own)

    def _minimize(self, block: Tensor, first: int, groups: list[dict], triples: np.ndarray) -> None:
        optimizer = torch.optim.Adam(groups, lr=0.0)
        seed, sides = self.config.seed, self.objective.sides
        log_q = self._is_softmax and self.estimates_all
        sampler = UniformSampler(self.store.num_entities)
        candidates = Candidates(sampler, self.candidates, log_q=log_q)
        batches = TripleBatches(triples, BatchPlan(BATCH, seed, tuple(sides), candidates))
        passes = max(PASSES, -(-LEAST_STEPS // batches.steps_per_epoch))
        steps = passes * batches.steps_per_epoch
        drawing = torch.Generator().manual_seed(seed)
        share = self.old.triples / len(triples)  # old queries per new query
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
                    parameter.grad[rows] = 0  # Adam doesn't move rows that never had a gradient
            optimizer.step()

    @property
    def _is_softmax(self) -> bool:
        return self.config.loss.name == "softmax"

    def _as_candidates(self, block: Tensor, of: _OldQueries, drawing: torch.Generator) -> Tensor:
        """Return the expected loss of the block's rows as candidates of old queries.

        The loss is the run's loss per query. For softmax, the sum over the other candidates is a
        constant.
        """
        entities, count = self.store.num_entities, len(block)
        some = torch.randperm(len(of.relation), generator=drawing)[:OLD_BATCH].to(self.device)
        rows = torch.randperm(count, generator=drawing)[:OLD_BATCH].to(self.device)
        scores = self.objective.scorer.score_candidates(
            of.anchor[None, some], of.relation[None, some], block[None, rows], of.side
        )
        # The probability that an entity is drawn as a candidate.
        chance = 1.0 if self.estimates_all else self.candidates / entities
        if self._is_softmax:
            added = softplus(scores - of.log_sum[None, some, None]).sum(-1).mean()
            return added * chance * count / len(rows)
        loss = self.objective.loss(of.positive[None, some], scores, torch.ones_like(scores) > 0)
        chosen = self.config.loss
        if chosen.name == "bce" and chosen.loss_options().reduction == "sum":
            return loss.mean() * chance * count / len(rows)
        return loss.mean() * count / entities  # here the loss averages over candidates

    @torch.no_grad()
    def _old_queries(self) -> Iterator[_OldQueries]:
        """Yield the queries of sampled old triples, per side."""
        count, seed = self.old.triples, self.config.seed
        stream = np.random.Generator(np.random.SFC64([seed, _STREAM]))
        sample = np.sort(stream.choice(count, min(count, OLD_TRIPLES), replace=False))
        head, relation, tail = torch.from_numpy(
            np.ascontiguousarray(np.asarray(self.store.train[sample], np.int64).T)
        ).to(self.device)
        drawn = torch.from_numpy(stream.integers(self.old.entities, size=self.candidates))
        candidates = self.shard.fetch(drawn.to(self.device))
        missing = math.log(self.store.num_entities / len(drawn)) if self.estimates_all else 0.0
        for side in self.objective.sides:
            ids = (head, tail) if side == "tail" else (tail, head)
            anchor, target = (self.shard.fetch(x) for x in ids)
            positive, log_sum = [], []
            for part in torch.arange(len(relation), device=self.device).split(BATCH):
                rows = (
                    anchor[None, part],
                    relation[None, part],
                    target[None, part],
                    candidates[None],
                )
                own, negative = self.objective.scorer.score_contrast(*rows, side)
                positive.append(own[0])
                log_sum.append(torch.logaddexp(own[0], negative[0].logsumexp(-1) + missing))
            yield _OldQueries(side, anchor, relation, torch.cat(positive), torch.cat(log_sum))

    def _batches(self, batches: TripleBatches, passes: int) -> Iterator[Batch]:
        for number in range(passes):
            for batch in batches.epoch(number):
                yield batch.to(self.device)

    def _rows(self, batch: Batch, block: Tensor, first: int) -> Tensor:
        """Return the rows (U, D) of a batch; only rows of the block get gradients."""
        ids = batch.ids[ENTITY].values()
        rows = self.shard.fetch(ids)
        own = ((ids >= first) & (ids < first + len(block))).nonzero().squeeze(1)
        return rows.index_copy(0, own, block[ids[own] - first])

    def _touching(self, first: int, stop: int) -> np.ndarray:
        """Return the new training triples (T, 3) that train a block.

        These are the triples of its entities. The first block also gets the triples of new
        relations between old entities. An empty range gets all triples of new relations.
        """
        triples = np.asarray(self.store.train[self.old.triples :], np.int64)
        ends, is_new = triples[:, 0::2], triples[:, 1] >= self.old.relations
        if first == stop:
            return triples[is_new]
        selected = ((ends >= first) & (ends < stop)).any(1)
        if first == self.old.entities:
            selected |= is_new & (ends < first).all(1)
        return triples[selected]

    def _start(self, drawn: Tensor, triples: np.ndarray, first: int) -> Tensor:
        """Return initial rows (m, D): the mean row of each entity's positions.

        An entity without a known position keeps its row of ``drawn`` (m, D).
        """
        sums, counts = torch.zeros_like(drawn), drawn.new_zeros(len(drawn), 1)
        for side, means in self.places.items():
            ids, relations = torch.from_numpy(triples[:, [0 if side == "head" else 2, 1]].T)
            known = (ids >= first) & (ids < first + len(drawn)) & means.exists[relations]
            own = (ids[known] - first).to(self.device)
            sums.index_add_(0, own, means.rows[relations[known]])
            counts.index_add_(0, own, counts.new_ones(len(own), 1))
        return torch.where(counts > 0, sums / counts.clamp_min(1), drawn)

    def _places(self) -> dict[Side, _Means]:
        """Return, per side, the mean row of each relation's entities in old triples."""
        count = self.old.triples
        stride = max(1, -(-count // _SAMPLE))
        triples = np.asarray(self.store.train[:count:stride], np.int64)
        relations = torch.from_numpy(triples[:, 1].copy())
        mean_rows: dict[Side, _Means] = {}
        for side in SIDES:
            ids = torch.from_numpy(triples[:, 0 if side == "head" else 2].copy())
            here = self.shard.holds(ids)
            local = (ids[here] - self.shard.first_row).to(self.device).split(BLOCK_ROWS)
            own = relations[here].to(self.device).split(BLOCK_ROWS)
            sums = torch.zeros(self.store.num_relations, self.shard.dim, device=self.device)
            for places, relation in zip(local, own, strict=True):
                sums.index_add_(0, relation, self.shard.own(places).float())
            if self.model.processes.world_size > 1:
                dist.all_reduce(sums)
            counts = torch.bincount(relations, minlength=self.store.num_relations)
            means = sums / counts.clamp_min(1)[:, None].to(self.device)
            mean_rows[side] = _Means(means, counts > 0)
        return mean_rows

    def _scale(self) -> float:
        """Return the root mean square of a sample of old rows."""
        ids = np.linspace(0, self.old.entities - 1, min(self.old.entities, 4096)).astype(np.int64)
        return _root_mean_square(self.shard.fetch(torch.from_numpy(ids).to(self.device)))


@dataclass(frozen=True)
class _OldQueries:
    """Queries of one side that new entities do not answer."""

    side: Side
    anchor: Tensor  # (S, D)
    relation: Tensor  # (S,)
    positive: Tensor  # (S,) the scores of the answers
    log_sum: Tensor  # (S,) log-sum-exp of the scores of answer and candidates


@dataclass(frozen=True)
class _Means:
    """Mean rows by relation, and the relations that have one."""

    rows: Tensor  # (R, D)
    exists: Tensor  # (R,) bool


def _objective(config: Config, scorer: Scorer) -> TripleObjective:
    """Return the run's loss of triples with sampled candidates, without dropout."""
    from kge_torchrec.training.assembly import (  # loads TorchRec
        build_loss,
        build_regularizers,
        sides_of,
    )

    return TripleObjective(
        scorer,
        build_loss(config.loss),
        sides_of(config.negatives.sides),
        build_regularizers(config.loss),
        config.loss.relation_weight,
    ).eval()


def _root_mean_square(numbers: Tensor) -> float:
    return float(numbers.detach().square().mean().sqrt())

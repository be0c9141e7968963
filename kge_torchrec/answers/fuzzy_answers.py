"""Answers to logical queries: every entity is a member of a query to a degree in [0, 1].

As CQD-Beam (Arakelyan et al. 2021, Complex Query Answering with Neural Link Predictors): a step
from one entity has the model's probabilities; a step from many is taken from the ``beam`` best of
them and keeps the best way to each answer; "and", "or" and "not" are a t-norm, its conorm, 1 - x.

A probability is the calibrated one, or else the softmax over all entities, times the number of
answers that the data has for the query (1 at least), capped at 1 (Bai et al. 2023, Query
Computation Tree Optimization).  Triples that the data holds are certain unless told otherwise.

A rank holds the degrees of its own rows: memory grows with steps times rows of the shard.

Shapes: n rows on this rank, B entities of a beam, k answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from kge_torchrec.answers.logical_queries import And, Entity, Node, Step
from kge_torchrec.answers.model import AnsweringModel
from kge_torchrec.answers.predictions import FEW, check_count
from kge_torchrec.config import ConfigError
from kge_torchrec.models.scorers.base import Side
from kge_torchrec.ranking.blocks import erase, local_scores, scoring
from kge_torchrec.ranking.topk import top_k_of

TNorm = Literal["product", "min"]
T_NORMS = ("product", "min")
FACTS = {"all": ("train", "valid", "test"), "train": ("train",), "none": ()}


@dataclass(frozen=True)
class Member:
    """An answer to a logical query."""

    rank: int  # from 1
    label: str
    score: float  # degree in [0, 1]
    via: tuple[str, ...] = ()  # entities on the best way there, one for each step inside a step


@dataclass(frozen=True)
class AskOptions:
    """How a logical query is answered.

    k: the best so many.
    beam: entities that a step from many is taken from.
    t_norm: product, or min (Goedel).
    facts: the splits whose triples are certain: all, train or none.

    Raises ConfigError for values that make no sense.
    """

    k: int = FEW
    beam: int = 64
    t_norm: TNorm = "product"
    facts: str = "all"

    def __post_init__(self) -> None:
        check_count(self.k)
        if self.beam < 1:
            raise ConfigError(f"beam must be an integer >= 1, got {self.beam}")
        if self.t_norm not in T_NORMS:
            raise ConfigError(f"t_norm must be one of {', '.join(T_NORMS)}, got {self.t_norm!r}")
        if self.facts not in FACTS:
            raise ConfigError(f"facts must be one of {', '.join(FACTS)}, got {self.facts!r}")


def ask(model: AnsweringModel, query: Node, options: AskOptions) -> list[Member]:
    """The members of highest degree, best first, those of degree 0 left out."""
    with scoring(model.scorer):
        members = _Asker(model, options).members(query)
        k = min(options.k, model.num_entities)
        degrees, ids = (part[0] for part in top_k_of(members.degrees[None], model.shard, k))
        wanted = degrees > 0
        degrees, ids = degrees[wanted].cpu(), ids[wanted]
        ways = [model.entities.labels(way.cpu().numpy()) for way in members.ways(ids)]
    labels = model.entities.labels(ids.cpu().numpy())
    vias = zip(*ways, strict=True) if ways else [()] * len(labels)
    answers = zip(labels, degrees.tolist(), vias, strict=True)
    return [Member(rank, *answer) for rank, answer in enumerate(answers, 1)]


class _Members(NamedTuple):
    """To what degree this rank's rows are members of a query.

    ways: for entities (M,) int64 the ids (M,) on the best way to each, step by step; collective.
    """

    degrees: Tensor  # (n,) float32
    ways: Callable[[Tensor], list[Tensor]]


def _no_ways(ids: Tensor) -> list[Tensor]:
    return []


class _Asker:
    def __init__(self, model: AnsweringModel, options: AskOptions):
        self._model, self._options = model, options
        self._shard = model.shard
        splits, store = FACTS[options.facts], model.store
        self._facts = store.filter_index(splits) if store is not None and splits else None
        self._counts = None if store is None else store.filter_index(("train",))

    def members(self, query: Node) -> _Members:
        """Of any query.  Collective."""
        if isinstance(query, Entity):
            return _Members(self._one(query.id), _no_ways)
        if isinstance(query, Step):
            return self._step(query)
        parts = [self.members(part) for part in query.parts]
        degrees = parts[0].degrees
        for part in parts[1:]:
            join = self._both if isinstance(query, And) else self._either
            degrees = join(degrees, part.degrees)
        if isinstance(query, And):
            for other in query.without:
                degrees = self._both(degrees, 1 - self.members(other).degrees)
        return _Members(degrees, lambda ids: [way for part in parts for way in part.ways(ids)])

    def _both(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y if self._options.t_norm == "product" else torch.minimum(x, y)

    def _either(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y - x * y if self._options.t_norm == "product" else torch.maximum(x, y)

    def _one(self, entity: int) -> Tensor:
        degrees = torch.zeros(self._shard.rows.shape[0], device=self._shard.rows.device)
        start, stop = self._shard.row_range
        if start <= entity < stop:
            degrees[entity - start] = 1
        return degrees

    def _step(self, step: Step) -> _Members:
        device = self._shard.rows.device
        if isinstance(step.of, Entity):
            anchor = torch.tensor([step.of.id], device=device)
            degrees, _ = self._taken(anchor, torch.ones(1, device=device), step)
            return _Members(degrees, _no_ways)
        before = self.members(step.of)
        beam = min(self._options.beam, self._model.num_entities)
        weights, ids = (x[0] for x in top_k_of(before.degrees[None], self._shard, beam))
        ids, weights = ids[weights > 0], weights[weights > 0]
        if not len(ids):
            nobody = torch.zeros(self._shard.rows.shape[0], device=device)
            return _Members(nobody, lambda some: [some, *before.ways(some)])
        degrees, place = self._taken(ids, weights, step)

        def ways(some: Tensor) -> list[Tensor]:
            through = ids[self._at(place, some)]
            return [through, *before.ways(through)]

        return _Members(degrees, ways)

    def _taken(self, ids: Tensor, weights: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """A step from entities ids (B,) of degrees (B,): the best of all ways to each row.

        Returns degrees (n,) and the place in ids (n,) int32 that each comes from.
        """
        relations = torch.full_like(ids, step.relation)
        degrees = torch.zeros(self._shard.rows.shape[0], device=ids.device)
        place = torch.zeros(len(degrees), dtype=torch.int32, device=ids.device)
        for first, chances in self._chances(ids, relations, step.side):
            rows = slice(first - self._shard.first_row, None)
            best = self._both(weights[:, None], chances).max(0)
            degrees[rows][: chances.shape[1]] = best.values
            place[rows][: chances.shape[1]] = best.indices
        return degrees, place

    def _chances(
        self, anchors: Tensor, relations: Tensor, side: Side
    ) -> Iterator[tuple[int, Tensor]]:
        """Blocks of probabilities (B, n) of the answers to B queries, from an id on."""
        rows = self._shard.fetch(anchors)
        queries = anchors.cpu().numpy(), relations.cpu().numpy()
        facts = None if self._facts is None else self._facts.answers(side, *queries)
        to_chance = self._to_chance(rows, relations, side, *queries)
        for first, scores in local_scores(self._model.scorer, self._shard, rows, relations, side):
            chances = to_chance(scores)
            if facts is not None:
                erase(chances, first, facts, 1.0)
            yield first, chances

    def _to_chance(
        self, rows: Tensor, relations: Tensor, side: Side, *queries: np.ndarray
    ) -> Callable[[Tensor], Tensor]:
        """What makes probabilities of blocks of scores (B, n)."""
        calibration = self._model.calibration
        if calibration is not None:
            return lambda scores: torch.from_numpy(
                calibration.probabilities(scores.cpu().numpy(), side)
            ).to(scores)
        total = self._log_sum(rows, relations, side)
        if self._counts is not None:
            answers = self._counts.answers(side, *queries).counts
            total = total - torch.from_numpy(answers.clip(1)).to(total).log()
        return lambda scores: (scores - total[:, None]).exp().clamp_max(1).nan_to_num(0)

    def _log_sum(self, rows: Tensor, relations: Tensor, side: Side) -> Tensor:
        """(B,) float32: the logarithm of the sum of e^score over all entities.  Collective."""
        total = torch.full((len(rows),), -torch.inf, device=rows.device)
        for _, scores in local_scores(self._model.scorer, self._shard, rows, relations, side):
            total = torch.logaddexp(total, scores.nan_to_num(nan=-torch.inf).logsumexp(1))
        if self._shard.ranks > 1:
            parts = [torch.empty_like(total) for _ in range(self._shard.ranks)]
            dist.all_gather(parts, total)
            total = torch.stack(parts).logsumexp(0)
        return total

    def _at(self, values: Tensor, ids: Tensor) -> Tensor:
        """What whole numbers (n,) of all ranks' rows are at entities (M,) int64.  Collective."""
        here = self._shard.holds(ids)
        found = torch.zeros_like(ids)
        found[here] = values[ids[here] - self._shard.first_row].long()
        if self._shard.ranks > 1:
            dist.all_reduce(found)
        return found

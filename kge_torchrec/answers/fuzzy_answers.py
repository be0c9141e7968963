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
import torch.nn.functional as F
from torch import Tensor

from kge_torchrec.answers.calibration import TIE
from kge_torchrec.answers.logical_queries import And, Entity, Node, Step
from kge_torchrec.answers.model import AnsweringModel
from kge_torchrec.answers.predictions import FEW, check_count
from kge_torchrec.config import ConfigError
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.models.scorers.base import Side
from kge_torchrec.ranking.blocks import erase, local_scores, scoring

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
        degrees, ids = _best(members.degrees, model.shard, min(options.k, model.num_entities))
        ways = [model.entities.labels(way.cpu().numpy()) for way in members.ways(ids)]
    labels = model.entities.labels(ids.cpu().numpy())
    vias = zip(*ways, strict=True) if ways else [()] * len(labels)
    answers = zip(labels, degrees.tolist(), vias, strict=True)
    return [Member(rank, *answer) for rank, answer in enumerate(answers, 1)]


def _at_most_one(expected: Tensor) -> Tensor:
    """Expected numbers of answers to probabilities, those above 1 still in their order."""
    return (1 - TIE) * expected.clamp_max(1) + TIE * expected / (1 + expected)


class _Members(NamedTuple):
    """To what degree this rank's rows are members of a query.

    ways: for entities (M,) int64 the ids (M,) on the best way to each, step by step; collective.
    """

    degrees: Tensor  # (n,) float64, so that different scores have different degrees
    ways: Callable[[Tensor], list[Tensor]]


def _no_ways(ids: Tensor) -> list[Tensor]:
    return []


def _best(degrees: Tensor, shard: EntityShard, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest degrees above 0, the largest first, and their ids (k,).  Collective.

    degrees: (n,) float64 of this rank's rows.  Equal ones come in order of id.
    """
    here = min(k, len(degrees))
    least = degrees.topk(here).values[-1:].clamp_min(0) if here else degrees
    rows = (degrees >= least).nonzero()[:, 0] if here else degrees.long()
    values, order = degrees[rows].sort(descending=True, stable=True)
    values, ids = values[:k], rows[order][:k] + shard.first_row
    if shard.ranks > 1:  # all ranks send as many, and their ids ascend
        missing = (0, k - len(values))
        parts = [(torch.empty_like(degrees[:0]).new_empty(k), ids.new_empty(k))
                 for _ in range(shard.ranks)]  # fmt: skip
        dist.all_gather([part[0] for part in parts], F.pad(values, missing))
        dist.all_gather([part[1] for part in parts], F.pad(ids, missing))
        every, every_id = (torch.cat(x) for x in zip(*parts, strict=True))
        values, order = every.sort(descending=True, stable=True)
        values, ids = values[:k], every_id[order][:k]
    return values[values > 0], ids[values > 0]


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
        degrees = self._nobody()
        start, stop = self._shard.row_range
        if start <= entity < stop:
            degrees[entity - start] = 1
        return degrees

    def _nobody(self) -> Tensor:
        rows = self._shard.rows
        return torch.zeros(len(rows), dtype=torch.float64, device=rows.device)

    def _step(self, step: Step) -> _Members:
        device = self._shard.rows.device
        if isinstance(step.of, Entity):
            anchor = torch.tensor([step.of.id], device=device)
            degrees, _ = self._taken(anchor, self._nobody().new_ones(1), step)
            return _Members(degrees, _no_ways)
        before = self.members(step.of)
        beam = min(self._options.beam, self._model.num_entities)
        weights, ids = _best(before.degrees, self._shard, beam)
        if not len(ids):
            return _Members(self._nobody(), lambda some: [some, *before.ways(some)])
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
        degrees = self._nobody()
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
            ).to(scores.device)
        total = self._log_sum(rows, relations, side)
        if self._counts is not None:
            answers = self._counts.answers(side, *queries).counts
            total = total - torch.from_numpy(answers.clip(1)).to(total).log()
        return lambda scores: _at_most_one((scores - total[:, None]).double().exp().nan_to_num(0))

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

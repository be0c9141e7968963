"""Logical queries of several steps: their JSON form, and their answers by CQD-Beam.

    "Austria"                              an entity
    {"relation": "borders", "from": Q}     tails of (Q, borders, ?)
    {"relation": "locatedin", "to": Q}     heads of (?, locatedin, Q)
    {"and": [Q, Q, {"not": Q}]}            members of every query, except those of "not"
    {"or": [Q, Q]}                         members of any query

Q is any of these forms. Each entity is a member of a query to a degree in [0, 1]. The method is
CQD-Beam (Arakelyan et al. 2021, Complex Query Answering with Neural Link Predictors). A step from
one entity gives the model's probabilities. A step from many entities starts from the ``beam`` best
of them and keeps the best path to each answer. "and" is a t-norm, "or" its conorm and "not" is
1 - x.

A probability is the calibrated one. Without a calibration it is the softmax over all entities,
times the number of answers in train (at least 1), capped at 1 (Bai et al. 2023, Query
Computation Tree Optimization). By default the triples of the data are certain.

Each rank holds the degrees of its own rows, so memory grows with the steps times the rows.

Shapes: n rows on this rank, B entities in a beam, k answers, M requested entities.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from kge_torchrec.answers.calibration import TIE
from kge_torchrec.answers.predictions import FEW
from kge_torchrec.config.checks import at_least, one_of
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.errors import DataError, KGEError
from kge_torchrec.files import in_words
from kge_torchrec.models.scorers.base import Side
from kge_torchrec.ranking.blocks import erase, local_scores, scoring
from kge_torchrec.trained_model import TrainedModel

DEEPEST = 50  # levels of nested steps


class QueryError(KGEError, ValueError):
    """An invalid logical query; the message says where."""

    on_every_rank = True


@dataclass(frozen=True)
class Entity:
    """One entity."""

    id: int


@dataclass(frozen=True)
class Step:
    """The entities that a relation links to members of another query."""

    relation: int
    side: Side  # the side of the answers
    of: Node


@dataclass(frozen=True)
class And:
    """The common members of some queries, without the members of others."""

    parts: tuple[Node, ...]  # at least one
    without: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Or:
    """The members of any of some queries."""

    parts: tuple[Node, ...]


Node = Entity | Step | And | Or


def read_query(path: str | Path, model: TrainedModel) -> Node:
    """Read a query from a JSON file, as ``parse_query`` does.

    Raises:
        DataError: The file cannot be read or is not JSON.
    """
    try:
        value = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise DataError(in_words(error)) from error
    except ValueError as error:
        raise DataError(f"{path}: invalid JSON: {error}") from error
    except RecursionError:
        raise QueryError(f"{path}: more than {DEEPEST} nested steps") from None
    return parse_query(value, model)


def parse_query(value: Any, model: TrainedModel) -> Node:
    """Build a query from a JSON value.

    Raises:
        QueryError: The query is invalid.
        UnknownLabelError: A label is not in the data; the message has close matches.
    """
    return _Parser(model).node(value, "query", 0)


class _Parser:
    """Builds nodes from JSON values; ``place`` is the position in the query, for error messages."""

    def __init__(self, model: TrainedModel):
        self._model = model

    def node(self, value: Any, place: str, depth: int) -> Node:
        if depth > DEEPEST:
            raise QueryError(f"{place[:60]}...: more than {DEEPEST} nested steps")
        if isinstance(value, str):
            return Entity(int(self._model.entity_ids(value)))
        if isinstance(value, dict):
            keys = set(value)
            if keys in ({"relation", "from"}, {"relation", "to"}):
                return self._step(value, place, depth)
            if keys == {"and"}:
                return self._and(value["and"], f"{place}.and", depth)
            if keys == {"or"}:
                return Or(self._nodes(value["or"], f"{place}.or", depth))
            if keys == {"not"}:
                raise QueryError(
                    f'{place}: "not" must be inside an "and", together with other queries'
                )
        raise QueryError(
            f"{place}: expected the label of an entity or an object with the keys relation and "
            f"from, relation and to, and, or; got {_shown(value)}"
        )

    def _step(self, value: dict[str, Any], place: str, depth: int) -> Step:
        relation = value["relation"]
        if not isinstance(relation, str):
            raise QueryError(f"{place}.relation: expected a label, got {_shown(relation)}")
        side: Side = "tail" if "from" in value else "head"
        key = "from" if side == "tail" else "to"
        number = int(self._model.relation_ids(relation))
        return Step(number, side, self.node(value[key], f"{place}.{key}", depth + 1))

    def _and(self, parts: Any, place: str, depth: int) -> And:
        parts = self._list(parts, place)
        is_not = [isinstance(part, dict) and set(part) == {"not"} for part in parts]
        if all(is_not):
            raise QueryError(f'{place}: "and" needs at least one query without "not"')
        made: dict[bool, list[Node]] = {True: [], False: []}
        for number, (part, negated) in enumerate(zip(parts, is_not, strict=True)):
            inner, where = part["not"] if negated else part, f"{place}[{number}]"
            made[negated].append(self.node(inner, f"{where}.not" if negated else where, depth + 1))
        return And(tuple(made[False]), tuple(made[True]))

    def _nodes(self, parts: Any, place: str, depth: int) -> tuple[Node, ...]:
        return tuple(
            self.node(part, f"{place}[{number}]", depth + 1)
            for number, part in enumerate(self._list(parts, place))
        )

    def _list(self, parts: Any, place: str) -> list[Any]:
        if not isinstance(parts, list) or not parts:
            raise QueryError(f"{place}: expected a list of queries, got {_shown(parts)}")
        return parts


def _shown(value: Any) -> str:
    """Return a value as error messages show it: as JSON if possible, otherwise as Python."""
    try:
        return json.dumps(value)[:80]
    except (TypeError, ValueError):
        return repr(value)[:80]
    except RecursionError:
        return "JSON that is nested too deeply"


TNorm = Literal["product", "min"]
T_NORMS = ("product", "min")
FACTS = {"all": ("train", "valid", "test"), "train": ("train",), "none": ()}


@dataclass(frozen=True)
class Member:
    """An answer to a logical query."""

    rank: int  # from 1
    label: str
    score: float  # degree in [0, 1]
    via: tuple[str, ...] = ()  # intermediate entities of the best path, one per nested step


@dataclass(frozen=True)
class AskOptions:
    """Options of a logical query.

    Attributes:
        k: The number of answers.
        beam: The number of entities that a step from many entities starts from.
        t_norm: "product", or "min" (Goedel).
        facts: The splits whose triples are certain: "all", "train" or "none". None: all, or none
            for an export, which has no data.

    Raises:
        ConfigError: A value is invalid.
    """

    k: int = FEW
    beam: int = 64
    t_norm: TNorm = "product"
    facts: str | None = None

    def __post_init__(self) -> None:
        at_least("k", self.k, 1)
        at_least("beam", self.beam, 1)
        one_of("t_norm", self.t_norm, T_NORMS)
        if self.facts is not None:
            one_of("facts", self.facts, tuple(FACTS))


def ask(model: TrainedModel, query: Node, options: AskOptions) -> list[Member]:
    """Return the members of the highest degree, best first. Collective.

    Entities of degree 0 are left out.
    """
    with scoring(model.scorer):
        members = _Asker(model, options).members(query)
        degrees, ids = _best(members.degrees, model.shard, min(options.k, model.num_entities))
        ways = [model.entity_labels.labels(way.cpu().numpy()) for way in members.ways(ids)]
    labels = model.entity_labels.labels(ids.cpu().numpy())
    vias = zip(*ways, strict=True) if ways else [()] * len(labels)
    answers = zip(labels, degrees.tolist(), vias, strict=True)
    return [Member(rank, *answer) for rank, answer in enumerate(answers, 1)]


def _at_most_one(expected: Tensor) -> Tensor:
    """Cap expected numbers of answers at about 1, without changing their order."""
    return (1 - TIE) * expected.clamp_max(1) + TIE * expected / (1 + expected)


class _Members(NamedTuple):
    """The degrees of this rank's rows, and the best path to each entity.

    ``ways`` maps entity ids (M,) to the intermediate entities of their best paths: one tensor (M,)
    per nested step. Collective.
    """

    degrees: Tensor  # (n,) float64, which keeps the degrees of different scores different
    ways: Callable[[Tensor], list[Tensor]]


def _no_ways(ids: Tensor) -> list[Tensor]:
    return []


def _best(degrees: Tensor, shard: EntityShard, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest of all degrees above 0 and their ids, at most (k,) each. Collective.

    ``degrees`` (n,) are those of this rank's rows. Equal degrees come in order of id.
    """
    here = min(k, len(degrees))
    least = degrees.topk(here).values[-1:].clamp_min(0) if here else degrees
    rows = (degrees >= least).nonzero()[:, 0] if here else degrees.long()
    values, order = degrees[rows].sort(descending=True, stable=True)
    values, ids = values[:k], rows[order][:k] + shard.first_row
    if shard.ranks > 1:  # ids ascend with the ranks, so a stable sort keeps ties in order of id
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
    """Computes the members of a query and of its parts."""

    def __init__(self, model: TrainedModel, options: AskOptions):
        self._model, self._options = model, options
        self._shard = model.shard
        store = model.store
        splits = FACTS[options.facts or ("none" if store is None else "all")]
        self._facts = model.known("certain triples").filter_index(splits) if splits else None
        self._counts = None if store is None else store.filter_index(("train",))

    def members(self, query: Node) -> _Members:
        """Return the members of a query. Collective."""
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
        """The t-norm."""
        return x * y if self._options.t_norm == "product" else torch.minimum(x, y)

    def _either(self, x: Tensor, y: Tensor) -> Tensor:
        """The conorm of the t-norm."""
        return x + y - x * y if self._options.t_norm == "product" else torch.maximum(x, y)

    def _one(self, entity: int) -> Tensor:
        degrees = self._nobody()
        start, stop = self._shard.row_range
        if start <= entity < stop:
            degrees[entity - start] = 1
        return degrees

    def _nobody(self) -> Tensor:
        size, device = len(self._shard.rows), self._shard.device
        return torch.zeros(size, dtype=torch.float64, device=device)

    def _step(self, step: Step) -> _Members:
        device = self._shard.device
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
        """Take a step from B entities with degrees ``weights`` and keep the best path to each row.

        Returns:
            Degrees (n,), and the index in ``ids`` (n,) int32 that each degree comes from.
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
        """Yield (first id, probabilities (B, n)) of the answers to B queries, block by block."""
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
        """Return a function that turns blocks of scores (B, n) into probabilities."""
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
        """Return the log-sum-exp (B,) float32 of the scores of all entities. Collective."""
        total = torch.full((len(rows),), -torch.inf, device=rows.device)
        for _, scores in local_scores(self._model.scorer, self._shard, rows, relations, side):
            total = torch.logaddexp(total, scores.nan_to_num(nan=-torch.inf).logsumexp(1))
        if self._shard.ranks > 1:
            parts = [torch.empty_like(total) for _ in range(self._shard.ranks)]
            dist.all_gather(parts, total)
            total = torch.stack(parts).logsumexp(0)
        return total

    def _at(self, values: Tensor, ids: Tensor) -> Tensor:
        """Look up the integers (n,) of all ranks' rows by ids (M,): (M,) int64. Collective."""
        here = self._shard.holds(ids)
        result = torch.zeros_like(ids)
        result[here] = values[ids[here] - self._shard.first_row].long()
        if self._shard.ranks > 1:
            dist.all_reduce(result)
        return result

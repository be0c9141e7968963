"""Fold-in: rows of entities that the run does not have, solved from triples given with a query.

The table, the relations and all other parameters stay as they are. The row of a new entity starts
at the mean of the rows that fit its facts best. It then takes a few steps of Adam down the run's
own loss of these facts: the same loss, penalties, sides and kind of queries as in training, without
dropout. Negatives are drawn with a fixed seed. Each entity is solved by itself, so its bits do not
depend on the other entities, on the order of the facts or on the batch.

Shapes: M facts of an entity, Q queries, K candidates, D elements per row, N entities of the run,
U new entities, T types.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from kge_torchrec.config import Config, DataConfig
from kge_torchrec.config.parser import config_from_dict
from kge_torchrec.config.registry import check_imports
from kge_torchrec.data import COLUMNS, OTHER, RELATION, SIDES, Side, answer_column
from kge_torchrec.data.readers.files import WHOLE
from kge_torchrec.data.readers.tables import InMemory
from kge_torchrec.data.reading import open_sources
from kge_torchrec.data.store import Vocabulary
from kge_torchrec.data.store.filter_index import FilterIndex
from kge_torchrec.data.types import Ends
from kge_torchrec.distributed.processes import on_first_rank
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.errors import DataError, KGEError
from kge_torchrec.models.losses import build_loss
from kge_torchrec.models.model import Objective, relation_prediction
from kge_torchrec.models.regularizers import build_regularizers
from kge_torchrec.models.scorers.base import Scorer
from kge_torchrec.ranking.blocks import scoring
from kge_torchrec.trained_model import TrainedModel

CANDIDATES = 1024  # entities that a query is compared with, at most
NEAREST = 16  # rows whose mean is the start
STEPS = 10
RATE = 0.1  # the first step, in root mean squares of the rows; falls linearly to 0
SEED = 0xF01D
DECAYS = 0.9, 0.99  # of Adam's averages
Loss = Callable[[Tensor], Tensor]  # a row (D,) -> the loss of some facts


class Facts(NamedTuple):
    """The facts of one new entity, each once and in a fixed order."""

    label: str
    triples: np.ndarray  # (M, 3) int64; the new entity is -1

    def on(self, side: Side) -> np.ndarray:
        """Return the facts that have the new entity on a side."""
        return self.triples[self.triples[:, answer_column(side)] < 0]


def read_facts(model: TrainedModel, source: InMemory | str | Path) -> list[Facts]:
    """Return the facts of each new entity, in order of the labels; see ``Answering.fold_in``."""
    sources: Any = [source] if isinstance(source, str | Path) else {WHOLE: source}
    batches = open_sources(sources, DataConfig(), progress=False).batches()
    columns: list[list[str]] = [[], [], []]
    for _, batch in batches:
        for column, part in zip(columns, COLUMNS, strict=True):
            column += batch[part].to_pylist()
    if not columns[0]:
        raise DataError("facts: there is no triple")
    ends = model.entity_labels.search(columns[0] + columns[2]).reshape(2, -1)
    ids = np.stack([ends[0], model.relation_labels.search(columns[1]), ends[1]], 1)
    of_label: dict[str, list[list[int]]] = defaultdict(list)
    for triple, own in zip(zip(*columns, strict=True), ids.tolist(), strict=True):
        head, relation, tail = triple
        named = f"facts: {head!r} {relation!r} {tail!r}: "
        if own[1] < 0:
            raise DataError(f"{named}{model.relation_labels.unknown(relation)}")
        if own[0] < 0 and own[2] < 0:
            raise DataError(
                f"{named}the run has neither {head!r} nor {tail!r}, and a fact needs one known "
                "entity; mend the label, or leave the fact out"
            )
        if own[0] >= 0 and own[2] >= 0:
            raise DataError(
                f"{named}the run has both entities; leave the fact out, or add it by `extend`"
            )
        of_label[head if own[0] < 0 else tail].append(own)
    return [Facts(label, np.unique(own, axis=0)) for label, own in sorted(of_label.items())]


def fold_in(model: TrainedModel, source: InMemory | str | Path) -> TrainedModel:
    """Return a model that also answers queries about the new entities of facts. Collective.

    Their ids follow those of the model's entities. They are no answers themselves, and their facts
    are known answers. See ``Answering.fold_in``.
    """
    facts = on_first_rank(model.processes, lambda: read_facts(model, source))
    count = model.num_entities
    config, ends = _config_of(model), model.ends
    entities = _WithLabels(model.entity_labels, [own.label for own in facts])
    if ends is not None:
        types = np.stack([_possible_types(ends, own) for own in facts])
        ends = ends.with_entities(types, entities)
    rows = torch.stack([solved(model, config, own) for own in facts])
    triples = np.concatenate([
        np.where(own.triples < 0, count + number, own.triples) for number, own in enumerate(facts)
    ])  # fmt: skip
    folded = copy.copy(model)  # shares the candidates that the model keeps
    folded.shard = _WithRows(**vars(model.shard), new=rows.to(model.shard.device))
    folded.entity_labels, folded.ends = entities, ends
    folded.facts = FilterIndex.of(triples)
    return folded


def training_of(config: Config) -> dict[str, Any]:
    """Return what an export keeps of the config, so that entities can be folded in."""
    negatives = config.negatives
    names = ["regime", "sides", *([] if negatives.is_full else ["count", "head_count"])]
    kept = {name: getattr(negatives, name) for name in names}
    return {"loss": asdict(config.loss), "negatives": kept}


def _config_of(model: TrainedModel) -> Config:
    """Return the config of a run, or what an export keeps of it."""
    if model.config is not None:
        return model.config
    training = model.description.get("training")
    if training is None or model.path is None:
        raise KGEError("facts need a run, or an export that says how it was trained: export again")
    loss = training["loss"]
    named = {"loss.name": loss["name"], "loss.regularizers": loss["regularizers"]}
    check_imports(named, model.path)
    return config_from_dict({"model": model.description["model"], **training})


def _possible_types(ends: Ends, facts: Facts) -> np.ndarray:
    """Return the types (T,) bool of entities that may have all the facts."""
    possible = np.ones(len(ends.names), bool)
    for side in SIDES:
        possible &= ends.kinds(side, facts.on(side)[:, RELATION])[0].all(0)
    if not possible.any():
        raise DataError(
            f"facts: no type of entity has the relations of all facts of {facts.label!r}; mend "
            "them, or give two entities two labels"
        )
    return possible


def solved(model: TrainedModel, config: Config, facts: Facts) -> Tensor:
    """Return the row (D,) of a new entity, on the CPU. Collective."""
    scorer, negatives = model.scorer, config.negatives
    sides = tuple(side for side in SIDES if negatives.sides in ("both", side))
    objective = Objective(
        scorer, build_loss(config.loss), sides, build_regularizers(config.loss),
        config.loss.relation_weight or 0.0,
    )  # fmt: skip
    types = None if model.ends is None else _possible_types(model.ends, facts)
    drawn = torch.from_numpy(_drawn(model, types, CANDIDATES)[0])
    similar = model.shard.fetch(drawn.to(model.shard.device))
    asked = [_Queries.of(model, side, facts.on(OTHER[side]), config) for side in SIDES]
    answered = [_Queries.of(model, side, facts.on(side), config) for side in SIDES]

    def solve() -> Tensor:
        with scoring(scorer):
            trained = [own for own in asked if own and own.side in sides]
            losses = [_loss_of(objective, own, config, True) for own in trained]
            trained = [own for own in answered if own and own.side in sides]
            losses += [_loss_of(objective, own, config, False) for own in trained]
            start = _start(scorer, [own for own in answered if own], similar)
            return _descended(start, losses, float(similar.square().mean().sqrt())).cpu()

    return on_first_rank(model.processes, solve)


class _Queries(NamedTuple):
    """The queries of facts for one side, and their candidates."""

    side: Side  # the side that is asked for
    relation: Tensor  # (M,) int64
    others: Tensor  # (M, D), the rows of the known entities
    candidates: Tensor  # (K, D)
    mask: Tensor  # (M, K) bool: candidates of a possible type that make no fact
    shift: float  # added to the scores of candidates that stand for more entities than they are

    @classmethod
    def of(
        cls, model: TrainedModel, side: Side, triples: np.ndarray, config: Config
    ) -> _Queries | None:
        """Return the queries of triples (M, 3) with an end of -1; None if M is 0. Collective."""
        if not len(triples):
            return None
        ends, negatives, types = model.ends, config.negatives, None
        relations, known = triples[:, RELATION], triples[:, answer_column(OTHER[side])]
        answers = triples[:, answer_column(side)]
        if ends is not None:
            types = np.asarray(ends.kinds(side, relations)[0].any(0))
        limit = CANDIDATES if negatives.is_full else min(CANDIDATES, negatives.drawn(side))
        ids, total = _drawn(model, types, limit)
        distinct, place = np.unique(relations, return_inverse=True)
        mask = np.stack([~np.isin(ids, answers[relations == one]) for one in distinct])
        if ends is not None:
            mask &= np.stack([ends.contain(side, np.full(len(ids), one), ids) for one in distinct])
        device, fetch = model.shard.device, model.shard.fetch
        arrays = relations, np.maximum(known, answers), ids, mask[place]
        relation, others, candidates, are_negatives = (
            torch.from_numpy(array).to(device) for array in arrays
        )
        shift = float(np.log(total / len(ids))) if negatives.is_full else 0.0
        return cls(side, relation, fetch(others), fetch(candidates), are_negatives, shift)


def _drawn(model: TrainedModel, types: np.ndarray | None, limit: int) -> tuple[np.ndarray, int]:
    """Draw at most ``limit`` entities of types (T,) bool; return ids and how many there are."""
    ranges = np.array([[0, model.num_entities]])
    if types is not None and model.ends is not None:
        ranges = model.ends.ranges(types)
    sizes = np.diff(ranges)[:, 0]
    total, bounds = int(sizes.sum()), np.cumsum(sizes)
    if total <= limit:
        places = np.arange(total)
    else:
        places = np.unique(np.random.default_rng(SEED).integers(total, size=limit))
    run = np.searchsorted(bounds, places, side="right")
    return ranges[run, 0] + places - (bounds - sizes)[run], total


def _start(scorer: Scorer, answers: Sequence[_Queries], similar: Tensor) -> Tensor:
    """Return the mean (D,) of the rows (K, D) that fit the facts best."""
    fit = torch.zeros(len(similar), device=similar.device)
    for own in answers:
        query = scorer.encode(own.others[None], own.relation[None], own.side)
        fit += scorer.matrix(query, similar[None], exact=False)[0].float().sum(0)
    best = fit.nan_to_num(nan=-torch.inf).topk(min(NEAREST, len(fit))).indices
    return similar[best].mean(0)


def _loss_of(objective: Objective, facts: _Queries, config: Config, asks: bool) -> Loss:
    """Return the loss of queries that the new entity asks, or that it answers."""
    scorer, relation, query, mask = objective.scorer, facts.relation, None, facts.mask
    if asks and config.negatives.examples == "queries":  # facts of a relation answer one query
        relation, query = relation.unique(return_inverse=True)
        first = (query == torch.arange(len(relation), device=query.device)[:, None]).int().argmax(1)
        mask = mask[first]
    weight = 1.0 if query is None or not config.loss.sums_answers else query.bincount()

    def loss(row: Tensor) -> Tensor:
        rows = row.expand_as(facts.others)
        anchor, answer = (rows, facts.others) if asks else (facts.others, rows)
        encoded = each = scorer.encode(anchor[None, : len(relation)], relation[None], facts.side)
        if query is not None:
            each = tree_map_only(Tensor, lambda part: part.index_select(1, query), encoded)
        positive = scorer.pairs(each, answer[None])[0]
        negative = scorer.matrix(encoded, facts.candidates[None], exact=False)[0] + facts.shift
        total = (objective.loss(positive, query, negative, mask) * weight).sum()
        total = total + objective.regularizers.of_entities(scorer, row) * len(relation)
        triples = anchor[None], facts.relation[None], answer[None], facts.side
        total = total + objective.regularizers.of_triples(scorer, *triples).sum()
        if objective.relation_weight:
            predicted = relation_prediction(scorer, *triples)
            total = total + objective.relation_weight * predicted.sum()
        return total

    return loss


def _descended(start: Tensor, losses: Sequence[Loss], scale: float) -> Tensor:
    """Return the row (D,) after ``STEPS`` of Adam, whose first one is ``RATE`` times ``scale``."""
    row = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([row], betas=DECAYS, eps=torch.finfo(row.dtype).tiny)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * scale * (1 - step / STEPS)
        with torch.enable_grad():
            total = torch.stack([loss(row) for loss in losses]).sum()
            (row.grad,) = torch.autograd.grad(total, row)  # and none of the scorer
        optimizer.step()
    return row.detach()


@dataclass(frozen=True)
class _WithRows(EntityShard):
    """A shard that also fetches the rows (U, D) of new entities, which every rank has."""

    new: Tensor = field(kw_only=True)

    def fetch(self, ids: Tensor) -> Tensor:
        is_new = ids >= self.num_entities
        rows = super().fetch(ids.masked_fill(is_new, 0))
        rows[is_new] = self.new[ids[is_new] - self.num_entities]
        return rows


class _WithLabels(Vocabulary):
    """A vocabulary that also has the labels of new entities, behind its own."""

    def __init__(self, old: Vocabulary, new: Sequence[str]):
        super().__init__(old.array, "entity")
        self.new = pa.array(new, pa.large_string())
        self._id_of = {label: len(old) + number for number, label in enumerate(new)}

    def __getitem__(self, id: int) -> str:
        return self.take([id])[0].as_py()

    def find(self, labels: Sequence[str]) -> np.ndarray:
        ids = [self._id_of.get(label, -1) for label in labels]
        return np.where(np.array(ids) < 0, super().find(labels), ids)

    def take(self, ids: Sequence[int] | np.ndarray) -> pa.Array:
        ids = np.asarray(ids, np.int64)
        is_new = ids >= len(self)
        old = super().take(np.where(is_new, 0, ids))
        return pc.if_else(is_new, self.new.take(pa.array((ids - len(self)).clip(0))), old)

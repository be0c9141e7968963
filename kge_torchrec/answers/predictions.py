"""The best answers to a triple with one part missing: a head, a relation or a tail.

Shapes: B queries, k answers, N entities, R relations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.answers.model import AnsweringModel, Label
from kge_torchrec.config import ConfigError
from kge_torchrec.data.filter_index import FilterIndex
from kge_torchrec.ranking.blocks import score_block, scoring
from kge_torchrec.ranking.topk import top_k

Part = Literal["head", "relation", "tail"]
PARTS: tuple[Part, ...] = ("head", "relation", "tail")
RELATIONS = 256  # relations that a pair of entities is scored with at once


@dataclass(frozen=True)
class Prediction:
    """One answer to a query."""

    rank: int  # from 1
    label: str
    score: float
    known: str | None = None  # the split that holds the completed triple, if any


class Query(NamedTuple):
    """A triple of labels or ids; the part that is asked for is None."""

    head: Label | None
    relation: Label | None
    tail: Label | None

    @property
    def asked(self) -> Part:
        """Raises ConfigError unless exactly one part is missing."""
        missing = [part for part, given in zip(PARTS, self, strict=True) if given is None]
        if len(missing) != 1:
            raise ConfigError(
                "predict takes two of head, relation and tail and finds the third, got "
                f"{3 - len(missing)} of them"
            )
        return missing[0]


def check_count(k: int) -> None:
    """Raises ConfigError unless k answers can be asked for."""
    if k < 1:
        raise ConfigError(f"k must be an integer >= 1, got {k}")


def predict(
    model: AnsweringModel, query: Query, k: int = 10, known: bool = True
) -> list[Prediction]:
    """The k best answers, best first; equal scores come in order of id, NaN counts as -inf.

    known: list answers that the data holds already, marked with their split; False leaves them out.

    Raises ConfigError for a query that makes no sense, UnknownLabelError with close matches, and
    IndexError for an id.
    """
    asked = query.asked
    check_count(k)
    of_part = model.entity_ids, model.relation_ids, model.entity_ids
    ids = [
        torch.tensor(0) if given is None else find(given)
        for find, given in zip(of_part, query, strict=True)
    ]
    (found,) = answer(model, asked, torch.stack(ids)[None], k, known)
    return found


def answer(
    model: AnsweringModel, asked: Part, queries: Tensor, k: int, known: bool = True
) -> list[list[Prediction]]:
    """The k best answers to each of B queries for the same part.

    queries: (B, 3) int64 ids; what stands at the part that is asked for plays no role.
    """
    scores, ids = best(model, asked, queries, k, known)
    labels = model.relations if asked == "relation" else model.entities
    splits = _splits(model, asked, queries.numpy(), ids.numpy())
    answers = []
    for its_scores, its_ids, its_splits in zip(scores, ids, splits, strict=True):
        count = int((its_ids >= 0).sum())
        parts = labels.labels(its_ids[:count].numpy()), its_scores[:count].tolist(), its_splits
        answers.append(
            [Prediction(rank, *one) for rank, one in enumerate(zip(*parts, strict=False), 1)]
        )
    return answers


def best(
    model: AnsweringModel, asked: Part, queries: Tensor, k: int, known: bool = True
) -> tuple[Tensor, Tensor]:
    """Scores (B, k) float32, best first, and ids (B, k) int64, on the host, of ``answer``.

    Where fewer than k answers are left the rest is -inf and id -1.
    """
    heads, relations, tails = queries.T
    if asked == "relation":
        return _best_relations(model, queries, min(k, model.num_relations), known)
    anchors = heads if asked == "tail" else tails
    exclude = None
    if not known:
        index = model.known("leaving out what is known").filter_index()
        exclude = index.answers(asked, anchors.numpy(), relations.numpy())
    k = min(k, model.num_entities)
    scores, ids = top_k(model.scorer, model.shard, anchors, relations, asked, k, exclude)
    return scores.cpu(), ids.cpu()


def _best_relations(
    model: AnsweringModel, queries: Tensor, k: int, known: bool
) -> tuple[Tensor, Tensor]:
    """``best`` of (h, ?, t).  All relations are scored, as the tail's query."""
    scores = torch.cat([_relation_scores(model, *query) for query in queries[:, ::2].tolist()])
    if not known:
        index = model.known("leaving out what is known").filter_index()
        every = np.arange(model.num_relations)
        for row, query in zip(scores, queries.numpy(), strict=True):
            row[torch.from_numpy(_holds(index, query[0], every, query[2]))] = torch.nan
    left_out = scores.isnan()
    order = scores.nan_to_num(nan=-torch.inf).sort(dim=1, descending=True, stable=True)
    scores, ids = (x[:, :k] for x in order)
    return scores, ids.masked_fill(left_out.gather(1, ids), -1)


def _relation_scores(model: AnsweringModel, head: int, tail: int) -> Tensor:
    """(1, R) float32: of every relation between two entities, with the bits of ``model.scores``."""
    device = model.shard.rows.device
    rows = model.shard.fetch(torch.tensor([head, tail], device=device))
    with scoring(model.scorer):
        parts = [
            score_block(model.scorer, rows[:1].expand(len(some), -1), some, rows[1:], "tail")[:, 0]
            for some in torch.arange(model.num_relations, device=device).split(RELATIONS)
        ]
    # Whoever is asked last comes last: NaN is for those that are left out.
    return (
        torch.cat(parts).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)[None].cpu()
    )


def _splits(
    model: AnsweringModel, asked: Part, queries: np.ndarray, ids: np.ndarray
) -> list[list[str | None]]:
    """The split that holds each of the answers ids (B, k), the first of several; None of -1."""
    splits: list[list[str | None]] = [[None] * ids.shape[1] for _ in ids]
    if model.store is None:
        return splits
    for split in ("test", "valid", "train"):
        known = _contains(model.store.filter_index((split,)), asked, queries, ids)
        for query, place in zip(*np.nonzero(known & (ids >= 0)), strict=True):
            splits[query][place] = split
    return splits


def _contains(index: FilterIndex, asked: Part, queries: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """(B, k) bool: whether the index holds each query with each of its answers ids (B, k)."""
    heads, relations, tails = queries.T
    if asked == "relation":
        pairs = zip(heads, np.maximum(ids, 0), tails, strict=True)
        return np.stack([_holds(index, *three) for three in pairs])
    return index.contains(asked, heads if asked == "tail" else tails, relations, ids)


def _holds(index: FilterIndex, head: int, relations: np.ndarray, tail: int) -> np.ndarray:
    """(M,) bool: whether each of the relations (M,) holds between two entities."""
    heads = np.full(len(relations), head)
    return index.contains("tail", heads, relations, np.array([tail]))[:, 0]

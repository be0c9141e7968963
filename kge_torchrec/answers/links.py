"""The best triples of a relation that the data does not hold: top-k over all entity pairs.

Heads come in batches and tails in blocks of the shard, so memory holds one block of scores and
the results. All N x N pairs are scored, so the time grows with N squared unless the candidates
are restricted. If every entity has one type, pairs are of the types that the relation has.

Shapes: B heads per batch, n tails per block, k triples, M triples found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.answers.predictions import FEW
from kge_torchrec.config.checks import at_least, one_of
from kge_torchrec.data.sort import chunks
from kge_torchrec.data.store.filter_index import Answers, anchors_of, relations_of
from kge_torchrec.ranking.blocks import scoring
from kge_torchrec.ranking.search import Queries, allowed_scores
from kge_torchrec.trained_model import Label, TrainedModel

HEADS = 512  # heads per batch
CANDIDATES = ("all", "seen")


@dataclass(frozen=True)
class Link:
    """A triple that the data does not hold."""

    rank: int  # from 1
    head: str
    relation: str
    tail: str
    score: float
    probability: float | None = None  # None without a calibration


class Triples(NamedTuple):
    """M scored pairs of one relation, best first; equal scores come in order of head, then tail."""

    heads: np.ndarray  # (M,) int64
    tails: np.ndarray  # (M,) int64
    scores: np.ndarray  # (M,) float32

    @classmethod
    def best(cls, parts: list[Triples], k: int) -> Triples:
        """Merge several parts and keep the k best."""
        heads, tails, scores = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.lexsort((tails, heads, -scores))[:k]
        return cls(heads[order], tails[order], scores[order])


NOTHING = Triples(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))


def new_links(
    model: TrainedModel,
    relation: Label,
    k: int = FEW,
    candidates: str = "all",
    loops: bool = False,
) -> list[Link]:
    """Return the best triples of a relation that no split holds; see ``Run.new_links``. Collective.

    Tail queries give the scores. Scores of NaN and minus infinity are left out.
    """
    at_least("k", k, 1)
    one_of("candidates", candidates, CANDIDATES)
    known = model.known("new links").filter_index()
    number = int(model.relation_ids(relation))
    heads, best = torch.arange(model.num_entities), _Best(k)
    only = model.candidates(candidates) if candidates == "seen" else model.ends
    if candidates == "seen":
        heads = _seen_heads(model, number)
    elif only is not None:
        heads = torch.from_numpy(np.flatnonzero(only.mask("head", number, 0, len(heads))))
    with scoring(model.scorer), model.bar(len(heads), "pairs of all heads", "head") as bar:
        for batch in heads.split(HEADS):
            queries = Queries(batch, torch.full_like(batch, number), "tail", only)
            exclude = known.answers("tail", batch.numpy(), queries.relations.numpy())
            if not loops:
                exclude = Answers.merged([exclude, Answers.single(batch.numpy())])
            blocks = allowed_scores(model.scorer, model.shard, queries, exclude, nan_is_best=False)
            for first, scores in blocks:
                best.offer(batch, first, scores)
            bar.update(len(batch))
    links = Triples.best([Triples(*part) for part in model.processes.gather(best.triples)], k)
    (label,) = model.relation_labels.labels([number])
    columns = (
        model.entity_labels.labels(links.heads),
        [label] * len(links.heads),
        model.entity_labels.labels(links.tails),
        links.scores.tolist(),
        model.probabilities(links.scores, "tail"),
    )
    return [Link(rank, *link) for rank, link in enumerate(zip(*columns, strict=True), 1)]


def _seen_heads(model: TrainedModel, relation: int) -> Tensor:
    """Return the heads of a relation in train: (M,) int64, ascending."""
    queries = model.known("new links").side_index("train", "tail").queries
    parts = [anchors_of(part[relations_of(part) == relation]) for part in chunks(queries)]
    return torch.from_numpy(np.concatenate(parts))


class _Best:
    """Collects the k best triples."""

    def __init__(self, k: int):
        self._k, self._parts = k, [NOTHING]

    @property
    def triples(self) -> Triples:
        """The triples so far, best first."""
        self._parts = [Triples.best(self._parts, self._k)]
        return self._parts[0]

    def offer(self, heads: Tensor, first: int, scores: Tensor) -> None:
        """Add pairs that can be among the best from the scores (B, n) of heads (B,) and tails."""
        row, column = (scores >= self._least(scores)).nonzero(as_tuple=True)
        if len(row):
            tails, values = first + column.cpu().numpy(), scores[row, column].cpu().numpy()
            self._parts.append(Triples(heads.numpy()[row.cpu().numpy()], tails, values))

    def _least(self, scores: Tensor) -> float:
        """Return the lowest score that can still be among the k best; it is finite."""
        so_far, lowest = self.triples.scores, torch.finfo(torch.float32).min
        if len(so_far) == self._k:
            return float(so_far[-1])
        if scores.numel() <= self._k:
            return lowest
        values = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        return max(lowest, float(values.view(-1).topk(self._k).values[-1]))

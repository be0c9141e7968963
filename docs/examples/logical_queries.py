"""Answer logical queries of several steps with CQD-Beam, from an exported model.

    python logical_queries.py EXPORT query.json [--top K] [--beam B] [--predict-all]

A query is the label of an entity or one of these forms, where Q is any query:

    {"relation": "borders", "from": Q}      tails of (Q, borders, ?)
    {"relation": "in_continent", "to": Q}   heads of (?, in_continent, Q)
    {"and": [Q, Q, {"not": Q}]}             members of all, but not of Q under "not"
    {"or": [Q, Q]}                          members of any

Each entity is a member of a query to a degree in [0, 1]. A step from one entity gives the
probabilities of its answers. A step from many entities starts from the ``beam`` best of them and
keeps the best path to each answer. "and" is the product, "not" is 1 - x, "or" follows from both.

Source: Arakelyan et al. 2021, Complex Query Answering with Neural Link Predictors.

Shapes: N entities, B entities of a beam, D elements per row.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import kge_torchrec


class LogicalQueries:
    """Answers logical queries.

    Args:
        model: The model, as ``kge_torchrec.load_model`` returns it.
        beam: The number of entities that a step from many entities starts from.
        certain: Whether the triples of train are certain.
    """

    def __init__(self, model: Any, beam: int = 64, certain: bool = True):
        self.model, self.beam = model, beam
        self.rows = model.rows(torch.arange(model.num_entities))  # (N, D)
        self.known = model.store.filter_index(("train",) if certain else ())

    def answer(self, query: Any, k: int = 10) -> list[tuple[str, float]]:
        """Return the k entities of the highest degree, and their degrees, best first."""
        degrees, ids = self._best(self.degrees(query), k)
        labels = self.model.entity_labels.labels(ids.numpy())
        return list(zip(labels, degrees.tolist(), strict=True))

    def degrees(self, query: Any) -> Tensor:
        """Return the degree of each entity: (N,) float64."""
        match query:
            case str():
                degrees = torch.zeros(len(self.rows), dtype=torch.float64)
                degrees[self.model.entity_ids(query)] = 1
                return degrees
            case {"relation": relation, "from": start, **rest} if not rest:
                return self._step(start, relation, "tail")
            case {"relation": relation, "to": start, **rest} if not rest:
                return self._step(start, relation, "head")
            case {"and": [*parts], **rest} if parts and not rest:
                return torch.stack([self.degrees(part) for part in parts]).prod(0)
            case {"or": [*parts], **rest} if parts and not rest:
                return 1 - torch.stack([1 - self.degrees(part) for part in parts]).prod(0)
            case {"not": part, **rest} if not rest:
                return 1 - self.degrees(part)
        raise ValueError(f"expected a label, or an object with the keys of a query, got {query!r}")

    def _step(self, start: Any, relation: str, side: str) -> Tensor:
        """Return the degrees (N,) of the entities that a relation links to the members of a query.

        ``side`` is the side of the answers.
        """
        number = int(self.model.relation_ids(relation))
        degrees, ids = self._best(self.degrees(start), self.beam)
        result = torch.zeros(len(self.rows), dtype=torch.float64)
        for degree, anchor in zip(degrees, ids.tolist(), strict=True):
            result = result.maximum(degree * self.probabilities(anchor, number, side))
        return result

    def probabilities(self, anchor: int, relation: int, side: str) -> Tensor:
        """Return the probability of each entity to be an answer of one step: (N,) float64.

        It is the calibrated probability. Without a calibration it is the softmax of the scores
        times the number of certain answers, at most 1 (Bai et al. 2023, QTO).
        """
        query = np.array([anchor]), np.array([relation])
        certain = torch.from_numpy(self.known.answers(side, *query).all()[1])
        anchors, relations = self.rows[anchor][None], torch.tensor([relation])
        with torch.no_grad():
            query = self.model.scorer.encode(anchors[None], relations[None], side)
            scores = self.model.scorer.matrix(query, self.rows[None])[0, 0]
        if self.model.calibration is None:
            chances = (scores.double().softmax(0) * max(1, len(certain))).clamp_max(1)
        else:
            own = relations.expand(len(scores)).numpy()
            found = self.model.calibration.probabilities(scores.numpy(), side, own)
            chances = torch.tensor(found)
        chances[certain] = 1
        return chances

    def _best(self, degrees: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k largest degrees above 0 (B,) and their ids (B,)."""
        values, ids = degrees.topk(min(k, len(degrees)))
        return values[values > 0], ids[values > 0]


def main() -> None:
    parser = argparse.ArgumentParser(description="Answer a logical query from an exported model.")
    parser.add_argument("export", help="folder of the export")
    parser.add_argument("query", type=Path, help="JSON file of the query")
    parser.add_argument("--top", type=int, default=10, help="number of answers (default: 10)")
    parser.add_argument("--beam", type=int, default=64, help="entities per step (default: 64)")
    parser.add_argument("--predict-all", action="store_true", help="trust no triple of train")
    options = parser.parse_args()
    model = kge_torchrec.load_model(options.export)
    queries = LogicalQueries(model, options.beam, not options.predict_all)
    for label, degree in queries.answer(json.loads(options.query.read_text("utf-8")), options.top):
        print(f"{degree:.4f}  {label}")


if __name__ == "__main__":
    main()

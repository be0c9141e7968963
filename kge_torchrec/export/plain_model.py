"""An exported model in one process: no TorchRec, no process group, the table on the disk.

Shapes: N entities, D numbers per entity, M triples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from kge_torchrec.config import ConfigError
from kge_torchrec.data.store import Vocabulary
from kge_torchrec.errors import ExportError
from kge_torchrec.export.description import (
    ENTITIES,
    PARAMETERS,
    RELATIONS,
    model_config,
    read_description,
)
from kge_torchrec.export.formats import FORMATS, open_table
from kge_torchrec.export.text import read_labels
from kge_torchrec.models.scorers import SIDES, Scorer, Side, build_scorer

Ids = str | int | Sequence[str] | Sequence[int] | np.ndarray | Tensor  # labels, or ids


@dataclass(frozen=True)
class Prediction:
    """One answer to a query."""

    rank: int  # from 1
    label: str
    score: float
    known: str | None = None  # the split that holds the completed triple, if any


def load_model(path: str | Path) -> PlainModel:
    """The model of a folder that `kge-torchrec export` wrote.

    The entity table stays on the disk and is read where it is looked at; word2vec text is read
    into memory.  Raises ExportError when there is no export, it is damaged or of another version,
    or a parameter is missing, unexpected or of another shape.
    """
    path = Path(path)
    description = read_description(path)
    table_format, size = description["entities"]["format"], description["num_entities"]
    file = path / FORMATS[table_format].file
    table = open_table(file, table_format, size, model_config(path, description).dim)
    return PlainModel(path, description, table, load_scorer(path, description))


class PlainModel:
    """A trained model that scores triples and answers queries in this process alone.

    Attributes:
        path: folder of the export.
        description: what its model.json holds.
        entities: (N, D) float32, read-only; memory-mapped unless the export is word2vec text.
        scorer: the package's Scorer, with its parameters.
    """

    def __init__(
        self, path: Path, description: dict[str, Any], entities: np.ndarray, scorer: Scorer
    ):
        self.path, self.description = path, description
        self.entities, self.scorer = entities, scorer

    @cached_property
    def entity_labels(self) -> Vocabulary:
        """Labels and ids of the entities, read at first use."""
        return read_labels(self.path / ENTITIES, "entity", len(self.entities))

    @cached_property
    def relation_labels(self) -> Vocabulary:
        """Labels and ids of the relations, read at first use."""
        return read_labels(self.path / RELATIONS, "relation", self.scorer.num_relations)

    def embedding(self, freeze: bool = True) -> nn.Embedding:
        """The entities as a layer of its own, the whole table copied into memory."""
        return nn.Embedding.from_pretrained(torch.from_numpy(np.array(self.entities)), freeze)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of entity ids: (...) int64 -> (..., D) float32, copied."""
        return torch.from_numpy(np.take(self.entities, ids.numpy(), axis=0))

    @torch.no_grad()
    def score(self, heads: Ids, relations: Ids, tails: Ids, side: Side = "tail") -> Tensor:
        """Scores of triples, given as labels or ids: M each, or one for all: (M,), or () of one.

        side: the end that is asked for; with reciprocal relations the two ends score differently.
        Raises UnknownLabelError for a label, IndexError for an id that the model does not have.
        """
        if side not in SIDES:
            raise ValueError(f"side must be one of {', '.join(SIDES)}, got {side!r}")
        triples = self._entity_ids(heads), self._relation_ids(relations), self._entity_ids(tails)
        head, relation, tail = torch.broadcast_tensors(*triples)
        anchor, target = (head, tail) if side == "tail" else (tail, head)
        return self.scorer.score_triples(self.rows(anchor), relation, self.rows(target), side)

    def predict(
        self,
        head: str | int | None = None,
        relation: str | int | None = None,
        tail: str | int | None = None,
        k: int = 10,
    ) -> list[Prediction]:
        """The k best tails of (head, relation, ?), or heads of (?, relation, tail), best first.

        All entities are candidates, scored block by block: the data, and with it what is known
        already, is no part of an export.  Raises as ``score`` does, and ConfigError for a query
        that makes no sense.
        """
        side: Side = "tail" if tail is None else "head"
        given = head if tail is None else tail
        if relation is None or given is None or (head is not None and tail is not None):
            raise ConfigError("predict takes a relation and either a head or a tail")
        if k < 1:
            raise ConfigError(f"k must be an integer >= 1, got {k}")
        anchor, relations = self._entity_ids(given)[None], self._relation_ids(relation)[None]
        scores, ids = self._best(self.rows(anchor), relations, side, k)
        labels = self.entity_labels.labels(ids.numpy())
        return [
            Prediction(rank, label, score)
            for rank, (label, score) in enumerate(zip(labels, scores.tolist(), strict=True), 1)
        ]

    def _best(self, anchor: Tensor, relation: Tensor, side: Side, k: int) -> tuple[Tensor, Tensor]:
        """The k best scores (k,) and ids (k,) of one query, (1, D) and (1,); NaN counts as -inf."""
        from kge_torchrec.ranking.blocks import block_height, score_block, scoring

        best, ids = torch.empty(0), torch.empty(0, dtype=torch.int64)
        height = block_height(1, anchor.device)
        with scoring(self.scorer):
            for first in range(0, len(self.entities), height):
                rows = torch.from_numpy(np.array(self.entities[first : first + height]))
                scores = score_block(self.scorer, anchor, relation, rows, side)[0]
                scores = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
                new = torch.arange(first, first + len(scores))
                # Stable: equal scores stay in order of id.
                best, order = torch.cat([best, scores]).sort(descending=True, stable=True)
                best, ids = best[:k], torch.cat([ids, new])[order[:k]]
        return best, ids

    def _entity_ids(self, given: Ids) -> Tensor:
        return _ids(given, "entity", len(self.entities), lambda: self.entity_labels)

    def _relation_ids(self, given: Ids) -> Tensor:
        return _ids(given, "relation", self.scorer.num_relations, lambda: self.relation_labels)

    def __repr__(self) -> str:
        size = f"{len(self.entities):,} entities x {self.scorer.dim}"
        relations = f"{self.scorer.num_relations:,} relations"
        return f"PlainModel({str(self.path)!r}: {self.description['scorer']}, {size}, {relations})"


def load_scorer(path: Path, description: dict[str, Any]) -> Scorer:
    """The scorer of an export with its parameters, ready to score.

    Raises ExportError, naming every parameter that is missing, unexpected or of another shape.
    """
    file = path / PARAMETERS
    try:
        parameters = safetensors.torch.load_file(file)
    except SafetensorError as error:
        raise ExportError(f"{file} is no readable safetensors file: {error}") from error
    model = model_config(path, description)
    scorer = build_scorer(model, description["num_relations"])
    try:
        scorer.load_state_dict(parameters, strict=True)
    except RuntimeError as error:
        problems = " ".join(line.strip() for line in str(error).splitlines()[1:])
        raise ExportError(f"{file} does not fit the scorer {model.scorer}: {problems}") from error
    return scorer.eval()


def _ids(given: Ids, kind: str, count: int, vocabulary: Callable[[], Vocabulary]) -> Tensor:
    """int64 ids () or (M,) of labels or ids."""
    array = np.asarray(given)
    if array.dtype.kind in "UTO":  # text, or objects such as a data frame's labels
        found = vocabulary().ids(array.reshape(-1).tolist())
        return torch.from_numpy(found.reshape(array.shape))
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{kind} ids must be integers or labels, not {array.dtype}")
    if array.size and not (array.min() >= 0 and array.max() < count):
        raise IndexError(f"{kind} ids must lie in [0, {count})")
    return torch.from_numpy(np.array(array, np.int64))

"""An exported model in one process: no TorchRec, no process group, and the table stays on disk.

Shapes: N entities, D elements per entity row, M triples.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from kge_torchrec.answers.answering import Answering, Triple
from kge_torchrec.answers.calibration import Calibration
from kge_torchrec.answers.model import AnsweringModel, Labels, check_side
from kge_torchrec.data.store import Vocabulary
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.errors import ExportError
from kge_torchrec.export.description import (
    ENTITIES,
    PARAMETERS,
    RELATIONS,
    model_config,
    read_description,
)
from kge_torchrec.export.table_files import FORMATS, open_table, read_labels
from kge_torchrec.models.scorers import Scorer, Side, build_scorer


def load_model(path: str | Path) -> PlainModel:
    """Load the model of a folder that `kge-torchrec export` wrote.

    The entity table stays on disk and is read on access, except that word2vec text is read into
    memory.

    Args:
        path: Folder of the export.

    Returns:
        The model.

    Raises:
        ExportError: There is no export, it is damaged or has another version, or a parameter is
            missing, unexpected or of another shape.
    """
    path = Path(path)
    description = read_description(path)
    table_format, size = description["entities"]["format"], description["num_entities"]
    file = path / FORMATS[table_format].name
    table = open_table(file, table_format, size, model_config(path, description).dim)
    return PlainModel(path, description, table, load_scorer(path, description))


class PlainModel(Answering):
    """A trained model that scores triples and answers queries in this process only.

    Attributes:
        path: Folder of the export.
        description: Contents of its model.json.
        entities: (N, D) float32, read-only; memory-mapped unless the export is word2vec text.
        scorer: The Scorer with its parameters.
    """

    def __init__(
        self, path: Path, description: dict[str, Any], entities: np.ndarray, scorer: Scorer
    ):
        self.path, self.description = path, description
        self.entities, self.scorer = entities, scorer

    @cached_property
    def entity_labels(self) -> Vocabulary:
        """Entity labels and ids, read on first use."""
        return read_labels(self.path / ENTITIES, "entity", len(self.entities))

    @cached_property
    def relation_labels(self) -> Vocabulary:
        """Relation labels and ids, read on first use."""
        return read_labels(self.path / RELATIONS, "relation", self.scorer.num_relations)

    def embedding(self, freeze: bool = True) -> nn.Embedding:
        """Return the entities as an embedding layer; copies the whole table into memory."""
        return nn.Embedding.from_pretrained(torch.from_numpy(np.array(self.entities)), freeze)

    def rows(self, ids: Tensor) -> Tensor:
        """Copy the rows of entity ids: (...) int64 -> (..., D) float32."""
        return torch.from_numpy(np.take(self.entities, ids.numpy(), axis=0))

    @overload  # type: ignore[override]
    def score(self, heads: Sequence[Triple], *, side: Side = "tail") -> list[float]: ...

    @overload
    def score(
        self, heads: Labels, relations: Labels, tails: Labels, side: Side = "tail"
    ) -> Tensor: ...

    def score(
        self,
        heads: Labels | Sequence[Triple],
        relations: Labels | None = None,
        tails: Labels | None = None,
        side: Side = "tail",
    ) -> Tensor | list[float]:
        """Score triples, as ``score(triples)`` or as ``score(heads, relations, tails)``.

        ``score(triples)`` works as it does on a run and returns a list of floats.

        Args:
            heads: Triples; or M labels or ids, or one for all triples.
            relations: M labels or ids, or one for all triples.
            tails: M labels or ids, or one for all triples.
            side: The end that the query asks for. With reciprocal relations the two ends score
                differently.

        Returns:
            A list of floats for triples. For columns a tensor (M,), or () if all are single; its
            last bits may differ from the scores of ``predict``.

        Raises:
            UnknownLabelError: The model does not have a label.
            IndexError: The model does not have an id.
        """
        if relations is None or tails is None:
            return super().score(heads, side)  # type: ignore[arg-type]
        check_side(side)
        model = self.answering_model()
        triples = model.entity_ids(heads), model.relation_ids(relations), model.entity_ids(tails)  # type: ignore[arg-type]
        head, relation, tail = torch.broadcast_tensors(*triples)
        anchor, target = (head, tail) if side == "tail" else (tail, head)
        with torch.no_grad():
            return self.scorer.score_triples(self.rows(anchor), relation, self.rows(target), side)

    def answering_model(self) -> AnsweringModel:
        """Return the model that answers queries, with the table in place and without data."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns that the array is read-only
            rows = torch.from_numpy(self.entities)
        shard = EntityShard(rows, 0, len(rows), alone=True)
        return AnsweringModel(
            self.scorer,
            shard,
            lambda: self.entity_labels,
            lambda: self.relation_labels,
            calibration=self._calibration,
        )

    @cached_property
    def _calibration(self) -> Calibration | None:
        return Calibration.read(self.path)

    def __repr__(self) -> str:
        size = f"{len(self.entities):,} entities x {self.scorer.dim}"
        relations = f"{self.scorer.num_relations:,} relations"
        return f"PlainModel({str(self.path)!r}: {self.description['scorer']}, {size}, {relations})"


def load_scorer(path: Path, description: dict[str, Any]) -> Scorer:
    """Load the scorer of an export with its parameters, in evaluation mode.

    Raises:
        ExportError: A parameter is missing, unexpected or of another shape; the message lists all.
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

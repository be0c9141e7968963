"""What the layouts of other programs are made from: a whole model, and what a layout can hold.

Those programs hold a model in memory, and so does rank 0 while it writes their files.

Shapes: N entities, D numbers an entity, R relation rows (inverses included), W numbers a relation.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kge_torchrec.config import ModelConfig
from kge_torchrec.data.store import Vocabulary
from kge_torchrec.errors import ExportError
from kge_torchrec.export.description import ExportFolder
from kge_torchrec.models.scorers import Scorer


@dataclass(frozen=True)
class WholeModel:
    """A trained model in this process.

    scorer: with its parameters, ready to score.
    rows: (N, D) float32, as training has them.
    data: a short name of the graph, of letters, digits, dots, dashes and underscores.
    epoch: the number of epochs that it was trained for.
    """

    config: ModelConfig
    scorer: Scorer
    rows: Tensor
    entity_labels: Vocabulary
    relation_labels: Vocabulary
    data: str
    epoch: int = 0

    @cached_property
    @torch.no_grad()
    def entities(self) -> Tensor:
        """(N, D) float32 as the formula takes them, normalised."""
        return self.scorer.entity(self.rows)

    @cached_property
    @torch.no_grad()
    def relations(self) -> Tensor:
        """(R, W) float32 as the formula takes them, normalised."""
        return self.scorer.relation(torch.arange(self.scorer.relation_rows), drop=False)


@dataclass(frozen=True)
class ForeignFormat:
    """Files that another program reads.

    program: its name.
    scorers: ours that it has with the same formula; None if it takes every one.
    holds_inverses: whether it asks head queries by relations of their own.
    holds_biases: whether it takes model.biases.
    write: puts the files into the folder; returns how to load them, as Markdown.
    """

    program: str
    scorers: tuple[str, ...] | None
    holds_inverses: bool
    holds_biases: bool
    write: Callable[[ExportFolder, WholeModel], str]

    def check(self, model: ModelConfig) -> None:
        """Raises ExportError unless the layout can hold such a model."""
        if self.scorers is not None and model.scorer not in self.scorers:
            raise ExportError(
                f"{self.program} has no model with the formula of {model.scorer}, only those of "
                f"{', '.join(self.scorers)}; npy, safetensors, word2vec, parquet and torch hold "
                "every scorer"
            )
        if model.biases and not self.holds_biases:
            raise ExportError(
                f"{self.program} has no place for the biases of model.biases true; npy, "
                "safetensors, word2vec, parquet and torch hold them"
            )
        if model.reciprocal and not self.holds_inverses:
            raise ExportError(
                f"{self.program} has no inverse relations, by which this model (model.reciprocal "
                "true) answers head queries; pykeen and libkge have them"
            )


def halves(rows: Tensor) -> Tensor:
    """Complex numbers as all real parts, then all imaginary ones: (..., D) -> (..., D)"""
    return rows.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def labels_of(vocabulary: Vocabulary) -> list[str]:
    """All labels in order of id."""
    return vocabulary.array.to_pylist()


def single_lines(vocabulary: Vocabulary, program: str) -> list[str]:
    """All labels in order of id, each line break a space: LibKGE and DGL-KE read a label per line.

    Raises ExportError if two labels would become the same.
    """
    seen: dict[str, str] = {}
    for label in labels_of(vocabulary):
        line = label.replace("\r", " ").replace("\n", " ")
        other = seen.setdefault(line, label)
        if other != label:
            raise ExportError(
                f"the labels {other!r} and {label!r} would both be {line!r} for {program}, which "
                "has no line breaks within a label; pykeen, npy and safetensors hold them"
            )
    return list(seen)


def saved(value: Any) -> memoryview:
    """What torch.save makes of a value.

    Not straight into the file: where a disk is full torch says so without the reason, and from its
    C++ parts ends the process.
    """
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getbuffer()

"""Input and capabilities of the layouts of other programs.

Those programs hold a whole model in memory, and so does rank 0 while it writes their files.

Shapes: N entities, D elements per entity row, R relation rows (inverses included), W elements per
relation row.
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
from kge_torchrec.trained_model import TrainedModel


@dataclass(frozen=True)
class Contents:
    """What is written in the layout of another program.

    Attributes:
        model: The trained model; this process holds all of it, in evaluation mode.
        config: The model section of the config.
        data: A short name of the graph: letters, digits, dots, dashes and underscores.
        epoch: The number of epochs that the model was trained for.
    """

    model: TrainedModel
    config: ModelConfig
    data: str
    epoch: int = 0

    @cached_property
    @torch.no_grad()
    def entities(self) -> Tensor:
        """(N, D) float32 entity rows, normalized as the formula expects."""
        return self.model.scorer.entity(self.model.shard.rows)

    @cached_property
    @torch.no_grad()
    def relations(self) -> Tensor:
        """(R, W) float32 relation rows, normalized as the formula expects."""
        scorer = self.model.scorer
        return scorer.relation(torch.arange(scorer.relation_rows), drop=False)


@dataclass(frozen=True)
class ForeignFormat:
    """A layout that another program reads.

    Attributes:
        program: Name of the program.
        scorers: Our scorers that it supports with the same formula; None means all.
        holds_inverses: Whether it answers head queries by inverse relations.
        holds_biases: Whether it supports model.biases.
        write: Function that writes the files and returns how to load them, as Markdown.
    """

    program: str
    scorers: tuple[str, ...] | None
    holds_inverses: bool
    holds_biases: bool
    write: Callable[[ExportFolder, Contents], str]

    def check(self, model: ModelConfig) -> None:
        """Raise ExportError unless the layout can hold this model."""
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
    """Reorder complex numbers to all real, then all imaginary parts: (..., D) -> (..., D)."""
    return rows.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def labels_of(vocabulary: Vocabulary) -> list[str]:
    """Return all labels in order of id."""
    return vocabulary.array.to_pylist()


def single_lines(vocabulary: Vocabulary, program: str) -> list[str]:
    """Return all labels in order of id, with line breaks replaced by spaces.

    LibKGE and DGL-KE read one label per line.

    Raises:
        ExportError: Two labels would become the same.
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
    """Return the bytes of torch.save.

    torch.save does not write to the file directly: on a full disk torch's error lacks the reason,
    and its C++ code can end the process.
    """
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getbuffer()

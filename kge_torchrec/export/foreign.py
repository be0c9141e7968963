"""Formats of other programs: what they hold, and a program of torch.export as one of them.

The other programs hold a whole model in memory, and so does rank 0 while it writes their files.
PyTorch runs the program of torch.export without this package.

Shapes: N entities, D elements per entity row, R relation rows (inverses included), W elements per
relation row, n triples.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from kge_torchrec.config import ModelConfig
from kge_torchrec.data.store import Vocabulary
from kge_torchrec.errors import ExportError
from kge_torchrec.export.description import ENTITIES, RELATIONS, ExportFolder
from kge_torchrec.export.table_files import label_lines
from kge_torchrec.models.scorers import Scorer
from kge_torchrec.pages import render
from kge_torchrec.trained_model import TrainedModel

PROGRAM = "scores.pt2"


@dataclass(frozen=True)
class Contents:
    """The contents of an export in the layout of another program.

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
                f"{self.program} cannot hold biases (model.biases true); npy, "
                "safetensors, word2vec, parquet and torch hold them"
            )
        if model.reciprocal and not self.holds_inverses:
            raise ExportError(
                f"{self.program} has no inverse relations, with which this model (model.reciprocal "
                "true) answers head queries; export to pykeen or libkge"
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
    label_of: dict[str, str] = {}
    for label in labels_of(vocabulary):
        line = label.replace("\r", " ").replace("\n", " ")
        other = label_of.setdefault(line, label)
        if other != label:
            raise ExportError(
                f"the labels {other!r} and {label!r} would both be {line!r} for {program}, which "
                "has no line breaks within a label; pykeen, npy and safetensors hold them"
            )
    return list(label_of)


def saved(value: Any) -> memoryview:
    """Return the bytes of torch.save.

    torch.save does not write to the file directly: on a full disk torch's error lacks the reason,
    and its C++ code can end the process.
    """
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getbuffer()


class TripleScores(nn.Module):
    """Scores triples of ids: (n,), (n,), (n,) int64 -> (n,) float32.

    With reciprocal relations the ids of inverses follow those of relations.
    """

    def __init__(self, scorer: Scorer, rows: Tensor):
        super().__init__()
        self.scorer = scorer
        self.entities = nn.Parameter(rows, requires_grad=False)

    def forward(self, head: Tensor, relation: Tensor, tail: Tensor) -> Tensor:
        anchor, target = self.entities[head], self.entities[tail]
        return self.scorer.score_triples(anchor, relation, target, "tail")


def program_of(content: Contents) -> torch.export.ExportedProgram:
    """Return the traced module, for any number of triples."""
    for parameter in content.model.scorer.parameters():
        parameter.requires_grad_(False)
    module = TripleScores(content.model.scorer, content.model.shard.rows).eval()
    ids = torch.zeros(3, dtype=torch.int64)
    count = {0: torch.export.Dim("triples", min=1)}
    return torch.export.export(
        module, (ids, ids.clone(), ids.clone()), dynamic_shapes=(count, count, count)
    )


def write_program(folder: ExportFolder, content: Contents) -> str:
    """Write scores.pt2 and the labels; return how to load them, as Markdown."""
    buffer = io.BytesIO()  # see ``saved``
    torch.export.save(program_of(content), buffer)
    folder.append(PROGRAM, [buffer.getbuffer()])
    folder.append(ENTITIES, label_lines(content.model.entity_labels))
    folder.append(RELATIONS, label_lines(content.model.relation_labels))
    count = len(content.model.relation_labels)
    return render("load_torch.md", count=count, reciprocal=content.config.reciprocal)


PROGRAM_FORMAT = ForeignFormat("torch.export", None, True, True, write_program)

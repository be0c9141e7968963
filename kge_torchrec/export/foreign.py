"""Formats of other programs: DGL-KE, LibKGE, and a program of torch.export (``pykeen``: PyKEEN).

The other programs hold a whole model in memory, and so does rank 0 while it writes their files.
PyTorch runs the program of torch.export without this package.

DGL-KE and LibKGE store all real parts, then all imaginary parts. DGL-KE's distance scores are
gamma - distance; gamma is 0 here. Its RotatE's relations are phases times
(gamma + 2) / (D / 2) / pi, which DGL-KE divides out again. In LibKGE's reciprocal model the inverse
of relation r is r + number of relations, as in ours.

Sources: DGL-KE's save_model and InferModel (https://github.com/awslabs/dgl-ke); LibKGE's
KgeModel.create_from, Dataset.create_from and Config.create_from (https://github.com/uma-pi1/kge).

Shapes: N entities, D elements per entity row, R relation rows (inverses included), W elements per
relation row, n triples.
"""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import yaml
from torch import Tensor, nn

from kge_torchrec.config import ModelConfig
from kge_torchrec.data.store import Vocabulary
from kge_torchrec.errors import ExportError
from kge_torchrec.export.description import ENTITIES, RELATIONS, ExportFolder
from kge_torchrec.export.table_files import label_lines, npy_file
from kge_torchrec.models.scorers import Scorer
from kge_torchrec.pages import render
from kge_torchrec.trained_model import TrainedModel

PROGRAM = "scores.pt2"


@dataclass(frozen=True)
class Contents:
    """The contents of an export in the layout of another program."""

    model: TrainedModel  # this process holds all of it, in evaluation mode
    config: ModelConfig
    data: str  # a short name of the graph: letters, digits, dots, dashes and underscores
    epoch: int = 0  # epochs that the model was trained for

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
    """A layout that another program reads."""

    program: str
    scorers: tuple[str, ...] | None  # that it supports with the same formula; None: all
    holds_inverses: bool  # whether it answers head queries by inverse relations
    holds_biases: bool  # whether it supports model.biases
    write: Callable[[ExportFolder, Contents], str]  # returns how to load the files, as Markdown

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


def single_lines(vocabulary: Vocabulary, program: str) -> list[str]:
    """Return all labels in order of id, with line breaks replaced by spaces.

    LibKGE and DGL-KE read one label per line.

    Raises:
        ExportError: Two labels would become the same.
    """
    label_of: dict[str, str] = {}
    for label in vocabulary.array.to_pylist():
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


_Rows = Callable[[Tensor], Tensor]
EPSILON = 2.0  # DGL-KE's EMB_INIT_EPS


def _phases(phases: Tensor) -> Tensor:
    scale = EPSILON / phases.shape[1] / math.pi
    return (phases.double() * scale).float()


# Scorer -> (DGL-KE's name, conversion of entities, conversion of relations).
DGLKE_MODELS: dict[str, tuple[str, _Rows, _Rows]] = {
    "transe_l1": ("TransE_l1", Tensor.contiguous, Tensor.contiguous),
    "transe_l2": ("TransE_l2", Tensor.contiguous, Tensor.contiguous),
    "distmult": ("DistMult", Tensor.contiguous, Tensor.contiguous),
    "complex": ("ComplEx", halves, halves),
    "rotate": ("RotatE", halves, _phases),
    "rescal": ("RESCAL", Tensor.contiguous, Tensor.contiguous),
}


def write_dglke(folder: ExportFolder, content: Contents) -> str:
    """Write arrays, config.json and maps; return how to load them, as Markdown."""
    name, convert_entities, convert_relations = DGLKE_MODELS[content.config.scorer]
    entities, relations = convert_entities(content.entities), convert_relations(content.relations)
    stem = f"{content.data}_{name}"
    for kind, table in (("entity", entities), ("relation", relations)):
        folder.append(f"{stem}_{kind}.npy", npy_file(table.numpy()))
    doubled = name == "RotatE"  # an entity row has twice the elements of a relation row
    size = content.config.dim // 2 if doubled else content.config.dim
    config = {  # DGL-KE 0.1.2 reads model and emb_size, later commits model_name and hidden_dim
        "dataset": content.data,
        "model": name,
        "model_name": name,
        "emb_size": size,
        "hidden_dim": size,
        "gamma": 0.0,
        "double_ent": doubled,
        "double_rel": False,
        "emap_file": "entities.tsv",
        "rmap_file": "relations.tsv",
    }
    folder.append("config.json", [f"{json.dumps(config, indent=4)}\n".encode()])
    folder.append("entities.tsv", [_map(content.model.entity_labels)])
    folder.append("relations.tsv", [_map(content.model.relation_labels)])
    return render("load_dglke.md", stem=stem)


def _map(vocabulary: Vocabulary) -> bytes:
    """Return lines "id<tab>label"; csv quotes a label that contains a tab or a quote."""
    out = io.StringIO()
    lines = csv.writer(out, delimiter="\t", lineterminator="\n")
    lines.writerows(enumerate(single_lines(vocabulary, "DGL-KE")))
    return out.getvalue().encode()


DGLKE = ForeignFormat("DGL-KE", tuple(DGLKE_MODELS), False, False, write_dglke)


CHECKPOINT = "checkpoint_best.pt"
RECIPROCAL = "reciprocal_relations_model"
# Scorer -> (LibKGE's name, options except widths, conversions of entities and of relations).
LIBKGE_MODELS: dict[str, tuple[str, dict[str, Any], _Rows, _Rows]] = {
    "transe_l1": ("transe", {"l_norm": 1.0}, Tensor.contiguous, Tensor.contiguous),
    "transe_l2": ("transe", {"l_norm": 2.0}, Tensor.contiguous, Tensor.contiguous),
    "distmult": ("distmult", {}, Tensor.contiguous, Tensor.contiguous),
    "complex": ("complex", {}, halves, halves),
    "rotate": ("rotate", {"l_norm": 1.0}, halves, Tensor.contiguous),
    "rotate_l2": ("rotate", {"l_norm": 2.0}, halves, Tensor.contiguous),
    "simple": ("simple", {}, Tensor.contiguous, Tensor.contiguous),
    "rescal": ("rescal", {}, Tensor.contiguous, Tensor.contiguous),
}


def write_libkge(folder: ExportFolder, content: Contents) -> str:
    """Write the checkpoint and the dataset folder; return how to load them, as Markdown."""
    name, options, convert_entities, convert_relations = LIBKGE_MODELS[content.config.scorer]
    entities, relations = convert_entities(content.entities), convert_relations(content.relations)
    tables = {"entity": entities, "relation": relations}
    prefixes = ("", "_base_model.") if content.config.reciprocal else ("",)
    state = {
        f"{prefix}_{side}_embedder._embeddings.weight": table
        for prefix in prefixes
        for side, table in tables.items()
    }
    widths = {f"{side}_embedder": {"dim": table.shape[1]} for side, table in tables.items()}
    dataset = {
        "name": content.data,
        "num_entities": len(entities),
        "num_relations": len(content.model.relation_labels),
    }
    config = _config(name, options | widths, dataset, content.config.reciprocal)
    labels = {"entity": content.model.entity_labels, "relation": content.model.relation_labels}
    meta = {f"{kind}_ids": of.array.to_pylist() for kind, of in labels.items()}
    with _config_class() as config_class:
        checkpoint = {
            "type": "package",
            "model": (state, {}),
            "epoch": content.epoch,
            "job_id": None,
            "valid_trace": [],
            "config": config_class(config),
            "dataset": _dataset_part(dataset, meta),
        }
        folder.append(CHECKPOINT, [saved(checkpoint)])
    folder.append("config.yaml", [yaml.safe_dump(config).encode()])
    for kind, of in labels.items():
        lines = enumerate(single_lines(of, "LibKGE"))
        folder.append(
            f"dataset/{kind}_ids.del", ["".join(f"{i}\t{line}\n" for i, line in lines).encode()]
        )
    files = {f"{kind}_ids": {"filename": f"{kind}_ids.del", "type": "map"} for kind in labels}
    text = yaml.safe_dump({"dataset": dataset | {"files": files}})
    folder.append("dataset/dataset.yaml", [text.encode()])
    return render("load_libkge.md", data=content.data)


def _config(
    name: str, options: dict[str, Any], dataset: dict[str, Any], reciprocal: bool
) -> dict[str, Any]:
    """Return the options of a LibKGE config that differ from its defaults."""
    model = RECIPROCAL if reciprocal else name
    config = {"model": model, "import": [name], name: options, "dataset": dataset}
    config["job"] = {"device": "cpu"}  # load_checkpoint sets this key but cannot add it
    if reciprocal:
        config[RECIPROCAL] = {"base_model": {"type": name}}
        config["import"] = [name, RECIPROCAL]
    return config


def _dataset_part(dataset: dict[str, Any], meta: dict[str, Any]) -> dict[str, Any]:
    """Return the dataset entries twice: newer LibKGE versions prefix keys with ``dataset.``."""
    part = {"num_entities": dataset["num_entities"], "num_relations": dataset["num_relations"]}
    part["meta"] = meta
    return part | {f"dataset.{key}": value for key, value in part.items()}


@contextmanager
def _config_class() -> Iterator[Any]:
    """Provide a stand-in for kge.config.Config with the same attributes, for pickling.

    A pickle stores the name of an object's class and its attributes. LibKGE resolves the name to
    its own class when it loads the file.
    """

    class Config:
        def __init__(self, options: dict[str, Any]):
            self.options = options
            self.folder = self.log_folder = self.log_prefix = None

    Config.__module__, Config.__qualname__ = "kge.config", "Config"
    package, module = ModuleType("kge"), ModuleType("kge.config")
    package.config, module.Config = module, Config  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {"kge": package, "kge.config": module}):
        yield Config


LIBKGE = ForeignFormat("LibKGE", tuple(LIBKGE_MODELS), True, False, write_libkge)

"""A checkpoint as `kge package` of LibKGE writes it, and the folder of its dataset.

LibKGE stores all real parts, then all imaginary parts. In its reciprocal model the inverse of
relation r is r + number of relations, as in ours.

Source: LibKGE's KgeModel.create_from, Dataset.create_from and Config.create_from
(https://github.com/uma-pi1/kge).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import yaml
from torch import Tensor

from kge_torchrec.export.description import ExportFolder
from kge_torchrec.export.foreign import (
    Contents,
    ForeignFormat,
    halves,
    labels_of,
    saved,
    single_lines,
)
from kge_torchrec.pages import render

CHECKPOINT = "checkpoint_best.pt"
RECIPROCAL = "reciprocal_relations_model"
# Scorer -> (LibKGE's name, options except widths, conversions of entities and of relations).
_Rows = Callable[[Tensor], Tensor]
MODELS: dict[str, tuple[str, dict[str, Any], _Rows, _Rows]] = {
    "transe_l1": ("transe", {"l_norm": 1.0}, Tensor.contiguous, Tensor.contiguous),
    "transe_l2": ("transe", {"l_norm": 2.0}, Tensor.contiguous, Tensor.contiguous),
    "distmult": ("distmult", {}, Tensor.contiguous, Tensor.contiguous),
    "complex": ("complex", {}, halves, halves),
    "rotate": ("rotate", {"l_norm": 1.0}, halves, Tensor.contiguous),
    "rotate_l2": ("rotate", {"l_norm": 2.0}, halves, Tensor.contiguous),
    "simple": ("simple", {}, Tensor.contiguous, Tensor.contiguous),
    "rescal": ("rescal", {}, Tensor.contiguous, Tensor.contiguous),
}


def write(folder: ExportFolder, content: Contents) -> str:
    """Write the checkpoint and the dataset folder; return how to load them, as Markdown."""
    name, options, convert_entities, convert_relations = MODELS[content.config.scorer]
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
    meta = {f"{kind}_ids": labels_of(of) for kind, of in labels.items()}
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


FORMAT = ForeignFormat("LibKGE", tuple(MODELS), True, False, write)

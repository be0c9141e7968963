"""The layout in which `dglke_train` saves a model: two arrays, config.json and two maps.

config.json has the keys of DGL-KE 0.1.2 (``model``, ``emb_size``) and those that later commits
read (``model_name``, ``hidden_dim``).

DGL-KE stores all real parts, then all imaginary parts. Its distance scores are gamma - distance;
gamma is 0 here. RotatE's relations are phases times (gamma + 2) / (D / 2) / pi, which DGL-KE
divides out again.

Source: DGL-KE's save_model and InferModel (https://github.com/awslabs/dgl-ke).
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable

from torch import Tensor

from kge_torchrec.data.store import Vocabulary
from kge_torchrec.export.description import ExportFolder
from kge_torchrec.export.foreign import Contents, ForeignFormat, halves, single_lines
from kge_torchrec.export.table_files import npy_file
from kge_torchrec.pages import render

EPSILON = 2.0  # DGL-KE's EMB_INIT_EPS


def _phases(phases: Tensor) -> Tensor:
    scale = EPSILON / phases.shape[1] / math.pi
    return (phases.double() * scale).float()


# Scorer -> (DGL-KE's name, conversion of entities, conversion of relations).
_Rows = Callable[[Tensor], Tensor]
MODELS: dict[str, tuple[str, _Rows, _Rows]] = {
    "transe_l1": ("TransE_l1", Tensor.contiguous, Tensor.contiguous),
    "transe_l2": ("TransE_l2", Tensor.contiguous, Tensor.contiguous),
    "distmult": ("DistMult", Tensor.contiguous, Tensor.contiguous),
    "complex": ("ComplEx", halves, halves),
    "rotate": ("RotatE", halves, _phases),
    "rescal": ("RESCAL", Tensor.contiguous, Tensor.contiguous),
}


def write(folder: ExportFolder, content: Contents) -> str:
    """Write arrays, config.json and maps; return how to load them, as Markdown."""
    name, convert_entities, convert_relations = MODELS[content.config.scorer]
    entities, relations = convert_entities(content.entities), convert_relations(content.relations)
    stem = f"{content.data}_{name}"
    for kind, table in (("entity", entities), ("relation", relations)):
        folder.append(f"{stem}_{kind}.npy", npy_file(table.numpy()))
    doubled = name == "RotatE"  # an entity row has twice the elements of a relation row
    size = content.config.dim // 2 if doubled else content.config.dim
    config = {
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


FORMAT = ForeignFormat("DGL-KE", tuple(MODELS), False, False, write)

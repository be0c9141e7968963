"""A folder in DGL-KE's layout, as `dglke_train` saves a model: two arrays, config.json, two maps.

DGL-KE's complex numbers are all real parts, then all imaginary ones.  Its scores of distances are
gamma - distance, with gamma 0 here.  RotatE's relations are phases times
(gamma + 2) / (D / 2) / pi, by which DGL-KE divides them again.

Source: DGL-KE's save_model and InferModel (https://github.com/awslabs/dgl-ke).
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.export.description import ExportFolder
from kge_torchrec.export.foreign import ForeignFormat, WholeModel, halves, id_lines

EPSILON = 2.0  # DGL-KE's EMB_INIT_EPS
LOADING = """\
```sh
dglke_predict --model_path . --format h_r_t --data_files head.list rel.list tail.list \\
    --raw_data --entity_mfile entities.tsv --rel_mfile relations.tsv --score_func none
```

```python
import numpy as np

entities = np.load("{entities}.npy")  # a row an entity, in the order of entities.tsv
relations = np.load("{relations}.npy")
```
"""


def _phases(phases: Tensor) -> Tensor:
    scale = EPSILON / phases.shape[1] / math.pi
    return (phases.double() * scale).float()


# Ours -> (DGL-KE's name, entities, relations).
_Rows = Callable[[Tensor], Tensor]
MODELS: dict[str, tuple[str, _Rows, _Rows]] = {
    "transe_l1": ("TransE_l1", Tensor.contiguous, Tensor.contiguous),
    "transe_l2": ("TransE_l2", Tensor.contiguous, Tensor.contiguous),
    "distmult": ("DistMult", Tensor.contiguous, Tensor.contiguous),
    "complex": ("ComplEx", halves, halves),
    "rotate": ("RotatE", halves, _phases),
    "rescal": ("RESCAL", Tensor.contiguous, Tensor.contiguous),
}


def write(folder: ExportFolder, model: WholeModel) -> str:
    """Writes arrays, config.json and maps; returns how to load them."""
    name, of_entities, of_relations = MODELS[model.config.scorer]
    entities, relations = of_entities(model.entities), of_relations(model.relations)
    stem = f"{model.data}_{name}"
    for kind, table in (("entity", entities), ("relation", relations)):
        folder.append(f"{stem}_{kind}.npy", _npy(table))
    doubled = name == "RotatE"  # an entity has twice the numbers of a relation
    config = {
        "dataset": model.data,
        "model": name,
        "emb_size": model.config.dim // 2 if doubled else model.config.dim,
        "gamma": 0.0,
        "double_ent": doubled,
        "double_rel": False,
        "emap_file": "entities.tsv",
        "rmap_file": "relations.tsv",
    }
    folder.append("config.json", [f"{json.dumps(config, indent=4)}\n".encode()])
    folder.append("entities.tsv", [id_lines(model.entity_labels)])
    folder.append("relations.tsv", [id_lines(model.relation_labels)])
    names = {"{entities}": f"{stem}_entity", "{relations}": f"{stem}_relation"}
    text = LOADING
    for place, file in names.items():
        text = text.replace(place, file)
    return text


def _npy(table: Tensor) -> list[bytes | memoryview]:
    header = io.BytesIO()
    array = np.ascontiguousarray(table.to(torch.float32).numpy())
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    return [header.getvalue(), array.data]


FORMAT = ForeignFormat("DGL-KE", tuple(MODELS), False, False, write)

"""Loads an export in one process: no TorchRec, no process group, and the table stays on disk."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from kge_torchrec.answers import AnsweringModel
from kge_torchrec.answers.calibration import Calibration
from kge_torchrec.config.registry import import_modules
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
from kge_torchrec.export.table_files import Safetensors, open_table, read_labels
from kge_torchrec.models.scorers import Scorer, build_scorer


def load_model(path: str | Path, allow_imports: Sequence[str] = ()) -> AnsweringModel:
    """Load the model of a folder that `kge-torchrec export` wrote.

    The entity table stays on disk and is read on access.

    Args:
        path: Folder of the export.
        allow_imports: Modules to import for a scorer that is not built in. An export of somebody
            else runs no code except theirs.

    Returns:
        The model.

    Raises:
        ExportError: There is no export, it is damaged or has another version, or a parameter is
            missing, unexpected or of another shape.
    """
    import_modules(allow_imports)
    path = Path(path)
    description = read_description(path)
    size, dim = description["num_entities"], model_config(path, description).dim
    table = open_table(path / Safetensors.name, size, dim)
    scorer = load_scorer(path, description)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that the array is read-only
        shard = EntityShard(torch.from_numpy(table), 0, len(table), replicated=True)
    return AnsweringModel(
        scorer,
        shard,
        _Exported(path, size, scorer.num_relations),
        calibration=Calibration.read(path),
        path=path,
        description=description,
        table=table,
    )


class _Exported:
    """The labels of an export, each read when first needed."""

    def __init__(self, path: Path, num_entities: int, num_relations: int):
        self._path, self._sizes = path, (num_entities, num_relations)

    @cached_property
    def entities(self) -> Vocabulary:
        """Entity labels and ids."""
        return read_labels(self._path / ENTITIES, "entity", self._sizes[0])

    @cached_property
    def relations(self) -> Vocabulary:
        """Relation labels and ids."""
        return read_labels(self._path / RELATIONS, "relation", self._sizes[1])


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

"""Loads an export in one process: no TorchRec, no process group, and the table stays on disk."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from kge_torchrec.answers import AnsweringModel
from kge_torchrec.answers.calibration import Calibration
from kge_torchrec.config.registry import import_modules
from kge_torchrec.data.store import TripleStore
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.errors import ExportError, StoreError
from kge_torchrec.export.description import (
    PARAMETERS,
    STORE,
    damaged,
    model_config,
    read_description,
)
from kge_torchrec.export.table_files import Safetensors, open_table
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
    try:
        store = TripleStore.open(path / STORE)
    except StoreError as error:
        raise damaged(path, str(error).removesuffix("; prepare it again")) from error
    if store.fingerprint != description["checkpoint"]["data"]:
        raise damaged(path, f"{STORE} holds another graph than the model was trained on")
    dim = model_config(path, description).dim
    table = open_table(path / Safetensors.name, store.num_entities, dim)
    scorer = load_scorer(path, description)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that the array is read-only
        shard = EntityShard(torch.from_numpy(table), 0, len(table), replicated=True)
    return AnsweringModel(
        scorer,
        shard,
        store,
        calibration=Calibration.read(path),
        path=path,
        description=description,
        table=table,
    )


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

"""Write the model of a run as an export, chunk by chunk.

Shapes: N entities, D elements per entity row, m rows per chunk.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import cast

import safetensors.torch
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from tqdm import tqdm

from kge_torchrec.answers.fold_in import training_of
from kge_torchrec.config import Config, ConfigError, ModelConfig
from kge_torchrec.config.checks import one_of
from kge_torchrec.data.store import TripleStore
from kge_torchrec.distributed.processes import Processes, on_first_rank
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.errors import ExportError
from kge_torchrec.export import FORMATS
from kge_torchrec.export.description import (
    CARD,
    ENTITIES,
    PARAMETERS,
    RELATIONS,
    STORE,
    ExportFolder,
    card_text,
    describe,
)
from kge_torchrec.export.plain_model import load_scorer
from kge_torchrec.export.program import write_program
from kge_torchrec.export.table_files import Parquet, Safetensors, write_labels
from kge_torchrec.export.vectors import metric_of, write_vectors
from kge_torchrec.models.scorers import Scorer, build_scorer
from kge_torchrec.trained_model import TrainedModel
from kge_torchrec.training.checkpoints import name_of
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.state import TrainState


def check_format(name: str, relation: str | None, model: ModelConfig) -> None:
    """Check that a format exists, has a ``relation`` if one is named, and can hold the model."""
    one_of("format", name, FORMATS)
    if name == "vectors":
        metric_of(build_scorer(model, 1))
    elif relation is not None:
        raise ConfigError(f"relation: format {name} has no vectors; export to vectors")


def export_run(
    model: TrainedModel,
    progress: TrainState,
    folder: ExportFolder,
    format: str,
    relation: str | None,
) -> None:
    """Write the folder of an export, completely or not at all. Collective; rank 0 writes.

    Besides the model, rank 0 needs memory for the scorer's parameters and a few chunks of 16,384
    rows. For vectors and for a program it also needs two or three copies of the table.

    Raises:
        ExportError: On every rank, for example if the disk is full.
    """
    ranks, store, config, path = model.processes, model.store, model.config, model.path
    assert config is not None and path is not None  # of a run
    parameters = dense_parameters(model.scorer)
    description = describe(config.model, store.num_entities, store.num_relations, format)
    if format == "safetensors":
        description["training"] = training_of(config)
        description["data"] = {"columns": config.data.columns, "relation": config.data.relation}
    description["checkpoint"] = {
        "name": name_of(progress),
        "epoch": progress.epoch,
        "step": progress.global_step,
        "data": progress.data,
    }
    results = RunFolder(path).results
    if results.is_file():
        found = json.loads(results.read_text(encoding="utf-8"))
        if found["checkpoint"]["name"] == name_of(progress):
            description["results"] = found

    def write_dense() -> None:
        write_labels(folder.partial / ENTITIES, store.entities)
        write_labels(folder.partial / RELATIONS, store.relations)
        contiguous = {name: values.contiguous() for name, values in parameters.items()}
        (folder.partial / PARAMETERS).write_bytes(safetensors.torch.save(contiguous))

    def write_other(rows: Tensor) -> None:
        scorer = build_scorer(config.model, store.num_relations)
        scorer.load_state_dict(parameters)
        whole = EntityShard(rows, 0, len(rows), replicated=True)
        alone = TrainedModel(scorer.eval(), whole, store)
        if format == "vectors":
            description["vectors"] = write_vectors(folder.partial, alone, relation)
        else:
            write_program(folder.partial, alone)

    def finish() -> None:
        """Write what ``load_model`` needs besides the table, and put the folder in place."""
        if format == "safetensors":
            load_scorer(folder.partial, description)  # do not keep an export that does not load
            store.copy(folder.partial / STORE)
            if model.calibration is not None:
                model.calibration.write(folder.partial)
        features, name = store.num_rows - store.num_entities, _name_of_graph(config)
        text = card_text(description, name, store.report["triples"], features)
        (folder.partial / CARD).write_text(text, encoding="utf-8")
        folder.finish(description)

    try:
        on_first_rank(ranks, folder.begin)
        if format in ("safetensors", "parquet"):
            on_first_rank(ranks, write_dense)
            hide = None if config.run.progress else True
            write_entities(folder.partial, format, model.shard, store, ranks, hide)
        else:
            rows = _whole(model.shard, ranks)
            on_first_rank(ranks, lambda: write_other(rows))
        on_first_rank(ranks, finish)
    except BaseException as error:
        if ranks.is_first:
            folder.discard()
        if isinstance(error, OSError):
            raise ExportError(
                f"{folder.path} could not be written: {error} ({folder.free()} free on that "
                "disk); the incomplete export was removed"
            ) from error
        raise


def _name_of_graph(config: Config) -> str:
    """Return a short name of the graph that is valid in a file name."""
    path = Path(config.data.path)
    name = path.parent.name if path.stem in ("store", "triples", "data") else path.stem
    return re.sub(r"[^\w.-]+", "_", name) or "graph"


def dense_parameters(scorer: Scorer) -> dict[str, Tensor]:
    """Return the scorer's parameters and buffers on the CPU, gathered from all ranks.

    Collective. Empty except on rank 0.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return cast(dict[str, Tensor], get_model_state_dict(scorer, options=options))


def write_entities(
    folder: Path,
    format: str,
    shard: EntityShard,
    store: TripleStore,
    processes: Processes,
    hide_bar: bool | None = None,
) -> None:
    """Write the entity table from the shards, with the labels and types of a store.

    Collective. A failure on rank 0 is raised on every rank before the next chunk.
    """
    tables: list[Safetensors | Parquet] = []  # one on rank 0

    def begin() -> None:
        is_parquet, sizes = format == "parquet", (shard.num_entities, shard.dim)
        tables.append(
            Parquet(folder, store, shard.dim) if is_parquet else Safetensors(folder, *sizes)
        )

    def append(first: int, rows: Tensor) -> None:
        bar.update(len(rows))
        tables[0].append(first, rows.cpu().numpy())

    total = shard.num_entities
    with tqdm(total=total, desc="export", unit="row", disable=hide_bar, leave=False) as bar:
        on_first_rank(processes, begin)
        for chunk in chunks(shard):
            on_first_rank(processes, partial(append, *chunk))
        on_first_rank(processes, lambda: tables[0].close())


def _whole(shard: EntityShard, processes: Processes) -> Tensor:
    """Return all rows (N, D) on rank 0. Collective."""
    rows = torch.empty(shard.num_entities if processes.is_first else 0, shard.dim)
    for first, chunk in chunks(shard):
        if processes.is_first:
            rows[first : first + len(chunk)] = chunk
    return rows


CHUNK_ROWS = 1 << 14


def chunks(shard: EntityShard) -> Iterator[tuple[int, Tensor]]:
    """Yield (id of the first row, rows (m, D) float32) in order of id, with m <= 16,384.

    Collective: every rank gets all chunks, one after another. Of several ranks, -0.0 comes as 0.0.
    """
    for first in range(0, shard.num_entities, CHUNK_ROWS):
        stop = min(first + CHUNK_ROWS, shard.num_entities)
        yield first, shard.fetch(torch.arange(first, stop, device=shard.device))

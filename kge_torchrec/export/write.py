"""Write the model of a run as an export, chunk by chunk.

Shapes: N entities, D elements per entity row, m rows per chunk.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from tqdm import tqdm

from kge_torchrec.answers.calibration import Calibration
from kge_torchrec.config import Config, ConfigError, ModelConfig
from kge_torchrec.config.checks import one_of
from kge_torchrec.data.store import TripleStore, Vocabulary
from kge_torchrec.distributed.processes import Processes, on_first_rank
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.errors import ExportError
from kge_torchrec.export.description import (
    CARD,
    ENTITIES,
    HUB_CONFIG,
    PARAMETERS,
    RELATIONS,
    ExportFolder,
    card_text,
    describe,
    describe_foreign,
    hub_config,
)
from kge_torchrec.export.plain_model import load_scorer
from kge_torchrec.export.program import write_program
from kge_torchrec.export.table_files import FORMATS, label_lines, npy_file, parquet_file
from kge_torchrec.export.vectors import VectorFormat
from kge_torchrec.models.scorers import Scorer, build_scorer
from kge_torchrec.pages import render
from kge_torchrec.trained_model import TrainedModel
from kge_torchrec.training.checkpoints import name_of
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.state import TrainState

OURS = (*FORMATS, "huggingface")  # formats that load_model reads
_VECTORS = {"vectors": VectorFormat("npy"), "vectors-parquet": VectorFormat("parquet")}
_TABLES = {"huggingface": "safetensors"}  # table format, where it has another name


def vectors_of(name: str, relation: str | None) -> VectorFormat | None:
    """Return the format of vectors, or None for another format; see ``Run.export``.

    Raises ConfigError if a format without vectors has a relation.
    """
    if name in _VECTORS:
        return replace(_VECTORS[name], relation=relation)
    if relation is not None:
        raise ConfigError(
            f"relation: format {name} has no vectors; export to vectors or vectors-parquet"
        )
    return None


def check_format(name: str, model: ModelConfig, vectors: VectorFormat | None) -> None:
    """Raise ConfigError if the format does not exist, ExportError if it cannot hold the model."""
    if vectors is not None:
        vectors.check(model)
    else:
        one_of("format", name, (*OURS, "torch", *_VECTORS))


@dataclass(frozen=True)
class Export:
    """The export of a run's model.

    Besides the model, rank 0 needs memory for a chunk of 65,536 rows and the scorer's parameters.
    For vectors and for a program it also needs two or three copies of the table.
    """

    model: TrainedModel  # of a checkpoint, with the data
    run: RunFolder
    config: Config
    folder: ExportFolder
    format: str
    progress: TrainState  # of the checkpoint
    with_results: bool  # whether results.json is of this checkpoint and goes into model.json
    vectors: VectorFormat | None = None  # for the formats of vectors

    @property
    def store(self) -> TripleStore:
        """The data."""
        return self.model.known("an export")

    def write(self) -> None:
        """Write the folder, completely or not at all.

        Collective; rank 0 writes.

        Raises:
            ExportError: On every rank, for example if the disk is full.
        """
        ranks, folder = self.model.processes, self.folder
        parameters = dense_parameters(self.model.scorer)
        write = self._write_ours if self.format in OURS else self._write_other
        try:
            on_first_rank(ranks, folder.begin)
            description, loading = write(parameters)
            on_first_rank(ranks, lambda: self._finish(description, loading))
        except BaseException as error:
            if ranks.is_first:
                folder.discard()
            if isinstance(error, OSError):
                raise ExportError(
                    f"{folder.path} could not be written: {error} ({folder.free()} free on that "
                    "disk); the incomplete export was removed"
                ) from error
            raise

    def _write_ours(self, parameters: dict[str, Tensor]) -> tuple[dict[str, Any], str]:
        """Write our own layout; return the contents of model.json and how to load the files."""
        folder, ranks, store = self.folder, self.model.processes, self.store
        table_format = _TABLES.get(self.format, self.format)

        def write_dense() -> None:
            FORMATS[table_format].check(store.entities)
            folder.append(ENTITIES, label_lines(store.entities))
            folder.append(RELATIONS, label_lines(store.relations))
            _write_dense(folder, table_format, parameters, store.relations)

        on_first_rank(ranks, write_dense)
        hide = None if self.config.run.progress else True
        write_entities(folder, table_format, self.model.shard, store.entities.array, ranks, hide)
        sizes = store.num_entities, store.num_relations
        return describe(self.config.model, *sizes, table_format), render("load_model.md")

    def _write_other(self, parameters: dict[str, Tensor]) -> tuple[dict[str, Any], str]:
        """Write a program or vectors; return the same as ``_write_ours``."""
        config = self.config.model
        ranks, store, shard = self.model.processes, self.store, self.model.shard
        rows = torch.empty(shard.num_entities, shard.dim) if ranks.is_first else torch.empty(0)
        for first, chunk in chunks_on_first_rank(shard, ranks):
            if chunk is not None:
                rows[first : first + len(chunk)] = torch.from_numpy(chunk)

        def write() -> str:
            scorer = build_scorer(config, store.num_relations)
            scorer.load_state_dict(parameters)
            whole = EntityShard(rows, 0, len(rows), replicated=True)
            model = TrainedModel(scorer.eval(), whole, store, store)
            if self.vectors is not None:
                return self.vectors.write(self.folder, model)
            return write_program(self.folder, model)

        loading = on_first_rank(ranks, write)
        sizes = store.num_entities, store.num_relations
        program = "torch.export" if self.vectors is None else "a search index"
        return describe_foreign(config, *sizes, program), loading

    def _finish(self, description: dict[str, Any], loading: str) -> None:
        """Write calibration, model.json and the card, and put the folder in place."""
        folder, store = self.folder, self.store
        progress, results = self.progress, self.run.results
        if self.format in OURS:
            load_scorer(folder.partial, description)  # do not keep an export that does not load
            calibration = Calibration.read(self.run.path)
            if calibration and calibration.is_of(progress.global_step, store.fingerprint):
                calibration.write(folder.partial)
        description["checkpoint"] = {
            "name": name_of(progress),
            "epoch": progress.epoch,
            "step": progress.global_step,
            "data": progress.data,
        }
        if self.with_results and results.is_file():
            description["results"] = json.loads(results.read_text(encoding="utf-8"))
        features, name = store.num_rows - store.num_entities, _name_of_graph(self.config)
        text = card_text(description, name, store.report["triples"], loading, features)
        folder.append(CARD, [text.encode()])
        if self.format == "huggingface":
            options = self.config.model.options
            folder.append(HUB_CONFIG, [hub_config(description, options).encode()])
        folder.finish(description)


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


def _write_dense(
    folder: ExportFolder, table_format: str, parameters: dict[str, Tensor], relations: Vocabulary
) -> None:
    """Write the scorer's parameters and, if the table format has one, a relation table."""
    contiguous = {name: values.contiguous() for name, values in parameters.items()}
    folder.append(PARAMETERS, [safetensors.torch.save(contiguous)])
    rows = _relation_table(parameters).numpy()
    forth, back = rows[: len(relations)], rows[len(relations) :]
    if table_format == "parquet":
        vectors = {"vector": forth} | ({"inverse": back} if len(back) else {})
        folder.append("relations.parquet", parquet_file(relations.array, vectors))
    elif table_format == "npy":
        folder.append("relations.npy", npy_file(forth))
        if len(back):
            folder.append("inverse_relations.npy", npy_file(back))


def _relation_table(parameters: dict[str, Tensor]) -> Tensor:
    """Return the scorer's relation rows; those of inverses come last."""
    return next(rows for name, rows in parameters.items() if name.split(".")[-1] == "relations")


def write_entities(
    folder: ExportFolder,
    table_format: str,
    shard: EntityShard,
    labels: pa.Array,
    processes: Processes,
    hide_bar: bool | None = None,
) -> None:
    """Write the entity table from the shards, with labels (N,).

    Collective. A failure on rank 0 is raised on every rank before the next chunk.
    """
    table = FORMATS[table_format](len(labels), shard.dim)

    def append(first: int, rows: np.ndarray | None) -> None:
        assert rows is not None  # true on rank 0, where this runs
        bar.update(len(rows))
        folder.append(table.name, table.rows(rows, labels[first : first + len(rows)]))

    total = shard.num_entities
    with tqdm(total=total, desc="export", unit="row", disable=hide_bar, leave=False) as bar:
        on_first_rank(processes, lambda: folder.append(table.name, table.begin()))
        for chunk in chunks_on_first_rank(shard, processes):
            on_first_rank(processes, partial(append, *chunk))
        on_first_rank(processes, lambda: folder.append(table.name, table.end()))


CHUNK_ROWS = 1 << 16


@torch.no_grad()
def chunks_on_first_rank(
    shard: EntityShard, processes: Processes
) -> Iterator[tuple[int, np.ndarray | None]]:
    """Yield (global id of the first row, rows (m, D) float32) in order of id, with m <= 65,536.

    Collective: every rank iterates over all chunks. The rows are None except on rank 0 and are
    valid until the next chunk. Ranks send rows directly to rank 0, which keeps every bit (a sum
    over the ranks would turn -0.0 into 0.0). Besides its shard, rank 0 holds one chunk, and other
    ranks at most a copy of their part of it.
    """
    ranges = _row_ranges(shard, processes)
    buffer = None
    if processes.is_first:
        height = min(CHUNK_ROWS, shard.num_entities)
        buffer = torch.empty(height, shard.dim, device=shard.rows.device)
    for first in range(0, shard.num_entities, CHUNK_ROWS):
        stop = min(first + CHUNK_ROWS, shard.num_entities)
        chunk = None if buffer is None else buffer[: stop - first]
        for owner, (low, high) in enumerate(ranges):
            low, high = max(low, first), min(high, stop)
            if low < high:
                part = None if chunk is None else chunk[low - first : high - first]
                _move(shard, processes, owner, low, high, part)
        yield first, None if chunk is None else chunk.cpu().numpy()


def _row_ranges(shard: EntityShard, processes: Processes) -> list[tuple[int, int]]:
    """Return the ids [start, stop) of every rank."""
    if processes.world_size == 1:
        return [shard.row_range]
    mine = torch.tensor(shard.row_range, device=shard.rows.device)
    ranges = [torch.empty_like(mine) for _ in range(processes.world_size)]
    dist.all_gather(ranges, mine, group=processes.group)
    return [tuple(bounds.tolist()) for bounds in ranges]


def _move(
    shard: EntityShard, processes: Processes, owner: int, low: int, high: int, part: Tensor | None
) -> None:
    """Copy the rows [low, high) of the rank ``owner`` to ``part`` on rank 0."""
    if processes.rank == owner:
        rows = shard.rows[low - shard.first_row : high - shard.first_row]
        if part is not None:
            part.copy_(rows)
        else:
            dist.send(rows.float().contiguous(), 0, group=processes.group)
    elif part is not None:
        dist.recv(part, owner, group=processes.group)

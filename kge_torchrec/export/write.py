"""From a loaded run to a folder of plain files, in the memory of a chunk of rows.

The rows of other ranks come to rank 0 one chunk after another.

Shapes: N entities, D numbers per entity, m rows of a chunk.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import numpy as np
import pyarrow as pa
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from tqdm import tqdm

from kge_torchrec.config import ConfigError
from kge_torchrec.distributed.processes import Processes, on_first_rank
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.errors import ExportError
from kge_torchrec.export.description import ENTITIES, PARAMETERS, RELATIONS, ExportFolder, describe
from kge_torchrec.export.formats import FORMATS
from kge_torchrec.export.plain_model import load_scorer
from kge_torchrec.export.text import label_lines
from kge_torchrec.models.scorers import Scorer
from kge_torchrec.training.checkpoints import name_of
from kge_torchrec.training.session import Session
from kge_torchrec.training.state import TrainState


def check_format(name: str) -> None:
    """Raises ConfigError for a format that there is not."""
    if name not in FORMATS:
        raise ConfigError(f"format must be one of {', '.join(FORMATS)}, got {name!r}")


def export_model(
    session: Session,
    folder: ExportFolder,
    table_format: str,
    progress: TrainState,
    with_results: bool,
) -> None:
    """Writes the parameters in ``session``, whole or not at all.  Collective; rank 0 writes.

    Beyond what the session holds, rank 0 needs a chunk of 65,536 rows and the scorer's
    parameters; see ``word2vec.check`` for the labels of that format.
    progress: of the checkpoint that the parameters are of.
    with_results: whether results.json speaks of this checkpoint, and goes into model.json.
    Raises ExportError, on every rank.
    """
    ranks, store = session.processes, session.store
    parameters = dense_parameters(session.scorer)
    try:
        on_first_rank(ranks, folder.begin)
        on_first_rank(ranks, lambda: FORMATS[table_format].check(store.entities))
        on_first_rank(ranks, lambda: _write_dense(session, folder, parameters))
        write_entities(
            folder,
            table_format,
            session.backend.shard(),
            store.entities.array,
            ranks,
            session.hide_bars,
        )
        on_first_rank(ranks, lambda: _finish(session, folder, table_format, progress, with_results))
    except BaseException as error:
        if ranks.is_first:
            folder.discard()
        if isinstance(error, OSError):
            raise ExportError(
                f"{folder.path} could not be written: {error} ({folder.free()} free on that disk); "
                "nothing is left of it"
            ) from error
        raise


def dense_parameters(scorer: Scorer) -> dict[str, Tensor]:
    """The scorer's parameters and buffers on the CPU, whole where ranks hold parts of them.

    Collective; empty but on rank 0.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return cast(dict[str, Tensor], get_model_state_dict(scorer, options=options))


def _write_dense(session: Session, folder: ExportFolder, parameters: dict[str, Tensor]) -> None:
    contiguous = {name: values.contiguous() for name, values in parameters.items()}
    folder.append(PARAMETERS, [safetensors.torch.save(contiguous)])
    folder.append(ENTITIES, label_lines(session.store.entities))
    folder.append(RELATIONS, label_lines(session.store.relations))


def write_entities(
    folder: ExportFolder,
    table_format: str,
    shard: EntityShard,
    labels: pa.Array,
    processes: Processes,
    hide_bar: bool | None = None,
) -> None:
    """Writes the table of the shards, with labels (N,) if the format takes them.  Collective.

    A failure on rank 0 is raised on every rank, before the next chunk.
    """
    table, total = FORMATS[table_format], shard.num_entities

    def append(first: int, rows: np.ndarray | None) -> None:
        assert rows is not None  # on the first rank
        folder.append(table.file, table.body(rows, labels[first : first + len(rows)]))
        bar.update(len(rows))

    with tqdm(total=total, desc="export", unit="row", disable=hide_bar, leave=False) as bar:
        header = table.header(total, shard.dim)
        on_first_rank(processes, lambda: folder.append(table.file, [header]))
        for chunk in chunks_on_first_rank(shard, processes):
            on_first_rank(processes, partial(append, *chunk))


def _finish(
    session: Session,
    folder: ExportFolder,
    table_format: str,
    progress: TrainState,
    with_results: bool,
) -> None:
    store = session.store
    description: dict[str, Any] = describe(
        session.config.model, store.num_entities, store.num_relations, table_format
    )
    load_scorer(folder.partial, description)  # what could not be loaded is not put in place
    description["checkpoint"] = {
        "name": name_of(progress),
        "epoch": progress.epoch,
        "step": progress.global_step,
        "data": progress.data,
    }
    results = session.folder.results
    if with_results and results.is_file():
        description["results"] = json.loads(results.read_text(encoding="utf-8"))
    folder.finish(description)


CHUNK_ROWS = 1 << 16


@torch.no_grad()
def chunks_on_first_rank(
    shard: EntityShard, processes: Processes
) -> Iterator[tuple[int, np.ndarray | None]]:
    """Yields (global id of the first row, rows (m, D) float32), in order of id, m <= 65,536.

    Collective: every rank goes through all chunks; the rows are None on the others.  They are
    valid until the next chunk.  Rows travel from the rank that holds them straight to rank 0, which
    keeps every bit (a sum over the ranks would turn -0.0 into 0.0); beside its shard rank 0 holds
    one chunk, the others at most a copy of their part of it.
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
    """The ids [start, stop) of every rank."""
    if processes.world_size == 1:
        return [shard.row_range]
    mine = torch.tensor(shard.row_range, device=shard.rows.device)
    ranges = [torch.empty_like(mine) for _ in range(processes.world_size)]
    dist.all_gather(ranges, mine, group=processes.group)
    return [tuple(one.tolist()) for one in ranges]


def _move(
    shard: EntityShard, processes: Processes, owner: int, low: int, high: int, part: Tensor | None
) -> None:
    """The rows [low, high) of the rank ``owner`` into ``part`` on rank 0."""
    if processes.rank == owner:
        rows = shard.rows[low - shard.first_row : high - shard.first_row]
        if part is not None:
            part.copy_(rows)
        else:
            dist.send(rows.float().contiguous(), 0, group=processes.group)
    elif part is not None:
        dist.recv(part, owner, group=processes.group)

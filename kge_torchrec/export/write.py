"""From a loaded run to a folder of plain files, in the memory of a chunk of rows.

The rows of other ranks come to rank 0 one chunk after another.

Shapes: N entities, D numbers per entity, m rows of a chunk.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
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
from kge_torchrec.config import ConfigError, ModelConfig
from kge_torchrec.data.store import Vocabulary
from kge_torchrec.distributed.processes import Processes, on_first_rank
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.errors import ExportError
from kge_torchrec.export import dglke, libkge, program, pykeen
from kge_torchrec.export.card import CARD, HUB_CONFIG, Facts, Licences, hub_config
from kge_torchrec.export.card import card as text_of_card
from kge_torchrec.export.changes import Earlier, write_ids
from kge_torchrec.export.columns import vectors_file
from kge_torchrec.export.description import (
    ENTITIES,
    PARAMETERS,
    RELATIONS,
    ExportFolder,
    describe,
    describe_foreign,
)
from kge_torchrec.export.foreign import WholeModel
from kge_torchrec.export.formats import FORMATS, npy_file
from kge_torchrec.export.plain_model import load_scorer
from kge_torchrec.export.text import label_lines
from kge_torchrec.models.scorers import Scorer, build_scorer
from kge_torchrec.pages import render
from kge_torchrec.training.checkpoints import name_of
from kge_torchrec.training.session import Session
from kge_torchrec.training.state import TrainState

OURS = (*FORMATS, "huggingface")  # what load_model reads
FOREIGN = {
    "pykeen": pykeen.FORMAT,
    "libkge": libkge.FORMAT,
    "dglke": dglke.FORMAT,
    "torch": program.FORMAT,
}
_TABLES = {"huggingface": "safetensors"}  # of ours that are no format of a table


def check_format(name: str, model: ModelConfig, only_changes: bool = False) -> None:
    """Raises ConfigError if there is no such format, ExportError if it cannot hold the model."""
    if only_changes and name not in FORMATS:
        raise ConfigError(
            f"format {name} is of a whole model; changes alone are written as {', '.join(FORMATS)}"
        )
    if name in FOREIGN:
        FOREIGN[name].check(model)
    elif name not in OURS:
        raise ConfigError(f"format must be one of {', '.join((*OURS, *FOREIGN))}, got {name!r}")


def export_model(
    session: Session,
    folder: ExportFolder,
    format: str,
    progress: TrainState,
    with_results: bool,
    card: Licences | None = None,
    earlier: Earlier | None = None,
) -> None:
    """Writes the parameters in ``session``, whole or not at all.  Collective; rank 0 writes.

    Beyond what the session holds, rank 0 needs a chunk of 65,536 rows and the scorer's
    parameters, see ``word2vec.check`` for the labels of that format; for the layout of another
    program the table as well, two or three times.
    progress: of the checkpoint that the parameters are of.
    with_results: whether results.json speaks of this checkpoint, and goes into model.json.
    card: what README.md says of licences; None writes one only if the format comes with one.
    earlier: given, only entities whose rows are others than there are written.
    Raises ExportError, on every rank.
    """
    ranks, model = session.processes, session.config.model
    check_format(format, model, earlier is not None)
    parameters = dense_parameters(session.scorer)
    try:
        on_first_rank(ranks, folder.begin)
        if format in FOREIGN:
            found = _write_foreign(session, folder, format, parameters, progress)
        else:
            table_format = _TABLES.get(format, format)
            found = _write_ours(session, folder, table_format, parameters, earlier)
        on_first_rank(
            ranks, lambda: _finish(session, folder, format, found, progress, with_results, card)
        )
    except BaseException as error:
        if ranks.is_first:
            folder.discard()
        if isinstance(error, OSError):
            raise ExportError(
                f"{folder.path} could not be written: {error} ({folder.free()} free on that disk); "
                "nothing is left of it"
            ) from error
        raise


@dataclass(frozen=True)
class _Written:
    """What model.json says of the files, and how to load them."""

    description: dict[str, Any]
    loading: str


def _write_ours(
    session: Session,
    folder: ExportFolder,
    table_format: str,
    parameters: dict[str, Tensor],
    earlier: Earlier | None,
) -> _Written:
    ranks, store, shard = session.processes, session.store, session.backend.shard()
    chosen, entities = None, store.entities
    if earlier is not None:
        chosen = earlier.changed(chunks_on_first_rank(shard, ranks), ranks)
        entities = Vocabulary(entities.array.filter(pa.array(chosen)), "entity")
    on_first_rank(ranks, lambda: FORMATS[table_format].check(entities))
    on_first_rank(ranks, lambda: _write_dense(session, folder, table_format, parameters, entities))
    labels = store.entities.array
    write_entities(folder, table_format, shard, labels, ranks, session.hide_bars, chosen)
    sizes = store.num_entities, store.num_relations
    description = describe(session.config.model, *sizes, table_format)
    if earlier is not None and chosen is not None:
        on_first_rank(ranks, lambda: write_ids(folder, chosen))
        description["entities"]["shape"][0] = len(entities)
        description |= {"changes": earlier.describe(chosen)}
    return _Written(description, render("load_model.md"))


def _write_foreign(
    session: Session,
    folder: ExportFolder,
    format: str,
    parameters: dict[str, Tensor],
    progress: TrainState,
) -> _Written:
    ranks, store, model = session.processes, session.store, session.config.model
    target, shard = FOREIGN[format], session.backend.shard()
    rows = torch.empty(shard.num_entities, shard.dim) if ranks.is_first else torch.empty(0)
    for first, chunk in chunks_on_first_rank(shard, ranks):
        if chunk is not None:
            rows[first : first + len(chunk)] = torch.from_numpy(chunk)

    def write() -> str:
        scorer = build_scorer(model, store.num_relations)
        scorer.load_state_dict(parameters)
        labels, name = (store.entities, store.relations), _data(session)
        whole = WholeModel(model, scorer.eval(), rows, *labels, name, progress.epoch)
        return target.write(folder, whole)

    loading = on_first_rank(ranks, write)
    sizes = store.num_entities, store.num_relations
    return _Written(describe_foreign(model, *sizes, target.program), loading)


def _data(session: Session) -> str:
    """A short name of the graph that is right as a part of a file's name."""
    path = Path(session.config.data.path)
    name = path.parent.name if path.stem in ("store", "triples", "data") else path.stem
    return re.sub(r"[^\w.-]+", "_", name) or "graph"


def dense_parameters(scorer: Scorer) -> dict[str, Tensor]:
    """The scorer's parameters and buffers on the CPU, whole where ranks hold parts of them.

    Collective; empty but on rank 0.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return cast(dict[str, Tensor], get_model_state_dict(scorer, options=options))


def _write_dense(
    session: Session,
    folder: ExportFolder,
    table_format: str,
    parameters: dict[str, Tensor],
    entities: Vocabulary,
) -> None:
    store = session.store
    contiguous = {name: values.contiguous() for name, values in parameters.items()}
    folder.append(PARAMETERS, [safetensors.torch.save(contiguous)])
    folder.append(ENTITIES, label_lines(entities))
    folder.append(RELATIONS, label_lines(store.relations))
    rows = _relation_table(parameters).numpy()
    forth, back = rows[: store.num_relations], rows[store.num_relations :]
    if table_format == "parquet":
        vectors = {"vector": forth} | ({"inverse": back} if len(back) else {})
        folder.append("relations.parquet", vectors_file(store.relations.array, vectors))
    elif table_format == "npy":
        folder.append("relations.npy", npy_file(forth))
        if len(back):
            folder.append("inverse_relations.npy", npy_file(back))


def _relation_table(parameters: dict[str, Tensor]) -> Tensor:
    """The scorer's relations, a row each, those of the inverses last."""
    return next(rows for name, rows in parameters.items() if name.split(".")[-1] == "relations")


def write_entities(
    folder: ExportFolder,
    table_format: str,
    shard: EntityShard,
    labels: pa.Array,
    processes: Processes,
    hide_bar: bool | None = None,
    chosen: np.ndarray | None = None,
) -> None:
    """Writes the table of the shards, with labels (N,) if the format takes them.  Collective.

    chosen: (N,) bool, which rows are written; None writes all.
    A failure on rank 0 is raised on every rank, before the next chunk.
    """
    table, total = FORMATS[table_format], shard.num_entities
    encoder = table.encoder(total if chosen is None else int(chosen.sum()), shard.dim)

    def append(first: int, rows: np.ndarray | None) -> None:
        assert rows is not None  # on the first rank
        bar.update(len(rows))
        own = labels[first : first + len(rows)]
        if chosen is not None:
            here = chosen[first : first + len(rows)]
            rows, own = rows[here], own.filter(pa.array(here))
        folder.append(table.file, encoder.rows(rows, own))

    with tqdm(total=total, desc="export", unit="row", disable=hide_bar, leave=False) as bar:
        on_first_rank(processes, lambda: folder.append(table.file, encoder.begin()))
        for chunk in chunks_on_first_rank(shard, processes):
            on_first_rank(processes, partial(append, *chunk))
        on_first_rank(processes, lambda: folder.append(table.file, encoder.end()))


def _finish(
    session: Session,
    folder: ExportFolder,
    format: str,
    found: _Written,
    progress: TrainState,
    with_results: bool,
    card: Licences | None,
) -> None:
    store, description = session.store, found.description
    if format in OURS and "changes" not in description:
        load_scorer(folder.partial, description)  # what could not be loaded is not put in place
        calibration = Calibration.read(session.folder.path)
        if calibration and calibration.is_of(progress.global_step, store.fingerprint):
            calibration.write(folder.partial)
    description["checkpoint"] = {
        "name": name_of(progress),
        "epoch": progress.epoch,
        "step": progress.global_step,
        "data": progress.data,
    }
    results = session.folder.results
    if with_results and results.is_file():
        description["results"] = json.loads(results.read_text(encoding="utf-8"))
    if card is not None or format not in FORMATS:
        model, triples = session.config.model, store.report["triples"]
        name, licences = _data(session), card or Licences()
        facts = Facts(model, description, name, triples, licences, found.loading)
        folder.append(CARD, [text_of_card(facts).encode()])
        if format == "huggingface":
            folder.append(HUB_CONFIG, [hub_config(facts).encode()])
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

"""Memory of a rank, by part.

Exact are weights, optimizer state, average, cache, gradients (of a replicated table, or held
against all entities) and dense parameters. Expected: rows and ids (they follow the number of
different entities per batch), activations (see ``cost``) and batches. Measured or assumed: the
process itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kge_torchrec.config.registry import resolve
from kge_torchrec.data.batches.triples import device_bytes, fits_device
from kge_torchrec.embeddings.torchrec.planner import Bytes, table_memory
from kge_torchrec.planning.cost import Cost
from kge_torchrec.planning.layout import Setup, Shard
from kge_torchrec.planning.workload import RankBatch, Workload
from kge_torchrec.training.checkpoint_files import PIECE_BYTES

MIB = 1 << 20

PARTS = (
    "weights",
    "optimizer state",
    "average",
    "cache",
    "gradients",
    "parts on their way",
    "dense parameters",
    "rows and ids",
    "activations",
    "batches",
    "triples",
    "process",
)
TABLE_PARTS = PARTS[:6]
SHARED = ("triples",)  # mapped files: in every rank's memory, but once per host

# A CPU rank with the packages imported, its process group and compiled kernels, and the blocks of
# scores of the final ranking: measured, docs/how-to/plan.md says how.
CPU_PROCESS = 560 * MIB
# A CUDA rank's context, libraries and NCCL's buffers, and its host side: assumed, not measured.
CUDA_PROCESS = Bytes(device=1536 * MIB, main=3072 * MIB)

# A CPU process keeps freed blocks up to a size (environment.keep_large_blocks), and not all of them
# are used again. The factors are the measured growth over an epoch, relative to the bytes alive.
_KEPT_BLOCK = 32 * MIB
_GROWTH_KEPT, _GROWTH_RETURNED = 2.6, 1.25
IN_FLIGHT = 3  # batches that TorchRec's pipeline holds at once

RankMemory = dict[str, Bytes]


@dataclass(frozen=True)
class RankStep:
    """The memory and work of one rank in a step.

    Args:
        cost: Of scoring its largest micro-batch.
        exchanged: Bytes of the rows and ids that it holds while they go between ranks.
        batch: Bytes of a batch.
        looked_up: (M,) number of rows of each table that it reads for all ranks.
        updated: (M,) number of rows of each table that its optimizer updates.
        ids: Number of entities of its largest micro-batch, repeated ones included.
    """

    cost: Cost
    exchanged: float
    batch: float
    looked_up: np.ndarray
    updated: np.ndarray
    ids: float = 0


def table_parts(setup: Setup, shards: Sequence[Shard]) -> RankMemory:
    """Return the bytes of a rank's shards of the table by part."""
    parts: RankMemory = {}
    for shard in shards:
        for _, rows, form in setup.pieces(shard):
            for part, size in table_memory(rows, shard.columns, form, setup.is_cuda).items():
                parts[part] = parts.get(part, Bytes()) + size
    return parts


def free_memory(setup: Setup, shards: Sequence[Shard]) -> int:
    """Return the bytes of a GPU's memory beside a rank's process and shards; 0 on a CPU."""
    held = sum(table_parts(setup, shards).values(), CUDA_PROCESS).device
    return max(0, setup.cluster.device.memory - held)


def rank_memory(setup: Setup, shards: Sequence[Shard], step: RankStep) -> RankMemory:
    """Return the bytes of one rank by part, at the fullest moment of training.

    Args:
        setup: The run, the devices and the layout.
        shards: The rank's shards of the table.
        step: What the rank holds in a step.
    """
    workload, is_cuda = setup.workload, setup.is_cuda
    parts: RankMemory = {**dict.fromkeys(PARTS, Bytes()), **table_parts(setup, shards)}

    def computed(size: float) -> Bytes:
        return Bytes(**{setup.place: round(size)})

    growth = _GROWTH_KEPT if step.cost.largest_bytes < _KEPT_BLOCK else _GROWTH_RETURNED
    growth = 1.0 if is_cuda else growth
    rows = 4 * workload.dim * sum(shard.rows for shard in shards)
    of_features = 4 * workload.dim * workload.num_features
    if workload.is_full and (workload.config.train.accumulation > 1 or of_features):
        # The sum over micro-batches, or the gradients of vectors.
        parts["gradients"] += computed(rows)
    if setup.parts is not None:  # one is read ahead, and one is written
        share = 2 / setup.parts.places
        held = parts["weights"] + parts["optimizer state"]
        parts["parts on their way"] = Bytes(main=round(share * (held.main + held.device)))
    parts["dense parameters"] = setup.dense.memory(workload, is_cuda)
    # A CUDA graph keeps its memory, and the last batch of an epoch has its own.
    growth *= 2 if setup.captures else 1
    parts["rows and ids"] = computed(growth * step.exchanged)
    if workload.is_full and of_features:  # vectors, rows of features and their gradients
        parts["rows and ids"] += computed(rows + 2 * of_features)
    parts["activations"] = computed(growth * step.cost.peak_bytes)
    parts["batches"] = computed(IN_FLIGHT * step.batch)
    parts["triples"] = Bytes(main=store_bytes(workload))
    parts["process"] = CUDA_PROCESS if is_cuda else Bytes(main=CPU_PROCESS)
    parts["process"] += Bytes(main=data_bytes(workload))
    if is_cuda:  # a checkpoint copies one piece after another; a CPU writes them in place
        saved = parts["weights"] + parts["optimizer state"]
        parts["process"] += Bytes(main=min(PIECE_BYTES, saved.device + saved.main))
    others = sum(part.device for part in parts.values())
    parts["triples"] += Bytes(device=_triples_on_device(setup, others))
    return parts


def _triples_on_device(setup: Setup, others: int) -> int:
    """Return the bytes of the triples that a rank holds on its GPU to make batches there.

    Args:
        setup: The run, the devices and the layout.
        others: Bytes of all other parts on the GPU.
    """
    config, features = setup.workload.config, setup.workload.frequency.features
    sampler = resolve("negative_sampler", config.negatives.sampling)
    on_cpu = config.train.batches == "cpu" or sampler.on_cpu
    if not setup.is_cuda or config.negatives.regime != "sampled" or on_cpu:
        return 0
    entities = setup.workload.num_entities - setup.workload.num_features
    of_features = () if features is None else (entities, len(features.feature))
    size = device_bytes(config, setup.workload.num_triples, *of_features)
    memory = setup.cluster.device.memory
    free = memory * (1 - setup.layout.reserve) - others
    chosen = config.train.batches == "device" or fits_device(size, memory, free)
    return size if chosen else 0


def exchange_bytes(workload: Workload, wanted: float, served: float) -> float:
    """Return the bytes of a rank's rows, gradients and ids of a step with lookups.

    Rows are held as looked up for others and as received, gradients as sent and as received. Ids
    are held as given, grouped by owner, with the way back, and as received. Gradients of several
    micro-batches wait for the step, which puts them together; clipping sums those of a row.

    Args:
        workload: The run.
        wanted: Number of rows that the rank looks up.
        served: Number of its rows that all ranks look up.
    """
    train, parts = workload.config.train, workload.micro_batches
    rows = 2 * (wanted / parts + served / parts)
    if parts > 1:
        rows += 2 * served
    if train.clips:
        rows += served
    return 4 * workload.dim * rows + 8 * (3 * (wanted / parts) + served / parts)


def batch_bytes(workload: Workload, batch: RankBatch) -> float:
    """Return the bytes of a batch: positions, ids, relations, weights, the mask of candidates.

    A pair of an entity and a feature has two positions and a weight.
    """
    entities = 2 * batch.chunks * batch.triples + batch.negatives
    queries = batch.chunks * batch.triples
    mask = 0
    if workload.config.negatives.masks_candidates:
        mask = queries * sum(workload.candidates.values())
    places = entities + batch.distinct + queries
    return 8 * places + 4 * queries + mask + 20 * batch.pairs


def sums_bytes(workload: Workload, batch: RankBatch) -> float:
    """Return the bytes of the vectors of entities with features, and of the rows of their pairs.

    The rows of a pair are held as looked up and times its weight.
    """
    if not workload.num_features:
        return 0
    return 4 * workload.dim * (batch.distinct + 2 * batch.pairs)


def fetched_bytes(workload: Workload) -> int:
    """Return the bytes of F fetched rows, their gradients, sums of own rows, and places."""
    return workload.of_micro_batch(workload.fetched) * (4 * 3 * workload.dim + 8 * 3)


def query_bytes(workload: Workload) -> int:
    """Return the bytes of anchors, relations and answers of Q queries, with one answer each."""
    return 8 * 4 * workload.queries


def store_bytes(workload: Workload) -> int:
    """Return the bytes of the store that training reads again and again: triples and filter index.

    The filter index of a side has an id per triple, and 16 bytes per query. A triple has at most
    one query of its own.
    """
    negatives, id_bytes = workload.config.negatives, 4 if workload.num_entities < 1 << 31 else 8
    ids = workload.num_triples * id_bytes
    triples = 3 * ids if negatives.regime in ("sampled", "1vsall") else 0
    is_indexed = negatives.filtered or negatives.examples == "queries"
    index = len(workload.sides) if is_indexed else 0
    return triples + (ids + 16 * workload.num_triples) * index


def data_bytes(workload: Workload) -> int:
    """Return the bytes with which each rank draws entities and finds triples.

    To draw by degree takes 8 bytes per entity. Where the table lies on disk, the numbers of the
    triples take 4 bytes each.
    """
    size = 0
    if workload.negative_power is not None and not workload.is_full:
        size += 8 * workload.num_entities
    if workload.config.entities.on_disk:  # numbers of triples, sorted by stage
        size += 4 * workload.num_triples
    return size

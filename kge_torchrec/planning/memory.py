"""What fills a rank's memory, part by part.

Exact: weights, optimizer state, cache, gradients of a replicated table or held against all
entities, dense parameters.
Expected: rows and ids (they follow the number of different entities of a batch), activations (the
objective is watched, see ``objective_cost``), batches.  Measured or assumed: the process itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kge_torchrec.data.compiled_index import STEP as QUERY_STEP
from kge_torchrec.data.negatives import STEP as DEGREE_STEP
from kge_torchrec.embeddings.chunks import CHUNK_BYTES
from kge_torchrec.embeddings.torchrec.planned import Shard
from kge_torchrec.embeddings.torchrec.planner import Bytes, table_memory
from kge_torchrec.planning.choice import Choice
from kge_torchrec.planning.devices import Cluster
from kge_torchrec.planning.layout import DenseLayout
from kge_torchrec.planning.operations import Cost
from kge_torchrec.planning.workload import RankBatch, Workload

MIB = 1 << 20

# In the order in which pictures stack them.
PARTS = (
    "weights",
    "optimizer state",
    "cache",
    "gradients",
    "dense parameters",
    "rows and ids",
    "activations",
    "batches",
    "triples",
    "process",
)
TABLE_PARTS = PARTS[:4]
SHARED = ("triples",)  # mapped files: in every rank's memory, but once on a host

# A CPU rank with the packages imported, its process group and compiled kernels, and the blocks of
# scores of the final ranking: measured, docs/how-to/plan.md says how.
CPU_PROCESS = 560 * MIB
# A CUDA rank's context, libraries and NCCL's buffers, and its host side: assumed, not measured.
CUDA_PROCESS = Bytes(device=1536 * MIB, main=3072 * MIB)

# A CPU process keeps the blocks that a step has freed up to a size (environment.keep_large_blocks),
# and not all of them serve again: measured as the growth over an epoch against the bytes alive.
_KEPT_BLOCK = 32 * MIB
_GROWTH_KEPT, _GROWTH_RETURNED = 2.6, 1.25
IN_FLIGHT = 3  # batches that TorchRec's pipeline holds at once

RankMemory = dict[str, Bytes]


@dataclass(frozen=True)
class Exchange:
    """Rows that a rank's step moves: asked for by it, and asked of it by all ranks."""

    wanted: float
    asked: float


def rank_memory(
    workload: Workload,
    cluster: Cluster,
    choice: Choice,
    shards: Sequence[Shard],
    cost: Cost,
    moved: float,
    batch: float,
) -> RankMemory:
    """Bytes of one rank by part, at the fullest moment of training.

    shards: those of this rank.  cost: of its largest micro-batch.  moved, batch: bytes of the rows
    that go between ranks, and of a batch.
    """
    is_cuda = cluster.device.is_cuda
    form = choice.form(workload)
    parts: RankMemory = dict.fromkeys(PARTS, Bytes())
    for shard in shards:
        for part, size in table_memory(shard.rows, shard.columns, form, is_cuda).items():
            parts[part] += size

    growth = 1.0 if is_cuda else _growth(cost)
    dense = DenseLayout.of(workload.config.dense, cluster)
    numbers = workload.dense_parameters
    parts["dense parameters"] = dense.memory(numbers, workload.optimizer, is_cuda)
    parts["rows and ids"] = on_device(cluster, growth * moved)
    parts["activations"] = on_device(cluster, growth * cost.peak_bytes)
    parts["batches"] = on_device(cluster, IN_FLIGHT * batch)
    parts["triples"] = Bytes(main=store_bytes(workload))
    parts["process"] = CUDA_PROCESS if is_cuda else Bytes(main=CPU_PROCESS)
    parts["process"] += Bytes(main=data_bytes(workload))
    if is_cuda:  # a checkpoint copies one piece after another; a CPU writes them as they are
        saved = parts["weights"].device + parts["optimizer state"].device
        parts["process"] += Bytes(main=min(CHUNK_BYTES, saved))
    return parts


def on_device(cluster: Cluster, size: float) -> Bytes:
    """Bytes where a rank computes."""
    return Bytes(device=round(size)) if cluster.device.is_cuda else Bytes(main=round(size))


def _growth(cost: Cost) -> float:
    """Bytes that a CPU process holds for each byte that its steps have alive."""
    return _GROWTH_KEPT if cost.largest_bytes < _KEPT_BLOCK else _GROWTH_RETURNED


def exchange_bytes(workload: Workload, exchange: Exchange) -> float:
    """Rows looked up for others and received, gradients sent and received, and their ids.

    Ids are held as given, grouped by owner, with the way back, and as received.  Gradients of
    several micro-batches wait for the step, where they are put together; clipping sums those of a
    row.
    """
    train = workload.config.train
    wanted, asked = exchange.wanted / train.accumulation, exchange.asked / train.accumulation
    rows = 2 * (wanted + asked)
    if train.accumulation > 1:
        rows += 2 * exchange.asked
    if train.clip_norm is not None or train.clip_value is not None:
        rows += exchange.asked
    return 4 * workload.dim * rows + 8 * (3 * wanted + asked)


def batch_bytes(workload: Workload, batch: RankBatch) -> float:
    """Positions, ids, relations and weights of a batch, and the mask of its candidates."""
    queries = batch.chunks * batch.triples
    mask = 0
    if workload.config.negatives.masks_candidates:
        mask = queries * sum(workload.candidates.values())
    return 8 * (batch.lookups + batch.distinct + queries) + 4 * queries + mask


def store_bytes(workload: Workload) -> int:
    """Pages of the store that training reads again and again: triples, filter index, degrees.

    An index of a side has two ids a triple, and a number of 8 bytes an entity; those of both sides
    are the degrees.
    """
    negatives, ids = workload.config.negatives, workload.num_triples * _id_bytes(workload)
    triples = index = 0
    if negatives.regime in ("sampled", "1vsall"):
        triples = 3 * ids
    if negatives.filtered or negatives.examples == "queries":
        index = len(workload.sides)
    pointers = 2 if _draws_by_degree(workload) else index
    return triples + 2 * ids * index + 8 * workload.num_entities * pointers


def data_bytes(workload: Workload) -> int:
    """What each rank holds of the data besides its batches: how to find queries and draw entities.

    A number of 8 bytes for every 512 triples of a side, and for every 64 entities.
    """
    size = 0
    if workload.config.negatives.regime in ("kvsall", "kvssample"):
        size += 8 * len(workload.sides) * workload.num_triples // QUERY_STEP
    if _draws_by_degree(workload):
        size += 8 * workload.num_entities // DEGREE_STEP
    return size


def _draws_by_degree(workload: Workload) -> bool:
    return workload.negative_power is not None and not workload.config.negatives.is_full


def _id_bytes(workload: Workload) -> int:
    """Of an id in the store."""
    return 4 if workload.num_entities < 1 << 31 else 8

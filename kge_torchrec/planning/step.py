"""Memory of a rank, and traffic and time of a step.

Of the memory are exact: weights, optimizer state, average, cache, gradients (of a replicated table,
or held against all entities) and dense parameters. Expected: rows and ids (they follow the number
of different entities per batch), activations (see ``cost``) and batches. Measured or assumed: the
process itself.

TorchRec's sequence embeddings send ids to the ranks that hold their rows (int64, with their number
per rank), rows back (float32 whatever the table's type) and gradients of rows home (float32). Rows
are assumed to be looked up on the ranks in proportion to the rows that they hold. Against all
entities the rows of the queries' anchors and their gradients are summed over the ranks instead. The
collectives of dense parameters and of replicas are rings: each rank sends to the next one, on its
host or not. Bytes that a rank keeps for itself are not sent.

The time is a model, not a measurement: bytes and operations over the device's speeds, one part
after another. Nothing overlaps, every device reaches the same share of its data sheet, and ranks
are even. The model shows what a step's time consists of and compares layouts, on the slowest rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kge_torchrec.data.batches.resident import DEVICE_SHARE, device_bytes
from kge_torchrec.data.negatives import STEP as DEGREE_STEP
from kge_torchrec.data.store.search import STEP as QUERY_STEP
from kge_torchrec.embeddings.chunks import CHUNK_BYTES
from kge_torchrec.embeddings.exchange import travel_bytes
from kge_torchrec.embeddings.optimizers import optimizer_class
from kge_torchrec.embeddings.torchrec.planned import Shard
from kge_torchrec.embeddings.torchrec.planner import DENSE, FUSED, UVM_CACHING, Bytes, table_memory
from kge_torchrec.planning.cost import Cost
from kge_torchrec.planning.devices import Cluster
from kge_torchrec.planning.layout import Setup
from kge_torchrec.planning.workload import RankBatch, Workload

KINDS = ("ids", "rows", "gradients", "dense", "replicas")
# Integers per pair of ranks that announce the ids. TorchRec sends the counts of lengths and values,
# the batch size, then the length. On a CPU, distinct ids are sent directly.
_COUNTS, _DIRECT_COUNTS = 4, 1

EFFICIENCY = 0.7  # share of the data sheet's bandwidths and operations that programs reach
# Collectives of lookups: sizes, lengths, ids, rows, gradients. Dense parameters add their own.
COLLECTIVES = 5
# Against all entities: anchors, partial statistics of the losses, gradients of anchors and dense
# ones.
_FULL_COLLECTIVES = 4
LATENCY = {"within": 2e-5, "between": 6e-5}  # seconds until a collective's first byte
PYTHON = 2e-3  # seconds of Python in a step, most of it TorchRec's pipeline
# A batch that a CPU makes takes a fixed time and one per id that it has (measured on one core).
_MAKING, _MAKING_ID = 4e-4, 1.15e-7
_MAKERS = 2  # threads that make batches beside the one that trains: assumed
_STARTED_BY_MAKER = 40  # operations of a batch that a GPU makes, by a count of ``ResidentBatches``
# What the parts of a step keep busy.
RESOURCES = {
    "host": ("starting operations", "starting collectives", "starting batches"),
    "loader": ("making batches",),
    "device": ("lookup", "scoring", "table optimizer"),
    "links": (
        "exchange of ids",
        "exchange of rows",
        "exchange of gradients",
        "dense gradients",
        "averaging replicas",
    ),
}
# Parts that take the same time whatever the batch, in the layouts that training has.
FIXED = (*RESOURCES["host"], "dense gradients", "averaging replicas")


class Traffic:
    """Bytes that each rank sends to each other rank in a step.

    Attributes:
        sent: Per kind (W, W), from the rank of the row to the rank of the column.
    """

    def __init__(self, cluster: Cluster) -> None:
        size = cluster.world_size
        hosts = np.arange(size) // cluster.local_world_size
        self._within = (hosts[:, None] == hosts) & ~np.eye(size, dtype=bool)
        self._between = hosts[:, None] != hosts
        self.sent = {kind: np.zeros((size, size)) for kind in KINDS}

    def of_ranks(self, kind: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (W,) bytes that each rank sends within its host, and to other hosts."""
        sent = self.sent[kind]
        return (sent * self._within).sum(1), (sent * self._between).sum(1)

    def total(self, kind: str | None = None) -> tuple[float, float]:
        """Return (within, between) hosts summed over all ranks, of one kind or of all."""
        pairs = [self.of_ranks(k) for k in (KINDS if kind is None else (kind,))]
        return float(sum(w.sum() for w, _ in pairs)), float(sum(b.sum() for _, b in pairs))

    def ring(self, kind: str, size: float, ranks: np.ndarray | None = None) -> None:
        """Add ``size`` bytes that each of some ranks (default: all) sends to the next one."""
        ranks = np.arange(len(self._within)) if ranks is None else ranks
        self.sent[kind][ranks, np.roll(ranks, -1)] += size

    def all_reduce(self, kind: str, size: float, ranks: np.ndarray | None = None) -> None:
        """Add an all-reduce of ``size`` bytes: each rank sends 2 (n - 1) / n of them."""
        count = len(self._within) if ranks is None else len(ranks)
        self.ring(kind, 2 * (count - 1) / count * size, ranks)


def looked_up(setup: Setup, shards: Sequence[Shard], wanted: np.ndarray) -> np.ndarray:
    """Return (2, W, W) ids that each rank sends to each, and elements that the answers have.

    Args:
        setup: The run, the devices and the layout.
        shards: Of all ranks.
        wanted: (W,) rows that each rank looks up.
    """
    size = setup.cluster.world_size
    shares, exchanged = np.zeros((2, size)), np.zeros((2, size, size))
    for shard in shards:
        share = shard.rows / setup.workload.num_entities
        shares[:, shard.rank] += share, share * shard.columns
    for group in setup.groups:
        exchanged[:, group[:, None], group] = wanted[group][:, None] * shares[:, None, group]
    return exchanged


def lookup_traffic(setup: Setup, lookups: np.ndarray, table_bytes: Sequence[float]) -> Traffic:
    """Return the traffic of a step with lookups.

    Args:
        setup: The run, the devices and the layout.
        lookups: (2, W, W) from ``looked_up``.
        table_bytes: Per rank, values and optimizer state, which 2-D replicas average.
    """
    workload, layout, traffic = setup.workload, setup.layout, Traffic(setup.cluster)
    ids, elements = lookups
    is_direct = not setup.is_cuda and workload.config.entities.deduplicate
    counts = (_DIRECT_COUNTS if is_direct else _COUNTS) * workload.micro_batches
    traffic.sent["ids"] += 8 * ids
    for group in setup.groups:
        traffic.sent["ids"][group[:, None], group] += 8 * counts
    answers = travel_bytes(workload.config.entities.exchange_dtype, ids, elements)
    traffic.sent["gradients"] += answers
    traffic.sent["rows"] += answers.T
    if layout.is_replicated:
        traffic.all_reduce("gradients", 4 * workload.num_entities * workload.dim)
    dense, numbers = setup.dense, workload.dense_parameters
    if dense.is_sharded:  # parameters are gathered per micro-batch, gradients travel at the last
        _send_parts(traffic, setup, dense.gathers * workload.micro_batches + 1)
    for copies in np.arange(setup.cluster.world_size).reshape(-1, dense.splits).T:
        traffic.all_reduce("dense", 4 * numbers / dense.splits, copies)
    if layout.replicas > 1:  # the mean of values and state, spread over the steps between
        for group in np.arange(setup.cluster.world_size).reshape(layout.replicas, -1).T:
            traffic.all_reduce("replicas", table_bytes[group[0]] / layout.sync_every, group)
    return traffic


def full_traffic(setup: Setup) -> Traffic:
    """Return the traffic of a step against all entities."""
    workload, traffic = setup.workload, Traffic(setup.cluster)
    for kind in ("rows", "gradients"):
        count = workload.fetched + workload.num_features
        traffic.all_reduce(kind, 4 * count * workload.dim)
    if setup.dense.is_sharded:  # parameters are gathered once, gradients are summed whole
        _send_parts(traffic, setup, 1)
    traffic.all_reduce("dense", 4 * workload.dense_parameters)
    traffic.ring("rows", 8 * 3 * workload.queries * (setup.cluster.world_size - 1))
    return traffic


def _send_parts(traffic: Traffic, setup: Setup, passes: int) -> None:
    """Add all parts of the dense parameters, ``passes`` times around the ranks of each copy."""
    splits = setup.dense.splits
    size = passes * (splits - 1) * 4 * setup.workload.dense_parameters / splits
    for group in np.arange(setup.cluster.world_size).reshape(-1, splits):
        traffic.ring("dense", size, group)


def step_time(
    setup: Setup,
    step: RankStep,
    columns: float,
    traffic: Traffic,
    cache_hits: float,
    makes_batches: bool,
) -> dict[str, float]:
    """Return the seconds of each part of a step.

    Args:
        setup: The run, the devices and the layout.
        step: Of the rank that updates most rows.
        columns: Mean number of columns of that rank's shards.
        traffic: What all ranks send.
        cache_hits: Share of the rows that a cache holds.
        makes_batches: Whether a GPU makes its batches.
    """
    workload, form, micro_batches = setup.workload, setup.form, setup.workload.micro_batches
    local, values, _ = _row_speeds(setup, cache_hits)
    read, sent = columns * form.value_bytes / values, 4 * columns / local  # sent as float32
    times = {
        "lookup": step.looked_up * (read + sent),
        "scoring": micro_batches * _scoring_seconds(setup, step.cost),
        "table optimizer": _optimizer_seconds(setup, step.updated, columns, cache_hits),
        "starting operations": micro_batches
        * (step.cost.operations * setup.cluster.device.launch + PYTHON),
    }
    if makes_batches:
        times["starting batches"] = micro_batches * _STARTED_BY_MAKER * setup.cluster.device.launch
    elif step.ids:
        makers = _MAKERS if setup.is_cuda else 1
        times["making batches"] = micro_batches * (_MAKING + step.ids * _MAKING_ID) / makers
    if setup.cluster.world_size > 1:
        latency = LATENCY["between" if setup.cluster.hosts > 1 else "within"]
        collectives = (
            _FULL_COLLECTIVES if workload.is_full else COLLECTIVES + _dense_collectives(setup)
        )
        times["starting collectives"] = micro_batches * collectives * latency
    for name, kind in {
        "exchange of ids": "ids",
        "exchange of rows": "rows",
        "exchange of gradients": "gradients",
        "dense gradients": "dense",
        "averaging replicas": "replicas",
    }.items():
        times[name] = _sending_seconds(setup, traffic, kind)
    return {name: seconds for name, seconds in times.items() if seconds}


def _dense_collectives(setup: Setup) -> int:
    """Return the collectives per step: an all-reduce, or gathers, a scatter and a sum of copies."""
    dense = setup.dense
    if not dense.is_sharded:
        return 1
    return dense.gathers + (2 if setup.cluster.world_size > dense.splits else 1)


def _speed(setup: Setup) -> float:
    """Return the share of the data sheet's speeds that a rank has; a CPU's ranks share them."""
    return EFFICIENCY / (1 if setup.is_cuda else setup.cluster.local_world_size)


def _scoring_seconds(setup: Setup, cost: Cost) -> float:
    """Return the seconds of arithmetic, and of the bytes that all other operations move."""
    device, train = setup.cluster.device, setup.workload.config.train
    flops = device.flops
    if train.precision != "fp32":
        flops = device.flops_16bit
    elif train.tf32 and device.is_cuda:  # half as fast as 16 bits
        flops = max(flops, device.flops_16bit / 2)
    speed = _speed(setup)
    return cost.flops / (flops * speed) + cost.moved_bytes / (device.memory_bandwidth * speed)


def _row_speeds(setup: Setup, cache_hits: float) -> tuple[float, float, float]:
    """Return the bytes per second of single rows on the device, of the table and of its state.

    Rows in main memory pass the host's link; cached values do when they are missed.
    """
    device, form, speed = setup.cluster.device, setup.form, _speed(setup)
    local = values = state = device.gather_bandwidth
    if device.is_cuda:
        link, in_main = device.host_link, form.kernel not in (FUSED, DENSE)
        if in_main:
            hits = cache_hits if form.kernel == UVM_CACHING else 0.0
            values = 1 / (hits / local + (1 - hits) / link)
        by_row_only = not optimizer_class(form.optimizer).state_numbers()[0]  # stays on the GPU
        if form.state_in_main if not in_main else not by_row_only:
            state = link
    return local * speed, values * speed, state * speed


def _optimizer_seconds(setup: Setup, rows: float, columns: float, cache_hits: float) -> float:
    """Return the seconds to update rows: read gradients in float32, read and write the rest."""
    form = setup.form
    per_element, by_row = setup.state_numbers
    if form.kernel == DENSE:  # the whole table and its gradient, every step
        moved = (
            setup.workload.num_entities
            * setup.workload.dim
            * (3 * form.value_bytes + 8 * per_element)
        )
        return moved / (setup.cluster.device.memory_bandwidth * _speed(setup))
    local, values, state = _row_speeds(setup, cache_hits)
    value_bytes = columns * form.value_bytes
    state_bytes = form.state_bytes * (per_element * columns + by_row)
    return rows * (4 * columns / local + 2 * value_bytes / values + 2 * state_bytes / state)


def _sending_seconds(setup: Setup, traffic: Traffic, kind: str) -> float:
    """Return the seconds until the last rank has sent its bytes of a kind; both ways at once."""
    device, (within, between) = setup.cluster.device, traffic.of_ranks(kind)
    return float(np.max(within / device.within_host + between / device.between_hosts)) / EFFICIENCY


MIB = 1 << 20

# In the order in which pictures stack them.
PARTS = (
    "weights",
    "optimizer state",
    "average",
    "cache",
    "gradients",
    "dense parameters",
    "rows and ids",
    "activations",
    "batches",
    "triples",
    "process",
)
TABLE_PARTS = PARTS[:5]
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
        looked_up: Number of rows that it reads for all ranks.
        updated: Number of rows that its table optimizer updates.
        ids: Number of entities of its largest micro-batch, repeated ones included.
    """

    cost: Cost
    exchanged: float
    batch: float
    looked_up: float
    updated: float
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
    if workload.is_full and (workload.config.train.needs_whole_gradient or of_features):
        # Rows step only when the gradients of all rows are known.
        parts["gradients"] += computed(rows)
    parts["dense parameters"] = setup.dense.memory(workload, is_cuda)
    parts["rows and ids"] = computed(growth * step.exchanged)
    if workload.is_full and of_features:  # vectors, rows of features and their gradients
        parts["rows and ids"] += computed(rows + 2 * of_features)
    parts["activations"] = computed(growth * step.cost.peak_bytes)
    parts["batches"] = computed(IN_FLIGHT * step.batch)
    parts["triples"] = Bytes(main=store_bytes(workload))
    parts["process"] = CUDA_PROCESS if is_cuda else Bytes(main=CPU_PROCESS)
    parts["process"] += Bytes(main=data_bytes(workload))
    if is_cuda:  # a checkpoint copies one piece after another; a CPU writes them in place
        saved = parts["weights"].device + parts["optimizer state"].device
        parts["process"] += Bytes(main=min(CHUNK_BYTES, saved))
    others = sum(part.device for part in parts.values())
    parts["triples"] += Bytes(device=_triples_on_device(setup, others))
    return parts


def _triples_on_device(setup: Setup, others: int) -> int:
    """Return the bytes of the triples that a rank holds on its GPU to make batches there.

    Args:
        setup: The run, the devices and the layout.
        others: Bytes of all other parts on the GPU.
    """
    config = setup.workload.config
    on_cpu = config.train.batches == "cpu" or setup.workload.num_features  # as ResidentBatches
    if not setup.is_cuda or config.negatives.regime != "sampled" or on_cpu:
        return 0
    size = device_bytes(config, setup.workload.num_triples)
    memory = setup.cluster.device.memory
    free = memory * (1 - setup.layout.reserve) - others
    chosen = config.train.batches == "device" or size <= min(memory * DEVICE_SHARE, free / 2)
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
    if train.clip_norm is not None or train.clip_value is not None:
        rows += served
    return 4 * workload.dim * rows + 8 * (3 * (wanted / parts) + served / parts)


def batch_bytes(workload: Workload, batch: RankBatch) -> float:
    """Return the bytes of a batch: positions, ids, relations, weights, the mask of candidates.

    A pair of an entity and a feature has two positions and a weight.
    """
    queries = batch.chunks * batch.triples
    mask = 0
    if workload.config.negatives.masks_candidates:
        mask = queries * sum(workload.candidates.values())
    places = batch.lookups - batch.features + batch.distinct + queries
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
    """Return the bytes of the store that training reads again and again: triples, index, degrees.

    The filter index of a side has two ids per triple, and a number of 8 bytes per entity. The
    numbers of both sides together are the degrees.
    """
    negatives, id_bytes = workload.config.negatives, 4 if workload.num_entities < 1 << 31 else 8
    ids = workload.num_triples * id_bytes
    triples = 3 * ids if negatives.regime in ("sampled", "1vsall") else 0
    is_indexed = negatives.filtered or negatives.examples == "queries"
    index = len(workload.sides) if is_indexed else 0
    pointers = 2 if _draws_by_degree(workload) else index
    return triples + 2 * ids * index + 8 * workload.num_entities * pointers


def data_bytes(workload: Workload) -> int:
    """Return the bytes with which each rank finds queries and draws entities.

    That is a number of 8 bytes per 512 triples of a side, and per 64 entities.
    """
    size = 0
    if workload.config.negatives.regime in ("kvsall", "kvssample"):
        size += 8 * len(workload.sides) * workload.num_triples // QUERY_STEP
    if _draws_by_degree(workload):
        size += 8 * workload.num_entities // DEGREE_STEP
    return size


def _draws_by_degree(workload: Workload) -> bool:
    return workload.negative_power is not None and not workload.is_full

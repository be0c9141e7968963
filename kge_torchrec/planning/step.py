"""Traffic and time of a step.

TorchRec's sequence embeddings send ids to the ranks that hold their rows (int64, with their number
per rank), rows back and gradients of rows home (in entities.exchange.dtype). Rows of a table are
assumed to be looked up on the ranks in proportion to the rows of it that they hold.

Against all entities the rows of the queries' anchors and their gradients are summed over the ranks
instead. The collectives of dense parameters are rings: each rank sends to the next one, on its host
or not. Bytes that a rank keeps for itself are not sent.

The time is a model, not a measurement: bytes and operations over the device's speeds. Every device
reaches the same share of its data sheet. ``TrainingPlan.step_seconds`` says which parts overlap.
The model shows what a step's time consists of and compares layouts, on the slowest rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kge_torchrec.embeddings.exchange import travel_bytes
from kge_torchrec.embeddings.optimizers import optimizer_class
from kge_torchrec.embeddings.torchrec.planner import DENSE, UVM_CACHING, TableForm
from kge_torchrec.planning.cost import Cost
from kge_torchrec.planning.devices import Cluster
from kge_torchrec.planning.layout import Setup, Shard
from kge_torchrec.planning.memory import RankStep

KINDS = ("ids", "rows", "gradients", "dense")
# Integers per pair of ranks that announce the ids. TorchRec sends the counts of lengths and values,
# the batch size, then the length. The hand-rolled engine sends one.
_COUNTS, _DIRECT_COUNTS = 4, 1

EFFICIENCY = 0.7  # share of the data sheet's bandwidths and operations that programs reach
# The same of kernels on a GPU: a step of 65,536 triples of ComplEx took an H200 4.1 to 4.3 ms.
GPU_EFFICIENCY = 0.55
# The same of Ethernet between hosts by gloo: 2 ranks reached 90 %, 4 ranks 80 % over emulated links
# of 100 and 1,000 Mbit/s.
ETHERNET_EFFICIENCY = 0.85
# Collectives of lookups: sizes, lengths, ids, rows, gradients. Dense parameters add their own.
COLLECTIVES = 5
# Against all entities: anchors, partial statistics of the losses, gradients of anchors and dense
# ones.
_FULL_COLLECTIVES = 4
LATENCY = {"within": 2e-5, "between": 6e-5}  # seconds until a collective's first byte
# Seconds of each further message of an all-to-all: of gloo measured, of NCCL assumed.
_MESSAGE, _MESSAGE_GPU = 1e-4, 1e-6
# Seconds of one hop of NCCL's trees, within a host and between hosts: NCCL's src/graph/tuning.cc.
_HOP = {"within": 1.2e-6, "between": 8.5e-6}
# Seconds of Python in a step, most of it TorchRec's and FBGEMM's (measured beside an H200).
PYTHON = 3.6e-3
# With a CUDA graph: lookup, updates, copies of the batch and the graph; and their Python.
OUTSIDE_GRAPH, PYTHON_OUTSIDE = 33, 2e-3
# A batch that a CPU makes takes a fixed time and one per id that it has (measured on one core).
_MAKING, _MAKING_ID = 4e-4, 1.15e-7
_MAKERS = 2  # threads that make batches beside the one that trains: assumed
STARTED_BY_MAKER = 39  # operations of a batch that a GPU makes, by a count of ``TripleBatches``
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
    ),
}
# Parts that take the same time whatever the batch, in the layout that training has.
FIXED = (*RESOURCES["host"], "dense gradients")


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

    def of_ranks(self, kind: str, received: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return (W,) bytes that each rank sends (receives) within its host, and between hosts."""
        sent, axis = self.sent[kind], 0 if received else 1
        return (sent * self._within).sum(axis), (sent * self._between).sum(axis)

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


@dataclass(frozen=True)
class Lookups:
    """The rows that all ranks look up in a step.

    Args:
        exchanged: (2, W, W) ids that each rank sends to each, and elements that the answers have.
        served: (M, W) rows of each table that a rank reads for all ranks.
        sent: (M,) rows of each table that travel to another rank.
    """

    exchanged: np.ndarray
    served: np.ndarray
    sent: np.ndarray

    @classmethod
    def of(cls, setup: Setup, shards: Sequence[Shard], wanted: np.ndarray) -> Lookups:
        """Return the lookups of a layout.

        Args:
            setup: The run, the devices and the layout.
            shards: Of all ranks.
            wanted: (M, W) rows of each table that each rank looks up.
        """
        tables, size = wanted.shape
        shares, exchanged = np.zeros((2, tables, size)), np.zeros((2, size, size))
        totals = [max(1, len(ids)) for _, ids, _ in setup.forms]
        for shard in shards:
            share = setup.rows_by_table(shard) / totals
            shares[:, :, shard.rank] += share, share * shard.columns
        served = np.zeros((tables, size))
        for group in setup.groups:
            exchanged[:, group[:, None], group] = wanted[:, group].T @ shares[:, :, group]
            served[:, group] = wanted[:, group].sum(1, keepdims=True) * shares[0, :, group].T
        return cls(exchanged, served, (served - wanted * shares[0]).sum(1))


def lookup_traffic(setup: Setup, lookups: Lookups) -> Traffic:
    """Return the traffic of a step with lookups."""
    workload, traffic = setup.workload, Traffic(setup.cluster)
    ids, elements = lookups.exchanged
    engine = workload.config.entities.engine
    counts = (_COUNTS if engine == "torchrec" else _DIRECT_COUNTS) * workload.micro_batches
    traffic.sent["ids"] += 8 * ids
    for group in setup.groups:
        traffic.sent["ids"][group[:, None], group] += 8 * counts
    answers = travel_bytes(workload.config.entities.exchange.dtype, ids, elements)
    traffic.sent["gradients"] += answers
    traffic.sent["rows"] += answers.T
    if setup.layout.is_replicated:
        traffic.all_reduce("gradients", 4 * workload.num_entities * workload.dim)
    dense, numbers = setup.dense, workload.dense_parameters
    if dense.is_sharded:  # parameters are gathered per micro-batch, gradients travel at the last
        _send_parts(traffic, setup, dense.gathers * workload.micro_batches + 1)
    for copies in np.arange(setup.cluster.world_size).reshape(-1, dense.splits).T:
        traffic.all_reduce("dense", 4 * numbers / dense.splits, copies)
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


def table_seconds(
    setup: Setup, step: RankStep, columns: float, cache_hits: float
) -> dict[str, list[float]]:
    """Return the seconds of each table (M) for "lookup" and "table optimizer".

    Args:
        setup: The run, the devices and the layout.
        step: Of the rank that updates most rows.
        columns: Mean number of columns of that rank's shards.
        cache_hits: Share of the rows that a cache holds.
    """
    times: dict[str, list[float]] = {"lookup": [], "table optimizer": []}
    for (_, ids, form), read, updated in zip(
        setup.forms, step.looked_up, step.updated, strict=True
    ):
        speeds = _row_speeds(setup, form, cache_hits)
        local, values, _ = speeds
        row = 4 * columns / values + 4 * columns / local
        times["lookup"].append(read * row)
        seconds = _optimizer_seconds(setup, form, len(ids), updated, columns, speeds)
        times["table optimizer"].append(seconds)
    return times


def step_time(
    setup: Setup,
    step: RankStep,
    of_tables: dict[str, list[float]],
    traffic: Traffic,
    makes_batches: bool,
) -> dict[str, float]:
    """Return the seconds of each part of a step.

    Args:
        setup: The run, the devices and the layout.
        step: Of the rank that updates most rows.
        of_tables: Of ``table_seconds``.
        traffic: What all ranks send.
        makes_batches: Whether a GPU makes its batches.
    """
    micro_batches = setup.workload.micro_batches
    started, python = step.cost.operations, PYTHON
    if setup.captures:
        started, python = OUTSIDE_GRAPH, PYTHON_OUTSIDE
    times = {
        **{part: sum(seconds) for part, seconds in of_tables.items()},
        "scoring": micro_batches * _scoring_seconds(setup, step.cost),
        "starting operations": micro_batches * (started * setup.cluster.device.launch + python),
    }
    if makes_batches:
        times["starting batches"] = micro_batches * STARTED_BY_MAKER * setup.cluster.device.launch
    elif step.ids:
        makers = _MAKERS if setup.is_cuda else 1
        times["making batches"] = micro_batches * (_MAKING + step.ids * _MAKING_ID) / makers
    if setup.cluster.world_size > 1:
        times["starting collectives"] = micro_batches * _starting_seconds(setup)
    for name, kind in {
        "exchange of ids": "ids",
        "exchange of rows": "rows",
        "exchange of gradients": "gradients",
        "dense gradients": "dense",
    }.items():
        times[name] = _sending_seconds(setup, traffic, kind)
    return {name: seconds for name, seconds in times.items() if seconds}


def _starting_seconds(setup: Setup) -> float:
    """Return the seconds of a micro-batch's collectives that do not depend on their sizes.

    An all-to-all sends a message to every other rank. NCCL sums along trees, gloo around a ring.
    """
    cluster = setup.cluster
    place = "between" if cluster.hosts > 1 else "within"
    others = cluster.world_size - 2  # a first message and a first hop are in the latency
    exchanges, sums = COLLECTIVES, _dense_collectives(setup)
    if setup.workload.is_full:
        exchanges, sums = 0, _FULL_COLLECTIVES
    if setup.is_cuda:
        hops = (cluster.local_world_size - 1, math.log2(cluster.hosts))
        message, hop = _MESSAGE_GPU, 2 * float(np.dot(hops, list(_HOP.values())))
    else:
        message, hop = _MESSAGE, 2 * others * LATENCY[place]
    return (exchanges + sums) * LATENCY[place] + exchanges * others * message + sums * hop


def _dense_collectives(setup: Setup) -> int:
    """Return the collectives per step: an all-reduce, or gathers, a scatter and a sum of copies."""
    dense = setup.dense
    if not dense.is_sharded:
        return 1
    return dense.gathers + (2 if setup.cluster.world_size > dense.splits else 1)


def _speed(setup: Setup) -> float:
    """Return the share of the data sheet's speeds that a rank has; a CPU's ranks share them."""
    return GPU_EFFICIENCY if setup.is_cuda else EFFICIENCY / setup.cluster.local_world_size


def _scoring_seconds(setup: Setup, cost: Cost) -> float:
    """Return the seconds of arithmetic, and of the bytes that all other operations move."""
    device, train = setup.cluster.device, setup.workload.config.train
    flops = device.flops
    if train.computes_in_16_bits:
        flops = device.flops_16bit
    elif train.precision == "tf32" and device.is_cuda:  # half as fast as 16 bits
        flops = max(flops, device.flops_16bit / 2)
    speed = _speed(setup)
    return cost.flops / (flops * speed) + cost.moved_bytes / (device.memory_bandwidth * speed)


def _row_speeds(setup: Setup, form: TableForm, cache_hits: float) -> tuple[float, float, float]:
    """Return the bytes per second of single rows on the device, of the table and of its state.

    Rows in main memory pass the host's link; cached values do when they are missed.
    """
    device, speed = setup.cluster.device, _speed(setup)
    local = values = state = device.gather_bandwidth
    if device.is_cuda:
        link, in_main = device.host_link, form.kernel == UVM_CACHING
        if in_main:
            values = 1 / (cache_hits / local + (1 - cache_hits) / link)
        by_row_only = not optimizer_class(form.optimizer).state_numbers()[0]  # stays on the GPU
        if form.state_in_main if not in_main else not by_row_only:
            state = link
    return local * speed, values * speed, state * speed


def _optimizer_seconds(
    setup: Setup,
    form: TableForm,
    size: int,
    rows: float,
    columns: float,
    speeds: tuple[float, float, float],
) -> float:
    """Return the seconds to update rows: read gradients, read and write values and state.

    Args:
        setup: The run, the devices and the layout.
        form: Of the table.
        size: Number of rows of the table.
        rows: Number of rows that are updated.
        columns: Number of elements per row.
        speeds: Of ``_row_speeds``.
    """
    per_element, by_row = optimizer_class(form.optimizer).state_numbers()
    if form.kernel == DENSE:  # the whole table and its gradient, every step
        moved = size * setup.workload.dim * (12 + 8 * per_element)
        return moved / (setup.cluster.device.memory_bandwidth * _speed(setup))
    local, values, state = speeds
    state_bytes = form.state_bytes * (per_element * columns + by_row)
    return rows * (4 * columns / local + 8 * columns / values + 2 * state_bytes / state)


def _sending_seconds(setup: Setup, traffic: Traffic, kind: str) -> float:
    """Return the seconds until the last rank has its bytes of a kind; both ways at once."""
    device = setup.cluster.device
    efficiency = EFFICIENCY if setup.is_cuda else ETHERNET_EFFICIENCY
    return max(
        float(np.max(within / (device.within_host * EFFICIENCY)
                     + between / (device.between_hosts * efficiency)))
        for within, between in (traffic.of_ranks(kind), traffic.of_ranks(kind, received=True))
    )  # fmt: skip

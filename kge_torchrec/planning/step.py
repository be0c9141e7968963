"""What a rank sends in a step, and how long a step takes.

TorchRec's sequence embeddings send ids to the ranks that hold their rows (int64, with their number
per rank), rows back and gradients of rows home (in entities.exchange.dtype). Against all entities
the rows of the queries' anchors and their gradients are summed over the ranks instead. Sums are
rings: each rank sends to the next one, and the link between two hosts decides.

The time is a model, not a measurement: bytes and operations over shares of the device's speeds. It
shows what a step's time consists of, and compares layouts, on the busiest rank.
"""

from __future__ import annotations

import math

import numpy as np

from kge_torchrec.embeddings.exchange import travel_bytes
from kge_torchrec.embeddings.optimizers import optimizer_class
from kge_torchrec.embeddings.torchrec.planner import DENSE, UVM_CACHING, TableForm
from kge_torchrec.planning.rank import Rank

# Integers per pair of ranks that announce the ids. TorchRec sends the counts of lengths and values,
# the batch size, then the length. The hand-rolled engine sends one.
_COUNTS, _DIRECT_COUNTS = 4, 1
LINK_SHARE = 0.7  # of the data sheet's bandwidths and operations, which programs reach
# The same of kernels on a GPU: a step of 65,536 triples of ComplEx took an H200 4.1 to 4.3 ms.
GPU_SHARE = 0.55
# The same of Ethernet between hosts by gloo: 2 ranks reached 90 %, 4 ranks 80 % over emulated links
# of 100 and 1,000 Mbit/s.
ETHERNET_SHARE = 0.85
# Collectives of lookups (sizes, lengths, ids, rows, gradients); dense parameters add their own.
# Against all entities: anchors, partial statistics of losses, gradients of anchors and dense ones.
_COLLECTIVES, _FULL_COLLECTIVES = 5, 4
LATENCY = {"within": 2e-5, "between": 6e-5}  # seconds until a collective's first byte
# Seconds of each further message of an all-to-all: of gloo measured, of NCCL assumed.
_MESSAGE, _MESSAGE_GPU = 1e-4, 1e-6
# Seconds of one hop of NCCL's trees, within a host and between hosts: NCCL's src/graph/tuning.cc.
_HOPS = (1.2e-6, 8.5e-6)
# Seconds of Python in a step, most of it TorchRec's and FBGEMM's (measured beside an H200).
_PYTHON = 3.6e-3
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
    "links": ("exchange of ids", "exchange of rows", "exchange of gradients", "dense gradients"),
}
Sent = dict[str, tuple[float, float]]  # bytes within a host and to other hosts, by kind


def sent_bytes(rank: Rank, wanted: np.ndarray) -> Sent:
    """Return the bytes that a rank sends in a step, the mean of all ranks.

    Args:
        rank: The rank.
        wanted: (M,) rows of each type that a rank looks up.
    """
    cluster, config, dim = rank.cluster, rank.config, rank.dim
    others, numbers = cluster.world_size - 1, rank.costs.dense_numbers
    sent: dict[str, tuple[float, float]] = {}

    def to_all(kind: str, size: float) -> None:
        """Add bytes that a rank sends to all others, equally many to each."""
        far = (cluster.world_size - cluster.per_host) / max(1, others)
        within, between = sent.get(kind, (0.0, 0.0))
        sent[kind] = within + (1 - far) * size, between + far * size

    def ring(kind: str, size: float, leaves_host: bool = cluster.hosts > 1) -> None:
        """Add bytes that a rank sends to the next one, which may be on another host."""
        within, between = sent.get(kind, (0.0, 0.0))
        sent[kind] = (within, between + size) if leaves_host else (within + size, between)

    def all_reduced(size: float, count: int = cluster.world_size) -> float:
        return 2 * (count - 1) / count * size

    splits, sharded = rank.dense_splits, rank.dense_is_sharded
    spans = cluster.per_host % splits > 0
    part = (splits - 1) * 4 * numbers / splits  # of a gather or a scatter
    if rank.is_full:
        ring("rows", 8 * 3 * rank.queries * others)
        for kind in ("rows", "gradients"):
            ring(kind, all_reduced(4 * (rank.fetched + rank.sizes.num_features) * dim))
        if sharded:  # parameters are gathered once, gradients are summed whole
            ring("dense", part, spans)
        ring("dense", all_reduced(4 * numbers))
        return sent
    if rank.layout == "data_parallel":
        ring("gradients", all_reduced(4 * rank.sizes.rows * dim))
    else:
        remote = others / cluster.world_size
        ids = remote * float(wanted.sum()) * (dim // rank.columns)  # to all shards of the row
        counts = _COUNTS if config.entities.engine == "torchrec" else _DIRECT_COUNTS
        to_all("ids", 8 * (ids + counts * rank.micro_batches * others))
        numbers_sent = remote * float(wanted.sum()) * dim
        for kind in ("rows", "gradients"):
            to_all(kind, float(travel_bytes(config.entities.exchange.dtype, ids, numbers_sent)))
    if sharded:  # parameters are gathered per micro-batch, gradients travel at the last
        ring("dense", (_gathers(rank) * rank.micro_batches + 1) * part, spans)
    copies = cluster.world_size // splits
    ring("dense", all_reduced(4 * numbers / splits, copies), copies > 1 < cluster.hosts)
    return sent


def _gathers(rank: Rank) -> int:
    """Return the number of gathers of split parameters per forward and backward."""
    return 2 if rank.config.dense.options.sharding == "full" else 1


def seconds_of_parts(rank: Rank, sent: Sent, on_device: bool) -> dict[str, float]:
    """Return the seconds of each part of a step that takes any.

    Args:
        rank: The rank.
        sent: The bytes that it sends.
        on_device: Whether a GPU makes its batches.
    """
    device, count = rank.cluster.device, rank.micro_batches
    started, python = rank.cost.operations, _PYTHON
    if rank.captures:
        started, python = OUTSIDE_GRAPH, PYTHON_OUTSIDE
    lookup, optimizer = seconds_of_types(rank)
    times = {
        "lookup": sum(lookup),
        "table optimizer": sum(optimizer),
        "scoring": count * _scoring(rank),
        "starting operations": count * (started * device.launch + python),
    }
    if on_device:
        times["starting batches"] = count * STARTED_BY_MAKER * device.launch
    elif not rank.is_full:
        ids = round(rank.batch.lookups.sum())
        makers = _MAKERS if rank.is_cuda else 1
        times["making batches"] = count * (_MAKING + ids * _MAKING_ID) / makers
    if rank.cluster.world_size > 1:
        times["starting collectives"] = count * _starting(rank)
        share = LINK_SHARE if rank.is_cuda else ETHERNET_SHARE
        for kind, (within, between) in sent.items():
            busiest = rank.busiest[2] if kind != "dense" else 1.0
            name = "dense gradients" if kind == "dense" else f"exchange of {kind}"
            seconds = within / (device.within_host * LINK_SHARE)
            times[name] = busiest * (seconds + between / (device.between_hosts * share))
    return {name: seconds for name, seconds in times.items() if seconds}


def seconds_of_types(rank: Rank) -> tuple[list[float], list[float]]:
    """Return the seconds of each node type (M) for lookups, and for the table's optimizer."""
    lookup, optimizer = [], []
    for form, served, rows in zip(
        rank.forms, rank.busiest[1], rank.rows_of_types(rank.block), strict=True
    ):
        local, values, state = _row_speeds(rank, form)
        read = 0 if rank.is_full else served
        lookup.append(float(read * 4 * rank.columns * (1 / values + 1 / local)))
        per_element, by_row = optimizer_class(form.optimizer).state_numbers()
        if form.kernel == DENSE:  # the whole table and its gradient, every step
            speed = rank.cluster.device.memory_bandwidth * _speed(rank)
            optimizer.append(float(rows * rank.dim * (12 + 8 * per_element) / speed))
            continue
        moved = form.state_bytes * (per_element * rank.columns + by_row)
        per_row = 4 * rank.columns * (1 / local + 2 / values) + 2 * moved / state
        optimizer.append(float(served * per_row))
    return lookup, optimizer


def _row_speeds(rank: Rank, form: TableForm) -> tuple[float, float, float]:
    """Return the bytes per second of single rows on the device, of the table and of its state.

    Rows in main memory pass the host's link; cached values do when they are missed.
    """
    device, speed = rank.cluster.device, _speed(rank)
    local = values = state = device.gather_bandwidth
    in_main = form.kernel == UVM_CACHING
    if in_main:
        hits = rank.sizes.cache_hits(rank.batch.chance, form.cache_ratio)
        values = 1 / (hits / local + (1 - hits) / device.host_link)
    by_row_only = not optimizer_class(form.optimizer).state_numbers()[0]  # stays on the GPU
    if device.is_cuda and (form.state_in_main if not in_main else not by_row_only):
        state = device.host_link
    return local * speed, values * speed, state * speed


def _scoring(rank: Rank) -> float:
    """Return the seconds of arithmetic, and of the bytes that all other operations move."""
    device, train, speed = rank.cluster.device, rank.config.train, _speed(rank)
    flops = device.flops
    if train.computes_in_16_bits:
        flops = device.flops_16bit
    elif train.precision == "tf32" and device.is_cuda:  # half as fast as 16 bits
        flops = max(flops, device.flops_16bit / 2)
    cost = rank.cost
    return (cost.flops / flops + cost.moved_bytes / device.memory_bandwidth) / speed


def _speed(rank: Rank) -> float:
    """Return the share of the data sheet's speeds that a rank has; a CPU's ranks share them."""
    return GPU_SHARE if rank.is_cuda else LINK_SHARE / rank.cluster.per_host


def _starting(rank: Rank) -> float:
    """Return the seconds of a micro-batch's collectives that do not depend on their sizes.

    An all-to-all sends a message to every other rank. NCCL sums along trees, gloo around a ring.
    Dense parameters take an all-reduce, or gathers, a scatter and a sum of copies.
    """
    cluster = rank.cluster
    place = "between" if cluster.hosts > 1 else "within"
    others = cluster.world_size - 2  # a first message and a first hop are in the latency
    exchanges, sums = _COLLECTIVES, 1
    if rank.dense_is_sharded:
        sums = _gathers(rank) + (2 if cluster.world_size > rank.dense_splits else 1)
    if rank.is_full:
        exchanges, sums = 0, _FULL_COLLECTIVES
    message, hop = _MESSAGE, 2 * others * LATENCY[place]
    if rank.is_cuda:
        hops = (cluster.per_host - 1, math.log2(cluster.hosts))
        message, hop = _MESSAGE_GPU, 2 * sum(n * s for n, s in zip(hops, _HOPS, strict=True))
    return (exchanges + sums) * LATENCY[place] + exchanges * others * message + sums * hop

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
from typing import TYPE_CHECKING

from kge_torchrec.embeddings.exchange import travel_bytes
from kge_torchrec.embeddings.optimizers import optimizer_class
from kge_torchrec.embeddings.torchrec.planner import DENSE, UVM_CACHING

if TYPE_CHECKING:
    from kge_torchrec.planning.plan import Plan

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


def sent_bytes(plan: Plan) -> Sent:
    """Return the bytes that a rank sends in a step, the mean of all ranks."""
    cluster, config, dim = plan.cluster, plan.config, plan.dim
    ranks, others, numbers = cluster.world_size, cluster.world_size - 1, plan.costs.dense_numbers
    sent: dict[str, tuple[float, float]] = {}

    def send(kind: str, size: float, far: float) -> None:
        """Add bytes, of which a share goes to other hosts."""
        within, between = sent.get(kind, (0.0, 0.0))
        sent[kind] = within + (1 - far) * size, between + far * size

    def all_reduced(size: float, count: int = ranks) -> float:
        return 2 * (count - 1) / count * size

    ring = float(cluster.hosts > 1)  # to the next rank, which may be on another host
    splits, sharded = plan.dense_splits, plan.dense_is_sharded
    spans = float(cluster.per_host % splits > 0)
    part = (splits - 1) * 4 * numbers / splits  # of a gather or a scatter
    if plan.is_full:
        send("rows", 8 * 3 * plan.queries * others, ring)
        for kind in ("rows", "gradients"):
            send(kind, all_reduced(4 * (plan.fetched + plan.sizes.num_features) * dim), ring)
        if sharded:  # parameters are gathered once, gradients are summed whole
            send("dense", part, spans)
        send("dense", all_reduced(4 * numbers), ring)
        return sent
    if plan.layout == "data_parallel":
        send("gradients", all_reduced(4 * plan.sizes.rows * dim), ring)
    else:
        far = (ranks - cluster.per_host) / max(1, others)  # equally many bytes to each rank
        remote = others / ranks * float(plan.wanted.sum())
        ids = remote * (dim // plan.columns)  # to all shards of the row
        counts = _COUNTS if config.entities.engine == "torchrec" else _DIRECT_COUNTS
        send("ids", 8 * (ids + counts * plan.micro_batches * others), far)
        for kind in ("rows", "gradients"):
            size = travel_bytes(config.entities.exchange.dtype, ids, remote * dim)
            send(kind, float(size), far)
    if sharded:  # parameters are gathered per micro-batch, gradients travel at the last
        send("dense", (_gathers(plan) * plan.micro_batches + 1) * part, spans)
    copies = ranks // splits
    send("dense", all_reduced(4 * numbers / splits, copies), float(copies > 1 < cluster.hosts))
    return sent


def _gathers(plan: Plan) -> int:
    """Return the number of gathers of split parameters per forward and backward."""
    return 2 if plan.config.dense.options.sharding == "full" else 1


def seconds_of_parts(plan: Plan) -> dict[str, float]:
    """Return the seconds of each part of a step that takes any."""
    device, count = plan.cluster.device, plan.micro_batches
    started, python = plan.cost.operations, _PYTHON
    if plan.captures:
        started, python = OUTSIDE_GRAPH, PYTHON_OUTSIDE
    lookup, optimizer = _table_seconds(plan)
    times = {
        "lookup": lookup,
        "table optimizer": optimizer,
        "scoring": count * _scoring(plan),
        "starting operations": count * (started * device.launch + python),
    }
    if plan.memory["triples"].device:  # a GPU makes its batches
        times["starting batches"] = count * STARTED_BY_MAKER * device.launch
    elif not plan.is_full:
        making = _MAKING + round(plan.batch.lookups.sum()) * _MAKING_ID
        times["making batches"] = count * making / (_MAKERS if plan.is_cuda else 1)
    if plan.cluster.world_size > 1:
        times["starting collectives"] = count * _starting(plan)
        share = LINK_SHARE if plan.is_cuda else ETHERNET_SHARE
        for kind, (within, between) in plan.sent.items():
            seconds = within / (device.within_host * LINK_SHARE)
            seconds += between / (device.between_hosts * share)
            if kind == "dense":
                times["dense gradients"] = seconds
            else:
                times[f"exchange of {kind}"] = plan.busiest[2] * seconds
    return {name: seconds for name, seconds in times.items() if seconds}


def _table_seconds(plan: Plan) -> tuple[float, float]:
    """Return the seconds of lookups in the table, and of its optimizer.

    Rows in main memory pass the host's link; cached values do when they are missed.
    """
    device, speed = plan.cluster.device, _speed(plan)
    lookup = optimizer = 0.0
    for form, served, rows in zip(plan.forms, plan.busiest[1], plan.rows, strict=True):
        per_element, by_row = optimizer_class(form.optimizer).state_numbers()
        local = values = state = device.gather_bandwidth
        if form.kernel == UVM_CACHING:
            hits = plan.sizes.cache_hits(plan.batch.chance, form.cache_ratio)
            values = 1 / (hits / local + (1 - hits) / device.host_link)
        # State with one element per row stays on the GPU.
        in_main = per_element > 0 if form.kernel == UVM_CACHING else form.state_in_main
        if device.is_cuda and in_main:
            state = device.host_link
        if not plan.is_full:
            lookup += served * 4 * plan.columns * (1 / values + 1 / local) / speed
        if form.kernel == DENSE:  # the whole table and its gradient, every step
            moved = rows * plan.dim * (12 + 8 * per_element)
            optimizer += moved / (device.memory_bandwidth * speed)
        else:
            moved = form.state_bytes * (per_element * plan.columns + by_row)
            per_row = 4 * plan.columns * (1 / local + 2 / values) + 2 * moved / state
            optimizer += served * per_row / speed
    return float(lookup), float(optimizer)


def _scoring(plan: Plan) -> float:
    """Return the seconds of arithmetic, and of the bytes that all other operations move."""
    device, train, speed = plan.cluster.device, plan.config.train, _speed(plan)
    flops = device.flops
    if train.computes_in_16_bits:
        flops = device.flops_16bit
    elif train.precision == "tf32" and device.is_cuda:  # half as fast as 16 bits
        flops = max(flops, device.flops_16bit / 2)
    cost = plan.cost
    return (cost.flops / flops + cost.moved_bytes / device.memory_bandwidth) / speed


def _speed(plan: Plan) -> float:
    """Return the share of the data sheet's speeds that a rank has; a CPU's ranks share them."""
    return GPU_SHARE if plan.is_cuda else LINK_SHARE / plan.cluster.per_host


def _starting(plan: Plan) -> float:
    """Return the seconds of a micro-batch's collectives that do not depend on their sizes.

    An all-to-all sends a message to every other rank. NCCL sums along trees, gloo around a ring.
    Dense parameters take an all-reduce, or gathers, a scatter and a sum of copies.
    """
    cluster = plan.cluster
    place = "between" if cluster.hosts > 1 else "within"
    others = cluster.world_size - 2  # a first message and a first hop are in the latency
    exchanges, sums = _COLLECTIVES, 1
    if plan.dense_is_sharded:
        sums = _gathers(plan) + (2 if cluster.world_size > plan.dense_splits else 1)
    if plan.is_full:
        exchanges, sums = 0, _FULL_COLLECTIVES
    message, hop = _MESSAGE, 2 * others * LATENCY[place]
    if plan.is_cuda:
        hops = (cluster.per_host - 1, math.log2(cluster.hosts))
        message, hop = _MESSAGE_GPU, 2 * sum(n * s for n, s in zip(hops, _HOPS, strict=True))
    return (exchanges + sums) * LATENCY[place] + exchanges * others * message + sums * hop

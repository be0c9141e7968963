"""A model of a step's time: bytes and operations over the device's speeds, one part after another.

It is a model, not a measurement: nothing overlaps, every device reaches the same share of its data
sheet, and ranks are even.  It is there to say what a step's time is made of and to compare
layouts, on the slowest rank.

What scoring a batch costs is watched: the real objective is run, so that any scorer and loss is
counted as it is, not by a formula that resembles it.  It runs on the meta device, where nothing is
computed and no memory taken, in the blocks of the device planned for.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from kge_torchrec.config import TrainConfig
from kge_torchrec.data import SIDES, Side
from kge_torchrec.embeddings.optimizers import optimizer_class
from kge_torchrec.embeddings.torchrec.planner import (
    DENSE,
    FUSED,
    UVM_CACHING,
    TableForm,
)
from kge_torchrec.models.model import Objective
from kge_torchrec.models.ops import planning_for
from kge_torchrec.planning.communication import Traffic
from kge_torchrec.planning.devices import Cluster, Device
from kge_torchrec.planning.layout import DenseLayout
from kge_torchrec.planning.memory import Exchange
from kge_torchrec.planning.operations import Cost, WatchOperations
from kge_torchrec.planning.workload import RankBatch, Workload

EFFICIENCY = 0.7  # share of the data sheet's bandwidths and operations that programs reach
COLLECTIVES = 5  # sizes, lengths, ids, rows, gradients; those of dense parameters come on top
LATENCY = {"within": 2e-5, "between": 6e-5}  # seconds until a collective's first byte
PYTHON = 2e-3  # seconds of TorchRec's pipeline and the batch's making
# Parts that take the same time whatever the batch, in the layouts that training has.
FIXED = ("starting operations", "starting collectives", "dense gradients", "averaging replicas")


def step_time(
    workload: Workload,
    cluster: Cluster,
    form: TableForm,
    exchange: Exchange,
    columns: float,
    cost: Cost,
    traffic: Traffic,
    cache_hits: float,
) -> dict[str, float]:
    """Seconds of each part of a step.

    exchange: of the rank that is asked for most rows; columns: of its shards.
    cache_hits: share of the asked rows that a cache holds.
    """
    device, micro_batches = cluster.device, workload.config.train.accumulation
    speed = _speed(cluster)
    local, values, _ = (x * speed for x in _row_speeds(device, form, cache_hits))
    read, sent = columns * form.value_bytes / values, 4 * columns / local  # sent as float32
    times = {
        "lookup": exchange.asked * (read + sent),
        "scoring": micro_batches * work_seconds(workload, cluster, cost),
        "table optimizer": table_optimizer_seconds(
            cluster, form, exchange.asked, columns, cache_hits
        ),
    }
    if form.kernel == DENSE:  # the whole table and its gradient, every step
        numbers, (each, _) = (
            workload.num_entities * workload.dim,
            optimizer_class(form.optimizer).state_numbers(),
        )
        moved = numbers * (3 * form.value_bytes + 8 * each)
        times["table optimizer"] = moved / (device.memory_bandwidth * speed)
    collectives = COLLECTIVES + DenseLayout.of(workload.config.dense, cluster).collectives(cluster)
    times |= starting_seconds(cluster, cost, micro_batches, collectives)
    return times | sending_seconds(cluster, traffic)


def work_seconds(workload: Workload, cluster: Cluster, cost: Cost) -> float:
    """Of arithmetic, and of the bytes that all other operations read and write."""
    device, speed = cluster.device, _speed(cluster)
    return cost.flops / (_flops(device, workload.config.train) * speed) + cost.moved_bytes / (
        device.memory_bandwidth * speed
    )


def table_optimizer_seconds(
    cluster: Cluster, form: TableForm, rows: float, columns: float, cache_hits: float = 0.0
) -> float:
    """Of stepping rows: gradients, in float32, are read; values and state read and written."""
    speeds = _row_speeds(cluster.device, form, cache_hits)
    local, values, state = (x * _speed(cluster) for x in speeds)
    each, row = optimizer_class(form.optimizer).state_numbers()
    value_bytes, state_bytes = columns * form.value_bytes, form.state_bytes * (each * columns + row)
    return rows * (4 * columns / local + 2 * value_bytes / values + 2 * state_bytes / state)


def starting_seconds(
    cluster: Cluster, cost: Cost, micro_batches: int, collectives: int
) -> dict[str, float]:
    """What operations and collectives take whatever their size."""
    operations = cost.operations * cluster.device.launch + PYTHON
    times = {"starting operations": micro_batches * operations}
    if cluster.world_size > 1:
        latency = LATENCY["between" if cluster.hosts > 1 else "within"]
        times["starting collectives"] = micro_batches * collectives * latency
    return times


def sending_seconds(cluster: Cluster, traffic: Traffic) -> dict[str, float]:
    """Of each kind of bytes, those that are sent."""
    names = {
        "exchange of ids": "ids",
        "exchange of rows": "rows",
        "exchange of gradients": "gradients",
        "dense gradients": "dense",
        "averaging replicas": "replicas",
    }
    seconds = {name: _slowest(cluster, traffic, kind) for name, kind in names.items()}
    return {name: value for name, value in seconds.items() if value}


def _speed(cluster: Cluster) -> float:
    """Share of the data sheet's speeds that a rank has; a CPU's ranks share them."""
    return EFFICIENCY / (1 if cluster.device.is_cuda else cluster.local_world_size)


def _flops(device: Device, train: TrainConfig) -> float:
    """Of products in the precision that they are computed in; TF32 is half as fast as 16 bits."""
    if train.precision != "fp32":
        return device.flops_16bit
    return (
        max(device.flops, device.flops_16bit / 2) if train.tf32 and device.is_cuda else device.flops
    )


def _row_speeds(device: Device, form: TableForm, cache_hits: float) -> tuple[float, float, float]:
    """Bytes a second of single rows on the device, of the table's and of its state's.

    Those in main memory pass the host's link; cached values do so when they are missed.
    """
    local, link = device.gather_bandwidth, device.host_link
    if not device.is_cuda or form.kernel in (FUSED, DENSE):
        return local, local, link if form.state_in_main and device.is_cuda else local
    hits = cache_hits if form.kernel == UVM_CACHING else 0.0
    values = 1 / (hits / local + (1 - hits) / link)
    by_row_only = not optimizer_class(form.optimizer).state_numbers()[
        0
    ]  # such state stays on the GPU
    return local, values, local if by_row_only else link


def _slowest(cluster: Cluster, traffic: Traffic, kind: str) -> float:
    """Seconds until the last rank has sent its bytes of a kind; both ways at once."""
    device = cluster.device
    seconds = (
        traffic.within[kind] / device.within_host + traffic.between[kind] / device.between_hosts
    )
    return float(np.max(seconds)) / EFFICIENCY


# A chunk of more triples than this is watched at half the size and at this one and extended in a
# straight line: some scorers work through it piece by piece, which would take seconds to watch.
_LARGEST = 1024


def objective_cost(workload: Workload, batch: RankBatch, is_cuda: bool) -> Cost:
    """Of one rank's batch, the gradient of the looked-up rows aside."""
    negatives, objective = workload.config.negatives, workload.objective

    def at(chunks: int, triples: int) -> Cost:
        key = (chunks, triples, is_cuda)
        if key not in workload.costs:
            with planning_for("cuda" if is_cuda else "cpu"):
                workload.costs[key] = _watch(
                    objective, chunks, triples, workload.candidates, negatives.masks_candidates
                )
        return workload.costs[key]

    chunks, triples = batch.chunks, batch.triples
    if not chunks * triples:
        return Cost(0, 0, 0, 0, 0)
    if chunks > 2:  # chunks are independent of each other
        one, two = at(1, min(triples, _LARGEST)), at(2, min(triples, _LARGEST))
        cost = one.extended(two, chunks - 1)
        return cost if triples <= _LARGEST else _scaled(cost, triples / _LARGEST)
    if triples <= _LARGEST:
        return at(chunks, triples)
    half = _LARGEST // 2
    return at(chunks, half).extended(at(chunks, _LARGEST), (triples - half) / half)


def _scaled(cost: Cost, factor: float) -> Cost:
    return Cost(*(value * factor for value in vars(cost).values()))


def _watch(
    objective: Objective, chunks: int, triples: int, candidates: dict[Side, int], masks: bool
) -> Cost:
    dim, counts = objective.scorer.dim, tuple(candidates.values())
    with torch.device("meta"):
        ids = torch.zeros(chunks * (2 * triples + sum(counts)), dtype=torch.int64)
        known = {
            side: torch.zeros((chunks, triples, candidates.get(side, 0)), dtype=torch.bool)
            for side in SIDES
        }
        none = torch.zeros(0, dtype=torch.bool)
        rows = torch.zeros(1, dim, requires_grad=True)
        batch = SimpleNamespace(
            entities=ids,
            relation=torch.zeros(chunks, triples, dtype=torch.int64),
            weight=torch.zeros(chunks, triples),
            known_head=known["head"] if masks else none,
            known_tail=known["tail"] if masks else none,
            candidates=counts,
            log_expected=torch.zeros(0),
            deduplicated=True,
        )
    with WatchOperations() as watcher:
        objective(rows, batch).backward()
    for parameter in objective.parameters():
        parameter.grad = None
    return watcher.cost

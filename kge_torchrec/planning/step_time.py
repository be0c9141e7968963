"""A model of a step's time: bytes and operations over the device's speeds, one part after another.

It is a model, not a measurement: nothing overlaps, every device reaches the same share of its data
sheet, and ranks are even.  It is there to say what a step's time is made of and to compare
layouts, on the slowest rank.
"""

from __future__ import annotations

from kge_torchrec.config import TrainConfig
from kge_torchrec.planning.dense_layout import DenseLayout
from kge_torchrec.planning.devices import Cluster, Device
from kge_torchrec.planning.memory import Exchange
from kge_torchrec.planning.table_memory import (
    DENSE,
    FUSED,
    STATE_NUMBERS,
    UVM_CACHING,
    TableForm,
)
from kge_torchrec.planning.traffic import Traffic
from kge_torchrec.planning.watch_operations import Cost
from kge_torchrec.planning.workload import Workload

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
        numbers, (each, _) = workload.num_entities * workload.dim, STATE_NUMBERS[form.optimizer]
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
    each, row = STATE_NUMBERS[form.optimizer]
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
    by_row_only = not STATE_NUMBERS[form.optimizer][0]  # such state stays on the GPU
    return local, values, local if by_row_only else link


def _slowest(cluster: Cluster, traffic: Traffic, kind: str) -> float:
    """Seconds until the last rank has sent its bytes of a kind; both ways at once."""
    device = cluster.device
    seconds = (
        traffic.within[kind] / device.within_host + traffic.between[kind] / device.between_hosts
    )
    return float(seconds.max()) / EFFICIENCY

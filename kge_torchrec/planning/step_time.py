"""A model of a step's time: bytes and operations over the device's speeds, one part after another.

It is a model, not a measurement: nothing overlaps, every device reaches the same share of its data
sheet, and ranks are even.  It is there to say what a step's time is made of and to compare
layouts, on the slowest rank.
"""

from __future__ import annotations

from kge_torchrec.config import TrainConfig
from kge_torchrec.planning.devices import Cluster, Device
from kge_torchrec.planning.memory import Exchange
from kge_torchrec.planning.objective_cost import Cost
from kge_torchrec.planning.table_memory import (
    DENSE,
    FUSED,
    STATE_NUMBERS,
    UVM_CACHING,
    TableForm,
)
from kge_torchrec.planning.traffic import Traffic
from kge_torchrec.planning.workload import Workload

EFFICIENCY = 0.7  # share of the data sheet's bandwidths and operations that programs reach
COLLECTIVES = 6  # sizes, lengths, ids, rows, gradients, dense gradients
LATENCY = {"within": 2e-5, "between": 6e-5}  # seconds until a collective's first byte
PYTHON = 2e-3  # seconds of TorchRec's pipeline and the batch's making


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
    device = cluster.device
    sharers = 1 if device.is_cuda else cluster.local_world_size  # a CPU's ranks share its speed
    speed = EFFICIENCY / sharers
    local, values, state = (x * speed for x in _row_speeds(device, form, cache_hits))
    micro_batches = workload.config.train.accumulation
    each, row = STATE_NUMBERS[form.optimizer]
    row_bytes, state_bytes = columns * form.value_bytes, form.state_bytes * (each * columns + row)
    out_bytes = 4 * columns  # rows out and gradients in are float32
    times = {
        "lookup": exchange.asked * (row_bytes / values + out_bytes / local),
        "scoring": micro_batches
        * (
            cost.flops / (_flops(device, workload.config.train) * speed)
            + cost.moved_bytes / (device.memory_bandwidth * speed)
        ),
        # Gradients are read; values and state read and written.
        "table optimizer": exchange.asked
        * (out_bytes / local + 2 * row_bytes / values + 2 * state_bytes / state),
        "starting operations": micro_batches * (cost.operations * device.launch + PYTHON),
    }
    if form.kernel == DENSE:  # the whole table and its gradient, every step
        numbers = workload.num_entities * workload.dim
        moved = numbers * (3 * form.value_bytes + 8 * each)
        times["table optimizer"] = moved / (device.memory_bandwidth * speed)
    for name, kinds in (
        ("exchange of ids", ("ids",)),
        ("exchange of rows", ("rows",)),
        ("exchange of gradients", ("gradients",)),
        ("dense gradients", ("dense",)),
        ("averaging replicas", ("replicas",)),
    ):
        seconds = sum(_slowest(cluster, traffic, kind) for kind in kinds)
        if seconds:
            times[name] = seconds
    if cluster.world_size > 1:
        where = "between" if cluster.hosts > 1 else "within"
        times["starting collectives"] = micro_batches * COLLECTIVES * LATENCY[where]
    return times


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

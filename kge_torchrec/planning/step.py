"""What a rank sends in a step, and how long a step takes.

TorchRec's sequence embeddings send ids to the ranks that hold their rows (int64, with their number
per rank), rows back and gradients of rows home (in entities.exchange.dtype). Against all entities
the rows of the queries' anchors and their gradients are summed over the ranks instead. Sums are
rings: each rank sends to the next one, and the link between two hosts decides.

The time is a model, not a measurement: bytes and operations over shares of the device's speeds. It
shows what a step's time consists of, and compares layouts, on the busiest rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from kge_torchrec.embeddings.exchange import travel_bytes
from kge_torchrec.embeddings.optimizers import optimizer_class
from kge_torchrec.embeddings.torchrec.planner import DENSE, UVM_CACHING
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
# Collectives of lookups (sizes, lengths, ids, rows, gradients), and the sum of dense gradients.
# Against all entities: anchors, partial statistics of losses, gradients of anchors and dense ones.
_COLLECTIVES, _FULL_COLLECTIVES = 6, 4
LATENCY = {"within": 2e-5, "between": 6e-5}  # seconds until a collective's first byte
# Seconds that each further rank adds to a collective: of gloo measured, of NCCL assumed.
_MESSAGE, _MESSAGE_GPU = 1e-4, 1e-6
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


def all_reduced(size: float, count: int) -> float:
    """Return what a rank of a ring sends."""
    return 2 * (count - 1) / count * size


@dataclass(frozen=True)
class Step:
    """A step of a planned run."""

    plan: Plan

    @cached_property
    def sent(self) -> dict[str, tuple[float, float]]:
        """The bytes that a rank sends, within its host and to other hosts, by kind: the mean."""
        sent: dict[str, tuple[float, float]] = {}
        for kind, size, far in [*self._sent_of_entities(), *self._sent_of_dense()]:
            within, between = sent.get(kind, (0.0, 0.0))
            sent[kind] = within + (1 - far) * size, between + far * size
        return sent

    def _sent_of_entities(self) -> Iterator[tuple[str, float, float]]:
        """Yield kind, bytes, and the share of them that goes to other hosts."""
        plan, cluster, dim = self.plan, self.plan.cluster, self.plan.dim
        ranks, others = cluster.world_size, cluster.world_size - 1
        ring = float(cluster.hosts > 1)  # to the next rank, which may be on another host
        if plan.is_full:
            yield "rows", 8 * 3 * plan.queries * others, ring
            summed = 4 * (plan.fetched + plan.sizes.num_features) * dim
            yield "rows", all_reduced(summed, ranks), ring
            yield "gradients", all_reduced(summed, ranks), ring
        elif plan.layout == "data_parallel":
            yield "gradients", all_reduced(4 * plan.sizes.rows * dim, ranks), ring
        else:
            far = (ranks - cluster.per_host) / max(1, others)  # equally many bytes to each rank
            remote = others / ranks * plan.wanted
            ids = remote * (dim // plan.columns)  # to all shards of the row
            counts = _COUNTS if plan.config.entities.engine == "torchrec" else _DIRECT_COUNTS
            yield "ids", 8 * (ids + counts * plan.micro_batches * others), far
            dtype = plan.config.entities.exchange.dtype
            for kind in ("rows", "gradients"):
                yield kind, float(travel_bytes(dtype, ids, remote * dim)), far

    def _sent_of_dense(self) -> Iterator[tuple[str, float, float]]:
        """Yield the same of gathered parameters and summed gradients."""
        plan, cluster, numbers = self.plan, self.plan.cluster, self.plan.costs.dense_numbers
        splits = plan.dense_splits
        copies = cluster.world_size // splits
        if plan.dense_is_sharded:
            per_batch = 2 if plan.config.dense.options.sharding == "full" else 1
            # Against all entities once. Else scattered gradients travel at the last micro-batch.
            times = 1 if plan.is_full else per_batch * plan.micro_batches + 1
            part = (splits - 1) * 4 * numbers / splits  # of a gather or a scatter
            yield "dense", times * part, float(cluster.per_host % splits > 0)
        if plan.is_full:  # gradients are summed whole
            yield "dense", all_reduced(4 * numbers, cluster.world_size), float(cluster.hosts > 1)
        else:
            far = float(copies > 1 < cluster.hosts)
            yield "dense", all_reduced(4 * numbers / splits, copies), far

    @property
    def load(self) -> float:
        """The bytes that the busiest rank sends, over the mean of all ranks."""
        plan = self.plan
        spread = plan.is_full or plan.layout in ("row_wise", "data_parallel")
        return 1.0 if spread else plan.cluster.world_size * plan.columns / plan.dim

    @cached_property
    def parts(self) -> dict[str, float]:
        """The seconds of each part that takes any."""
        plan, cluster, device = self.plan, self.plan.cluster, self.plan.cluster.device
        count, train = plan.micro_batches, plan.config.train
        started, python = plan.cost.operations, _PYTHON
        if plan.captures:
            started, python = OUTSIDE_GRAPH, PYTHON_OUTSIDE
        flops = device.flops
        if train.computes_in_16_bits:
            flops = device.flops_16bit
        elif train.precision == "tf32" and plan.is_cuda:  # half as fast as 16 bits
            flops = max(flops, device.flops_16bit / 2)
        scoring = plan.cost.flops / flops + plan.cost.moved_bytes / device.memory_bandwidth
        times = {
            **self._table(),
            "scoring": count * scoring / self._speed,
            "starting operations": count * (started * device.launch + python),
        }
        if plan.memory["triples"].device:  # a GPU makes its batches
            times["starting batches"] = count * STARTED_BY_MAKER * device.launch
        elif not plan.is_full:
            making = _MAKING + plan.batch.lookups * _MAKING_ID
            times["making batches"] = count * making / (_MAKERS if plan.is_cuda else 1)
        if cluster.world_size > 1:
            latency = LATENCY["between" if cluster.hosts > 1 else "within"]
            message = _MESSAGE_GPU if plan.is_cuda else _MESSAGE
            each = latency + (cluster.world_size - 2) * message  # the first is in the latency
            collectives = _FULL_COLLECTIVES if plan.is_full else _COLLECTIVES
            times["starting collectives"] = count * collectives * each
            share = LINK_SHARE if plan.is_cuda else ETHERNET_SHARE
            for kind, (within, between) in self.sent.items():
                seconds = within / (device.within_host * LINK_SHARE)
                seconds += between / (device.between_hosts * share)
                if kind == "dense":
                    times["dense gradients"] = seconds
                else:
                    times[f"exchange of {kind}"] = self.load * seconds
        return {name: seconds for name, seconds in times.items() if seconds}

    @property
    def _speed(self) -> float:
        """The share of the data sheet's speeds that a rank has; a CPU's ranks share them."""
        return GPU_SHARE if self.plan.is_cuda else LINK_SHARE / self.plan.cluster.per_host

    def _table(self) -> dict[str, float]:
        """Return the seconds of lookups in the table, and of its optimizer.

        Rows in main memory pass the host's link. A cache is taken to hold no more of a batch than
        of the table, so popular rows are faster than that.
        """
        plan, device = self.plan, self.plan.cluster.device
        lookup = optimizer = 0.0
        for form, share in plan.forms.items():
            served = share * plan.served
            per_element, by_row = optimizer_class(form.optimizer).state_numbers()
            local = values = state = device.gather_bandwidth
            if form.kernel == UVM_CACHING:
                values = 1 / (form.cache_ratio / local + (1 - form.cache_ratio) / device.host_link)
            # State with one element per row stays on the GPU.
            in_main = per_element > 0 if form.kernel == UVM_CACHING else form.state_in_main
            if device.is_cuda and in_main:
                state = device.host_link
            if not plan.is_full:
                lookup += served * 4 * plan.columns * (1 / values + 1 / local)
            if form.kernel == DENSE:  # the whole table and its gradient, every step
                moved = share * plan.rows * plan.dim * (12 + 8 * per_element)
                optimizer += moved / device.memory_bandwidth
            else:
                moved = form.state_bytes * (per_element * plan.columns + by_row)
                optimizer += served * (
                    4 * plan.columns * (1 / local + 2 / values) + 2 * moved / state
                )
        return {"lookup": lookup / self._speed, "table optimizer": optimizer / self._speed}

    @cached_property
    def decisive(self) -> dict[str, dict[str, float]]:
        """The seconds of the parts that the step's time is the sum of, by resource.

        A GPU works while the host starts its next operations and makes the next batch, so the
        longest of the three counts. On a CPU all parts add up.
        """
        busy = {
            name: {part: self.parts[part] for part in parts if part in self.parts}
            for name, parts in RESOURCES.items()
        }
        chains = (
            [("host",), ("loader",), ("device", "links")] if self.plan.is_cuda else [tuple(busy)]
        )
        longest = max(chains, key=lambda chain: sum(sum(busy[x].values()) for x in chain))
        return {name: busy[name] for name in longest}

    @property
    def bound(self) -> str:
        """The resource that decides how long a step takes."""
        return max(self.decisive, key=lambda name: sum(self.decisive[name].values()))

    @property
    def seconds(self) -> float:
        """Estimated seconds per step."""
        return sum(sum(parts.values()) for parts in self.decisive.values())

    @property
    def epoch_seconds(self) -> float:
        """Estimated seconds per epoch, without evaluation."""
        return self.seconds * self.plan.steps_per_epoch

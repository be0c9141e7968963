"""The plan of a run: one rank of it, the memory that it needs, and whether that fits.

It is the rank with the most rows: training splits rows so that every rank but the last has equally
many. The memory is that of the fullest moment of training. Exact are the bytes of the table and of
dense parameters. Expected are rows, ids and batches (they follow the number of different entities
per batch, see ``sizes``) and activations (see ``cost``). Measured or assumed is the process itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from kge_torchrec.config import Config, ConfigError
from kge_torchrec.config.keys import without_effect
from kge_torchrec.config.registry import resolve
from kge_torchrec.data.batches.triples import device_bytes, fits_device
from kge_torchrec.data.parts import PartLayout
from kge_torchrec.embeddings.torchrec.planner import (
    DENSE,
    FUSED,
    UVM_CACHING,
    Bytes,
    TableForm,
    check_cuda_dim,
    dense_state_numbers,
    table_memory,
)
from kge_torchrec.planning.cost import Cost, Costs
from kge_torchrec.planning.devices import Cluster
from kge_torchrec.planning.sizes import Batch, Sizes, degree_power
from kge_torchrec.training.assembly import sides_of
from kge_torchrec.training.checkpoint_files import PIECE_BYTES

MIB = 1 << 20
RESERVE = 0.05  # share of each device's memory, and of a CPU host's, that is left free
# A CUDA rank's context, libraries and NCCL's buffers, and its host side: assumed, not measured.
CUDA_PROCESS = Bytes(device=1536 * MIB, main=3072 * MIB)
# A CPU rank with packages, process group and compiled kernels: measured in tiny runs.
CPU_PROCESS = 592 * MIB
# Most bytes of the start and of earlier steps that the C library keeps free. Ranks that held
# the same had 69 to 131 MiB of these; tiny runs, which have no such blocks, had none.
CPU_FREED = 100 * MIB
RANKED_MOST = 128 * MIB  # pages of the filter index that the final ranking reads, at most: assumed
_IN_FLIGHT = 3  # batches that TorchRec's pipeline holds at once


@dataclass(frozen=True)
class Limit:
    """The capacity of a memory and the bytes needed in it."""

    place: str  # "memory of a GPU" or "main memory of a host"
    need: int
    capacity: int
    usable: int  # the capacity without the share that is left free

    @property
    def over(self) -> int:
        """Bytes over the capacity; negative if it fits."""
        return self.need - self.usable


@dataclass(frozen=True)
class Plan:
    """A run on some devices, and what it needs.

    Args:
        config: The config, with a value for every null: ``of`` chooses them.
        sizes: The sizes of the graph.
        cluster: The devices.
        layout: How the table is split, one of ``SHARDINGS``; training has row_wise.
        counted: The costs of the scorer, shared by plans with the same one.

    Raises:
        ConfigError: The run and the devices do not go together.
    """

    config: Config
    sizes: Sizes
    cluster: Cluster
    layout: str = "row_wise"
    counted: Costs | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        config, ranks = self.config, self.cluster.world_size
        unknown = sorted((config.entities.tables or {}).keys() - {*self.sizes.types})
        problems = {
            f"entities.tables: the sizes of {', '.join(unknown)} are not known; plan with typed "
            "data, or give --entities user=600k,item=400k": bool(unknown),
            f"dense.wrapper none is for one rank, not for {ranks}; use auto": (
                config.dense.wrapper == "none" and ranks > 1
            ),
            f"dense.options.replicas: {ranks} ranks cannot be split into {self.dense_copies} "
            "equal groups": ranks % self.dense_copies > 0,
        }
        for problem, holds in problems.items():
            if holds:
                raise ConfigError(problem)
        if self.is_cuda and config.entities.engine == "torchrec":
            check_cuda_dim(self.dim)

    @classmethod
    def of(cls, config: Config, sizes: Sizes, cluster: Cluster) -> Plan:
        """Return the plan of a config that may have nulls."""
        config.check_device(cluster.device.is_cuda)
        config = config.settled(sizes.graph, cluster.device.is_cuda, cluster.world_size)
        return cls(config, sizes, cluster)

    def changed(self, keys: dict[str, Any]) -> Plan:
        """Return the plan with other values of keys ("train.optimizer"), of cluster or layout.

        The keys are none of scorer, loss and negatives, so the costs of scoring stay.

        Raises:
            ConfigError: The config does not allow a value, or another key that is set loses its
                effect.
        """
        config, fields = self.config, {}
        for key, value in keys.items():
            section, _, name = key.partition(".")
            if not name:
                fields[key] = value
                continue
            changed = replace(getattr(config, section), **{name: value})
            config = replace(config, **{section: changed})
        if config is not self.config:
            idle = without_effect(self.config)
            for key, reason in without_effect(config).items():
                if key not in idle:
                    raise ConfigError(reason)
        return replace(self, config=config, counted=self.costs, **fields)

    # The run.

    @cached_property
    def costs(self) -> Costs:
        return self.counted or Costs(self.config, self.sizes.relations, self.is_cuda)

    @property
    def is_cuda(self) -> bool:
        return self.cluster.device.is_cuda

    @property
    def place(self) -> str:
        """Memory that a rank computes in, as a field of Bytes."""
        return "device" if self.is_cuda else "main"

    @property
    def dim(self) -> int:
        """D."""
        assert self.config.model.dim is not None
        return self.config.model.dim

    @property
    def is_full(self) -> bool:
        """Whether every query is compared with all entities."""
        return self.config.negatives.is_full

    @property
    def examples(self) -> int:
        """Number of examples per epoch: triples, or queries.

        Several triples can share a query, which then occurs once. Only the data would show that.
        """
        negatives, sizes = self.config.negatives, self.sizes
        sides = len(sides_of(negatives.sides))
        if negatives.regime == "allvsall":
            return sides * sizes.entities * sizes.relations
        return sizes.triples * (1 if negatives.examples == "triples" else sides)

    @property
    def batch_size(self) -> int:
        """Number of examples per step over all ranks, at most an epoch's."""
        assert self.config.train.batch_size is not None
        return min(self.config.train.batch_size, self.examples)

    @property
    def steps_per_epoch(self) -> float:
        """Number of steps per epoch; the last, smaller step counts as a part of one."""
        return self.examples / self.batch_size

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches per step."""
        return self.config.train.accumulation

    @property
    def queries(self) -> int:
        """Q. A triple is queried on each side, unless an epoch passes through queries."""
        negatives = self.config.negatives
        per_example = len(sides_of(negatives.sides)) if negatives.examples == "triples" else 1
        return self.batch_size * per_example

    @property
    def fetched(self) -> int:
        """Rows that every rank fetches for its queries of a step against all entities.

        One per query, or two for relation prediction and penalties on whole triples.
        """
        loss = self.config.loss
        penalties = any(resolve("regularizer", name).takes_triples for name in loss.regularizers)
        return self.queries * (2 if loss.relation_weight or penalties else 1)

    @property
    def captures(self) -> bool:
        """Whether a CUDA graph holds the scores of a step."""
        ranks, has_features = self.cluster.world_size, self.sizes.num_features > 0
        return self.config.captures(self.is_cuda, ranks, has_features)

    @property
    def dense_is_sharded(self) -> bool:
        """Whether the wrapper gathers whole dense parameters to run."""
        return self.config.dense.wrapper in ("fsdp", "hybrid")

    @property
    def dense_copies(self) -> int:
        """Number of copies of the dense parameters, as distributed.dense makes them."""
        dense, cluster = self.config.dense, self.cluster
        copies = {"fsdp": 1, "hybrid": dense.options.replicas or cluster.hosts}
        return copies.get(dense.wrapper, cluster.world_size)

    @property
    def dense_splits(self) -> int:
        """Number of neighboring ranks that hold a copy together."""
        return self.cluster.world_size // self.dense_copies

    # The table.

    @cached_property
    def parts(self) -> PartLayout | None:
        """How a table on disk is cut into parts; None of one in memory."""
        return PartLayout.of_config(self.config, self.sizes.rows, self.cluster.world_size)

    @property
    def rows(self) -> int:
        """Rows in the memory of the fullest rank."""
        if self.parts is not None:
            return self.parts.buffer_rows
        ranks = self.cluster.world_size if self.layout == "row_wise" else 1
        return -(-self.sizes.rows // ranks)

    @property
    def columns(self) -> int:
        """Columns of a shard, as TorchRec splits them."""
        if self.layout != "column_wise":
            return self.dim
        # FBGEMM reads four elements at a time.
        widths = range(-(-self.dim // self.cluster.world_size), self.dim)
        return next((w for w in widths if not (self.dim % w or w % 4)), self.dim)

    @cached_property
    def forms(self) -> dict[TableForm, float]:
        """How rows and their optimizer state are stored, with the share of the rows.

        Ids are in no order of types, so every rank has the same share of a type.
        """
        entities, train = self.config.entities, self.config.train
        replicated, forms = self.layout == "data_parallel", dict[TableForm, float]()
        for kind, rows in self.sizes.types.items():
            table = entities.table_of(kind, train, self.config.model)
            form = TableForm(
                table.optimizer,
                DENSE if replicated else UVM_CACHING if entities.cache_ratio else FUSED,
                0.0 if replicated else entities.cache_ratio,
                state_bytes=2 if entities.preset == "dicee" else 4,
                counts_rows=entities.preset == "dgl" and table.optimizer == "adam",
                state_in_main=entities.preset == "dicee",
                averages=train.averages,
            )
            forms[form] = forms.get(form, 0.0) + rows / self.sizes.rows
        return forms

    @cached_property
    def table(self) -> dict[str, Bytes]:
        """The bytes of a rank's rows and their state by part."""
        parts: dict[str, Bytes] = {}
        for form, share in self.forms.items():
            rows = round(share * self.rows)
            for part, size in table_memory(rows, self.columns, form, self.is_cuda).items():
                parts[part] = parts.get(part, Bytes()) + size
        return parts

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint in memory: rows, parameters, optimizer state and averages."""
        numbers, train, dim = self.costs.dense_numbers, self.config.train, self.dim
        assert train.optimizer is not None
        copies = 1 + train.averages
        row = sum(share * form.row_state_bytes(dim) for form, share in self.forms.items())
        dense = 4 * numbers * (copies + dense_state_numbers(train.optimizer))
        return round(self.sizes.rows * (4 * dim * copies + row)) + dense

    @property
    def disk_bytes(self) -> int:
        """Bytes of a rank's parts on disk, values and state; 0 of a table in memory."""
        if self.parts is None:
            return 0
        held = self.table["weights"] + self.table["optimizer state"]
        return round((held.main + held.device) / self.parts.places) * self.parts.parts

    # A micro-batch.

    @cached_property
    def candidates(self) -> dict[Any, int]:
        """K per side."""
        negatives = self.config.negatives
        chunk_size = negatives.chunk_size or self.batch_size
        return {side: negatives.candidates(side, chunk_size) for side in sides_of(negatives.sides)}

    @cached_property
    def batch(self) -> Batch:
        """The largest micro-batch of a rank."""
        shares = self.cluster.world_size * self.micro_batches
        return Batch.of(self.config.negatives, self.sizes, self.batch_size, shares)

    @property
    def wanted(self) -> float:
        """Rows that a rank looks up in a step."""
        rows = self.batch.lookups if self.captures else self.batch.distinct
        return self.micro_batches * rows

    @property
    def served(self) -> float:
        """Rows, of ``columns`` elements, that the busiest rank reads for all ranks in a step."""
        if self.is_full:  # it scores and updates its own rows
            return self.rows
        spread = self.layout in ("row_wise", "data_parallel")
        return self.wanted * (1 if spread else self.cluster.world_size)

    @cached_property
    def cost(self) -> Cost:
        """The cost of scoring a micro-batch."""
        if not self.is_full:
            return self.costs.of_batch(self.batch.chunks, self.batch.triples, self.candidates)
        held = sum(self.table.values(), CUDA_PROCESS).device
        queries = -(-self.queries // self.micro_batches)
        return self.costs.of_all(self.rows, queries, max(0, self.cluster.device.memory - held))

    # Memory.

    @cached_property
    def memory(self) -> dict[str, Bytes]:
        """The bytes of a rank by part, at the fullest moment of training."""
        config, sizes, parts = self.config, self.sizes, dict(self.table)
        held = parts["weights"] + parts["optimizer state"]
        saved = held.device + held.main

        def computed(size: float) -> Bytes:
            return Bytes(**{self.place: round(size)})

        if self.is_full and (self.micro_batches > 1 or sizes.num_features):
            # The sum over micro-batches, or the gradients of vectors of entities.
            parts["gradients"] = computed(4 * self.dim * self.rows)
        if self.parts is not None:  # one is read ahead, and one is written
            parts["parts on their way"] = Bytes(main=round(2 / self.parts.places * saved))
        parts["dense parameters"] = self._dense()
        # A CUDA graph keeps its memory, and the last batch of an epoch has its own.
        growth = 2 if self.captures else 1
        parts["rows and ids"] = computed(growth * self._exchanged())
        parts["activations"] = computed(growth * self.cost.peak_bytes)
        parts["batches"] = computed(_IN_FLIGHT * self._batch())
        freed = min(CPU_FREED, sum(size.main for size in parts.values()))
        process = CUDA_PROCESS if self.is_cuda else Bytes(main=CPU_PROCESS + freed)
        if degree_power(config.negatives) is not None and not self.is_full:  # cumulated degrees
            process += Bytes(main=8 * sizes.entities)
        if config.entities.on_disk:  # numbers of triples, sorted by stage
            process += Bytes(main=4 * sizes.triples)
        if self.is_cuda:  # a checkpoint copies one piece after another; a CPU writes them in place
            process += Bytes(main=min(PIECE_BYTES, saved))
        parts["process"] = process
        on_device = self._triples_on_device(sum(size.device for size in parts.values()))
        parts["triples"] = Bytes(on_device, self._mapped())
        return parts

    def _dense(self) -> Bytes:
        """Return the bytes of parameters, gradients, state and averages, all float32.

        DDP's buckets are views of the gradients. FSDP gathers whole parameters. It scatters whole
        gradients: those of a backward are among the activations. Against all entities they are
        summed over blocks first, and held once more where they are sent.
        """
        numbers, train = self.costs.dense_numbers, self.config.train
        assert train.optimizer is not None
        per_element = 4 * (2 + dense_state_numbers(train.optimizer) + train.averages)
        kept = -(-numbers // self.dense_splits) * per_element
        whole = 4 * numbers if self.dense_is_sharded else 0
        if self.is_full:
            whole *= 3 if self.dense_splits > 1 else 2
        if self.dense_is_sharded and self.config.dense.options.cpu_offload and self.is_cuda:
            return Bytes(device=whole, main=kept)
        return Bytes(**{self.place: kept + whole})

    def _exchanged(self) -> float:
        """Return the bytes of rows, gradients and ids that a rank holds in a micro-batch.

        Rows and gradients are held as sent and as received, ids as given, grouped by owner, with
        the way back, and as received. Gradients of several micro-batches wait for the step, which
        puts them together; clipping sums those of a row.
        """
        row, features, steps = 4 * self.dim, self.sizes.num_features, self.micro_batches
        if self.is_full:  # fetched rows, their gradients, sums of own rows, and places
            size = -(-self.fetched // steps) * (3 * row + 8 * 3)
            # Vectors, rows of features and their gradients.
            return size + (row * (self.rows + 2 * features) if features else 0)
        wanted, served = self.wanted, self.served
        rows = 2 * (wanted + served) / steps
        rows += 2 * served * (steps > 1) + served * self.config.train.clips
        if features:  # vectors of entities, rows of pairs, and these times weights
            rows += self.batch.distinct + 2 * self.batch.pairs
        return row * rows + 8 * (3 * wanted + served) / steps

    def _batch(self) -> float:
        """Return the bytes of a batch: positions, ids, relations, weights, the mask of candidates.

        A pair of an entity and a feature has two positions and a weight. Against all entities a
        batch has anchors, relations and answers of its queries, with one answer each.
        """
        if self.is_full:
            return 8 * 4 * self.queries
        batch = self.batch
        queries = batch.chunks * batch.triples
        places = 3 * queries + batch.negatives + batch.distinct
        masks = self.config.negatives.masks_candidates
        mask = queries * sum(self.candidates.values()) if masks else 0
        return 8 * places + 4 * queries + mask + 20 * batch.pairs

    def _mapped(self) -> int:
        """Return the bytes of the store that a run maps: triples, and the filter index of sides.

        The filter index of a side has an id per triple, and 16 bytes per query. A triple has at
        most one query of its own. On a CPU, the final ranking is as full a moment as training, and
        reads the index of both sides.
        """
        negatives, id_bytes = self.config.negatives, 4 if self.sizes.rows < 1 << 31 else 8
        ids = self.sizes.triples * id_bytes
        triples = 3 * ids if negatives.regime in ("sampled", "1vsall") else 0
        is_indexed = negatives.filtered or negatives.examples == "queries"
        sides, index = len(sides_of(negatives.sides)) * is_indexed, ids + 16 * self.sizes.triples
        ranked = 0 if self.is_cuda else min((2 - sides) * index, RANKED_MOST)
        return triples + sides * index + ranked

    def _triples_on_device(self, others: int) -> int:
        """Return the bytes of the triples from which a GPU makes its batches, beside others."""
        config, sizes = self.config, self.sizes
        on_cpu = config.train.batches == "cpu"
        on_cpu |= resolve("negative_sampler", config.negatives.sampling).on_cpu
        if not self.is_cuda or config.negatives.regime != "sampled" or on_cpu:
            return 0
        with_features = sizes.entities if sizes.num_features else 0
        size = device_bytes(config, sizes.triples, with_features, sizes.pairs)
        memory = self.cluster.device.memory
        free = memory * (1 - RESERVE) - others
        return size if config.train.batches == "device" or fits_device(size, memory, free) else 0

    @property
    def total(self) -> Bytes:
        """What a rank needs in all."""
        return sum(self.memory.values(), Bytes())

    @cached_property
    def limits(self) -> list[Limit]:
        """The memory of a GPU, if there are GPUs, then that of a host.

        The ranks of a host share its main memory. Mapped triples need none of it: the system drops
        pages of files where memory is short.
        """
        device = self.cluster.device
        main = self.cluster.per_host * (self.total.main - self.memory["triples"].main)
        needs = [("main memory of a host", main, device.host_memory)]
        if self.is_cuda:
            needs.insert(0, ("memory of a GPU", self.total.device, device.memory))
        return [Limit(*need, int(need[2] * (1 - RESERVE))) for need in needs]

    @property
    def worst(self) -> Limit:
        """The limit that is exceeded most, or has the least room."""
        return max(self.limits, key=lambda limit: limit.over)

    @property
    def fits(self) -> bool:
        return self.worst.over <= 0

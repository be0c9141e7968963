"""One rank of a run: its rows, its micro-batch and its memory.

It is the rank with the most rows. Training splits rows so that every rank but the
last has equally many. Exact are the bytes of the table and of dense parameters. Expected are rows,
ids and batches (they follow the number of different entities per batch) and activations (see
``cost``). Measured or assumed is the process itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from kge_torchrec.config import Config, ConfigError
from kge_torchrec.config.keys import Facts, without_effect
from kge_torchrec.config.registry import resolve
from kge_torchrec.data import ENTITY, SIDES
from kge_torchrec.data.batches.triples import device_bytes, fits_device, share_of
from kge_torchrec.data.parts import PartLayout
from kge_torchrec.distributed.processes import rows_by_rank
from kge_torchrec.embeddings.torchrec.planner import (
    DENSE,
    FUSED,
    SHARDINGS,
    UVM_CACHING,
    Bytes,
    TableForm,
    check_cuda_dim,
    dense_state_numbers,
    table_memory,
)
from kge_torchrec.planning.cost import Cost, Costs
from kge_torchrec.planning.devices import Cluster, is_number
from kge_torchrec.planning.sizes import Sizes
from kge_torchrec.training.assembly import sides_of
from kge_torchrec.training.checkpoint_files import PIECE_BYTES

MIB = 1 << 20
TABLE_PARTS = ("weights", "optimizer state", "average", "cache", "gradients", "parts on their way")

# A CPU rank with the packages imported, its process group and compiled kernels, and the bytes per
# triple of the pages that the final ranking maps, at most those of the largest graph that was
# measured: fitted to ten runs (docs/how-to/plan.md).
CPU_PROCESS, RANKED_TRIPLE, RANKED_MOST = 672 * MIB, 58, 128 * MIB
# A CUDA rank's context, libraries and NCCL's buffers, and its host side: assumed, not measured.
CUDA_PROCESS = Bytes(device=1536 * MIB, main=3072 * MIB)
_IN_FLIGHT = 3  # batches that TorchRec's pipeline holds at once


OfRank = TypeVar("OfRank", bound="Rank")


@dataclass(frozen=True)
class Batch:
    """The largest micro-batch of a rank."""

    chunks: int  # C
    triples: int  # b, padding included
    positives: int  # triples without padding
    negatives: int  # entities drawn, over chunks and sides
    distinct: np.ndarray  # (M,) different rows of each type, expected
    lookups: np.ndarray  # (M,) rows of each type with duplicates, expected
    pairs: float = 0.0  # of a different entity and one of its features, expected


@dataclass(frozen=True)
class Rank:
    """One rank of a run on some devices.

    Args:
        config: The config, with a value for every null: ``of`` chooses them.
        sizes: The sizes of the graph.
        cluster: The devices.
        layout: One of ``SHARDINGS``; training has row_wise.
        reserve: Share of each device's memory, and of a CPU host's, that is left free.
        known_costs: The costs of the scorer; shared by runs with the same one.
        known_cost: The cost of a micro-batch, in place of counting it.

    Raises:
        ConfigError: The run, the devices and the layout do not go together.
    """

    config: Config
    sizes: Sizes
    cluster: Cluster
    layout: str = "row_wise"
    reserve: float = 0.05
    known_costs: Costs | None = field(default=None, repr=False, compare=False)
    known_cost: Cost | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(
        cls: type[OfRank], config: Config, sizes: Sizes, cluster: Cluster, **options: Any
    ) -> OfRank:
        """Return the plan of a config that may have nulls."""
        config.check_device(cluster.device.is_cuda)
        config = config.settled(sizes.graph, cluster.device.is_cuda, cluster.world_size)
        return cls(config, sizes, cluster, **options)

    def __post_init__(self) -> None:
        config, ranks = self.config, self.cluster.world_size
        if self.layout not in SHARDINGS:
            raise ConfigError(
                f"--sharding must be one of {', '.join(SHARDINGS)}, got {self.layout!r}"
            )
        if not (is_number(self.reserve) and 0 <= self.reserve < 1):
            raise ConfigError(f"--reserve must be in [0, 1), got {self.reserve}")
        if self.layout != "row_wise":
            if config.entities.on_disk:
                raise ConfigError("--sharding: parts of a table on disk are split by rows")
            if config.negatives.is_full:
                raise ConfigError(
                    f"--sharding: with negatives.regime {config.negatives.regime} every rank "
                    "scores its own rows of one table; only row_wise does that"
                )
            if self.layout == "data_parallel" and config.entities.cache_ratio:
                raise ConfigError(
                    "--sharding: data_parallel tables lie whole on every device; use "
                    "entities.placement memory"
                )
            if config.entities.tables is not None:
                raise ConfigError(
                    f"--sharding: tables of node types are split by rows, not {self.layout}"
                )
        missing = (config.entities.tables or {}).keys() - {kind for kind, _ in self.sizes.runs}
        if missing:
            raise ConfigError(
                f"entities.tables: the sizes of {', '.join(sorted(missing))} are not known; "
                "plan with typed data, or give --entities user=600k,item=400k"
            )
        if self.is_cuda and config.entities.engine == "torchrec":
            check_cuda_dim(self.dim)
        if config.dense.wrapper == "none" and ranks > 1:
            raise ConfigError(f"dense.wrapper none is for one rank, not for {ranks}; use auto")
        if ranks % self.dense_copies:
            raise ConfigError(
                f"dense.options.replicas: {ranks} ranks cannot be split into "
                f"{self.dense_copies} equal groups"
            )

    def changed(self: OfRank, keys: dict[str, Any], **fields: Any) -> OfRank:
        """Return the plan with other values of config keys ("train.batch_size") and of fields.

        Raises:
            ConfigError: The config does not allow a value, or another key that is set loses its
                effect.
        """
        config = self.config
        for key, value in keys.items():
            section, name = key.split(".")
            changed = replace(getattr(config, section), **{name: value})
            config = replace(config, **{section: changed})
        idle = without_effect(self.config, Facts()) if keys else {}
        for key, reason in without_effect(config, Facts()).items() if keys else ():
            if key not in idle:
                raise ConfigError(reason)
        others = ("train.", "dense.", "entities.placement")
        costs = self.costs if all(key.startswith(others) for key in keys) else None
        return replace(self, config=config, known_costs=costs, **fields)

    # The run.

    @cached_property
    def costs(self) -> Costs:
        """The costs of the scorer."""
        return self.known_costs or Costs(self.config, self.sizes.relations)

    @property
    def is_cuda(self) -> bool:
        """Whether the devices are GPUs."""
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
    def micro_batches(self) -> int:
        """Number of micro-batches per step."""
        return self.config.train.accumulation

    @property
    def steps_per_epoch(self) -> float:
        """Number of steps per epoch; the last, smaller step counts as a part of one."""
        return self.examples / self.batch_size

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

    # The table.

    @cached_property
    def parts(self) -> PartLayout | None:
        """How a table on disk is cut into parts; None of one in memory."""
        return PartLayout.of_config(self.config, self.sizes.rows, self.cluster.world_size)

    @cached_property
    def types(self) -> list[str]:
        """The labels of the node types (M), features among them; one for a table without types."""
        if self.parts is not None or not self.sizes.runs:
            return [ENTITY]
        return list(dict.fromkeys(kind for kind, _ in self.sizes.runs))

    @cached_property
    def forms(self) -> list[TableForm]:
        """The storage of rows and optimizer state, for each type (M)."""
        entities, train = self.config.entities, self.config.train
        replicated = self.layout == "data_parallel"
        kernel = DENSE if replicated else UVM_CACHING if entities.cache_ratio else FUSED
        assert train.optimizer is not None
        names = [entities.optimizer_of(kind, train.optimizer) for kind in self.types]
        return [
            TableForm(
                name,
                kernel,
                0.0 if replicated else entities.cache_ratio,
                state_bytes=2 if entities.preset == "dicee" else 4,
                counts_rows=entities.preset == "dgl" and name == "adam",
                state_in_main=entities.preset == "dicee",
                averages=train.averages,
            )
            for name in names
        ]

    @property
    def in_words(self) -> str:
        """Layout, kernel and cached share of the rows, such as "row_wise, fused"."""
        form = self.forms[0]
        cached = f", cache {form.cache_ratio:.3g}" if form.cache_ratio else ""
        return f"{self.layout}, {form.kernel}{cached}"

    def rows_of_types(self, block: range) -> np.ndarray:
        """Return the number of rows of each type (M,) in a block of ids."""
        if len(self.types) == 1:
            return np.array([len(block)])
        place = [self.types.index(kind) for kind, _ in self.sizes.runs]
        edges = np.array([0, *(ids.stop for _, ids in self.sizes.runs)])
        rows = np.diff(edges.clip(block.start, block.stop))
        return np.bincount(place, rows, len(self.types)).astype(np.int64)

    @cached_property
    def blocks(self) -> list[range]:
        """The rows of each rank that may have other types than the rest: all ranks by rows."""
        if self.parts is not None:
            return [range(self.parts.buffer_rows)]
        if self.layout != "row_wise":
            return [range(self.sizes.rows)]
        blocks = rows_by_rank(self.sizes.rows, self.cluster.world_size)
        return blocks if len(self.types) > 1 else blocks[:1]

    @cached_property
    def block(self) -> range:
        """The rows of the rank that needs the most memory for them."""
        return max(self.blocks, key=lambda block: self.table_bytes(self.rows_of_types(block)))

    def table_bytes(self, rows: np.ndarray, columns: int | None = None) -> int:
        """Return the bytes of rows of each type (M,) with their optimizer state."""
        sizes = self._table(rows, self.dim if columns is None else columns).values()
        whole = sum(sizes, Bytes())
        return whole.device + whole.main

    def _table(self, rows: np.ndarray, columns: int) -> dict[str, Bytes]:
        parts: dict[str, Bytes] = {}
        for count, form in zip(rows.tolist(), self.forms, strict=True):
            for part, size in table_memory(count, columns, form, self.is_cuda).items():
                parts[part] = parts.get(part, Bytes()) + size
        return parts

    @property
    def columns(self) -> int:
        """Columns of a shard, as TorchRec splits them."""
        if self.layout != "column_wise":
            return self.dim
        # FBGEMM reads four elements at a time.
        widths = range(-(-self.dim // self.cluster.world_size), self.dim)
        return next((w for w in widths if not (self.dim % w or w % 4)), self.dim)

    @cached_property
    def table(self) -> dict[str, Bytes]:
        """The bytes of a rank's shard by part."""
        return self._table(self.rows_of_types(self.block), self.columns)

    # A micro-batch.

    @cached_property
    def candidates(self) -> dict[Any, int]:
        """K per side."""
        negatives = self.config.negatives
        chunk_size = negatives.chunk_size or self.batch_size
        return {side: negatives.candidates(side, chunk_size) for side in sides_of(negatives.sides)}

    @cached_property
    def drawn(self) -> np.ndarray:
        """(G,) chance that a negative is one particular entity of a group."""
        negatives, sizes = self.config.negatives, self.sizes
        chance, options = sizes.drawn(self._power), negatives.among_options
        sides = sides_of(negatives.sides)
        counts = [negatives.drawn(side) for side in SIDES if side in sides]
        by_type = negatives.among == "seen" or (negatives.among == "types" and not options.types)
        if sizes.of_ends is None or not by_type or not sum(counts):
            return chance
        ends = [of for side, of in zip(SIDES, sizes.of_ends, strict=True) if side in sides]
        of_type = np.average(ends, axis=0, weights=counts)
        return options.share * of_type + (1 - options.share) * chance

    @property
    def _power(self) -> float | None:
        """Exponent of degree sampling; None for uniform sampling."""
        negatives = self.config.negatives
        sampler = resolve("negative_sampler", negatives.sampling)
        return sampler.frequency_power(negatives.sampler_options())

    @cached_property
    def chance(self) -> np.ndarray:
        """(G,) chance that an entity of a group occurs in the micro-batch."""
        batch = self._shape
        return self.sizes.occurring(batch[2], batch[3], self.drawn)

    @cached_property
    def _shape(self) -> tuple[int, int, int, int]:
        """Chunks, triples per chunk, positives and negatives of the largest micro-batch."""
        negatives = self.config.negatives
        chunk_size = negatives.chunk_size or self.batch_size
        shares, shape = self.cluster.world_size * self.micro_batches, (0, 0, 0)
        for number in range(shares if negatives.chunk_size else 1):
            positions, inside = share_of(self.batch_size, chunk_size, number, shares)
            shape = max(shape, (*positions.shape, int(inside.sum())), key=lambda x: x[0] * x[1])
        if not negatives.chunk_size:  # shares of one chunk differ by one triple
            most = -(-self.batch_size // shares)
            shape = (1, most, most)
        per_chunk = sum(negatives.drawn(side) for side in sides_of(negatives.sides))
        return (*shape, shape[0] * per_chunk)

    @cached_property
    def batch(self) -> Batch:
        """The largest micro-batch of a rank."""
        chunks, triples, _, drawn = self._shape
        sizes, features = self.sizes, self.sizes.features
        times = 2 * chunks * triples * sizes.probability + drawn * self.drawn
        distinct, lookups = (sizes.per_type(x, self.types) for x in (self.chance, times))
        if features is None:
            return Batch(*self._shape, distinct, lookups)
        distinct[-1] += features.distinct(self.chance)
        lookups[-1] += features.pairs(times)
        return Batch(*self._shape, distinct, lookups, features.pairs(self.chance))

    @property
    def wanted(self) -> np.ndarray:
        """(M,) rows of each type that a rank looks up in a step."""
        rows = self.batch.lookups if self.captures else self.batch.distinct
        return self.micro_batches * rows

    @cached_property
    def served(self) -> np.ndarray:
        """(M,) rows of each type that the busiest rank reads for all ranks in a step."""
        ranks = self.cluster.world_size
        if self.is_full:  # it scores and updates its own rows
            return self.rows_of_types(self.block)
        if self.layout != "row_wise":
            return self.wanted * (1 if self.layout == "data_parallel" else ranks)
        return max(self._loads, key=lambda load: load.sum())

    @property
    def _loads(self) -> list[np.ndarray]:
        """(M,) rows that all ranks look up on each rank."""
        ranks, wanted = self.cluster.world_size, self.wanted
        if len(self.types) == 1:
            return [wanted]
        totals = self.rows_of_types(range(self.sizes.rows))
        shares = [self.rows_of_types(block) / totals.clip(1) for block in self.blocks]
        return [ranks * wanted * share for share in shares]

    @property
    def imbalance(self) -> tuple[int, float]:
        """The rank that reads the most rows for others, and its rows over the mean of all ranks."""
        if self.is_full or self.layout == "data_parallel":
            return 0, 1.0
        if self.layout == "row_wise":
            loads = [load.sum() for load in self._loads]
            return int(np.argmax(loads)), float(max(loads) / np.mean(loads))
        return 0, self.cluster.world_size * self.columns / self.dim

    @cached_property
    def cost(self) -> Cost:
        """The cost of scoring a micro-batch."""
        if self.known_cost is not None:
            return self.known_cost
        if not self.is_full:
            shape = self.batch.chunks, self.batch.triples
            return self.costs.of_batch(*shape, self.candidates, self.is_cuda)
        held = sum(self.table.values(), CUDA_PROCESS).device
        free = max(0, self.cluster.device.memory - held)
        queries = -(-self.queries // self.micro_batches)
        return self.costs.of_all(len(self.block), queries, self.is_cuda, free)

    # Memory.

    @cached_property
    def memory(self) -> dict[str, Bytes]:
        """The bytes of a rank by part, at the fullest moment of training."""
        config, dim, rows = self.config, self.dim, 4 * self.dim * len(self.block)
        parts = dict(self.table)

        def computed(size: float) -> Bytes:
            return Bytes(**{self.place: round(size)})

        # A CUDA graph keeps its memory, and the last batch of an epoch has its own.
        growth = 2 if self.captures else 1
        features = 4 * dim * self.sizes.num_features
        exchanged = self._exchanged
        if self.is_full:
            if self.micro_batches > 1 or features:  # sum over micro-batches; vectors' gradients
                parts["gradients"] = computed(rows)
            # Vectors, rows of features and their gradients.
            exchanged += rows + 2 * features if features else 0
        if self.parts is not None:  # one is read ahead, and one is written
            held = parts["weights"] + parts["optimizer state"]
            moving = 2 / self.parts.places * (held.main + held.device)
            parts["parts on their way"] = Bytes(main=round(moving))
        parts["dense parameters"] = self._dense_memory
        parts["rows and ids"] = computed(growth * exchanged)
        parts["activations"] = computed(growth * self.cost.peak_bytes)
        parts["batches"] = computed(_IN_FLIGHT * self._batch_bytes)
        parts["process"] = CUDA_PROCESS if self.is_cuda else Bytes(main=CPU_PROCESS)
        held_by_rank = 0
        if self._power is not None and not self.is_full:  # cumulated degrees
            held_by_rank += 8 * self.sizes.entities
        if config.entities.on_disk:  # numbers of triples, sorted by stage
            held_by_rank += 4 * self.sizes.triples
        if self.is_cuda:  # a checkpoint copies one piece after another; a CPU writes them in place
            saved = parts["weights"] + parts["optimizer state"]
            held_by_rank += min(PIECE_BYTES, saved.device + saved.main)
        parts["process"] += Bytes(main=held_by_rank)
        device = self._triples_on_device(sum(size.device for size in parts.values()))
        ranked = 0 if self.is_cuda else min(RANKED_TRIPLE * self.sizes.triples, RANKED_MOST)
        parts["triples"] = Bytes(device=device, main=self._mapped_bytes + ranked)
        return parts

    @property
    def _exchanged(self) -> float:
        """Bytes of rows, gradients and ids that a rank holds in a micro-batch.

        Rows are held as looked up for others and as received, gradients as sent and as received.
        Ids are held as given, grouped by owner, with the way back, and as received. Gradients of
        several micro-batches wait for the step, which puts them together; clipping sums those of a
        row.
        """
        if self.is_full:  # fetched rows, their gradients, sums of own rows, and places
            return -(-self.fetched // self.micro_batches) * (4 * 3 * self.dim + 8 * 3)
        wanted, served = self.wanted.sum(), self.served.sum()
        rows = 2 * (wanted + served) / self.micro_batches
        rows += 2 * served * (self.micro_batches > 1) + served * self.config.train.clips
        ids = (3 * wanted + served) / self.micro_batches
        size = 4 * self.dim * rows + 8 * ids
        if self.sizes.num_features:  # vectors of entities, rows of pairs, and these times weights
            size += 4 * self.dim * (self.batch.distinct.sum() + 2 * self.batch.pairs)
        return float(size)

    @property
    def _batch_bytes(self) -> float:
        """Bytes of a batch: positions, ids, relations, weights, the mask of candidates.

        A pair of an entity and a feature has two positions and a weight. Against all entities a
        batch has anchors, relations and answers of its queries, with one answer each.
        """
        if self.is_full:
            return 8 * 4 * self.queries
        batch = self.batch
        queries = batch.chunks * batch.triples
        places = 3 * queries + batch.negatives + batch.distinct.sum()
        mask = 0
        if self.config.negatives.masks_candidates:
            mask = queries * sum(self.candidates.values())
        return float(8 * places + 4 * queries + mask + 20 * batch.pairs)

    @property
    def _mapped_bytes(self) -> int:
        """Bytes of the store that training reads again and again: triples and filter index.

        The filter index of a side has an id per triple, and 16 bytes per query. A triple has at
        most one query of its own.
        """
        negatives, id_bytes = self.config.negatives, 4 if self.sizes.rows < 1 << 31 else 8
        ids = self.sizes.triples * id_bytes
        triples = 3 * ids if negatives.regime in ("sampled", "1vsall") else 0
        is_indexed = negatives.filtered or negatives.examples == "queries"
        index = len(sides_of(negatives.sides)) if is_indexed else 0
        return triples + (ids + 16 * self.sizes.triples) * index

    def _triples_on_device(self, others: int) -> int:
        """Return the bytes of the triples from which a GPU makes its batches, beside others."""
        config, features = self.config, self.sizes.features
        on_cpu = config.train.batches == "cpu"
        on_cpu |= resolve("negative_sampler", config.negatives.sampling).on_cpu
        if not self.is_cuda or config.negatives.regime != "sampled" or on_cpu:
            return 0
        of_features = () if features is None else (self.sizes.entities, len(features.feature))
        size = device_bytes(config, self.sizes.triples, *of_features)
        memory = self.cluster.device.memory
        free = memory * (1 - self.reserve) - others
        return size if config.train.batches == "device" or fits_device(size, memory, free) else 0

    # Dense parameters: copies, each split over neighboring ranks, as distributed.dense does.

    @property
    def dense_is_sharded(self) -> bool:
        """Whether the wrapper gathers whole parameters to run: fsdp and hybrid."""
        return self.config.dense.wrapper in ("fsdp", "hybrid")

    @property
    def dense_copies(self) -> int:
        """Number of copies, each split over ranks; one per rank if every rank holds all."""
        if not self.dense_is_sharded:
            return self.cluster.world_size
        if self.config.dense.wrapper == "fsdp":
            return 1
        return self.config.dense.options.replicas or self.cluster.hosts

    @property
    def dense_splits(self) -> int:
        """Number of neighboring ranks that hold a copy together."""
        return self.cluster.world_size // self.dense_copies

    @property
    def dense_gathers(self) -> int:
        """Number of gathers of split parameters per forward and backward."""
        return 2 if self.config.dense.options.sharding == "full" else 1

    @property
    def _dense_memory(self) -> Bytes:
        """A rank's parameters, gradients, state and averages, all float32.

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

    @property
    def total(self) -> Bytes:
        """What a rank needs in all."""
        return sum(self.memory.values(), Bytes())

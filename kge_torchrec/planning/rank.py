"""One rank of a run: its rows, and its share of a step.

It is the rank with the most rows. Training splits rows so that every rank but the last has equally
many. How many different rows a batch has is expected, not counted (see ``sizes``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from kge_torchrec.config import Config, ConfigError
from kge_torchrec.config.registry import resolve
from kge_torchrec.data import ENTITY, SIDES
from kge_torchrec.data.batches.triples import share_of
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
    table_memory,
)
from kge_torchrec.planning.cost import Cost, Costs
from kge_torchrec.planning.devices import Cluster, is_number
from kge_torchrec.planning.sizes import Sizes
from kge_torchrec.training.assembly import sides_of

# A CUDA rank's context, libraries and NCCL's buffers, and its host side: assumed, not measured.
CUDA_PROCESS = Bytes(device=1536 << 20, main=3072 << 20)


@dataclass(frozen=True)
class Batch:
    """The largest micro-batch of a rank."""

    chunks: int  # C
    triples: int  # b, padding included
    negatives: int  # entities drawn, over chunks and sides
    chance: np.ndarray  # (G,) that an entity of a group occurs
    distinct: np.ndarray  # (M,) different rows of each type, expected
    lookups: np.ndarray  # (M,) rows of each type with duplicates, expected
    pairs: float  # of a different entity and one of its features, expected


@dataclass(frozen=True)
class Rank:
    """One rank of a run on some devices.

    Args:
        config: The config, with a value for every null: ``Plan.of`` chooses them.
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

    def __post_init__(self) -> None:
        config, ranks, layout = self.config, self.cluster.world_size, self.layout
        tables, by_rows = config.entities.tables, layout == "row_wise"
        unknown = sorted((tables or {}).keys() - {kind for kind, _ in self.sizes.runs})
        problems = {
            f"--sharding must be one of {', '.join(SHARDINGS)}, got {layout!r}": (
                layout not in SHARDINGS
            ),
            f"--reserve must be in [0, 1), got {self.reserve}": (
                not (is_number(self.reserve) and 0 <= self.reserve < 1)
            ),
            "--sharding: parts of a table on disk are split by rows": (
                not by_rows and config.entities.on_disk
            ),
            f"--sharding: with negatives.regime {config.negatives.regime} every rank scores its "
            "own rows of one table; only row_wise does that": not by_rows and self.is_full,
            "--sharding: data_parallel tables lie whole on every device; use entities.placement "
            "memory": layout == "data_parallel" and config.entities.cache_ratio > 0,
            f"--sharding: tables of node types are split by rows, not {layout}": (
                not by_rows and tables is not None
            ),
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

    # Dense parameters: copies, each split over neighboring ranks, as distributed.dense does.

    @property
    def dense_is_sharded(self) -> bool:
        """Whether the wrapper gathers whole parameters to run."""
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
        names = [entities.table_of(x, train, self.config.model).optimizer for x in self.types]
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

    def table_of(self, rows: np.ndarray, columns: int) -> dict[str, Bytes]:
        """Return the bytes of rows of each type (M,) by part."""
        parts: dict[str, Bytes] = {}
        for count, form in zip(rows.tolist(), self.forms, strict=True):
            for part, size in table_memory(count, columns, form, self.is_cuda).items():
                parts[part] = parts.get(part, Bytes()) + size
        return parts

    def table_bytes(self, rows: np.ndarray) -> int:
        """Return the bytes of whole rows of each type (M,) with their optimizer state."""
        whole = sum(self.table_of(rows, self.dim).values(), Bytes())
        return whole.device + whole.main

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
        return self.table_of(self.rows_of_types(self.block), self.columns)

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
        chance, options = sizes.drawn(self.degree_power), negatives.among_options
        sides = sides_of(negatives.sides)
        counts = [negatives.drawn(side) for side in SIDES if side in sides]
        by_type = negatives.among == "seen" or (negatives.among == "types" and not options.types)
        if sizes.of_ends is None or not by_type or not sum(counts):
            return chance
        ends = [of for side, of in zip(SIDES, sizes.of_ends, strict=True) if side in sides]
        of_type = np.average(ends, axis=0, weights=counts)
        return options.share * of_type + (1 - options.share) * chance

    @property
    def degree_power(self) -> float | None:
        """Exponent of degree sampling; None for uniform sampling."""
        negatives = self.config.negatives
        sampler = resolve("negative_sampler", negatives.sampling)
        return sampler.frequency_power(negatives.options_in("options"))

    @cached_property
    def batch(self) -> Batch:
        """The largest micro-batch of a rank."""
        negatives, sizes, features = self.config.negatives, self.sizes, self.sizes.features
        shares = self.cluster.world_size * self.micro_batches
        most = -(-self.batch_size // shares)  # shares of one chunk differ by one triple
        chunks, triples, positives = 1, most, most
        if negatives.chunk_size:
            places = (share_of(self.batch_size, negatives.chunk_size, n, shares)
                      for n in range(shares))  # fmt: skip
            shapes = ((*at.shape, int(inside.sum())) for at, inside in places)
            chunks, triples, positives = max(shapes, key=lambda x: x[0] * x[1])
        drawn = chunks * sum(negatives.drawn(side) for side in sides_of(negatives.sides))
        chance = sizes.occurring(positives, drawn, self.drawn)
        times = 2 * chunks * triples * sizes.probability + drawn * self.drawn
        distinct, lookups = (sizes.per_type(x, self.types) for x in (chance, times))
        pairs = 0.0
        if features is not None:
            distinct[-1] += features.distinct(chance)
            lookups[-1] += features.pairs(times)
            pairs = features.pairs(chance)
        return Batch(chunks, triples, drawn, chance, distinct, lookups, pairs)

    @property
    def wanted(self) -> np.ndarray:
        """(M,) rows of each type that a rank looks up in a step."""
        rows = self.batch.lookups if self.captures else self.batch.distinct
        return self.micro_batches * rows

    @cached_property
    def busiest(self) -> tuple[int, np.ndarray, float]:
        """The rank that reads the most rows for all ranks in a step.

        With its rows of each type (M,), and their number over the mean of all ranks.
        """
        ranks, wanted = self.cluster.world_size, self.wanted
        if self.is_full:  # it scores and updates its own rows
            return 0, self.rows_of_types(self.block), 1.0
        if self.layout == "data_parallel":
            return 0, wanted, 1.0
        if self.layout != "row_wise":
            return 0, ranks * wanted, ranks * self.columns / self.dim
        loads = [wanted]
        if len(self.types) > 1:
            totals = self.rows_of_types(range(self.sizes.rows)).clip(1)
            loads = [ranks * wanted * (self.rows_of_types(x) / totals) for x in self.blocks]
        numbers = [load.sum() for load in loads]
        rank = int(np.argmax(numbers))
        return rank, loads[rank], float(numbers[rank] / np.mean(numbers))

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

"""A plan file: the sharding of the table that ``kge-torchrec plan`` made and training can use.

The file is JSON: ``{"format", "version", "packages", "table", "world", "sharding", "fits", ...}``.
Training ignores its other keys.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.planner.utils import placement
from torchrec.distributed.types import (
    CacheParams,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
)

from kge_torchrec import __version__
from kge_torchrec.config import Config, ConfigError
from kge_torchrec.data import ENTITY
from kge_torchrec.distributed.processes import Processes, on_first_rank, rows_by_rank
from kge_torchrec.embeddings.torchrec.planner import FUSED, UVM_CACHING
from kge_torchrec.environment import installed

FORMAT = "kge-torchrec plan"
VERSION = 1
MODULE = "entities"  # name of the EmbeddingCollection in the model


@dataclass(frozen=True)
class Shard:
    """A block of the table on one rank."""

    rank: int
    first_row: int
    rows: int
    first_column: int
    columns: int


def shards_of(plan: ShardingPlan, num_entities: int, dim: int) -> list[Shard]:
    """Return the shards of a plan's entity table, ordered by rank.

    A data-parallel table has one whole shard per rank.
    """
    (tables,) = plan.plan.values()
    table = tables[ENTITY]
    if table.sharding_spec is None:
        return [Shard(rank, 0, num_entities, 0, dim) for rank in table.ranks]
    shards = [
        Shard(
            rank,
            first_row=shard.shard_offsets[0],
            rows=shard.shard_sizes[0],
            first_column=shard.shard_offsets[1],
            columns=shard.shard_sizes[1],
        )
        for rank, shard in zip(table.ranks, table.sharding_spec.shards, strict=True)
    ]
    return sorted(shards, key=lambda shard: (shard.rank, shard.first_row, shard.first_column))


def parameter_sharding(
    shards: Sequence[Shard],
    sharding: str,
    kernel: str,
    device_type: str,
    local_world_size: int,
    cache_ratio: float = 0.0,
) -> ParameterSharding:
    """Return TorchRec's description of the shards of a table.

    Args:
        shards: The shards of the table.
        sharding: TorchRec's name of the sharding, such as "row_wise".
        kernel: TorchRec's name of the kernel, such as "fused".
        device_type: "cpu" or "cuda".
        local_world_size: Ranks per host.
        cache_ratio: Share of the rows in the GPU cache; 0 without a cache.
    """
    spec = None
    if sharding != "data_parallel":
        spec = EnumerableShardingSpec(
            [
                ShardMetadata(
                    shard_offsets=[shard.first_row, shard.first_column],
                    shard_sizes=[shard.rows, shard.columns],
                    placement=placement(device_type, shard.rank, local_world_size),
                )
                for shard in shards
            ]
        )
    return ParameterSharding(
        sharding_type=sharding,
        compute_kernel=kernel,
        ranks=[shard.rank for shard in shards],
        sharding_spec=spec,
        cache_params=CacheParams(load_factor=cache_ratio) if cache_ratio else None,
    )


def sharding_plan(shards: Sequence[Shard], *description: Any) -> ShardingPlan:
    """Invert ``shards_of``: make a plan for DistributedModelParallel of one table.

    ``description`` are the other arguments of ``parameter_sharding``.
    """
    table = parameter_sharding(shards, *description)
    return ShardingPlan({MODULE: EmbeddingModuleShardingPlan({ENTITY: table})})


def package_versions() -> dict[str, str]:
    """Return the package versions that a plan depends on, without build tags such as "+cpu"."""
    versions = {"kge-torchrec": __version__, **installed(("torch", "torchrec"))}
    return {name: version.split("+")[0] for name, version in versions.items()}


@dataclass(frozen=True)
class PlanFile:
    """A plan read from a file.  Call ``check`` before training with it."""

    path: Path
    content: dict[str, Any]

    @property
    def shards(self) -> list[Shard]:
        return [Shard(**shard) for shard in self.content["sharding"]["shards"]]

    def check(
        self,
        *,
        config: Config,
        num_entities: int,
        world_size: int,
        local_world_size: int,
        device_type: str,
    ) -> None:
        """Check that the plan matches a run.

        Args:
            config: The config of the run.
            num_entities: Rows of its table.
            world_size: Its ranks.
            local_world_size: Those of a host.
            device_type: "cpu" or "cuda".

        Raises:
            ConfigError: The plan is for another run.  The message names the difference.
        """
        dim, cache_ratio = config.model.dim, config.entities.cache_ratio
        table, world, layout = (self.content[key] for key in ("table", "world", "sharding"))
        planned = {
            **{name: version for name, version in self.content["packages"].items()},
            "the number of ranks": world["size"],
            "the number of ranks on a host": world["size"] // world["hosts"],
            "the kind of device": world["device"]["kind"],
            "the number of entities": table["entities"],
            "model.dim": table["dim"],
            "train.optimizer": table["optimizer"],
            "the sharding": layout["type"],
            "the kernel": layout["kernel"],
            "the cached share of the rows": layout["cache_ratio"],
            "the table's type": table["dtype"],
            "the number of replicas": layout["replicas"],
        }
        here = {
            **package_versions(),
            "the number of ranks": world_size,
            "the number of ranks on a host": local_world_size,
            "the kind of device": device_type,
            "the number of entities": num_entities,
            "model.dim": dim,
            "train.optimizer": config.train.optimizer,
            "the kernel": UVM_CACHING if cache_ratio else FUSED,
            "the cached share of the rows": cache_ratio,
            # Training supports no other values.
            "the sharding": "row_wise",
            "the table's type": "fp32",
            "the number of replicas": 1,
        }
        for name, value in here.items():
            if planned.get(name) != value:
                raise ConfigError(
                    f"{self.path} is a plan for another run: {name} is {planned.get(name)!r} "
                    f"there and {value!r} here; plan again"
                )
        self._check_rows(num_entities, dim, world_size)

    def _check_rows(self, num_entities: int, dim: int, world_size: int) -> None:
        """Check that the shards are TorchRec's row-wise split.

        TorchRec finds the rank of a row by division, so no other split works.
        """
        shards = self.shards
        if len(shards) != world_size:
            raise ConfigError(
                f"{self.path} has been changed: it needs {world_size} shards and has "
                f"{len(shards)}; plan again"
            )
        for rank, own in enumerate(rows_by_rank(num_entities, world_size)):
            shard, first, rows = shards[rank], own.start, len(own)
            if shard != Shard(rank, first if rows else shard.first_row, rows, 0, dim):
                raise ConfigError(
                    f"{self.path} has been changed: rank {rank} must hold {rows:,} rows from "
                    f"{first:,} on, as row-wise sharding requires; plan again"
                )

    def sharding_plan(self) -> ShardingPlan:
        """Return the plan in the form for DistributedModelParallel."""
        world, layout = self.content["world"], self.content["sharding"]
        return sharding_plan(
            self.shards,
            layout["type"],
            layout["kernel"],
            world["device"]["kind"],
            world["size"] // world["hosts"],
            layout["cache_ratio"],
        )


def planned_sharding(
    config: Config, num_entities: int, processes: Processes
) -> ShardingPlan | None:
    """Return the sharding of the plan file run.plan, or None without one.  Collective.

    Raises:
        ConfigError: The plan is for another run.  Raised on every rank.
    """
    file = config.run.plan
    if file is None:
        return None

    def read() -> ShardingPlan:
        plan = read_plan(file)
        plan.check(
            config=config,
            num_entities=num_entities,
            world_size=processes.world_size,
            local_world_size=processes.local_world_size,
            device_type=processes.device.type,
        )
        return plan.sharding_plan()

    return on_first_rank(processes, read)


def read_plan(path: str | Path) -> PlanFile:
    """Read a plan file.

    Raises:
        ConfigError: The file is not a plan, has another version or is incomplete, or the plan does
            not fit its devices.
    """
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ConfigError(f"{path} is no plan; `kge-torchrec plan ... --output` writes one")
    if content.get("version") != VERSION:
        raise ConfigError(
            f"{path} is a plan of version {content.get('version')!r}, this program reads "
            f"{VERSION}; plan again"
        )
    try:
        plan = PlanFile(path, content)
        plan.sharding_plan()
        required = content["packages"], content["table"]["entities"], content["world"]["hosts"]
        fits = bool(content["fits"] and required)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            f"{path} is damaged ({type(error).__name__}: {error}); plan again"
        ) from None
    if not fits:
        raise ConfigError(f"{path} is a plan that does not fit its devices; see its advice")
    return plan

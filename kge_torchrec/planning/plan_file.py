"""A plan as JSON: what the dry run says, and what training checks and takes.

    {"format", "version", "packages", "table", "world", "sharding": {"shards": [...]}, "fits",
     "memory", "limits", "traffic", "step", "advice", ...}

Bytes are integers, times seconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from torchrec.distributed.types import ShardingPlan

from kge_torchrec.config import ConfigError
from kge_torchrec.planning.advice import Advice, Faster
from kge_torchrec.planning.communication import KINDS, Traffic
from kge_torchrec.planning.layout import Shard, sharding_plan
from kge_torchrec.planning.plan import TrainingPlan

FORMAT = "kge-torchrec plan"
VERSION = 1
_PACKAGES = ("kge-torchrec", "torch", "torchrec")


def plan_content(
    plan: TrainingPlan, advice: Sequence[Advice] = (), quicker: Faster | None = None
) -> dict[str, Any]:
    """Everything a dry run says, as plain values."""
    workload, cluster, choice = plan.workload, plan.cluster, plan.choice
    form = choice.form(workload)
    return {
        "format": FORMAT,
        "version": VERSION,
        "packages": package_versions(),
        "table": {
            "entities": workload.num_entities,
            "dim": workload.dim,
            "dtype": choice.dtype,
            "optimizer": workload.optimizer,
        },
        "world": {
            "size": cluster.world_size,
            "hosts": cluster.hosts,
            "device": asdict(cluster.device),
        },
        "sharding": {
            "type": choice.sharding,
            "kernel": form.kernel,
            "cache_ratio": form.cache_ratio,
            "replicas": choice.replicas,
            "shards": [asdict(shard) for shard in plan.shards],
        },
        "choice": asdict(choice),
        "run": {
            "relations": workload.num_relations,
            "triples": workload.num_triples,
            "batch_size": workload.batch_size,
            "scorer": workload.config.model.scorer,
            "dense_parameters": workload.dense_parameters,
            "config": workload.config.to_dict(),
        },
        "fits": plan.fits,
        "memory": [
            {
                "rank": rank,
                "host": cluster.host_of(rank),
                "device": {part: size.device for part, size in parts.items() if size.device},
                "main": {part: size.main for part, size in parts.items() if size.main},
                "total": asdict(plan.total(rank)),
            }
            for rank, parts in enumerate(plan.memory)
        ],
        "limits": [{**asdict(limit), "over": max(0, limit.over)} for limit in plan.limits],
        "traffic": {
            "unit": "bytes sent in a step by all ranks",
            "steps_per_epoch": workload.steps_per_epoch,
            "lookups": {
                "deduplicated": plan.distinct,
                "with_duplicates": plan.lookups,
            },
            "sent": _traffic(plan.traffic),
            "with_duplicates": _traffic(plan.with_duplicates),
        },
        "step": {
            "what": "a model from bytes, operations and the device's speeds, not a measurement",
            "seconds": plan.step_seconds,
            "parts": plan.times,
            "largest": plan.largest_time,
        },
        "advice": [asdict(item) for item in advice],
        "faster": quicker and quicker.figures(),
        "notes": plan.notes,
    }


def _traffic(traffic: Traffic) -> dict[str, dict[str, float]]:
    names = ("within_hosts", "between_hosts")
    sums = {kind: traffic.total(kind) for kind in KINDS} | {"all": traffic.total()}
    return {kind: dict(zip(names, both, strict=True)) for kind, both in sums.items()}


def package_versions() -> dict[str, str]:
    """Versions that a plan depends on; builds for CPU and GPU count as the same."""
    return {name: metadata.version(name).split("+")[0] for name in _PACKAGES}


def write_plan(path: str | Path, content: dict[str, Any]) -> None:
    """Writes the content as JSON, whole or not at all."""
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


@dataclass(frozen=True)
class PlanFile:
    """A plan that was read; ``check`` before training with it."""

    path: Path
    content: dict[str, Any]

    @property
    def shards(self) -> list[Shard]:
        return [Shard(**shard) for shard in self.content["sharding"]["shards"]]

    def check(
        self,
        *,
        num_entities: int,
        dim: int,
        optimizer: str,
        world_size: int,
        local_world_size: int,
        device_type: str,
    ) -> None:
        """Raises ConfigError, saying what differs, unless the plan is for just this run."""
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
            "train.optimizer": optimizer,
            # What training can do so far.
            "the sharding": "row_wise",
            "the kernel": "fused",
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
        """TorchRec finds a row's rank by division, so that no other split works."""
        block, shards = -(-num_entities // world_size), self.shards
        if len(shards) != world_size:
            raise ConfigError(
                f"{self.path} has been changed: it needs {world_size} shards and has "
                f"{len(shards)}; plan again"
            )
        for rank, shard in enumerate(shards):
            first = min(rank * block, num_entities)
            rows = min(block, num_entities - first)
            if shard != Shard(rank, first if rows else shard.first_row, rows, 0, dim):
                raise ConfigError(
                    f"{self.path} has been changed: rank {rank} must hold {rows:,} rows from "
                    f"{first:,} on, as row-wise sharding has it; plan again"
                )

    def sharding_plan(self) -> ShardingPlan:
        """As DistributedModelParallel takes it."""
        world, layout = self.content["world"], self.content["sharding"]
        return sharding_plan(
            self.shards,
            layout["type"],
            layout["kernel"],
            world["device"]["kind"],
            world["size"] // world["hosts"],
            layout["cache_ratio"],
        )


def read_plan(path: str | Path) -> PlanFile:
    """Reads what ``write_plan`` wrote.

    Raises ConfigError for a file that is no plan, of another version, or incomplete, and for a
    plan that does not fit its devices.
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
        wanted = content["packages"], content["table"]["entities"], content["world"]["hosts"]
        fits = bool(content["fits"] and wanted)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            f"{path} is damaged ({type(error).__name__}: {error}); plan again"
        ) from None
    if not fits:
        raise ConfigError(f"{path} is a plan that does not fit its devices; see its advice")
    return plan

"""A plan as JSON: what the dry run says, and what training takes (``torchrec.planned``).

    {"format", "version", "packages", "table", "world", "sharding": {"shards": [...]}, "fits",
     "memory", "limits", "traffic", "step", "advice", ...}

Bytes are integers, times seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kge_torchrec import files
from kge_torchrec.embeddings.torchrec.planned import FORMAT, VERSION, package_versions
from kge_torchrec.planning.advice import Advice, Faster
from kge_torchrec.planning.communication import KINDS, Traffic
from kge_torchrec.planning.plan import TrainingPlan


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


def write_plan(path: str | Path, content: dict[str, Any]) -> None:
    """Writes the content as JSON, whole or not at all."""
    files.write_json(Path(path), content)

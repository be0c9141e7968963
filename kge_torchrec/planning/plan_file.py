"""The content of a plan file (plan.json), which another run can train with (run.plan).

    {"format", "version", "packages", "table", "world", "sharding": {"shards": [...]}, "fits",
     "memory", "limits", "traffic", "step", "advice", ...}

Bytes are integers, times seconds. ``embeddings.torchrec.planned`` reads the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kge_torchrec.data.parts import least_exchanges
from kge_torchrec.embeddings.torchrec.planned import FORMAT, VERSION, package_versions
from kge_torchrec.planning.advice import Advice, Faster
from kge_torchrec.planning.plan import TrainingPlan, table_sizes
from kge_torchrec.planning.step import KINDS, Traffic


def plan_content(
    plan: TrainingPlan, advice: Sequence[Advice] = (), quicker: Faster | None = None
) -> dict[str, Any]:
    """Return everything that a plan says, as plain values."""
    workload, cluster, layout = plan.workload, plan.cluster, plan.layout
    return {
        "format": FORMAT,
        "version": VERSION,
        "packages": package_versions(),
        "table": {
            "entities": workload.num_entities - workload.num_features,
            "features": workload.num_features,
            "dim": workload.dim,
            "dtype": layout.dtype,
            "optimizer": workload.optimizer,
        },
        "tables": table_sizes(plan),
        "disk": disk_use(plan),
        "world": {
            "size": cluster.world_size,
            "hosts": cluster.hosts,
            "device": asdict(cluster.device),
            "straggler": asdict(cluster.straggler),
        },
        "sharding": {
            "type": layout.sharding,
            "kernel": plan.form.kernel,
            "cache_ratio": plan.form.cache_ratio,
            "replicas": layout.replicas,
            "shards": [asdict(shard) for shard in plan.shards],
        },
        "choice": asdict(layout),
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
            "lookups": {"deduplicated": plan.distinct, "with_duplicates": plan.lookups},
            "sent": _sent(plan.traffic),
            "with_duplicates": _sent(plan.with_duplicates),
        },
        "step": {
            "what": "a model from bytes, operations and the device's speeds, not a measurement",
            "seconds": plan.step_seconds,
            "parts": plan.times,
            "largest": plan.largest_time,
            "busy": plan.busy,
            "bound": plan.bound,
        },
        "advice": [asdict(item) for item in advice],
        "faster": quicker
        and {
            "what": "a model, not a measurement",
            "settings": quicker.settings,
            "limit": quicker.limit,
            "now": _speed(quicker.now),
            "then": _speed(quicker.then),
        },
        "notes": plan.notes,
    }


def _sent(traffic: Traffic) -> dict[str, dict[str, float]]:
    names = ("within_hosts", "between_hosts")
    sums = {kind: traffic.total(kind) for kind in KINDS} | {"all": traffic.total()}
    return {kind: dict(zip(names, both, strict=True)) for kind, both in sums.items()}


def _speed(plan: TrainingPlan) -> dict[str, float]:
    return {
        "examples_per_second": plan.examples_per_second,
        "step_seconds": plan.step_seconds,
        "fixed_share": plan.fixed_share,
        "batch_size": plan.workload.batch_size,
        "batch_size_of_rank": plan.workload.batch_size / plan.cluster.world_size,
        "steps_per_epoch": plan.workload.steps_per_epoch,
    }


def disk_use(plan: TrainingPlan) -> dict[str, Any] | None:
    """Return what a table on disk takes there, and what an epoch reads; None of one in memory."""
    parts = plan.parts
    if parts is None:
        return None
    memory = plan.memory[0]
    held = memory["weights"] + memory["optimizer state"]
    size = round((held.main + held.device) / parts.places)
    exchanges = parts.exchanges
    return {
        "parts": parts.parts,
        "buffer": parts.places,
        "part_bytes": size,
        "table_bytes": size * parts.parts,
        "exchanges": exchanges,
        "least_exchanges": parts.passes * least_exchanges(parts.parts, parts.places),
        "epoch_bytes": size * exchanges,
        "stage_seconds": plan.step_seconds * plan.workload.steps_per_epoch / (exchanges + 1),
    }

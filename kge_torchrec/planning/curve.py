"""The same run on more and more ranks: memory, traffic and time of each number as curves.

Every point is a whole plan, so its figures are those that a plan of these ranks reports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kge_torchrec.config import ConfigError
from kge_torchrec.embeddings.torchrec.planner import amount
from kge_torchrec.planning.devices import GB, Cluster
from kge_torchrec.planning.layout import Layout
from kge_torchrec.planning.plan import TrainingPlan, plan_training
from kge_torchrec.planning.report import seconds, table
from kge_torchrec.planning.step import KINDS
from kge_torchrec.planning.workload import Workload

MOST_RANKS = 1024


def curve(
    workload_of: Callable[[Cluster], Workload], smallest: Cluster, layout: Layout, grows: bool
) -> list[TrainingPlan]:
    """Return the plans of W, 2 W, 4 W, ... ranks up to ``MOST_RANKS``.

    Args:
        workload_of: Returns the run on some devices.
        smallest: The first devices.
        layout: Of the table.
        grows: Whether train.batch_size grows with the ranks. Otherwise they share the first one's.

    Raises:
        ConfigError: There are more ranks than ``MOST_RANKS``, or the run, the devices and the
            layout do not go together.
    """
    if smallest.world_size > MOST_RANKS:
        raise ConfigError(
            f"--curve: a curve ends at {MOST_RANKS:,} ranks; --devices begins it with "
            f"{smallest.world_size:,}"
        )
    plans: list[TrainingPlan] = []
    ranks = smallest.world_size
    while ranks <= MOST_RANKS:
        cluster = smallest.larger(ranks)
        workload = workload_of(cluster)
        if plans:
            first = plans[0].workload
            size = first.batch_size * (ranks // smallest.world_size if grows else 1)
            workload = workload.with_settings({"train.batch_size": size})
            workload.memo.update(first.memo)  # the same objective
        plans.append(plan_training(workload, cluster, layout))
        ranks *= 2
    return plans


def curve_content(plans: Sequence[TrainingPlan]) -> list[dict[str, Any]]:
    """Return the figures of each plan, as plain values: bytes, seconds and examples."""
    first = plans[0].examples_per_second / plans[0].cluster.world_size
    return [
        {
            "ranks": plan.cluster.world_size,
            "hosts": plan.cluster.hosts,
            "fits": plan.fits,
            "memory_of_rank": plan.need(plan.fullest),
            "over": plan.overruns[0].over if plan.overruns else 0,
            "batch_size": plan.workload.batch_size,
            **{f"sent_{place}_of_rank": size for place, size in _sent(plan).items()},
            "compute_seconds": plan.compute_seconds,
            "exchange_seconds": plan.exchange_seconds,
            "step_seconds": plan.step_seconds,
            "slowdown": plan.cluster.slowdown,
            "bound": plan.bound,
            "examples_per_second": plan.examples_per_second,
            "efficiency": plan.examples_per_second / plan.cluster.world_size / first,
        }
        for plan in plans
    ]


def _sent(plan: TrainingPlan) -> dict[str, float]:
    """Return the bytes of a step that the busiest rank sends within its host and between hosts."""
    sent = np.array([plan.traffic.of_ranks(kind) for kind in KINDS]).sum(0)  # (2, W)
    within, between = sent.max(1).tolist()
    return {"within": within, "between": between}


def curve_text(plans: Sequence[TrainingPlan]) -> str:
    """Return the curve as a table with a line per number of ranks."""
    examples = plans[0].workload.config.negatives.examples
    rows = [["ranks", "hosts", "fits", "memory of a rank", "batch", "sent within", "between hosts",
             "compute", "exchange", "step", f"{examples}/s", "efficiency"]]  # fmt: skip
    for point in curve_content(plans):
        rows.append(
            [
                f"{point['ranks']:,}",
                f"{point['hosts']:,}",
                "yes" if point["fits"] else f"no, {amount(point['over'])} over",
                amount(point["memory_of_rank"]),
                f"{point['batch_size']:,}",
                amount(round(point["sent_within_of_rank"])),
                amount(round(point["sent_between_of_rank"])),
                *(seconds(point[f"{part}_seconds"]) for part in ("compute", "exchange", "step")),
                f"{point['examples_per_second']:,.0f}",
                f"{point['efficiency']:.0%}",
            ]
        )
    return "\n".join([heading(plans), "", table(rows), "", *_notes(plans)])


def heading(plans: Sequence[TrainingPlan]) -> str:
    """Return the run, the devices and their links in two lines."""
    work, device = plans[0].workload, plans[0].cluster.device
    return (
        f"{work.rows_in_words} x {work.dim}, {work.optimizer}: {device.name}, {plans[0].layout}\n"
        f"a rank sends {device.within_host / GB:.4g} GB/s within its host, "
        f"{device.between_hosts / GB:.4g} GB/s to other hosts: a model, not a measurement"
    )


def _notes(plans: Sequence[TrainingPlan]) -> list[str]:
    notes = [
        "sent: by the rank that sends most, in a step; efficiency: "
        f"{plans[0].workload.config.negatives.examples}/s of a rank, over those of the first line"
    ]
    if plans[0].is_cuda:
        notes.append("a GPU computes while its host starts operations, so the longest part counts")
    if plans[-1].cluster.slowdown > 1:
        first, last = (plan.cluster.slowdown for plan in (plans[0], plans[-1]))
        notes.append(
            f"the slowest rank computes {first:.3g} to {last:.3g} times as long (expected)"
        )
    return notes

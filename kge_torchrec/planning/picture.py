"""A picture of a plan: a column a rank, what fills it, and the line it must stay below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from kge_torchrec.embeddings.torchrec.planner import GIB, amount
from kge_torchrec.planning.memory import PARTS, SHARED
from kge_torchrec.planning.plan import Limit, TrainingPlan
from kge_torchrec.planning.report import rank_groups, ranks_text

MOST_COLUMNS = 16  # more ranks are drawn as groups that hold the same
_SMALL = 0.1  # a host's memory that is filled less than this is a line of text

# Okabe and Ito's colours (2008), which differ for any colour vision; greys for the process.
_COLOURS = {
    "weights": "#0072B2",
    "optimizer state": "#56B4E9",
    "cache": "#009E73",
    "gradients": "#CC79A7",
    "dense parameters": "#F0E442",
    "rows and ids": "#E69F00",
    "activations": "#D55E00",
    "batches": "#8C6D46",
    "triples": "#C8C8C8",
    "process": "#7A7A7A",
}
_DARK = ("weights", "activations", "batches", "process")  # take white text
_LIMIT = "#B00000"


@dataclass(frozen=True)
class _Column:
    """One bar: its name and the bytes of its parts."""

    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class _Panel:
    """Bars of one kind of memory, with its limits in bytes."""

    title: str
    columns: Sequence[_Column]
    usable: float
    capacity: float


def draw(plan: TrainingPlan, path: str | Path) -> None:
    """Writes a PNG, SVG or PDF, by the ending of the path."""
    panels, remark = _panels(plan)
    widths = [max(2.4, 0.75 * len(panel.columns)) for panel in panels]
    figure = Figure(figsize=(sum(widths) + 1.7 * len(panels) + 1.9, 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), width_ratios=widths, squeeze=False)[0]
    for axis, panel in zip(axes, panels, strict=True):
        _draw_panel(axis, panel)
    shown = [p for p in PARTS if any(c.parts.get(p) for panel in panels for c in panel.columns)]
    handles = [Patch(color=_COLOURS[part], label=part) for part in reversed(shown)]
    figure.legend(handles=handles, loc="outside right center", frameon=False, fontsize=9)
    figure.suptitle(_title(plan), fontsize=11, x=0.02, ha="left")
    if remark:
        figure.supxlabel(remark, fontsize=9, x=0.02, ha="left")
    figure.savefig(path, dpi=150)


def _title(plan: TrainingPlan) -> str:
    workload = plan.workload
    verdict = "fits" if plan.fits else "does not fit"
    return (
        f"{workload.num_entities:,} entities x {workload.dim}, {workload.optimizer}: {verdict}\n"
        f"{plan.cluster}, {plan.choice}"
    )


def _panels(plan: TrainingPlan) -> tuple[list[_Panel], str]:
    """The panels, and in words the main memory that is too empty for one."""
    limits = [limit for limit in plan.limits if limit.place.startswith("main")]
    fullest = max(limits, key=lambda limit: limit.need)
    local = plan.cluster.local_world_size
    if not plan.cluster.device.is_cuda:
        title = "main memory" if local == 1 else f"main memory, each with 1/{local} of its host's"
        columns = _rank_columns(plan, "main")
        return [_Panel(title, columns, fullest.usable / local, fullest.capacity / local)], ""
    device = next(limit for limit in plan.limits if limit.place.startswith("device"))
    panels = [
        _Panel("device memory", _rank_columns(plan, "device"), device.usable, device.capacity)
    ]
    if fullest.need < _SMALL * fullest.usable:
        return panels, _words(fullest)
    columns = _host_columns(plan)
    panels.append(_Panel("main memory of a host", columns, fullest.usable, fullest.capacity))
    return panels, ""


def _words(limit: Limit) -> str:
    return f"main memory of a host: {amount(limit.need)} of {amount(limit.usable)} usable"


def _rank_columns(plan: TrainingPlan, place: str) -> list[_Column]:
    groups = [(rank, rank, rank) for rank in range(plan.cluster.world_size)]
    if len(groups) > MOST_COLUMNS:
        groups = rank_groups(plan)
    return [
        _Column(
            ranks_text(first, last).replace(" ", "\n"),
            {part: getattr(size, place) for part, size in plan.memory[fullest].items()},
        )
        for first, last, fullest in groups[:MOST_COLUMNS]
    ]


def _host_columns(plan: TrainingPlan) -> list[_Column]:
    local = plan.cluster.local_world_size
    columns = []
    for host in range(min(plan.cluster.hosts, MOST_COLUMNS)):
        ranks = range(host * local, (host + 1) * local)
        parts = {
            part: sum(plan.memory[r][part].main for r in (ranks[:1] if part in SHARED else ranks))
            for part in PARTS
        }
        columns.append(_Column(f"host\n{host}", parts))
    return columns


def _draw_panel(axis: Axes, panel: _Panel) -> None:
    highest = max(panel.capacity, *(column.total for column in panel.columns)) / GIB
    usable = panel.usable / GIB
    for at, column in enumerate(panel.columns):
        top = _draw_column(axis, at, column, highest)
        label, colour = f"{top:.3g}", "black"
        if top > usable:
            label, colour = f"{top:.3g}\n+{top - usable:.3g}", _LIMIT
        axis.text(
            at, top + 0.01 * highest, label, ha="center", va="bottom", fontsize=8, color=colour
        )
    _draw_limit(axis, usable, "usable", "-", "top")
    _draw_limit(axis, panel.capacity / GIB, "capacity", ":", "bottom")
    empty = max(0.0, 3 - len(panel.columns)) / 2  # few columns are no wider than many
    axis.set_xlim(-0.6 - empty, len(panel.columns) - 0.4 + empty)
    axis.set_ylim(0, 1.12 * highest)
    axis.set_xticks(range(len(panel.columns)), [c.name for c in panel.columns], fontsize=8)
    axis.set_ylabel("GiB")
    axis.set_title(panel.title, fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)


def _draw_column(axis: Axes, at: int, column: _Column, highest: float) -> float:
    """Stacks a column's parts, with numbers where there is room; returns its height in GiB."""
    top = 0.0
    for part in PARTS:
        height = column.parts.get(part, 0) / GIB
        axis.bar(at, height, 0.74, top, color=_COLOURS[part])
        if height > 0.04 * highest:
            colour = "white" if part in _DARK else "black"
            middle = top + height / 2
            axis.text(
                at, middle, f"{height:.3g}", ha="center", va="center", fontsize=8, color=colour
            )
        top += height
    return top


def _draw_limit(axis: Axes, level: float, name: str, style: str, below: str) -> None:
    axis.axhline(level, color=_LIMIT, linestyle=style, linewidth=1.3)
    axis.annotate(
        f"{name} {level:.4g}",
        (1.0, level),
        xycoords=("axes fraction", "data"),
        xytext=(3, 0),
        textcoords="offset points",
        va=below,
        fontsize=8,
        color=_LIMIT,
    )

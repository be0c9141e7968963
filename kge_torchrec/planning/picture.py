"""The picture of a plan: one bar per rank, its parts, and the limit it must stay below.

``draw_curve`` draws the speed and the time of several plans over their numbers of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from kge_torchrec.embeddings.torchrec.planner import GIB, amount, ranks_text
from kge_torchrec.planning.curve import curve_content, heading
from kge_torchrec.planning.plan import TrainingPlan
from kge_torchrec.planning.report import rank_groups

MOST_BARS = 16  # more ranks are drawn as groups that hold the same
_SMALL = 0.1  # a host's memory that is filled less than this becomes a line of text

# Okabe and Ito's colors (2008), which differ for any color vision, and others; in the order of
# PARTS.
_COLORS = {
    "weights": "#0072B2",
    "optimizer state": "#56B4E9",
    "average": "#000000",
    "cache": "#009E73",
    "gradients": "#CC79A7",
    "parts on their way": "#7FBF7B",
    "dense parameters": "#F0E442",
    "rows and ids": "#E69F00",
    "activations": "#D55E00",
    "batches": "#8C6D46",
    "triples": "#C8C8C8",
    "process": "#7A7A7A",
}
_DARK = ("weights", "average", "activations", "batches", "process")  # take white text
_LIMIT = "#B00000"


@dataclass(frozen=True)
class _Panel:
    """Bars of one kind of memory: bytes by part and name of the bar; the limits in bytes."""

    title: str
    bars: dict[str, dict[str, int]]
    usable: float
    capacity: float


def draw(plan: TrainingPlan, path: str | Path) -> None:
    """Write the picture; the ending of the path chooses PNG, SVG or PDF."""
    panels, remark = _panels(plan)
    widths = [max(2.4, 0.75 * len(panel.bars)) for panel in panels]
    figure = Figure(figsize=(sum(widths) + 1.7 * len(panels) + 1.9, 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), width_ratios=widths, squeeze=False)[0]
    for axis, panel in zip(axes, panels, strict=True):
        _draw_panel(axis, panel)
    bars = [bar for panel in panels for bar in panel.bars.values()]
    shown = [part for part in _COLORS if any(bar.get(part) for bar in bars)]
    handles = [Patch(color=_COLORS[part], label=part) for part in reversed(shown)]
    figure.legend(handles=handles, loc="outside right center", frameon=False, fontsize=9)
    work, verdict = plan.workload, "fits" if plan.fits else "does not fit"
    title = f"{work.rows_in_words} x {work.dim}, {work.optimizer}: {verdict}"
    figure.suptitle(f"{title}\n{plan.cluster}, {plan.layout}", fontsize=11, x=0.02, ha="left")
    if remark:
        figure.supxlabel(remark, fontsize=9, x=0.02, ha="left")
    figure.savefig(path, dpi=150)


def _panels(plan: TrainingPlan) -> tuple[list[_Panel], str]:
    """Return the panels, and in words the main memory that is too empty for one."""
    fullest = max(plan.limits_of("main"), key=lambda limit: limit.need)
    local = plan.cluster.local_world_size
    groups = [(rank, rank, rank) for rank in range(plan.cluster.world_size)]
    if len(groups) > MOST_BARS:
        groups = rank_groups(plan)
    ranks = {
        ranks_text(first, last).replace(" ", "\n"): {
            part: getattr(size, plan.place) for part, size in plan.memory[rank].items()
        }
        for first, last, rank in groups[:MOST_BARS]
    }
    if not plan.is_cuda:
        title = "main memory" if local == 1 else f"main memory, each with 1/{local} of its host's"
        return [_Panel(title, ranks, fullest.usable / local, fullest.capacity / local)], ""
    device = plan.limits_of("device")[0]
    panels = [_Panel("device memory", ranks, device.usable, device.capacity)]
    title = "main memory of a host"
    if fullest.need < _SMALL * fullest.usable:
        return panels, f"{title}: {amount(fullest.need)} of {amount(fullest.usable)} usable"
    hosts = range(min(plan.cluster.hosts, MOST_BARS))
    bars = {f"host\n{host}": plan.host_memory(host) for host in hosts}
    return [*panels, _Panel(title, bars, fullest.usable, fullest.capacity)], ""


def _draw_panel(axis: Axes, panel: _Panel) -> None:
    totals = np.array([sum(bar.values()) for bar in panel.bars.values()]) / GIB
    usable, capacity = panel.usable / GIB, panel.capacity / GIB
    highest = max(capacity, *totals)
    top = np.zeros(len(totals))
    for part, color in _COLORS.items():
        heights = np.array([bar.get(part, 0) for bar in panel.bars.values()]) / GIB
        bars = axis.bar(range(len(top)), heights, 0.74, top, color=color)
        labels = [f"{height:.3g}" if height > 0.04 * highest else "" for height in heights]
        text = "white" if part in _DARK else "black"
        axis.bar_label(bars, labels, label_type="center", fontsize=8, color=text)
        top += heights
    for at, total in enumerate(totals):
        over = f"\n+{total - usable:.3g}" if total > usable else ""
        place = (at, total + 0.01 * highest, f"{total:.3g}{over}")
        color = _LIMIT if over else "black"
        axis.text(*place, ha="center", va="bottom", fontsize=8, color=color)
    for name, level, style, va in (
        ("usable", usable, "-", "top"),
        ("capacity", capacity, ":", "bottom"),
    ):
        axis.axhline(level, color=_LIMIT, linestyle=style, linewidth=1.3)
        right = axis.get_yaxis_transform()  # x as a share of the axis, y in GiB
        text = f" {name} {level:.4g}"
        axis.text(1.0, level, text, transform=right, va=va, fontsize=8, color=_LIMIT)
    empty = max(0.0, 3 - len(panel.bars)) / 2  # a few bars are no wider than many
    axis.set_xlim(-0.6 - empty, len(panel.bars) - 0.4 + empty)
    axis.set_ylim(0, 1.12 * highest)
    axis.set_xticks(range(len(panel.bars)), list(panel.bars), fontsize=8)
    axis.set_ylabel("GiB")
    axis.set_title(panel.title, fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)


def draw_curve(plans: Sequence[TrainingPlan], path: str | Path) -> None:
    """Write the curves of speed and time; the ending of the path chooses PNG, SVG or PDF."""
    points = curve_content(plans)
    ranks = [point["ranks"] for point in points]
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    speed, time = figure.subplots(1, 2)
    speeds = [point["examples_per_second"] for point in points]
    ideal = [speeds[0] * number / ranks[0] for number in ranks]
    speed.plot(ranks, ideal, ":", color="#7A7A7A", label="efficiency of 100 %")
    speed.plot(ranks, speeds, "o-", color="#0072B2", label="modelled")
    without = [point for point in points if not point["fits"]]
    places = [[point[name] for point in without] for name in ("ranks", "examples_per_second")]
    if without:
        speed.plot(*places, "x", color="#B00000", markersize=11, label="does not fit")
    speed.set_ylabel(f"{plans[0].workload.config.negatives.examples}/s")
    for part, color in (("compute", "#009E73"), ("exchange", "#D55E00"), ("step", "#000000")):
        values = [1e3 * point[f"{part}_seconds"] for point in points]
        time.plot(ranks, values, "o-", color=color, label=part)
    time.set_ylabel("ms per step")
    for axis in (speed, time):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(ranks, [f"{number:,}" for number in ranks])
        axis.set_xlabel("ranks")
        axis.legend(frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(heading(plans), fontsize=10, x=0.02, ha="left")
    figure.savefig(path, dpi=150)

"""The measurements of comparison.json as pictures.

A variant has the same color in every picture. The colors differ for any color vision (variants:
Okabe and Ito; parts of a step: Paul Tol).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kge_torchrec.comparison.report import examples_of, largest, ranks
from kge_torchrec.training.step import PARTS

_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
_PART_COLORS = ("#88CCEE", "#DDCC77", "#999933", "#882255", "#44AA99")
_STYLES = ("-", "--", "-.", ":")  # curves that lie on each other stay visible
_WIDTH = 0.8
_LOOK: dict[Any, Any] = {  # newer matplotlibs type the keys, older ones take str
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "savefig.dpi": 150,
}


def draw(comparison: dict[str, Any], folder: Path) -> list[Path]:
    """Write the pictures for which there are measurements; return their files."""
    trained = {w: content for w, content in comparison["training"].items() if content["steps"]}
    summary = comparison["summary"]
    sending = {w: content for w, content in summary.items() if int(w) > 1}  # one rank sends nothing
    pictures = {
        "losses": (_losses, trained),
        "differences": (_differences, trained),
        "speed": (_speed, summary),
        "split": (_split, summary),
        "traffic": (_traffic, sending),
    }
    written = []
    with matplotlib.rc_context(_LOOK):
        for name, (draws, content) in pictures.items():
            if content:
                figure = Figure(layout="constrained")  # without pyplot: no display, no global state
                draws(figure, content, comparison)
                written.append(folder / f"{name}.png")
                figure.savefig(written[-1])
    return written


def _losses(figure: Figure, training: dict[str, Any], comparison: dict[str, Any]) -> None:
    for trained, axes in _panels(figure, training):
        for i, (name, losses) in enumerate(trained["losses"].items()):
            steps = range(1, len(losses) + 1)
            axes.plot(steps, losses, label=name, color=_COLORS[i], linestyle=_STYLES[i], lw=1.5)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel="step", ylabel="loss of the batch")
        axes.legend()


def _differences(figure: Figure, training: dict[str, Any], comparison: dict[str, Any]) -> None:
    for trained, axes in _panels(figure, training):
        for i, (name, measured) in enumerate(trained["differences"].items(), 1):
            apart = [largest(entry) for entry in measured]
            values = [float("nan") if value is None else value for value in apart]
            axes.plot([entry["step"] for entry in measured], values, label=name, color=_COLORS[i],
                      linestyle=_STYLES[i], marker="o", markersize=4, clip_on=False)  # fmt: skip
        rate = comparison["config"]["train"]["lr"]
        axes.axhline(rate, color="#666666", lw=1, label="learning rate")
        axes.set_xscale("symlog", linthresh=1)
        axes.set_yscale("symlog", linthresh=1e-9)  # bitwise equal is 0
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        first = comparison["engines"][0]
        axes.set(xlabel="step", ylabel=f"largest parameter difference from {first}")
        axes.legend()


def _speed(figure: Figure, summary: dict[str, Any], comparison: dict[str, Any]) -> None:
    axes = figure.add_subplot()
    for place, color, name, figures in _bars(axes, summary):
        speed = figures["triples_per_second"]
        median = speed["median"]
        below, above = median - speed["lowest"], speed["highest"] - median
        axes.bar(place, median, _WIDTH, color=color, label=name)
        axes.errorbar(place, median, [[below], [above]], color="black", capsize=4)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set(ylabel=f"{examples_of(comparison)} per second")
    axes.set_title("median and spread of the repeats", fontsize="medium")


def _split(figure: Figure, summary: dict[str, Any], comparison: dict[str, Any]) -> None:
    axes, names = figure.add_subplot(), {}
    for place, _, name, figures in _bars(axes, summary):
        bottom = 0.0
        for part, color in zip(PARTS, _PART_COLORS, strict=True):
            milliseconds = figures["split_milliseconds"][part]
            axes.bar(place, milliseconds, _WIDTH, bottom=bottom, color=color, label=part)
            bottom += milliseconds
        names[place] = name
    axes.set(ylabel="milliseconds per step, parts one after another")
    axes.secondary_xaxis("top").set_xticks(list(names), list(names.values()), fontsize="small")


def _traffic(figure: Figure, summary: dict[str, Any], comparison: dict[str, Any]) -> None:
    axes, half = figure.add_subplot(), _WIDTH / 2
    for place, color, name, figures in _bars(axes, summary):
        traffic = figures["traffic"]
        distinct, duplicated = (
            traffic[kind]["bytes_sent"] / 1024 for kind in ("deduplicated", "duplicated")
        )
        axes.bar(place - half / 2, distinct, half, color=color, label=name)
        axes.bar(place + half / 2, duplicated, half, color=color, alpha=0.5, hatch="//",
                 label=f"{name}, with duplicates")  # fmt: skip
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.set(ylabel="KiB to other ranks, per step and rank")


def _panels(figure: Figure, training: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Axes]]:
    """Yield axes side by side, one per world size."""
    figure.set_size_inches(1 + 4.5 * len(training), 4)
    for i, (world_size, trained) in enumerate(training.items(), 1):
        axes = figure.add_subplot(1, len(training), i)
        axes.set_title(ranks(world_size), fontsize="medium")
        yield trained, axes


def _bars(axes: Axes, summary: dict[str, Any]) -> Iterator[tuple[float, str, str, dict[str, Any]]]:
    """Yield (place, color, variant, figures) of each bar; there is one group per world size."""
    centers, place = [], 0.0
    for by_name in summary.values():
        places = [place + i for i in range(len(by_name))]
        for center, color, (name, figures) in zip(places, _COLORS, by_name.items(), strict=False):
            yield center, color, name, figures
        centers.append((places[0] + places[-1]) / 2)
        place = places[-1] + 1.6
    axes.set_xticks(centers, [ranks(world_size) for world_size in summary])
    figure = axes.figure
    assert isinstance(figure, Figure)  # these axes lie in no part of one
    figure.set_size_inches(3 + 0.8 * place, 4.5)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles, loc="outside right upper")  # each name once

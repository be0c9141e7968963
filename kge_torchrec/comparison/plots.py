"""The measurements of comparison.json as pictures.

A variant has the same colour in every picture.  Colours are told apart with any colour vision
(variants: Okabe and Ito; parts of a step: Paul Tol).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kge_torchrec.comparison.report import examples_of, largest
from kge_torchrec.training.step import PARTS

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
PART_COLOURS = ("#88CCEE", "#DDCC77", "#999933", "#882255", "#44AA99")
_STYLES = ("-", "--", "-.", ":")  # curves that lie on each other stay visible
_LOOK: dict[Any, Any] = {  # newer matplotlibs type the keys, older ones have them be str
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
    """Writes the pictures that there are measurements for; returns their files."""
    written = []
    with matplotlib.rc_context(_LOOK):
        for name, draws in _PICTURES.items():
            figure = Figure(layout="constrained")  # without pyplot: no display, no global state
            if draws(comparison, figure):
                written.append(folder / f"{name}.png")
                figure.savefig(written[-1])
    return written


def _losses(comparison: dict[str, Any], figure: Figure) -> bool:
    found = {w: t for w, t in comparison["training"].items() if t["steps"]}
    for world_size, axes in _panels(figure, list(found)):
        for i, (name, losses) in enumerate(found[world_size]["losses"].items()):
            steps = range(1, len(losses) + 1)
            axes.plot(steps, losses, label=name, color=COLOURS[i], linestyle=_STYLES[i], lw=1.5)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel="step", ylabel="loss of the batch")
        axes.legend()
    return bool(found)


def _differences(comparison: dict[str, Any], figure: Figure) -> bool:
    found = {w: t for w, t in comparison["training"].items() if t["steps"]}
    first, rate = comparison["engines"][0], comparison["config"]["train"]["lr"]
    for world_size, axes in _panels(figure, list(found)):
        for i, (name, measured) in enumerate(found[world_size]["differences"].items(), 1):
            steps = [one["step"] for one in measured]
            apart = [largest(one) for one in measured]
            values = [float("nan") if value is None else value for value in apart]
            axes.plot(steps, values, label=name, color=COLOURS[i], linestyle=_STYLES[i],
                      marker="o", markersize=4, clip_on=False)  # fmt: skip
        axes.axhline(rate, color="#666666", lw=1, label="learning rate")
        axes.set_xscale("symlog", linthresh=1)
        axes.set_yscale("symlog", linthresh=1e-9)  # bitwise equal is 0
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.set(xlabel="step", ylabel=f"largest parameter difference from {first}")
        axes.legend()
    return bool(found)


def _speed(comparison: dict[str, Any], figure: Figure) -> bool:
    summary = comparison["summary"]
    axes = figure.add_subplot()
    for place, colour, name, found in _bars(axes, summary):
        speed = found["triples_per_second"]
        median = speed["median"]
        below, above = median - speed["lowest"], speed["highest"] - median
        axes.bar(place, median, _WIDTH, color=colour, label=name)
        axes.errorbar(place, median, [[below], [above]], color="black", capsize=4)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set(ylabel=f"{examples_of(comparison)} per second")
    axes.set_title("median and spread of the repeats", fontsize="medium")
    return bool(summary)


def _split(comparison: dict[str, Any], figure: Figure) -> bool:
    summary = comparison["summary"]
    axes, ticks = figure.add_subplot(), []
    for place, _, name, found in _bars(axes, summary):
        bottom = 0.0
        for part, colour in zip(PARTS, PART_COLOURS, strict=True):
            milliseconds = found["split_milliseconds"][part]
            axes.bar(place, milliseconds, _WIDTH, bottom=bottom, color=colour, label=part)
            bottom += milliseconds
        ticks.append((place, name))
    axes.set(ylabel="milliseconds a step, parts one after another")
    if ticks:
        places, names = zip(*ticks, strict=True)
        axes.secondary_xaxis("top").set_xticks(places, names, fontsize="small")
    return bool(summary)


def _traffic(comparison: dict[str, Any], figure: Figure) -> bool:
    """With a single rank nothing leaves it."""
    summary = {w: found for w, found in comparison["summary"].items() if int(w) > 1}
    axes = figure.add_subplot()
    for place, colour, name, found in _bars(axes, summary):
        seen = found["traffic"]
        once, every = (seen[kind]["bytes_sent"] / 1024 for kind in ("deduplicated", "duplicated"))
        half = _WIDTH / 2
        axes.bar(place - half / 2, once, half, color=colour, label=name)
        axes.bar(place + half / 2, every, half, color=colour, alpha=0.5, hatch="//",
                 label=f"{name}, with duplicates")  # fmt: skip
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.set(ylabel="KiB to other ranks, a step and rank")
    return bool(summary)


_PICTURES = {
    "losses": _losses,
    "differences": _differences,
    "speed": _speed,
    "split": _split,
    "traffic": _traffic,
}
_WIDTH = 0.8


def _panels(figure: Figure, world_sizes: list[str]) -> Iterator[tuple[str, Axes]]:
    """Axes beside each other, one a world size."""
    figure.set_size_inches(1 + 4.5 * len(world_sizes), 4)
    for i, world_size in enumerate(world_sizes, 1):
        axes = figure.add_subplot(1, len(world_sizes), i)
        axes.set_title(_ranks(world_size), fontsize="medium")
        yield world_size, axes


def _bars(axes: Axes, summary: dict[str, Any]) -> Iterator[tuple[float, str, str, dict[str, Any]]]:
    """(place, colour, variant, figures) of each bar; bars stand in groups, one a world size."""
    centres, place = [], 0.0
    for by_name in summary.values():
        places = [place + i for i in range(len(by_name))]
        for at, colour, (name, found) in zip(places, COLOURS, by_name.items(), strict=False):
            yield at, colour, name, found
        centres.append((places[0] + places[-1]) / 2)
        place = places[-1] + 1.6
    axes.set_xticks(centres, [_ranks(world_size) for world_size in summary])
    figure = axes.figure
    assert isinstance(figure, Figure)  # these axes lie in no part of one
    figure.set_size_inches(3 + 0.8 * place, 4.5)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    if handles:  # each name once
        figure.legend(handles.values(), handles, loc="outside right upper")


def _ranks(world_size: str) -> str:
    return f"{world_size} rank{'' if world_size == '1' else 's'}"

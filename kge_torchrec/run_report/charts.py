"""The charts of a report, as SVG inside the page.

Axes and text take the color of the text around them, so that they can be read on a dark page.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from html import escape
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure

from kge_torchrec.diagnosis.report import chart_label
from kge_torchrec.run_report.facts import RunFacts
from kge_torchrec.run_report.trained import NAMED, EntityMap

# Okabe and Ito, told apart by everybody; a ninth run has the first colour again.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
RELATIONS = 15  # of the chart by relation, those with most test triples
# The part of viridis that can be seen on white and on black; many triples are dark on white.
_SHADES = ListedColormap(matplotlib.colormaps["viridis"](np.linspace(0.85, 0.3, 256)))


def curves(runs: Sequence[RunFacts]) -> str:
    """Loss by step, and filtered MRR of validation by epoch."""
    figure, (loss, mrr) = _figure(2, (10, 3.2))
    for number, run in enumerate(runs):
        colour = COLOURS[number % len(COLOURS)]
        loss.plot(*run.losses(), color=colour, lw=1.5)
        name = chart_label(run.name)
        mrr.plot(*run.valid_mrr(), color=colour, lw=1.5, marker="o", ms=3, label=name)
    loss.set(title="Training loss", xlabel="step")
    if any(min(run.losses()[1], default=0) > 0 for run in runs):
        loss.set_yscale("log")
    mrr.set(title="Filtered MRR of validation", xlabel="epoch")
    if len(runs) > 1:
        _legend(figure, mrr)
    return _svg(
        figure,
        "training loss by step and validation MRR by epoch of "
        + ", ".join(run.name for run in runs),
    )


def by_relation(of_runs: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """MRR of both sides for the relations with most test triples, a bar for each run.

    of_runs: names, and what ``evaluate --by relation`` found.
    """
    groups = of_runs[0][1]["groups"][:RELATIONS]
    first = {group["group"]: group["both"]["realistic"]["mrr"] for group in groups}
    order = list(first)
    height = 0.8 / len(of_runs)
    figure, (axes,) = _figure(1, (10, 1.2 + 0.3 * len(order) * max(1, len(of_runs) / 2)))
    for number, (name, found) in enumerate(of_runs):
        mrr = {g["group"]: g["both"]["realistic"]["mrr"] for g in found["groups"]}
        places = np.arange(len(order)) + height * (number - (len(of_runs) - 1) / 2)
        values = [mrr.get(label, 0.0) for label in order]
        colour = COLOURS[number % len(COLOURS)]
        axes.barh(places, values, 0.9 * height, color=colour, label=chart_label(name))
    queries = {g["group"]: g["both"]["queries"] for g in of_runs[0][1]["groups"]}
    labels = [f"{chart_label(label)}  ({queries[label]:,})" for label in order]
    axes.set_yticks(range(len(order)), labels, fontsize="small")
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), xlabel="filtered MRR of test, heads and tails; in brackets: queries")
    if len(of_runs) > 1:
        _legend(figure, axes)
    best, worst = (pick(order, key=lambda label: first[label]) for pick in (max, min))
    return _svg(
        figure,
        f"Filtered MRR of {len(order)} relations; in the first run {best} is best with "
        f"{first[best]:.3f}, {worst} worst with {first[worst]:.3f}",
    )


def entity_map(found: EntityMap) -> str:
    """Entities with most triples, the named ones at most; colour: training triples."""
    figure, (axes,) = _figure(1, (10, 6))
    shades = LogNorm(vmin=max(1, found.degrees.min()), vmax=max(2, found.degrees.max()))
    across, up = found.places.T
    shown = axes.scatter(across, up, c=found.degrees.clip(1), norm=shades, s=9, cmap=_SHADES, lw=0)
    for (x, y), label in zip(found.places[:NAMED], found.labels[:NAMED], strict=False):
        axes.annotate(chart_label(label), (x, y), fontsize="x-small", alpha=0.8)
    bar = figure.colorbar(shown, ax=axes, label="training triples", shrink=0.6)
    bar.ax.set_facecolor("none")
    title = (
        f"The {len(found.labels):,} entities with most triples on the first two principal axes "
        f"({found.explained:.0%} of the variance)"
    )
    axes.set(xticks=[], yticks=[], title=title)
    return _svg(figure, title)


def times(runs: Sequence[RunFacts]) -> str:
    """Seconds of training and of validation, a bar for each run."""
    figure, (axes,) = _figure(1, (10, 0.9 + 0.35 * len(runs)))
    start = np.zeros(len(runs))
    for colour, part in zip(COLOURS, ("training", "validation"), strict=False):
        values = np.array([run.seconds()[part] for run in runs])
        axes.barh(range(len(runs)), values, 0.6, left=start, color=colour, label=part)
        start += values
    axes.set_yticks(range(len(runs)), [chart_label(run.name) for run in runs], fontsize="small")
    axes.invert_yaxis()
    axes.set(xlabel="seconds, without start-up and the ranking of test")
    _legend(figure, axes)
    seconds = "; ".join(
        f"{run.name}: training {run.seconds()['training']:,.1f} s, validation "
        f"{run.seconds()['validation']:,.1f} s"
        for run in runs
    )
    return _svg(figure, seconds)


def _legend(figure: Figure, axes: Axes) -> None:
    """A legend above the axes, where it hides no bar and no line."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside upper right", ncols=4, frameon=False, fontsize="small"
    )


def _figure(count: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    figure = Figure(layout="constrained", figsize=size, facecolor="none")
    axes = list(np.atleast_1d(figure.subplots(1, count)))
    for one in axes:
        one.set_facecolor("none")
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _svg(figure: Figure, description: str) -> str:
    """The figure as an SVG element.

    Text stays text, which is smaller and can be searched.  Ids are the same every time.  Black
    becomes the color of the page's text; matplotlib leaves out a fill that is black, which the
    page's style sets.

    Args:
        figure: Drawn with axes that have no background.
        description: What the chart shows, for people who cannot see it.
    """
    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kge_torchrec"}):
        figure.savefig(out, format="svg", metadata={"Date": None}, facecolor="none")
    text = out.getvalue().replace("#000000", "currentColor")
    element = text[text.index("<svg") + len("<svg") :]
    label = escape(description, quote=True)
    return f'<div class="chart"><svg role="img" aria-label="{label}"{element}</div>'

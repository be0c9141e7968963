"""The charts of a report on runs, as SVG inside the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.colors import ListedColormap, LogNorm

from kge_torchrec.pages import add_legend, chart_label, color_of, draw_bars, new_figure, svg
from kge_torchrec.reports.facts import RunFacts
from kge_torchrec.reports.trained import MAX_NAMED, EntityMap

MAX_RELATIONS = 15  # relations with the most test triples
# The part of viridis that is visible on white and on black; entities with many triples are dark.
_SHADES = ListedColormap(matplotlib.colormaps["viridis"](np.linspace(0.85, 0.3, 256)))


def curves(runs: Sequence[RunFacts]) -> Markup:
    """Draw the loss by step, and the filtered MRR of validation by epoch."""
    figure, (loss, mrr) = new_figure(10, 3.2, columns=2)
    for place, run in enumerate(runs):
        loss.plot(*run.losses(), color=color_of(place), lw=1.5)
        style: dict[str, Any] = {"color": color_of(place), "lw": 1.5, "marker": "o", "ms": 3}
        mrr.plot(*run.valid_mrr(), **style, label=chart_label(run.name))
    loss.set(title="Training loss", xlabel="step")
    if any(min(run.losses()[1], default=0) > 0 for run in runs):
        loss.set_yscale("log")
    mrr.set(title="Filtered MRR of validation", xlabel="epoch")
    if len(runs) > 1:
        add_legend(figure, mrr)
    names = ", ".join(run.name for run in runs)
    return svg(figure, f"training loss by step and validation MRR by epoch of {names}")


def by_relation(groups_of: Mapping[str, dict[str, Any]]) -> Markup:
    """Draw the MRR of both sides for the relations with most test triples, a bar per run.

    Args:
        groups_of: The results of ``evaluate --by relation``, by the name of the run.
    """
    mrr = {
        name: {group["group"]: group["both"]["realistic"]["mrr"] for group in groups["groups"]}
        for name, groups in groups_of.items()
    }
    first = next(iter(groups_of.values()))["groups"][:MAX_RELATIONS]
    shown = [group["group"] for group in first]
    figure, (axes,) = new_figure(10, 1.2 + 0.3 * len(shown) * max(1, len(mrr) / 2))
    labels = [f"{chart_label(group['group'])}  ({group['both']['queries']:,})" for group in first]
    series = {
        chart_label(name): [mrr_by_relation.get(relation, 0.0) for relation in shown]
        for name, mrr_by_relation in mrr.items()
    }
    draw_bars(axes, labels, series)
    axes.set(xlim=(0, 1), xlabel="filtered MRR of test, heads and tails; in brackets: queries")
    if len(mrr) > 1:
        add_legend(figure, axes)
    values = next(iter(mrr.values()))
    best, worst = (pick(shown, key=lambda label: values[label]) for pick in (max, min))
    return svg(
        figure,
        f"Filtered MRR of {len(shown)} relations; in the first run {best} is best with "
        f"{values[best]:.3f}, {worst} worst with {values[worst]:.3f}",
    )


def entity_map(points: EntityMap) -> Markup:
    """Draw the entities with most triples, some of them with labels; color: training triples."""
    figure, (axes,) = new_figure(10, 6)
    shades = LogNorm(vmin=max(1, points.degrees.min()), vmax=max(2, points.degrees.max()))
    across, up = points.places.T
    shown = axes.scatter(across, up, c=points.degrees.clip(1), norm=shades, s=9, cmap=_SHADES, lw=0)
    for (x, y), label in zip(points.places[:MAX_NAMED], points.labels[:MAX_NAMED], strict=False):
        axes.annotate(chart_label(label), (x, y), fontsize="x-small", alpha=0.8)
    bar = figure.colorbar(shown, ax=axes, label="training triples", shrink=0.6)
    bar.ax.set_facecolor("none")
    title = (
        f"The {len(points.labels):,} entities with most triples on the first two principal axes "
        f"({points.explained:.0%} of the variance)"
    )
    axes.set(xticks=[], yticks=[], title=title)
    return svg(figure, title)


def times(runs: Sequence[RunFacts]) -> Markup:
    """Draw the seconds of training and of validation, a bar per run."""
    figure, (axes,) = new_figure(10, 0.9 + 0.35 * len(runs))
    start = np.zeros(len(runs))
    for place, part in enumerate(("training", "validation")):
        values = np.array([run.seconds()[part] for run in runs])
        axes.barh(range(len(runs)), values, 0.6, left=start, color=color_of(place), label=part)
        start += values
    axes.set_yticks(range(len(runs)), [chart_label(run.name) for run in runs], fontsize="small")
    axes.invert_yaxis()
    axes.set(xlabel="seconds, without start-up and without ranking test")
    add_legend(figure, axes)
    seconds = "; ".join(
        f"{run.name}: training {run.seconds()['training']:,.1f} s, validation "
        f"{run.seconds()['validation']:,.1f} s"
        for run in runs
    )
    return svg(figure, seconds)

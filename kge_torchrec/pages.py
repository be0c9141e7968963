"""Pages, model cards and charts: Jinja2 templates (``templates/``) and matplotlib figures.

All charts share their colors, axes without a frame, grouped bars, and SVG for a page.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from kge_torchrec.environment import installed

if TYPE_CHECKING:  # loads slowly, and the server draws no charts
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which color-blind people can read. A ninth series reuses the first color.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
MAX_LABEL = 48  # characters of a label


def render(template: str, **values: Any) -> str:
    """Return the text of a file in ``templates/`` with the values that it names, all of them.

    In HTML every value is escaped that is no ``Markup``.
    """
    return _environment().get_template(template).render(**values)


def isolated(text: object) -> Markup:
    """Return text as an HTML element that keeps its own direction, such as a label in Arabic."""
    return Markup("<bdi>{}</bdi>").format(text)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("kge_torchrec"),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"isolated": isolated, "zip": zip}
    environment.globals["version"] = installed(["kge-torchrec"]).get("kge-torchrec", "")
    return environment


def short_label(label: str, width: int = MAX_LABEL) -> str:
    """Return the end of a label that is longer than ``width`` characters; labels differ there."""
    return label if len(label) <= width else f"...{label[3 - width :]}"


def chart_label(label: str) -> str:
    """Return a short label for matplotlib, which reads text between two dollar signs as math."""
    return short_label(label).replace("$", r"\$")


def color_of(place: int) -> str:
    """Return the color of the series at a place, from 0."""
    return COLORS[place % len(COLORS)]


def new_figure(width: float, height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """Return a figure of ``width`` by ``height`` inches and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained", figsize=(width, height), facecolor="none")
    axes = figure.subplots(1, columns, squeeze=False).ravel()
    for axis in axes:
        axis.set_facecolor("none")
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes)


def draw_bars(axes: Axes, labels: Sequence[str], series: Mapping[str, Sequence[float]]) -> None:
    """Draw horizontal bars: a group per label, first label on top, with one bar per series."""
    height = 0.8 / len(series)
    for place, (name, values) in enumerate(series.items()):
        offset = height * (place - (len(series) - 1) / 2)
        color = color_of(place)
        axes.barh(
            [y + offset for y in range(len(labels))], values, 0.9 * height, color=color, label=name
        )
    axes.set_yticks(range(len(labels)), labels, fontsize="small")
    axes.invert_yaxis()


def add_legend(figure: Figure, axes: Axes) -> None:
    """Add the legend of ``axes`` above them, where it hides no bar and no line."""
    handles, labels = axes.get_legend_handles_labels()
    place: dict[str, Any] = {"loc": "outside upper right", "ncols": 4}
    figure.legend(handles, labels, **place, frameon=False, fontsize="small")


def svg(figure: Figure, description: str) -> Markup:
    """Return a figure from ``new_figure`` as an SVG element with a description for screen readers.

    Text stays text, which is smaller and can be searched. Ids are the same every time. Black
    becomes the color of the page's text, so that the chart suits a dark page. Matplotlib leaves
    out a black fill, which the stylesheet sets.
    """
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kge_torchrec"}):
        figure.savefig(out, format="svg", metadata={"Date": None}, facecolor="none")
    text = out.getvalue().replace("#000000", "currentColor")
    element = Markup(text[text.index("<svg") + len("<svg") :])  # matplotlib escapes labels
    chart = Markup('<div class="chart"><svg role="img" aria-label="{}"{}</div>')
    return chart.format(description, element)

"""Pages, model cards and charts: Jinja2 templates (``templates/``) and matplotlib figures.

All charts share their colors, axes without a frame, grouped bars, and SVG for a page.
"""

from __future__ import annotations

import io
from functools import cache
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from kge_torchrec.environment import installed
from kge_torchrec.tables import amount, cut, seconds

if TYPE_CHECKING:  # loads slowly, and the server draws no charts
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which color-blind people can read. A ninth series reuses the first color.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
MAX_LABEL = 32  # characters of a label in a chart


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
    environment.filters |= {"isolated": isolated, "amount": amount, "seconds": seconds}
    environment.globals["version"] = installed(["kge-torchrec"]).get("kge-torchrec", "")
    return environment


def chart_label(label: str) -> str:
    """Return a short label for matplotlib, which reads text between two dollar signs as math."""
    return cut(label, MAX_LABEL).replace("$", r"\$")


def color_of(place: int) -> str:
    """Return the color of the series at a place, from 0."""
    return COLORS[place % len(COLORS)]


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure of ``width`` by ``height`` inches and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained", figsize=(width, height), facecolor="none")
    axes = figure.subplots()
    axes.set_facecolor("none")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


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

"""One HTML page about one run or several: config, curves, results, charts, examples, times."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from kge_torchrec import files
from kge_torchrec.errors import KGEError
from kge_torchrec.pages import (
    add_legend,
    chart_label,
    color_of,
    draw_bars,
    isolated,
    new_figure,
    render,
    svg,
)
from kge_torchrec.ranking.ranks import ranked_among
from kge_torchrec.reports.facts import (
    MAX_NAMED,
    EntityMap,
    Example,
    ReportError,
    RunFacts,
    differences,
    entity_map,
    examples,
    names_of,
    ranks_by_relation,
)
from kge_torchrec.trained_run import Run

try:
    import matplotlib
    from matplotlib.colors import ListedColormap, LogNorm
except ImportError:
    raise KGEError("report needs matplotlib: pip install -e '.[report]'") from None

log = logging.getLogger(__name__)

_METRICS = ("mrr", "hits@1", "hits@3", "hits@10", "mr")


def report(
    runs: str | Path | Sequence[str | Path], output: str | Path, with_models: bool = True
) -> Path:
    """Write a page about runs that needs no other file and no network.

    The page has the results, curves, settings that differ, times, memory and layout of each run.
    The models of the best checkpoints add ranks by relation and, for the first run, a map of its
    entities (principal components) and answers to a few test triples.

    Args:
        runs: The folder of a run, or several.
        output: The file to write.
        with_models: False uses only what the folders hold, and loads no model.

    Returns:
        The path of the page.

    Raises:
        ConfigError: A folder holds no run.
        ReportError: A run is named twice, or none is named.
    """
    paths = [Path(run) for run in ([runs] if isinstance(runs, str | Path) else runs)]
    if not paths:
        raise ReportError("a report needs at least one run folder")
    facts = [RunFacts.read(*run) for run in zip(paths, names_of(paths), strict=True)]
    files.check_place(Path(output))
    has_curves = any(run.losses()[0] or run.valid_mrr()[0] for run in facts)
    has_times = any(sum(run.seconds().values()) for run in facts)
    text = render(
        "runs.html",
        title=", ".join(run.name for run in facts),
        runs=facts,
        curves=draw_curves(facts) if has_curves else "",
        times=draw_times(facts) if has_times else "",
        **_results(facts),
        settings=_settings(facts),
        **_model_parts(facts, with_models),
    )
    files.write_text(Path(output), text)
    return Path(output)


def _results(runs: list[RunFacts]) -> dict[str, Any]:
    """Return the rows of the table of test results, and the notes below it."""
    rows, notes = [], []
    for run in runs:
        if run.results is None or run.results["test"] is None:
            notes.append(f"{run.name}: {run.damaged or 'no test results yet'}.")
            continue
        test, train = run.results["test"], run.results["train"]
        notes += [f"{run.name}: {ranked_among(test)}."] if "candidates" in test else []
        notes += [f"{run.name}: {note}" for note in run.results["notes"]]
        if (early := train.get("stopped_early")) is not None:
            ended = f"training ended after epoch {early['epoch']} of {early['of']}"
            notes.append(f"{run.name}: {ended}: {early['reason']}.")
        memory = f"{train['peak_memory_bytes'] / 2**20:,.0f} MiB"
        for side in ("head", "tail", "both"):
            metrics = test[side]["realistic"]
            values = [f"{metrics[m]:,.1f}" if m == "mr" else f"{metrics[m]:.4f}" for m in _METRICS]
            run_cells = [train["epochs"], f"{train['seconds']:,.1f}", memory]
            rows.append(
                [isolated(run.name), side, *values, *(run_cells if side == "both" else [""] * 3)]
            )
    return {"results": rows, "notes": notes}


def _settings(runs: list[RunFacts]) -> list[list[Any]]:
    """Return the rows of settings that differ among runs, or from the defaults."""
    return [
        [key, *(isolated(_shown(value)) for value in values)] for key, values in differences(runs)
    ]


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)


def _model_parts(runs: list[RunFacts], with_models: bool) -> dict[str, Any]:
    """Return the charts by relation and of the entities, and the rows of examples."""
    by_relation: dict[str, dict[str, Any]] = {}
    first: dict[str, Any] = {"map": "", "examples": []}
    for facts in runs:
        groups = facts.groups("relation")
        if with_models:
            try:
                with Run(facts.path, facts.config) as run:
                    groups = groups or ranks_by_relation(run)
                    if facts is runs[0]:
                        entities = entity_map(run)
                        first["map"] = draw_entity_map(entities) if entities else ""
                        first["examples"] = [_cells(example) for example in examples(run)]
            except KGEError as error:  # such as a run that keeps no checkpoint
                log.warning("%s: the report leaves out the model: %s", facts.path, error)
        if groups is not None:
            by_relation[facts.name] = groups
    chart = draw_by_relation(by_relation) if by_relation else ""
    return {"by_relation": chart, **first}


def _cells(example: Example) -> list[Markup]:
    """Return the cells of an example: its triple, and the best answers, the right one marked."""
    answers = []
    for answer in example.answers:
        text = isolated(answer.label)
        if answer.label == example.tail:
            text = Markup('<span class="right">{}</span>').format(text)
        elif answer.known:
            text += Markup(" <small>(known)</small>")
        answers.append(text)
    triple = example.head, example.relation, example.tail
    return [*map(isolated, triple), Markup(", ").join(answers)]


MAX_RELATIONS = 15  # relations with the most test triples
# The part of viridis that is visible on white and on black; entities with many triples are dark.
_SHADES = ListedColormap(matplotlib.colormaps["viridis"](np.linspace(0.85, 0.3, 256)))


def draw_curves(runs: Sequence[RunFacts]) -> Markup:
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


def draw_by_relation(groups_of: Mapping[str, dict[str, Any]]) -> Markup:
    """Draw the MRR of both sides for the relations with most test triples, a bar per run.

    ``groups_of`` are the results of ``evaluate --by relation`` by the name of the run.
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


def draw_entity_map(points: EntityMap) -> Markup:
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


def draw_times(runs: Sequence[RunFacts]) -> Markup:
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

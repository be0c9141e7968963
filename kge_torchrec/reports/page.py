"""One HTML page about one run or several: results, curves, settings, relations, entities, examples.

Shapes: M entities on the map, D elements per row.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from markupsafe import Markup

from kge_torchrec import files, pages
from kge_torchrec.config import ConfigError
from kge_torchrec.config.training import cutoff_of
from kge_torchrec.errors import KGEError
from kge_torchrec.pages import isolated
from kge_torchrec.ranking.groups import GROUPINGS, grouped
from kge_torchrec.ranking.ranks import ranked_among
from kge_torchrec.ranking.recommendation import grouped_recommendations
from kge_torchrec.reports.folders import RunFacts, differences, names_of
from kge_torchrec.trained_run import Run
from kge_torchrec.training.run_folder import RunFolder

try:
    import matplotlib
    from matplotlib.colors import ListedColormap, LogNorm
except ImportError:
    raise KGEError("report needs matplotlib: pip install -e '.[report]'") from None

log = logging.getLogger(__name__)

MAX_RELATIONS = 15  # relations with the most answers in test
MAX_ON_MAP, MAX_NAMED = 2000, 25  # entities with the most triples, and those with a label
MAX_TYPES = len(pages.COLORS) - 1  # types with a color of their own
EXAMPLES, TOP = 6, 5  # test triples, and the answers to each
_MAX_SCORES = 2e9  # up to this number of scores, ranking test takes seconds


def report(
    runs: str | Path | Sequence[str | Path],
    output: str | Path | None = None,
    with_models: bool = True,
) -> Path:
    """Write a page about runs that needs no other file and no network; return its path.

    The page has the results, curves, settings that differ, times, memory and layout of each run.
    The models of the best checkpoints add ranks by relation and, for the first run, a map of its
    entities (principal components) and answers to a few test triples. Nothing else is written.

    Args:
        runs: The folder of a run, or several. A run may still train.
        output: The file to write (default: report.html in the first run).
        with_models: False uses only what the folders hold, and loads no model.

    Raises:
        ConfigError: A folder holds no run (such as an export), or a run is named twice.
    """
    paths = [RunFolder(run).path for run in ([runs] if isinstance(runs, str | Path) else runs)]
    if not paths:
        raise ConfigError("a report needs at least one run folder")
    facts = [RunFacts.read(*run) for run in zip(paths, names_of(paths), strict=True)]
    for run in facts:
        if run.state == "export":
            raise ConfigError(
                f"{run.path} is an export, without curves and test triples; name the run that it "
                f"was made from, or use `kge-torchrec show {run.path}`"
            )
        if run.damaged:
            log.warning("the report leaves out the results: %s", run.damaged)
    page = Path(output) if output is not None else paths[0] / "report.html"
    files.check_place(page)
    text = pages.render(
        "runs.html",
        title=", ".join(run.name for run in facts),
        runs=facts,
        notes=[note for run in facts for note in _notes(run)],
        curves=draw_curves(facts),
        changed=differences([run.settings for run in facts]),
        **(_model_parts(facts) if with_models else {"relations": [], "map": "", "examples": []}),
    )
    files.write_text(page, text)
    return page


def _notes(run: RunFacts) -> list[str]:
    if not run.test:
        epochs = f"{run.epochs or 0} of {run.settings['train.epochs']} epochs"
        return [f"{run.name}: {run.damaged or f'no test results yet; {run.state}, {epochs}'}."]
    notes = [f"test: {ranked_among(run.test)}", *run.results.get("notes", ())]
    if (early := run.results["train"].get("stopped_early")) is not None:
        ended = f"training ended after epoch {early['epoch']} of {early['of']}"
        notes.append(f"{ended}: {early['reason']}")
    return [f"{run.name}: {note}." for note in notes]


def draw_curves(runs: Sequence[RunFacts]) -> list[Markup]:
    """Draw the loss by step and, for each metric of selection, its validations by epoch."""
    lines: dict[tuple[str, str], list[tuple[int, Any]]] = {}  # place of the run, and its points
    for place, run in enumerate(runs):
        lines.setdefault(("training loss", "step"), []).append((place, run.losses()))
        lines.setdefault((f"{run.metric} of valid", "epoch"), []).append((place, run.validations()))
    charts = []
    for (title, unit), of_runs in lines.items():
        drawn = [(place, points) for place, points in of_runs if points[0]]
        if not drawn:
            continue
        figure, axes = pages.new_figure(5.2, 3.2)
        for place, points in drawn:
            marker = "o" if unit == "epoch" else ""
            axes.plot(*points, color=pages.color_of(place), lw=1.5, marker=marker, ms=3,
                      label=pages.chart_label(runs[place].name))  # fmt: skip
        axes.set(title=title, xlabel=unit)
        if unit == "step" and all(min(values) > 0 for _, (_, values) in drawn):
            axes.set_yscale("log")
        if len(runs) > 1:
            pages.add_legend(figure, axes)
        names = ", ".join(runs[place].name for place, _ in drawn)
        charts.append(pages.svg(figure, f"{title} by {unit} of {names}"))
    return charts


def _model_parts(runs: Sequence[RunFacts]) -> dict[str, Any]:
    """Return the tables by relation, the map and the rows of examples."""
    found: dict[str, dict[str, dict[str, tuple[float, int]]]] = {}  # by metric and run
    first: dict[str, Any] = {"map": "", "examples": []}
    for facts in runs:
        try:
            with Run(facts.path) as run:
                metric = facts.metric if cutoff_of(facts.metric) is not None else "mrr"
                if stats := relation_metrics(run, metric):
                    found.setdefault(metric, {})[facts.name] = stats
                if facts is runs[0]:
                    first = {"map": draw_entity_map(run), "examples": example_rows(run)}
        except KGEError as error:  # such as a run without a checkpoint
            log.warning("%s: the report leaves out the model: %s", facts.path, error)
    return {"relations": found, **first}


def relation_metrics(run: Run, metric: str) -> dict[str, tuple[float, int]]:
    """Return a metric of the best checkpoint on test by relation, and the number of answers.

    Relations with the most answers, and these first. It is {} if ranking test would take long.
    """
    model, evaluation = run.model, run.config.evaluation
    store = model.store
    triples = np.asarray(store.test, np.int64)
    if not len(triples) or 2.0 * len(triples) * store.num_entities > _MAX_SCORES:
        return {}
    if (k := cutoff_of(metric)) is None:
        ranks = model.ranks_of(triples, "test", evaluation)
        groups = grouped(ranks, GROUPINGS["relation"](store, triples))["groups"]
        found = {x["group"]: (x["both"]["realistic"][metric], x["both"]["queries"]) for x in groups}
    else:
        lists = model.recommendations_of(triples, "test", evaluation, k)
        grouping = GROUPINGS["relation"](store, np.append(lists.triples, lists.listed(), 0))
        groups = grouped_recommendations(lists, [k], grouping)["groups"]
        stats = [(x["group"], x["recommendation"]) for x in groups]
        found = {name: (x[metric], x["answers"]) for name, x in stats if metric in x}
    return dict(sorted(found.items(), key=lambda item: -item[1][1])[:MAX_RELATIONS])


def draw_entity_map(run: Run) -> Markup | str:
    """Draw the entities with most triples; color: the type or, without types, the triples."""
    store = run.model.store
    chosen = np.argsort(-store.degrees(), kind="stable")[:MAX_ON_MAP]
    if len(chosen) < 3:
        return ""
    places, explained = principal_axes(run.model.rows(torch.from_numpy(chosen)).cpu())
    figure, axes = pages.new_figure(7.8, 5.4)
    kinds = types_of(run, chosen)
    for place, name in enumerate(dict.fromkeys(kinds)):
        mine = np.array([kind == name for kind in kinds])
        x, y = places[mine].T
        axes.scatter(x, y, color=pages.color_of(place), s=9, lw=0, label=pages.chart_label(name))
    if kinds:
        pages.add_legend(figure, axes)
    else:
        degrees = store.degrees()[chosen]
        # The part of viridis that is visible on white and on black.
        colors = ListedColormap(matplotlib.colormaps["viridis"](np.linspace(0.85, 0.3, 256)))
        shades = LogNorm(vmin=max(1, degrees.min()), vmax=max(2, degrees.max()))
        x, y = places.T
        dots = axes.scatter(x, y, c=degrees.clip(1), norm=shades, s=9, cmap=colors, lw=0)
        bar = figure.colorbar(dots, ax=axes, label="training triples", shrink=0.6)
        bar.ax.set_facecolor("none")
    for point, label in zip(places, run.entity_labels.labels(chosen[:MAX_NAMED]), strict=False):
        axes.annotate(pages.chart_label(label), point, fontsize="x-small", alpha=0.8)
    axes.set(xticks=[], yticks=[])
    return pages.svg(
        figure,
        f"The {len(chosen):,} entities with most triples on the first two principal axes "
        f"({explained:.0%} of the variance)",
    )


def principal_axes(rows: torch.Tensor) -> tuple[np.ndarray, float]:
    """Return rows (M, D) on their first two principal axes (M, 2), and the share of variance."""
    left, spread, _ = torch.linalg.svd((rows - rows.mean(0)).double(), full_matrices=False)
    places = (left * spread)[:, :2]
    # The sign of an axis is arbitrary; choose one that is the same on every machine.
    places = places * torch.sign(places.gather(0, places.abs().argmax(0, keepdim=True)))
    explained = spread[:2].square().sum() / spread.square().sum().clamp_min(1e-30)
    return places.numpy(), float(explained)


def types_of(run: Run, entities: np.ndarray) -> list[str]:
    """Return the type of each of the entities, the first of several; [] without types."""
    store = run.model.store
    types = store.types()
    if types is None:
        return []
    which, kinds = types.of(entities)
    names = np.full(len(entities), "no type", object)
    names[which[::-1]] = np.array(types.names.to_pylist(), object)[kinds[::-1]]
    common = [str(name) for name in names]
    kept = sorted(set(common), key=lambda name: -common.count(name))[:MAX_TYPES]
    return [name if name in kept else "other types" for name in common]


def example_rows(run: Run) -> list[list[Markup]]:
    """Return a few test triples, the same every time, with the best answers to (head, relation)."""
    store = run.model.store
    triples = np.asarray(store.test, np.int64)
    drawn = np.random.default_rng(0).permutation(len(triples))[:EXAMPLES]
    rows = []
    for head, relation, tail in triples[np.sort(drawn)]:
        ends = store.entities.labels([head, tail])
        name = store.relations.labels([relation])[0]
        answers = []
        for answer in run.predict(head=ends[0], relation=name, k=TOP):
            text = isolated(answer.label)
            if answer.label == ends[1]:
                text = Markup('<span class="right">{}</span>').format(text)
            elif answer.known:
                text += Markup(" <small>(known)</small>")
            answers.append(text)
        rows.append([*map(isolated, (ends[0], name, ends[1])), Markup(", ").join(answers)])
    return rows

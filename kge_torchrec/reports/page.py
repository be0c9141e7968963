"""One HTML page about one run or several: results, curves, settings, relations and examples."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
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
    import matplotlib  # noqa: F401
except ImportError:
    raise KGEError("report needs matplotlib: pip install -e '.[report]'") from None

log = logging.getLogger(__name__)

MAX_RELATIONS = 15  # relations with the most answers in test
EXAMPLES, TOP = 6, 5  # test triples, and the answers to each
_MAX_SCORES = 2e9  # up to this number of scores, ranking test takes seconds


def report(
    runs: str | Path | Sequence[str | Path],
    output: str | Path | None = None,
    with_models: bool = True,
) -> Path:
    """Write a page about runs that needs no other file and no network; return its path.

    The page has the results, curves, settings that differ, times, memory and layout of each run.
    The models of the best checkpoints add ranks by relation and, for the first run, answers to a
    few test triples. Nothing else is written.

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
        **(_model_parts(facts) if with_models else {"relations": {}, "examples": []}),
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
    """Return the tables by relation and the rows of examples."""
    found: dict[str, dict[str, dict[str, tuple[float, int]]]] = {}  # by metric and run
    examples: list[list[Markup]] = []
    for facts in runs:
        try:
            with Run(facts.path) as run:
                metric = facts.metric if cutoff_of(facts.metric) is not None else "mrr"
                if stats := relation_metrics(run, metric):
                    found.setdefault(metric, {})[facts.name] = stats
                if facts is runs[0]:
                    examples = example_rows(run)
        except KGEError as error:  # such as a run without a checkpoint
            log.warning("%s: the report leaves out the model: %s", facts.path, error)
    return {"relations": found, "examples": examples}


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

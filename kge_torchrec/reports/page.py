"""A self-contained HTML page about one run, or several runs side by side."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from kge_torchrec import files
from kge_torchrec.errors import KGEError
from kge_torchrec.pages import isolated, render
from kge_torchrec.ranking.metrics import ranked_among
from kge_torchrec.reports import run_charts
from kge_torchrec.reports.facts import ReportError, RunFacts, differences, names_of
from kge_torchrec.reports.trained import Example, entity_map, examples, ranks_by_relation
from kge_torchrec.trained_run import Run

log = logging.getLogger(__name__)

_METRICS = ("mrr", "hits@1", "hits@3", "hits@10", "mr")
_DEFAULT = Markup(' <span class="small">(default for this graph)</span>')


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
        curves=run_charts.curves(facts) if has_curves else "",
        times=run_charts.times(facts) if has_times else "",
        **_results(facts),
        **_settings(facts),
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
        memory = f"{train['peak_memory_bytes'] / 2**20:,.0f} MiB"
        for side in ("head", "tail", "both"):
            metrics = test[side]["realistic"]
            values = [f"{metrics[m]:,.1f}" if m == "mr" else f"{metrics[m]:.4f}" for m in _METRICS]
            run_cells = [train["epochs"], f"{train['seconds']:,.1f}", memory]
            rows.append(
                [isolated(run.name), side, *values, *(run_cells if side == "both" else [""] * 3)]
            )
    return {"results": rows, "notes": notes}


def _settings(runs: list[RunFacts]) -> dict[str, Any]:
    """Return the rows of settings that differ, or a run's own settings and resolved defaults."""
    changed = differences(runs)
    if len(runs) > 1:
        rows = [
            [key, *(_value(run, key, value) for run, value in zip(runs, values, strict=True))]
            for key, values in changed
        ]
        return {"settings": rows, "defaults": []}
    (run,) = runs
    own = {key: value for key, (value, _) in changed if not run.was_resolved(key)}
    resolved = {key: value for key, value in run.resolved.items() if run.was_resolved(key)}
    return {
        name: [[key, isolated(_shown(value))] for key, value in values.items()]
        for name, values in (("settings", own), ("defaults", resolved))
    }


def _value(run: RunFacts, key: str, value: Any) -> Markup:
    return isolated(_shown(value)) + (_DEFAULT if run.was_resolved(key) else "")


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
                        first["map"] = run_charts.entity_map(entities) if entities else ""
                        first["examples"] = [_cells(example) for example in examples(run)]
            except KGEError as error:  # such as a run that keeps no checkpoint
                log.warning("%s: the report leaves out the model: %s", facts.path, error)
        if groups is not None:
            by_relation[facts.name] = groups
    chart = run_charts.by_relation(by_relation) if by_relation else ""
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

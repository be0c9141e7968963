"""``report(runs)``: one self-contained HTML page about one run, or several side by side."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from kge_torchrec import __version__, files
from kge_torchrec.errors import KGEError
from kge_torchrec.ranking.metrics import ranked_among
from kge_torchrec.run_report import charts
from kge_torchrec.run_report.facts import ReportError, RunFacts, differences, names_of
from kge_torchrec.run_report.trained import (
    EntityMap,
    Example,
    entity_map,
    examples,
    ranks_by_relation,
)
from kge_torchrec.trained_run import Run

log = logging.getLogger(__name__)

_METRICS = ("mrr", "hits@1", "hits@3", "hits@10", "mr")
_STYLE = """
:root { color-scheme: light dark; --text: #222; --page: #fff; --quiet: #666; --line: #ddd;
        --code: #f6f6f6; --right: #00714d; }
@media (prefers-color-scheme: dark) {
  :root { --text: #ddd; --page: #16181c; --quiet: #a0a0a0; --line: #3a3d43; --code: #22252b;
          --right: #4fd1a5; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page);
       max-width: 1000px; margin: 2em auto; padding: 0 1em; overflow-wrap: anywhere; }
h1 { font-size: 1.6em; }
h2 { font-size: 1.2em; margin-top: 2em; border-bottom: 1px solid var(--line); }
table { border-collapse: collapse; margin: .5em 0; }
.scroll, .chart { overflow-x: auto; }
th, td { text-align: left; padding: .2em .8em; border-bottom: 1px solid var(--line);
         overflow-wrap: normal; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
pre { background: var(--code); padding: .8em; overflow-x: auto; font-size: 13px; }
svg { width: 100%; min-width: 640px; height: auto; fill: currentColor; }
svg text { unicode-bidi: isolate; }
.right { color: var(--right); font-weight: 600; } .small { color: var(--quiet); font-size: 13px; }
@media (max-width: 480px) { body { margin: 1em auto; } th, td { padding: .2em .4em; } }
"""


def report(
    runs: str | Path | Sequence[str | Path], output: str | Path, with_models: bool = True
) -> Path:
    """Writes a page about runs that needs no other file and no network; returns its path.

    Curves, results, differences of configs, times, memory and layout of each; by the models of
    their best checkpoints also test by relation, a map of entities (principal components) and
    answers to a few test triples of the first run.

    with_models: False takes what the folders say alone, and loads no model.

    Raises ConfigError for a folder without a run, ReportError for one that is given twice.
    """
    paths = [Path(run) for run in ([runs] if isinstance(runs, str | Path) else runs)]
    if not paths:
        raise ReportError("a report needs the folder of a run")
    facts = [RunFacts.read(*one) for one in zip(paths, names_of(paths), strict=True)]
    files.check_place(Path(output))
    parts = [_head(facts), *_of_folders(facts), *_of_models(facts, with_models), *_layouts(facts)]
    title = ", ".join(run.name for run in facts)
    files.write_text(Path(output), _document(title, parts))
    return Path(output)


def _document(title: str, parts: Iterable[str]) -> str:
    body = "\n".join(parts)
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n{body}\n"
        f"<p class='small'>Made by kge-torchrec {__version__}.</p></body></html>\n"
    )


def _head(runs: list[RunFacts]) -> str:
    of = ", ".join(
        f"{run.config.model.scorer} (dim {run.config.model.dim}) on "
        f"{Path(run.config.data.path).name}"
        for run in runs
    )
    names = " and ".join(_isolated(run.name) for run in runs)
    return f"<h1>{names}</h1><p>{_isolated(of)}</p>"


def _of_folders(runs: list[RunFacts]) -> Iterator[str]:
    yield _results(runs)
    if any(run.losses()[0] or run.valid_mrr()[0] for run in runs):
        yield _section("Curves", charts.curves(runs))
    if any(sum(run.seconds().values()) for run in runs):
        yield _section("Time", charts.times(runs))
    yield from _settings(runs)


def _settings(runs: list[RunFacts]) -> Iterator[str]:
    """What the configs say, values that were resolved for the graph apart from the user's own."""
    changed = differences(runs)
    if len(runs) > 1:
        rows = [
            [key, *(_value(run, key, value) for run, value in zip(runs, values, strict=True))]
            for key, values in changed
        ]
        table = _table(["key", *(_isolated(run.name) for run in runs)], rows)
        yield _section("Settings that differ", table if rows else "<p>None.</p>")
        return
    (run,) = runs
    own = [(key, value) for key, (value, _) in changed if not run.was_resolved(key)]
    table = _table(["key", "value"], [[key, _isolated(_shown(value))] for key, value in own])
    yield _section("Settings of your own", table if own else "<p>None.</p>")
    if run.resolved:
        rows = [[k, _isolated(_shown(v))] for k, v in run.resolved.items() if run.was_resolved(k)]
        said = "<p class='small'>Values of keys that you left open (null):</p>"
        yield _section("Defaults for this graph", said + _table(["key", "value"], rows))


def _value(run: RunFacts, key: str, value: Any) -> str:
    mark = " <span class='small'>(default for this graph)</span>" if run.was_resolved(key) else ""
    return _isolated(_shown(value)) + mark


def _results(runs: list[RunFacts]) -> str:
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
            values = [_metric(name, test[side]["realistic"][name]) for name in _METRICS]
            of_run = [str(train["epochs"]), f"{train['seconds']:,.1f}", memory]
            last = of_run if side == "both" else [""] * 3
            rows.append([_isolated(run.name), side, *values, *last])
    head = ["run", "side", "MRR", "Hits@1", "Hits@3", "Hits@10", "mean rank", "epochs",
            "seconds of training", "peak memory per rank"]  # fmt: skip
    table = _table(head, rows, numbers_from=2) if rows else ""
    said = "".join(f"<p class='small'>{_isolated(note)}</p>" for note in notes)
    return _section("Test, filtered and realistic, all entities ranked", table + said)


def _of_models(runs: list[RunFacts], with_models: bool) -> Iterator[str]:
    by_relation, pages = [], [""]
    for facts in runs:
        found = facts.groups("relation")
        if with_models:
            try:
                with Run(facts.path, facts.config) as run:
                    found = found or ranks_by_relation(run)
                    if facts is runs[0]:
                        pages = [_map_of(entity_map(run)), _examples(examples(run))]
            except KGEError as error:  # such as a run that keeps no checkpoint
                log.warning("%s: the report goes without its model: %s", facts.path, error)
        if found is not None:
            by_relation.append((facts.name, found))
    if by_relation:
        yield _section("By relation", charts.by_relation(by_relation))
    yield from filter(None, pages)


def _map_of(found: EntityMap | None) -> str:
    return "" if found is None else _section("Map of entities", charts.entity_map(found))


def _examples(found: list[Example]) -> str:
    rows = []
    for example in found:
        answers = ", ".join(
            f"<span class='right'>{_isolated(answer.label)}</span>"
            if answer.label == example.tail
            else _isolated(answer.label) + (" <small>(known)</small>" if answer.known else "")
            for answer in example.answers
        )
        triple = example.head, example.relation, example.tail
        rows.append([*(_isolated(label) for label in triple), answers])
    if not rows:
        return ""
    table = _table(["head", "relation", "tail", "best answers"], rows)
    said = "Random test triples, and the best answers of the first run to (head, relation, ?)."
    return _section("Examples", f"<p class='small'>{said}</p>{table}")


def _layouts(runs: list[RunFacts]) -> Iterator[str]:
    for run in runs:
        if run.layout:
            title = f"Layout of {_isolated(run.name)}"
            yield _section(title, f"<pre tabindex='0'>{escape(run.layout)}</pre>")


def _section(title: str, content: str) -> str:
    """title, content: HTML."""
    return f"<section><h2>{title}</h2>{content}</section>"


def _isolated(text: str) -> str:
    """Text as HTML; if it reads from right to left, only it does."""
    return f"<bdi>{escape(text)}</bdi>"


def _table(head: list[str], rows: list[list[str]], numbers_from: int | None = None) -> str:
    """Cells are HTML; those from column ``numbers_from`` on are aligned on the right."""

    def line(cells: list[str], tag: str) -> str:
        parts = []
        for place, cell in enumerate(cells):
            is_number = numbers_from is not None and place >= numbers_from
            parts.append(f"<{tag}{' class=number' if is_number else ''}>{cell}</{tag}>")
        return f"<tr>{''.join(parts)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<div class='scroll'><table>{line(head, 'th')}{body}</table></div>"


def _metric(name: str, value: float) -> str:
    return f"{value:,.1f}" if name == "mr" else f"{value:.4f}"


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)

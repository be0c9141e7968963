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
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1000px; margin: 2em auto;
       padding: 0 1em; }
h1 { font-size: 1.6em; } h2 { font-size: 1.2em; margin-top: 2em; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; margin: .5em 0; } .scroll { overflow-x: auto; }
th, td { text-align: left; padding: .2em .8em; border-bottom: 1px solid #eee; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
pre { background: #f6f6f6; padding: .8em; overflow-x: auto; font-size: 13px; }
svg { max-width: 100%; height: auto; } .right { color: #00714d; font-weight: 600; }
.small { color: #666; font-size: 13px; }
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
        f"{run.config.model.scorer} of {run.config.model.dim} numbers on "
        f"{Path(run.config.data.path).name}"
        for run in runs
    )
    names = " and ".join(run.name for run in runs)
    return f"<h1>{escape(names)}</h1><p>{escape(of)}</p>"


def _of_folders(runs: list[RunFacts]) -> Iterator[str]:
    yield _results(runs)
    if any(run.losses()[0] or run.valid_mrr()[0] for run in runs):
        yield _section("Curves", charts.curves(runs))
    if any(sum(run.seconds().values()) for run in runs):
        yield _section("Time", charts.times(runs))
    changed = differences(runs)
    what = "Settings that differ" if len(runs) > 1 else "Settings other than the defaults"
    columns = [run.name for run in runs] if len(runs) > 1 else [runs[0].name, "default"]
    rows = [[key, *(_shown(value) for value in values)] for key, values in changed]
    yield _section(what, _table(["key", *columns], rows) if rows else "<p>None.</p>")


def _results(runs: list[RunFacts]) -> str:
    rows, notes = [], []
    for run in runs:
        if run.results is None or run.results["test"] is None:
            notes.append(f"{run.name} has no test results yet.")
            continue
        test, train = run.results["test"], run.results["train"]
        notes += [f"{run.name}: {ranked_among(test)}."] if "candidates" in test else []
        notes += [f"{run.name}: {note}" for note in run.results["notes"]]
        memory = f"{train['peak_memory_bytes'] / 2**20:,.0f} MiB"
        for side in ("head", "tail", "both"):
            values = [_metric(name, test[side]["realistic"][name]) for name in _METRICS]
            of_run = [str(train["epochs"]), f"{train['seconds']:,.1f}", memory]
            rows.append([run.name, side, *values, *(of_run if side == "both" else [""] * 3)])
    head = ["run", "side", "MRR", "Hits@1", "Hits@3", "Hits@10", "mean rank", "epochs",
            "seconds of training", "peak memory a rank"]  # fmt: skip
    table = _table(head, rows, numbers_from=2) if rows else ""
    said = "".join(f"<p class='small'>{escape(note)}</p>" for note in notes)
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
            f"<span class='right'>{escape(answer.label)}</span>"
            if answer.label == example.tail
            else escape(answer.label) + (" <small>(known)</small>" if answer.known else "")
            for answer in example.answers
        )
        rows.append([escape(example.head), escape(example.relation), escape(example.tail), answers])
    if not rows:
        return ""
    table = _table(["head", "relation", "tail", "best answers"], rows, is_html=True)
    said = "Test triples drawn at random; the best answers of the first run to (head, relation, ?)."
    return _section("Examples", f"<p class='small'>{said}</p>{table}")


def _layouts(runs: list[RunFacts]) -> Iterator[str]:
    for run in runs:
        if run.layout:
            yield _section(f"Layout of {run.name}", f"<pre>{escape(run.layout)}</pre>")


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _table(
    head: list[str], rows: list[list[str]], numbers_from: int | None = None, is_html: bool = False
) -> str:
    def line(cells: list[str], tag: str) -> str:
        parts = []
        for place, cell in enumerate(cells):
            is_number = numbers_from is not None and place >= numbers_from
            text = cell if is_html else escape(cell)
            parts.append(f"<{tag}{' class=number' if is_number else ''}>{text}</{tag}>")
        return f"<tr>{''.join(parts)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<div class='scroll'><table>{line(head, 'th')}{body}</table></div>"


def _metric(name: str, value: float) -> str:
    return f"{value:,.1f}" if name == "mr" else f"{value:.4f}"


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)

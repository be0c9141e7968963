"""Displays grouped ranks: a table for the terminal, a JSON file and a chart."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from kge_torchrec import files
from kge_torchrec.pages import chart_label, draw_bars, new_figure, short_label
from kge_torchrec.ranking.metrics import ranked_among

LINES = 30  # groups in a table or a chart; the file has all groups
# Columns of the table: a side of the triple and the value to show.
_CELLS = [
    ("both", "queries"), ("both", "mrr"),
    ("head", "mrr"), ("head", "hits@10"), ("tail", "mrr"), ("tail", "hits@10"),
]  # fmt: skip
_OF_LISTS = ("recall", "ndcg", "hit_rate", "listed", "coverage")
_WIDEST = 48  # characters per label


def table(name: str, results: dict[str, Any]) -> str:
    """Return a table of the realistic metrics of head and tail prediction, one line per group.

    For recommendations it has the metrics of the longest lists. The table fits the terminal, or 80
    columns without one. Long labels are cut at the start.

    Args:
        name: The name of the grouping.
        results: The result of ``grouped`` or ``grouped_recommendations``.
    """
    shown, columns = results["groups"][:LINES], _columns(results)
    widest = max([len(group["group"]) for group in shown] + [len(name)])
    room = shutil.get_terminal_size().columns - 9 * len(columns)
    width = min(widest, max(room, 12), _WIDEST)
    sides = [side for side, _ in columns]
    titles = [column.replace("hits@", "H@").replace("mrr", "MRR") for _, column in columns]
    lines = [
        f"by {name}: {results['about']}; {ranked_among(results['total'])}",
        " " * width + "".join(f"{side:>9}" for side in sides),
        f"{name:<{width}}" + "".join(f"{title:>9}" for title in titles),
        "-" * (width + 9 * len(columns)),
    ]
    for group in shown:
        cells = [_cell(group, *column) for column in columns]
        label = short_label(group["group"], width)
        lines.append(f"{label:<{width}}" + "".join(f"{cell:>9}" for cell in cells))
    if len(results["groups"]) > LINES:
        lines.append(f"and {len(results['groups']) - LINES:,} more groups, in the file")
    return "\n".join(lines)


def _columns(results: dict[str, Any]) -> list[tuple[str, str]]:
    if "recommendation" not in results["total"]:
        return _CELLS
    at = _longest(results)
    return [("", "answers"), *((at, name) for name in _OF_LISTS)]


def _longest(results: dict[str, Any]) -> str:
    """Return the longest length of lists as "@k"."""
    names = results["total"]["recommendation"]
    return f"@{max(int(name[7:]) for name in names if name.startswith('recall@'))}"


def _cell(group: dict[str, Any], side: str, column: str) -> str:
    lists = group.get("recommendation")
    if lists is not None:
        value = lists.get(f"{column}{side}")
    elif column == "queries":
        value = group[side]["queries"]
    else:
        value = group[side].get("realistic", {}).get(column)
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def write(folder: Path, split: str, candidates: str, by: dict[str, dict[str, Any]]) -> None:
    """Write evaluation-SPLIT-by-NAME.json and .png for each grouping.

    Args:
        folder: The folder of the run.
        split: The split whose triples were ranked.
        candidates: The value of evaluation.candidates. Unless it is "all", file names end with it.
        by: The results of ``grouped`` by the name of the grouping.
    """
    ending = "" if candidates == "all" else f"-{candidates}-candidates"
    for name, results in by.items():
        file = folder / f"evaluation-{split}-by-{name}{ending}.json"
        files.write_json(file, {"split": split, "by": name, **results})
        _draw(f"{split}, by {name}", results, file.with_suffix(".png"))


def _draw(title: str, results: dict[str, Any], file: Path) -> None:
    groups = results["groups"][:LINES]
    figure, (axes,) = new_figure(8, 1.8 + 0.34 * len(groups))
    if "recommendation" in results["total"]:
        names = [f"{name}{_longest(results)}" for name in ("recall", "listed")]
        series = {name: [g["recommendation"].get(name, 0.0) for g in groups] for name in names}
        sizes = [group["recommendation"]["answers"] for group in groups]
        total, about = results["total"]["recommendation"][names[0]], "share; in brackets: answers"
    else:
        series = {
            f"{side} prediction": [g[side].get("realistic", {}).get("mrr", 0.0) for g in groups]
            for side in ("head", "tail")
        }
        sizes = [group["both"]["queries"] for group in groups]
        total = results["total"]["both"]["realistic"]["mrr"]
        about = "MRR (realistic); in brackets: queries of both sides"
    labels = [
        f"{chart_label(group['group'])}  ({size:,})"
        for group, size in zip(groups, sizes, strict=True)
    ]
    draw_bars(axes, labels, series)
    axes.axvline(total, color="#666666", lw=1, label=f"all, {total:.4f}")
    notes = [title]
    if len(results["groups"]) > LINES:
        notes.append(f"first {LINES} of {len(results['groups'])}")
    if "candidates" in results["total"]:
        kind = results["total"]["candidates"].get("kind", "restricted")
        notes.append(f"{kind.upper()} candidates")
    axes.set_title("; ".join(notes), fontsize="medium")
    axes.set(xlabel=about)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(file, dpi=150, facecolor="white")

"""The table of grouped ranks for the terminal."""

from __future__ import annotations

import shutil
from typing import Any

from kge_torchrec.pages import short_label
from kge_torchrec.ranking.metrics import ranked_among

LINES = 30  # groups in a table; the file has all groups
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
    names = results["total"]["recommendation"]
    longest = max(int(name[7:]) for name in names if name.startswith("recall@"))
    return [("", "answers"), *((f"@{longest}", name) for name in _OF_LISTS)]


def _cell(group: dict[str, Any], side: str, column: str) -> str:
    lists = group.get("recommendation")
    if lists is not None:
        value = lists.get(f"{column}{side}")
    elif column == "queries":
        value = group[side]["queries"]
    else:
        value = group[side].get("realistic", {}).get(column)
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4f}"

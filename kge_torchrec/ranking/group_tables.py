"""Grouped metrics for people: a table for the terminal, a file and a picture beside the results."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from kge_torchrec import files
from kge_torchrec.ranking.metrics import ranked_among

LINES = 30  # of a table, and bars of a picture; the file has all groups
# Columns of the table: a side of the triple and what is shown of it.
_CELLS = [
    ("both", "queries"), ("both", "mrr"),
    ("head", "mrr"), ("head", "hits@10"), ("tail", "mrr"), ("tail", "hits@10"),
]  # fmt: skip
COLOURS = {"head": "#0072B2", "tail": "#D55E00"}  # Okabe and Ito
_WIDEST = 48  # of a label


def table(name: str, found: dict[str, Any]) -> str:
    """The realistic metrics of head and tail prediction, one line per group.

    The table fits the terminal, or 80 columns where there is none: long labels lose their start.

    Args:
        name: Of the grouping.
        found: What ``grouped`` returned.
    """
    shown = found["groups"][:LINES]
    widest = max([len(group["group"]) for group in shown] + [len(name)])
    room = shutil.get_terminal_size().columns - 9 * len(_CELLS)
    width = min(widest, max(room, 12), _WIDEST)
    sides = [side for side, _ in _CELLS]
    titles = [column.replace("hits@", "H@").replace("mrr", "MRR") for _, column in _CELLS]
    lines = [
        f"by {name}: {found['about']}; {ranked_among(found['total'])}",
        " " * width + "".join(f"{side:>9}" for side in sides),
        f"{name:<{width}}" + "".join(f"{title:>9}" for title in titles),
        "-" * (width + 9 * len(_CELLS)),
    ]
    for group in shown:
        cells = [_cell(group[side], column) for side, column in _CELLS]
        label = short_label(group["group"], width)
        lines.append(f"{label:<{width}}" + "".join(f"{cell:>9}" for cell in cells))
    if len(found["groups"]) > LINES:
        lines.append(f"and {len(found['groups']) - LINES:,} more groups, in the file")
    return "\n".join(lines)


def _cell(of_side: dict[str, Any], column: str) -> str:
    if column == "queries":
        return f"{of_side['queries']:,}"
    return f"{of_side['realistic'][column]:.4f}" if "realistic" in of_side else "-"


def short_label(label: str, width: int = _WIDEST) -> str:
    """The end of a label longer than ``width`` characters: labels tend to differ there."""
    return label if len(label) <= width else f"...{label[3 - width :]}"


def chart_label(label: str) -> str:
    """``short_label`` for matplotlib, which takes text between two dollar signs for a formula."""
    return short_label(label).replace("$", r"\$")


def write(folder: Path, split: str, candidates: str, by: dict[str, dict[str, Any]]) -> list[Path]:
    """Writes evaluation-SPLIT-by-NAME.json and .png for each grouping; returns their paths.

    candidates: what evaluation.candidates says; names of restricted ones end with it.
    """
    ending = "" if candidates == "all" else f"-{candidates}-candidates"
    written = []
    for name, found in by.items():
        file = folder / f"evaluation-{split}-by-{name}{ending}.json"
        files.write_json(file, {"split": split, "by": name, **found})
        picture = file.with_suffix(".png")
        _draw(f"{split}, by {name}", found, picture)
        written += [file, picture]
    return written


def _draw(title: str, found: dict[str, Any], file: Path) -> None:
    groups = found["groups"][:LINES]
    total = found["total"]["both"]["realistic"]["mrr"]
    figure = Figure(layout="constrained", figsize=(8, 1.8 + 0.34 * len(groups)))
    axes = figure.add_subplot()
    for side, offset in (("head", -0.2), ("tail", 0.2)):
        values = [group[side].get("realistic", {}).get("mrr", 0.0) for group in groups]
        places = [place + offset for place in range(len(groups))]
        axes.barh(places, values, 0.38, color=COLOURS[side], label=f"{side} prediction")
    axes.axvline(total, color="#666666", lw=1, label=f"all queries, {total:.4f}")
    labels = [f"{chart_label(group['group'])}  ({group['both']['queries']:,})" for group in groups]
    axes.set_yticks(range(len(groups)), labels, fontsize="small")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    more = len(found["groups"]) - len(groups)
    notes = [title, f"first {LINES} of {len(found['groups'])}"] if more else [title]
    if "candidates" in found["total"]:
        notes.append("RESTRICTED candidates")
    axes.set_title("; ".join(notes), fontsize="medium")
    axes.set(xlabel="filtered MRR (realistic); in brackets: queries of both sides")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(file, dpi=150)

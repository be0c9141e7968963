"""Grouped metrics for people: a table for the terminal, a file and a picture beside the results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from kge_torchrec import files
from kge_torchrec.ranking.metrics import ranked_among

LINES = 30  # of a table, and bars of a picture; the file has all groups
COLUMNS = ("mrr", "hits@1", "hits@10")
COLOURS = {"head": "#0072B2", "tail": "#D55E00"}  # Okabe and Ito
_WIDEST = 48  # of a label


def table(name: str, found: dict[str, Any]) -> str:
    """The realistic metrics of head and tail prediction, one line a group.

    found: what ``grouped`` gave.
    """
    shown = found["groups"][:LINES]
    width = max([len(short_label(group["group"])) for group in shown] + [len(name)])
    sides = ("head", "tail", "both")
    head = f"{name:<{width}}" + "".join(
        f"{side + ' ' + column:>{_width(side, column)}}"
        for side in sides
        for column in ("queries", *(COLUMNS if side != "both" else ("mrr",)))
        if side != "both" or column != "queries"
    )
    lines = [f"by {name}: {found['about']}; {ranked_among(found['total'])}", head, "-" * len(head)]
    for group in shown:
        cells = []
        for side in sides:
            of_side = group[side]
            ranked = of_side.get("realistic", {})
            if side != "both":
                cells.append(f"{of_side['queries']:>{_width(side, 'queries')},}")
            for column in COLUMNS if side != "both" else ("mrr",):
                value = f"{ranked[column]:.4f}" if ranked else "-"
                cells.append(f"{value:>{_width(side, column)}}")
        lines.append(f"{short_label(group['group']):<{width}}" + "".join(cells))
    if len(found["groups"]) > LINES:
        lines.append(f"and {len(found['groups']) - LINES:,} more groups, in the file")
    return "\n".join(lines)


def _width(side: str, column: str) -> int:
    return len(side) + len(column) + 3


def short_label(label: str) -> str:
    """The end of a long label, where they differ."""
    return label if len(label) <= _WIDEST else f"...{label[3 - _WIDEST :]}"


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
    labels = [f"{short_label(group['group'])}  ({group['both']['queries']:,})" for group in groups]
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

"""Tables of results: for a terminal, as CSV and as LaTeX."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from typing import Any, Literal

Format = Literal["table", "json", "latex", "csv"]
SIDES = ("head", "tail", "both")
Cell = str | float | tuple[float, float | None]  # the tuple is a mean and a standard deviation


def results_table(results: dict[str, Any], format: Format = "table", ties: bool = False) -> str:
    """Return the metrics of a ranking, one line per side.

    Args:
        results: The result of ``metrics``.
        format: Any but "json".
        ties: Whether to add lines with the optimistic and the pessimistic rank of ties.
    """
    rows: list[dict[str, Cell]] = []
    for side in (side for side in SIDES if side in results):
        for kind, row in results[side].items():
            if ties or kind == "realistic":
                rows.append({"side": side, **({"ties": kind} if ties else {}), **row})
    text = rows_table(rows, format)
    if format == "table" and "candidates" in results:
        from kge_torchrec.ranking.ranks import ranked_among

        text = f"{ranked_among(results)}\n{text}"
    return text


def rows_table(rows: Sequence[dict[str, Cell]], format: Format = "table") -> str:
    """Return rows with equal columns as a table; a mean has its deviation beside it."""
    names = list(rows[0])
    if format == "csv":
        return _csv(rows)
    texts = [[_text(name, row[name], format) for name in names] for row in rows]
    is_text = [isinstance(rows[0][name], str) for name in names]
    if format == "latex":
        alignment = "".join("l" if text else "r" for text in is_text)
        lines = [" & ".join(cells) for cells in [names, *texts]]
        head, *body = (f"{line} \\\\" for line in lines)
        begin, rule = f"\\begin{{tabular}}{{{alignment}}}", "\\hline"
        return "\n".join([begin, rule, head, rule, *body, rule, "\\end{tabular}"])
    widths = [max(map(len, column)) for column in zip(names, *texts, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if left else cell.rjust(max(width, 8))
            for cell, width, left in zip(cells, widths, is_text, strict=True)
        )
        for cells in [names, *texts]
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def selection(results: dict[str, Any]) -> str:
    """Return by which metric a run chose the checkpoint whose results.json this is."""
    valid, epoch = results.get("valid") or {}, (results.get("checkpoint") or {}).get("epoch")
    if valid.get("best") is None:
        return f"checkpoint of epoch {epoch}, the last one: nothing was validated"
    return f"checkpoint of epoch {epoch}, selected by valid {valid['metric']} {valid['best']:.4f}"


def _csv(rows: Sequence[dict[str, Cell]]) -> str:
    flat = []
    for row in rows:
        cells: dict[str, Any] = {}
        for name, cell in row.items():
            if isinstance(cell, tuple):
                cells |= {name: cell[0], f"{name}_std": cell[1]}
            else:
                cells[name] = cell
        flat.append(cells)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(flat[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue().rstrip("\n")


def _text(name: str, cell: Cell, format: Format) -> str:
    if isinstance(cell, str):
        return re.sub(r"([&%_#])", r"\\\1", cell) if format == "latex" else cell
    if isinstance(cell, tuple):
        mean, deviation = cell
        sign = "$\\pm$" if format == "latex" else "±"
        shown = "" if deviation is None else f" {sign} {_text(name, deviation, format)}"
        return _text(name, mean, format) + shown
    return f"{cell:.1f}" if name == "mr" else f"{cell:.4f}"

"""Tables of results: for a terminal, and as JSON, CSV and LaTeX.

table([{"side": "head", "mrr": 0.25}, {"side": "tail", "mrr": 0.5}])

side     mrr
------------
head  0.2500
tail  0.5000
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Literal

Format = Literal["table", "json", "latex", "csv"]
Cell = str | float | tuple[float, float | None] | None  # the tuple: a mean and its deviation
Shown = Mapping[str, str | Callable[[Any], str]]
SHORTEST = 8  # the smallest width to which a column of text is cut, in characters
_NUMBER = re.compile(r"[-+±]*[\d.,]*(e[-+]?\d+)?%?( [A-Za-z/]+)?").fullmatch  # "31 ms"


def table(
    rows: Sequence[Mapping[str, Cell]],
    format: Format = "table",
    shown: Shown | None = None,
    width: int | None = None,
) -> str:
    """Return rows with equal keys as a table.

    Text is on the left, numbers on the right. A mean has its deviation beside it, or in a column of
    its own (``name_std``) in JSON and CSV, which have numbers as they are.

    Args:
        rows: One or more. A line end in a key splits the heading.
        format: "table" for a terminal.
        shown: How the numbers of a column are written, in place of ",d" and ".4f": a format, or a
            function such as ``amount``.
        width: The widest columns of text are cut to fit so many characters.
    """
    if format in ("json", "csv"):
        return _plain(rows, format)
    names, shown = list(rows[0]), shown or {}
    is_latex = format == "latex"
    texts = [[_text(row[name], shown.get(name), is_latex) for name in names] for row in rows]
    numeric = [not any(isinstance(row[name], str) for row in rows) for name in names]
    if is_latex:
        lines = [" & ".join(cells) for cells in [map(_escaped, names), *texts]]
        head, *body = (f"{line} \\\\" for line in lines)
        columns = "".join("lr"[right] for right in numeric)
        begin, rule = f"\\begin{{tabular}}{{{columns}}}", "\\hline"
        return "\n".join([begin, rule, head, rule, *body, rule, "\\end{tabular}"])
    # A heading of two lines ends where that of one line ends.
    parts = [name.split("\n")[::-1] for name in names]
    heads = [*zip_longest(*parts, fillvalue="")][::-1]
    lines = aligned([*heads, *texts], numeric, width)
    rule = "-" * max(map(len, lines))
    return "\n".join([*lines[: len(heads)], rule, *lines[len(heads) :]])


def aligned(
    rows: Sequence[Sequence[str]], numeric: Sequence[bool] | None = None, width: int | None = None
) -> list[str]:
    """Return a line per row, in columns of equal width.

    Args:
        rows: The texts of the cells.
        numeric: Whether a column is on the right. None: all but the first whose texts, but that of
            the first row, are numbers with or without a unit, such as "31 ms".
        width: The widest columns of text are cut in the middle to fit so many characters.
    """
    if not rows:
        return []
    columns = list(zip(*rows, strict=True))
    if numeric is None:
        numeric = [i > 0 and all(map(_NUMBER, column[1:])) for i, column in enumerate(columns)]
    widths = [max(map(len, column)) for column in columns]
    while width is not None and sum(widths) + 2 * len(widths) - 2 > width:
        longest = max((w, i) for i, w in enumerate(widths) if not numeric[i])[1]
        if widths[longest] <= SHORTEST:
            break
        widths[longest] -= 1
    cells = [
        [f"{cut(text, w):>{w}}" if right else f"{cut(text, w):<{w}}" for text in column]
        for column, w, right in zip(columns, widths, numeric, strict=True)
    ]
    return ["  ".join(line).rstrip() for line in zip(*cells, strict=True)]


def cut(text: str, width: int) -> str:
    """Return a text that is longer than ``width`` characters with its middle left out."""
    if len(text) <= width:
        return text
    end = (width - 1) // 2
    return f"{text[: width - 1 - end]}\u2026{text[len(text) - end :]}"


def amount(size: float) -> str:
    """Format a number of bytes with a suitable unit, such as "96.11 GiB"."""
    if size >= 10 << 40:
        return f"{size / (1 << 40):.2f} TiB"
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit / 10:
            return f"{size / unit:.2f} {name}"
    return f"{size:.0f} bytes"


def seconds(value: float) -> str:
    """Return seconds in a unit that suits them: "31 ms"."""
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms")):
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value * 1e6:.3g} us"


def _plain(rows: Sequence[Mapping[str, Cell]], format: str) -> str:
    flat: list[dict[str, Any]] = [{} for _ in rows]
    for cells, row in zip(flat, rows, strict=True):
        for name, cell in row.items():
            if isinstance(cell, tuple):
                cells |= {name: cell[0], f"{name}_std": cell[1]}
            else:
                cells[name] = cell
    if format == "json":
        return json.dumps(flat, ensure_ascii=False)
    text = io.StringIO()
    names = dict.fromkeys(name for cells in flat for name in cells)
    writer = csv.DictWriter(text, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue().rstrip("\n")


def _text(cell: Cell, shown: str | Callable[[Any], str] | None, latex: bool) -> str:
    if isinstance(cell, str):
        return _escaped(cell) if latex else cell
    if cell is None:
        return "-"
    if isinstance(cell, tuple):
        mean, deviation = (None if x is None else _text(x, shown, latex) for x in cell)
        sign = "$\\pm$" if latex else "±"
        return f"{mean}" if deviation is None else f"{mean} {sign} {deviation}"
    if callable(shown):
        return shown(cell)
    return format(cell, shown or (",d" if isinstance(cell, int) else ".4f"))


def _escaped(text: str) -> str:
    return re.sub(r"([&%_#])", r"\\\1", text)

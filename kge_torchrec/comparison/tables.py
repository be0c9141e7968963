"""The measurements of comparison.json as text tables."""

from __future__ import annotations

import re
from typing import Any

from kge_torchrec.comparison.split import PARTS

Row = list[str]
_NUMERIC = re.compile(r"[\d.,e+-]+").fullmatch


def tables(comparison: dict[str, Any]) -> str:
    """All tables, one after another."""
    texts = []
    if comparison["training"]:
        title = "training, same start and batches; largest parameter difference from the first"
        texts.append(_table(title, *_training(comparison)))
    if comparison["summary"]:
        texts.append(_table("speed, spread over the repeats", *_speed(comparison["summary"])))
        texts.append(_table("a step, part by part, ms", *_split(comparison["summary"])))
        title = "traffic, a step and rank, to other ranks; integers are ids and their counts"
        texts.append(_table(title, *_traffic(comparison["summary"])))
    return "\n\n".join(texts)


def _training(comparison: dict[str, Any]) -> tuple[Row, list[Row]]:
    header = ["ranks", "contender", "steps", "last loss", "MRR", "hits@10", "difference"]
    rows = []
    for world_size, found in comparison["training"].items():
        for name, losses in found["losses"].items():
            metrics = found["metrics"].get(name, {}).get("both", {}).get("realistic", {})
            differences = found["differences"].get(name)
            rows.append([
                world_size,
                name,
                f"{found['steps']:,}",
                _number(losses[-1] if losses else None, ".4g"),
                _number(metrics.get("mrr"), ".4f"),
                _number(metrics.get("hits@10"), ".4f"),
                "-" if not differences else _number(largest(differences[-1]), ".1e"),
            ])  # fmt: skip
    return header, rows


def largest(difference: dict[str, Any]) -> float | None:
    """Of the entities' and the dense parameters'; None where either is not a number."""
    values = (difference["entities"], difference["dense"])
    return None if None in values else max(values)


def _speed(summary: dict[str, Any]) -> tuple[Row, list[Row]]:
    device = any(f["peak_device_bytes"] for by_name in summary.values() for f in by_name.values())
    header = ["ranks", "contender", "triples/s", "lowest", "highest", "ratio", "peak MiB"]
    rows = []
    for world_size, name, found in _each(summary):
        speed = found["triples_per_second"]
        row = [world_size, name, *(f"{speed[k]:,.0f}" for k in ("median", "lowest", "highest"))]
        row += [f"{found['ratio_to_first']['median']:.2f}", _mebibytes(found["peak_memory_bytes"])]
        rows.append(row + ([_mebibytes(found["peak_device_bytes"])] if device else []))
    return header + (["on GPU"] if device else []), rows


def _split(summary: dict[str, Any]) -> tuple[Row, list[Row]]:
    rows = []
    for world_size, name, found in _each(summary):
        parts = found["split_milliseconds"]
        values = [parts[part] for part in PARTS]
        rows.append([world_size, name, *(f"{v:.3g}" for v in values), f"{sum(values):.3g}"])
    return ["ranks", "contender", *PARTS, "all"], rows


def _traffic(summary: dict[str, Any]) -> tuple[Row, list[Row]]:
    header = ["ranks", "contender", "ids", "looked up", "rows sent", "integers", "KiB sent"]
    rows = []
    for world_size, name, found in _each(summary):
        for kind, seen in found["traffic"].items():
            collectives = seen["collectives"]
            rows.append([
                world_size,
                name,
                kind,
                f"{seen['ids_looked_up']:,.0f}",
                f"{seen['rows_sent']:,.0f}",
                f"{seen['integers_sent']:,.0f}",
                f"{seen['bytes_sent'] / 1024:,.1f}",
                ", ".join(f"{n:g} {kind}" for kind, n in collectives.items()) or "none",
            ])  # fmt: skip
    return [*header, "collectives"], rows


def _each(summary: dict[str, Any]):
    for world_size, by_name in summary.items():
        for name, found in by_name.items():
            yield world_size, name, found


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _mebibytes(value: int | None) -> str:
    return "-" if value is None else f"{value / 2**20:,.0f}"


def _table(title: str, header: Row, rows: list[Row]) -> str:
    """Fixed width; words to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    words = [not all(map(_NUMERIC, column)) for column in zip(*rows, strict=True)]

    def line(cells: Row) -> str:
        padded = (
            cell.ljust(width) if word else cell.rjust(width)
            for cell, width, word in zip(cells, widths, words, strict=True)
        )
        return "  ".join(padded).rstrip()

    ruler = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join([title, line(header), ruler, *map(line, rows)])

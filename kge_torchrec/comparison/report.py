"""The report of a comparison: figures out of repeats, and tables of them.

It reads the content of comparison.json. The part "speed" is {world size: {variant: [measurement per
repeat]}}, where a measurement is {"repeat", "triples_per_second": per block, "ranks": [what
``measure_speed`` returned on each rank]}.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kge_torchrec.config import NegativesConfig
from kge_torchrec.training.step import PARTS

Measurements = list[dict[str, Any]]
Row = list[str]


@dataclass(frozen=True)
class Spread:
    """A median with the lowest and the highest of its values."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Return the spread of some values."""
        return cls(statistics.median(values), min(values), max(values))


def triples_per_second(measurements: Measurements) -> Spread:
    """Return the speed over the repeats, each the median of its blocks; of one, over its blocks."""
    if len(measurements) == 1:
        return Spread.of(measurements[0]["triples_per_second"])
    return Spread.of([_speed_of(measurement) for measurement in measurements])


def ratio(ours: Measurements, base: Measurements) -> Spread:
    """Return the ratio of two speeds: of the medians, with the range over pairs of repeats."""
    theirs = {measurement["repeat"]: _speed_of(measurement) for measurement in base}
    pairs = [
        _speed_of(measurement) / theirs[measurement["repeat"]]
        for measurement in ours
        if measurement["repeat"] in theirs
    ]
    medians = triples_per_second(ours).median / triples_per_second(base).median
    return Spread(medians, min([*pairs, medians]), max([*pairs, medians]))


def _speed_of(measurement: dict[str, Any]) -> float:
    return statistics.median(measurement["triples_per_second"])


def _peak_bytes(measurements: Measurements, key: str) -> int | None:
    """Return the largest over ranks and repeats; None if it was not measured."""
    values = [
        rank[key] for measurement in measurements for rank in measurement["ranks"] if key in rank
    ]
    return max(values, default=None)


def _split(measurements: Measurements) -> dict[str, float]:
    """Return the milliseconds of each part: mean over ranks, median over repeats."""
    return {
        part: statistics.median(
            statistics.mean(rank["split"][part] for rank in measurement["ranks"])
            for measurement in measurements
        )
        for part in PARTS
    }


def traffic(measurements: Measurements) -> dict[str, dict[str, Any]]:
    """Return {"deduplicated" | "duplicated": means over ranks}; every repeat counts the same."""
    return _mean([rank["traffic"] for rank in measurements[0]["ranks"]])


def _mean(values: list[Any]) -> Any:
    """Return the mean of numbers, or of dicts of them by key; a missing key counts as 0."""
    if isinstance(values[0], dict):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: _mean([value.get(key, 0) for value in values]) for key in keys}
    return statistics.mean(values)


def summarize(speed: dict[str, dict[str, Measurements]]) -> dict[str, dict[str, Any]]:
    """Return the figures of the tables by world size and variant; unmeasured ones are left out."""
    summary: dict[str, dict[str, Any]] = {}
    for world_size, all_names in speed.items():
        by_name = {name: ours for name, ours in all_names.items() if ours}
        base = next(iter(by_name.values()))
        summary[world_size] = {
            name: {
                "triples_per_second": vars(triples_per_second(ours)),
                "ratio_to_first": vars(ratio(ours, base)),
                "peak_memory_bytes": _peak_bytes(ours, "peak_memory_bytes"),
                "peak_device_bytes": _peak_bytes(ours, "peak_device_bytes"),
                "split_milliseconds": _split(ours),
                "traffic": traffic(ours),
            }
            for name, ours in by_name.items()
        }
    return summary


def examples_of(comparison: dict[str, Any]) -> str:
    """Return what a speed counts, triples or queries; the keys say triples either way."""
    return NegativesConfig(regime=comparison["config"]["negatives"]["regime"]).examples


def ranks(world_size: int | str) -> str:
    """Return "1 rank" or "2 ranks"."""
    return f"{world_size} rank{'' if int(world_size) == 1 else 's'}"


def tables(comparison: dict[str, Any]) -> str:
    """Return all tables, one after another."""
    start = "training, same start and batches"
    traffic_title = "traffic per step and rank, to other ranks"
    made = {
        f"{start}; largest parameter difference from the first": _training_table(comparison),
        "speed, spread over the repeats": _speed_table(comparison),
        "a step, part by part, ms": _split_table(comparison),
        f"{traffic_title}; integers are ids and their counts": _traffic_table(comparison),
    }
    return "\n\n".join(_table(title, *rows) for title, rows in made.items() if len(rows) > 1)


def _training_table(comparison: dict[str, Any]) -> list[Row]:
    rows = [["ranks", "variant", "steps", "last loss", "MRR", "hits@10", "difference"]]
    for world_size, measured in comparison["training"].items():
        for name, losses in measured["losses"].items():
            metrics = measured["metrics"].get(name, {}).get("both", {}).get("realistic", {})
            differences = measured["differences"].get(name)
            rows.append([
                world_size,
                name,
                f"{measured['steps']:,}",
                _number(losses[-1] if losses else None, ".4g"),
                _number(metrics.get("mrr"), ".4f"),
                _number(metrics.get("hits@10"), ".4f"),
                _number(largest(differences[-1]) if differences else None, ".1e"),
            ])  # fmt: skip
    return rows


def largest(difference: dict[str, Any]) -> float | None:
    """Return the largest difference of entities and dense parameters; None if one is NaN."""
    values = (difference["entities"], difference["dense"])
    return None if None in values else max(values)


def _speed_table(comparison: dict[str, Any]) -> list[Row]:
    examples = examples_of(comparison)
    rows = [["ranks", "variant", f"{examples}/s", "lowest", "highest", "ratio", "peak MiB"]]
    on_gpu = any(figures["peak_device_bytes"] for _, _, figures in _each(comparison))
    rows[0] += ["on GPU"] if on_gpu else []
    for world_size, name, figures in _each(comparison):
        speed = figures["triples_per_second"]
        row = [world_size, name, *(f"{speed[k]:,.0f}" for k in ("median", "lowest", "highest"))]
        row.append(f"{figures['ratio_to_first']['median']:.2f}")
        for key in ("peak_memory_bytes", *(["peak_device_bytes"] if on_gpu else [])):
            row.append("-" if figures[key] is None else f"{figures[key] / 2**20:,.0f}")
        rows.append(row)
    return rows


def _split_table(comparison: dict[str, Any]) -> list[Row]:
    rows = [["ranks", "variant", *PARTS, "all"]]
    for world_size, name, figures in _each(comparison):
        values = [figures["split_milliseconds"][part] for part in PARTS]
        rows.append([world_size, name, *(f"{value:.3g}" for value in [*values, sum(values)])])
    return rows


def _traffic_table(comparison: dict[str, Any]) -> list[Row]:
    header = ["ranks", "variant", "ids", "looked up", "rows sent", "integers", "KiB sent"]
    rows = [[*header, "collectives"]]
    for world_size, name, figures in _each(comparison):
        for kind, means in figures["traffic"].items():
            counts = [f"{means[k]:,.0f}" for k in ("ids_looked_up", "rows_sent", "integers_sent")]
            sent = f"{means['bytes_sent'] / 1024:,.1f}"
            collectives = ", ".join(f"{n:g} {kind}" for kind, n in means["collectives"].items())
            rows.append([world_size, name, kind, *counts, sent, collectives or "none"])
    return rows


def _each(comparison: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for world_size, by_name in comparison["summary"].items():
        for name, figures in by_name.items():
            yield world_size, name, figures


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _table(title: str, header: Row, *rows: Row) -> str:
    """Return a table with words to the left and numbers to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    is_number = re.compile(r"[\d.,e+-]+").fullmatch
    numeric = [all(map(is_number, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in (header, *rows):
        cells = zip(row, widths, numeric, strict=True)
        padded = (cell.rjust(width) if right else cell.ljust(width) for cell, width, right in cells)
        lines.append("  ".join(padded).rstrip())
    return "\n".join([title, lines[0], "-" * (sum(widths) + 2 * (len(widths) - 1)), *lines[1:]])


def describe(failure: dict[str, Any]) -> str:
    """Return where and why a comparison ended."""
    if failure["world_size"] is None:
        return failure["reason"]
    who = f" of {failure['contender']}" if failure["contender"] else ""
    rank = "" if failure["rank"] is None else f"rank {failure['rank']} "
    where = f"at world size {failure['world_size']}, {failure['phase']}{who}"
    return f"{where}: {rank}{failure['reason']}"

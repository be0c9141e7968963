"""What a comparison says: single figures out of repeats, text tables, and conclusions in sentences.

Works on the ``speed`` part of comparison.json: {world size: {variant: [measurement per repeat]}},
where a measurement is {"repeat", "triples_per_second": of each block, "ranks": [what
``measure_speed`` returned on each rank]}.  Conclusions say no more than the repeats bear out.
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


@dataclass(frozen=True)
class Spread:
    """A median and the lowest and highest value that it stands for."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def overlaps(self, other: Spread) -> bool:
        return self.lowest <= other.highest and other.lowest <= self.highest


def triples_per_second(measurements: Measurements) -> Spread:
    """Over the repeats, each the median of its blocks; of one repeat, over its blocks."""
    if len(measurements) == 1:
        return Spread.of(measurements[0]["triples_per_second"])
    return Spread.of([statistics.median(one["triples_per_second"]) for one in measurements])


def ratio(ours: Measurements, base: Measurements) -> Spread:
    """Triples/s of ours by those of base: of the medians, and of the repeats one by one."""
    theirs = {one["repeat"]: statistics.median(one["triples_per_second"]) for one in base}
    pairs = [
        statistics.median(one["triples_per_second"]) / theirs[one["repeat"]]
        for one in ours
        if one["repeat"] in theirs
    ]
    medians = triples_per_second(ours).median / triples_per_second(base).median
    return Spread(medians, min([*pairs, medians]), max([*pairs, medians]))


def peak_bytes(measurements: Measurements, key: str = "peak_memory_bytes") -> int | None:
    """The largest over ranks and repeats; None if it was not measured."""
    values = [rank[key] for one in measurements for rank in one["ranks"] if key in rank]
    return max(values, default=None)


def split(measurements: Measurements) -> dict[str, float]:
    """Milliseconds of each part of a step: the mean of the ranks, the median of the repeats."""
    return {
        part: statistics.median(
            statistics.mean(rank["split"][part] for rank in one["ranks"]) for one in measurements
        )
        for part in PARTS
    }


def traffic(measurements: Measurements) -> dict[str, dict[str, Any]]:
    """{"deduplicated" | "duplicated": means over the ranks}; every repeat counts the same steps."""
    ranks = [rank["traffic"] for rank in measurements[0]["ranks"]]
    return {kind: _mean([rank[kind] for rank in ranks]) for kind in ranks[0]}


def _mean(values: list[Any]) -> Any:
    """Of numbers, or of dicts of them key by key; a key that one lacks counts as 0 there."""
    if isinstance(values[0], dict):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: _mean([value.get(key, 0) for value in values]) for key in keys}
    return statistics.mean(values)


def summarize(speed: dict[str, dict[str, Measurements]]) -> dict[str, dict[str, Any]]:
    """The figures of the tables by world size and variant, for comparison.json.

    Variants that were not measured, because the comparison ended, are left out.
    """
    found: dict[str, dict[str, Any]] = {}
    for world_size, all_names in speed.items():
        by_name = {name: ours for name, ours in all_names.items() if ours}
        base = next(iter(by_name.values()))
        found[world_size] = {
            name: {
                "triples_per_second": vars(triples_per_second(ours)),
                "ratio_to_first": vars(ratio(ours, base)),
                "peak_memory_bytes": peak_bytes(ours),
                "peak_device_bytes": peak_bytes(ours, "peak_device_bytes"),
                "split_milliseconds": split(ours),
                "traffic": traffic(ours),
            }
            for name, ours in by_name.items()
        }
    return found


Row = list[str]
_NUMERIC = re.compile(r"[\d.,e+-]+").fullmatch


def examples_of(comparison: dict[str, Any]) -> str:
    """What a speed counts, triples or queries; the figures are called triples either way."""
    return NegativesConfig(regime=comparison["config"]["negatives"]["regime"]).examples


def tables(comparison: dict[str, Any]) -> str:
    """All tables, one after another."""
    texts = []
    if comparison["training"]:
        title = "training, same start and batches; largest parameter difference from the first"
        texts.append(_table(title, *_training_table(comparison)))
    if comparison["summary"]:
        speed = _speed_table(comparison["summary"], examples_of(comparison))
        texts.append(_table("speed, spread over the repeats", *speed))
        texts.append(_table("a step, part by part, ms", *_split(comparison["summary"])))
        title = "traffic, a step and rank, to other ranks; integers are ids and their counts"
        texts.append(_table(title, *_traffic(comparison["summary"])))
    return "\n\n".join(texts)


def _training_table(comparison: dict[str, Any]) -> tuple[Row, list[Row]]:
    header = ["ranks", "variant", "steps", "last loss", "MRR", "hits@10", "difference"]
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


def _speed_table(summary: dict[str, Any], examples: str) -> tuple[Row, list[Row]]:
    device = any(f["peak_device_bytes"] for by_name in summary.values() for f in by_name.values())
    header = ["ranks", "variant", f"{examples}/s", "lowest", "highest", "ratio", "peak MiB"]
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
    return ["ranks", "variant", *PARTS, "all"], rows


def _traffic(summary: dict[str, Any]) -> tuple[Row, list[Row]]:
    header = ["ranks", "variant", "ids", "looked up", "rows sent", "integers", "KiB sent"]
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


def _each(summary: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
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


# In learning rates: up to the first, differences are float rounding that training carried along;
# beyond the second, the variants take other steps.  Between them either may be the reason.
ROUNDING, OTHER_STEPS = 1e-3, 0.1


def verdict(comparison: dict[str, Any]) -> list[str]:
    """Sentences: what is missing, then one a world size on parameters, metrics and speed."""
    sentences = _missing(comparison)
    world_sizes = dict.fromkeys([*comparison["training"], *comparison["speed"]])
    for world_size in world_sizes:
        said = _training(comparison, comparison["training"].get(world_size))
        measured = comparison["speed"].get(world_size, {})
        said += _speed(comparison["engines"][0], measured, examples_of(comparison))
        if said:
            sentences.append(f"At world size {world_size}, {'; '.join(said)}.")
    return sentences


def _missing(comparison: dict[str, Any]) -> list[str]:
    if comparison["complete"]:
        return []
    if comparison["failure"] is None:  # stays so if the command itself is killed
        return ["The comparison is incomplete: it has not come to its end."]
    return [f"The comparison is incomplete: {describe(comparison['failure'])}."]


def describe(failure: dict[str, Any]) -> str:
    """Where and why a comparison ended."""
    if failure["world_size"] is None:
        return failure["reason"]
    who = f" of {failure['contender']}" if failure["contender"] else ""
    rank = "" if failure["rank"] is None else f"rank {failure['rank']} "
    where = f"at world size {failure['world_size']}, {failure['phase']}{who}"
    return f"{where}: {rank}{failure['reason']}"


def _training(comparison: dict[str, Any], found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return []
    first, rate = comparison["engines"][0], comparison["config"]["train"]["lr"]
    said = [
        _parameters(name, first, measured, rate)
        for name, measured in found["differences"].items()
        if measured
    ]
    if found["metrics"]:
        values = [
            f"{metrics['both']['realistic']['mrr']:.3f} for {name}"
            for name, metrics in found["metrics"].items()
        ]
        said.append(f"the {found['split']} MRR is {_listed(values)}")
    return said


def _parameters(name: str, first: str, measured: list[dict[str, Any]], rate: float) -> str:
    """How far one variant's parameters lie from the first's, from start to end."""
    start, end = measured[0], measured[-1]
    before = largest(start)
    if before != 0:
        by = "not numbers" if before is None else f"{_about(before)} apart"
        return (
            f"{name} does not start where {first} does (parameters {by}), so the rest compares "
            "different models"
        )
    if end["step"] == 0:
        return f"{name} and {first} start bitwise the same; nothing was trained"
    steps = f"after {end['step']:,} step{'s' if end['step'] > 1 else ''}"
    apart = largest(end)
    if apart is None:
        return f"the parameters of {name} or {first} are no numbers any more {steps}"
    if apart == 0:
        return f"{name} and {first} have bitwise the same parameters {steps}"
    rates = f"{_about(apart)}, {_about(apart / rate)} learning rates"
    if apart <= ROUNDING * rate:
        said = f"{name} trains what {first} trains"
    elif apart <= OTHER_STEPS * rate:
        said = f"{name} stays close to {first}"
    else:
        said = f"{name} does not train what {first} trains"
    return f"{said}: {steps} parameters differ by up to {rates}"


def _speed(first: str, by_name: dict[str, Measurements], examples: str) -> list[str]:
    base = by_name.get(first)
    return [
        _faster(name, ours, first, base, examples)
        for name, ours in by_name.items()
        if name != first and ours and base
    ]


def _faster(name: str, ours: Measurements, first: str, base: Measurements, examples: str) -> str:
    """Who is faster, if the difference is larger than those between repeats of the same."""
    mine, theirs = triples_per_second(ours), triples_per_second(base)
    repeats = min(len(ours), len(base))
    over = f"over {repeats} repeats" if repeats > 1 else "in a single repeat"
    if mine.median > theirs.median:
        winner, loser, factor = name, first, ratio(ours, base)
    else:
        winner, loser, factor = first, name, ratio(base, ours)
    digits = 1 if factor.highest - factor.lowest > 0.1 or factor.median >= 2 else 2
    times, low, high = (
        f"{value:.{digits}f}" for value in (factor.median, factor.lowest, factor.highest)
    )
    among_themselves = max(mine.highest / mine.lowest, theirs.highest / theirs.lowest)
    if mine.overlaps(theirs) or factor.median <= among_themselves or float(times) == 1:
        return (
            f"no difference in speed stands out from the spread, {_range(mine)} {examples}/s of "
            f"{name} and {_range(theirs)} of {first} {over}"
        )
    between = f", {low} to {high} {over}" if low != high else f" {over}"
    return f"{winner} is about {times} times as fast as {loser}{between}"


def _range(speed: Spread) -> str:
    return f"{_rounded(speed.lowest, 3)} to {_rounded(speed.highest, 3)}"


def _about(value: float) -> str:
    """One significant digit: 2,000 or 0.02 or 3e-06."""
    return _rounded(value, 1) if value >= 1 else f"{value:.1g}"


def _rounded(value: float, digits: int) -> str:
    """That many significant digits, written out."""
    return f"{float(f'{value:.{digits}g}'):,.0f}"


def _listed(values: list[str]) -> str:
    return ", ".join(values[:-1]) + " and " + values[-1] if len(values) > 1 else values[0]

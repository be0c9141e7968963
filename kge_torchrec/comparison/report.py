"""The report of a comparison: figures out of repeats, tables, a verdict in sentences, pictures.

It reads the content of comparison.json. The part "speed" is {world size: {variant: [measurement per
repeat]}}, where a measurement is {"repeat", "triples_per_second": per block, "ranks": [what
``measure_speed`` returned on each rank]}. The verdict says no more than the repeats show.

A variant has the same color in every picture. The colors differ for any color vision (variants:
Okabe and Ito; parts of a step: Paul Tol).
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kge_torchrec.config import NegativesConfig
from kge_torchrec.pages import COLORS
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

    def overlaps(self, other: Spread) -> bool:
        """Whether the two ranges have a value in common."""
        return self.lowest <= other.highest and other.lowest <= self.highest

    def __str__(self) -> str:
        return f"{_rounded(self.lowest, 3)} to {_rounded(self.highest, 3)}"


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


# Differences in learning rates. Up to the first, they are rounding errors that training carried
# along; beyond the second, the variants take different steps. Between them both are possible.
ROUNDING, OTHER_STEPS = 1e-3, 0.1


def verdict(comparison: dict[str, Any]) -> list[str]:
    """Return sentences: what is missing, then parameters, metrics and speed per world size."""
    sentences = []
    if not comparison["complete"]:
        # The failure stays None if the command itself is killed.
        why = "it has not come to its end"
        if comparison["failure"] is not None:
            why = describe(comparison["failure"])
        sentences.append(f"The comparison is incomplete: {why}.")
    for world_size in dict.fromkeys([*comparison["training"], *comparison["speed"]]):
        said = [*_training(comparison, world_size), *_speed(comparison, world_size)]
        if said:
            sentences.append(f"At world size {world_size}, {'; '.join(said)}.")
    return sentences


def describe(failure: dict[str, Any]) -> str:
    """Return where and why a comparison ended."""
    if failure["world_size"] is None:
        return failure["reason"]
    who = f" of {failure['contender']}" if failure["contender"] else ""
    rank = "" if failure["rank"] is None else f"rank {failure['rank']} "
    where = f"at world size {failure['world_size']}, {failure['phase']}{who}"
    return f"{where}: {rank}{failure['reason']}"


def _training(comparison: dict[str, Any], world_size: str) -> Iterator[str]:
    """Yield what training side by side showed: parameters, then metrics."""
    training = comparison["training"].get(world_size)
    if training is None:
        return
    first, rate = comparison["engines"][0], comparison["config"]["train"]["lr"]
    for name, measured in training["differences"].items():
        if measured:
            yield _parameters(name, first, measured, rate)
    if training["metrics"]:
        *others, last = (
            f"{metrics['both']['realistic']['mrr']:.3f} for {name}"
            for name, metrics in training["metrics"].items()
        )
        values = f"{', '.join(others)} and {last}" if others else last
        yield f"the {training['split']} MRR is {values}"


def _parameters(name: str, first: str, measured: list[dict[str, Any]], rate: float) -> str:
    """Return how far the parameters of a variant are from the first's, from start to end."""
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


def _speed(comparison: dict[str, Any], world_size: str) -> Iterator[str]:
    """Yield which variant is faster, if the difference is larger than that between repeats."""
    first, by_name = comparison["engines"][0], comparison["speed"].get(world_size, {})
    base = by_name.get(first)
    for name, ours in by_name.items():
        if name != first and ours and base:
            yield _faster((name, ours), (first, base), examples_of(comparison))


def _faster(one: tuple[str, Measurements], other: tuple[str, Measurements], examples: str) -> str:
    (name, ours), (first, base) = one, other
    mine, theirs = triples_per_second(ours), triples_per_second(base)
    repeats = min(len(ours), len(base))
    over = f"over {repeats} repeats" if repeats > 1 else "in a single repeat"
    (winner, fast), (loser, slow) = (one, other) if mine.median > theirs.median else (other, one)
    factor = ratio(fast, slow)
    digits = 1 if factor.highest - factor.lowest > 0.1 or factor.median >= 2 else 2
    times, low, high = (
        f"{value:.{digits}f}" for value in (factor.median, factor.lowest, factor.highest)
    )
    between_repeats = max(mine.highest / mine.lowest, theirs.highest / theirs.lowest)
    if mine.overlaps(theirs) or factor.median <= between_repeats or float(times) == 1:
        return (
            f"no difference in speed stands out from the spread, {mine} {examples}/s of {name} "
            f"and {theirs} of {first} {over}"
        )
    between = f", {low} to {high} {over}" if low != high else f" {over}"
    return f"{winner} is about {times} times as fast as {loser}{between}"


def _about(value: float) -> str:
    """Return one significant digit: 2,000 or 0.02 or 3e-06."""
    return _rounded(value, 1) if value >= 1 else f"{value:.1g}"


def _rounded(value: float, digits: int) -> str:
    """Return that many significant digits, written out."""
    return f"{float(f'{value:.{digits}g}'):,.0f}"


_PART_COLORS = ("#88CCEE", "#DDCC77", "#999933", "#882255", "#44AA99")
_STYLES = ("-", "--", "-.", ":")  # curves that lie on each other stay visible
_WIDTH = 0.8
_LOOK: dict[Any, Any] = {  # newer matplotlibs type the keys, older ones take str
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "savefig.dpi": 150,
}


def draw(comparison: dict[str, Any], folder: Path) -> list[Path]:
    """Write the pictures for which there are measurements; return their files."""
    trained = {w: content for w, content in comparison["training"].items() if content["steps"]}
    summary = comparison["summary"]
    sending = {w: content for w, content in summary.items() if int(w) > 1}  # one rank sends nothing
    pictures = {
        "losses": (_draw_losses, trained),
        "differences": (_draw_differences, trained),
        "speed": (_draw_speed, summary),
        "split": (_draw_split, summary),
        "traffic": (_draw_traffic, sending),
    }
    written = []
    with matplotlib.rc_context(_LOOK):
        for name, (draws, content) in pictures.items():
            if content:
                figure = Figure(layout="constrained")  # without pyplot: no display, no global state
                draws(figure, content, comparison)
                written.append(folder / f"{name}.png")
                figure.savefig(written[-1])
    return written


def _draw_losses(figure: Figure, training: dict[str, Any], comparison: dict[str, Any]) -> None:
    for trained, axes in _panels(figure, training):
        for i, (name, losses) in enumerate(trained["losses"].items()):
            steps = range(1, len(losses) + 1)
            axes.plot(steps, losses, label=name, color=COLORS[i], linestyle=_STYLES[i], lw=1.5)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel="step", ylabel="loss of the batch")
        axes.legend()


def _draw_differences(figure: Figure, training: dict[str, Any], comparison: dict[str, Any]) -> None:
    for trained, axes in _panels(figure, training):
        for i, (name, measured) in enumerate(trained["differences"].items(), 1):
            apart = [largest(entry) for entry in measured]
            values = [float("nan") if value is None else value for value in apart]
            axes.plot([entry["step"] for entry in measured], values, label=name, color=COLORS[i],
                      linestyle=_STYLES[i], marker="o", markersize=4, clip_on=False)  # fmt: skip
        rate = comparison["config"]["train"]["lr"]
        axes.axhline(rate, color="#666666", lw=1, label="learning rate")
        axes.set_xscale("symlog", linthresh=1)
        axes.set_yscale("symlog", linthresh=1e-9)  # bitwise equal is 0
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        first = comparison["engines"][0]
        axes.set(xlabel="step", ylabel=f"largest parameter difference from {first}")
        axes.legend()


def _draw_speed(figure: Figure, summary: dict[str, Any], comparison: dict[str, Any]) -> None:
    axes = figure.add_subplot()
    for place, color, name, figures in _bars(axes, summary):
        speed = figures["triples_per_second"]
        median = speed["median"]
        below, above = median - speed["lowest"], speed["highest"] - median
        axes.bar(place, median, _WIDTH, color=color, label=name)
        axes.errorbar(place, median, [[below], [above]], color="black", capsize=4)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set(ylabel=f"{examples_of(comparison)} per second")
    axes.set_title("median and spread of the repeats", fontsize="medium")


def _draw_split(figure: Figure, summary: dict[str, Any], comparison: dict[str, Any]) -> None:
    axes, names = figure.add_subplot(), {}
    for place, _, name, figures in _bars(axes, summary):
        bottom = 0.0
        for part, color in zip(PARTS, _PART_COLORS, strict=True):
            milliseconds = figures["split_milliseconds"][part]
            axes.bar(place, milliseconds, _WIDTH, bottom=bottom, color=color, label=part)
            bottom += milliseconds
        names[place] = name
    axes.set(ylabel="milliseconds per step, parts one after another")
    axes.secondary_xaxis("top").set_xticks(list(names), list(names.values()), fontsize="small")


def _draw_traffic(figure: Figure, summary: dict[str, Any], comparison: dict[str, Any]) -> None:
    axes, half = figure.add_subplot(), _WIDTH / 2
    for place, color, name, figures in _bars(axes, summary):
        traffic = figures["traffic"]
        distinct, duplicated = (
            traffic[kind]["bytes_sent"] / 1024 for kind in ("deduplicated", "duplicated")
        )
        axes.bar(place - half / 2, distinct, half, color=color, label=name)
        axes.bar(place + half / 2, duplicated, half, color=color, alpha=0.5, hatch="//",
                 label=f"{name}, with duplicates")  # fmt: skip
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.set(ylabel="KiB to other ranks, per step and rank")


def _panels(figure: Figure, training: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Axes]]:
    """Yield axes side by side, one per world size."""
    figure.set_size_inches(1 + 4.5 * len(training), 4)
    for i, (world_size, trained) in enumerate(training.items(), 1):
        axes = figure.add_subplot(1, len(training), i)
        axes.set_title(ranks(world_size), fontsize="medium")
        yield trained, axes


def _bars(axes: Axes, summary: dict[str, Any]) -> Iterator[tuple[float, str, str, dict[str, Any]]]:
    """Yield (place, color, variant, figures) of each bar; there is one group per world size."""
    centers, place = [], 0.0
    for by_name in summary.values():
        places = [place + i for i in range(len(by_name))]
        for center, color, (name, figures) in zip(places, COLORS, by_name.items(), strict=False):
            yield center, color, name, figures
        centers.append((places[0] + places[-1]) / 2)
        place = places[-1] + 1.6
    axes.set_xticks(centers, [ranks(world_size) for world_size in summary])
    figure = axes.figure
    assert isinstance(figure, Figure)  # these axes lie in no part of one
    figure.set_size_inches(3 + 0.8 * place, 4.5)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles, loc="outside right upper")  # each name once

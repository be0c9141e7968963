"""Single figures out of the repeats of a measurement.

Works on the ``speed`` part of comparison.json: {world size: {contender: [measurement a repeat]}},
where a measurement is {"repeat", "triples_per_second": of each block, "ranks": [what
``measure_speed`` returned on each rank]}.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from kge_torchrec.comparison.split import PARTS

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
    """The figures of the tables by world size and contender, for comparison.json.

    Contenders that were not measured, because the comparison ended, are left out.
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

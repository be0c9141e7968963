"""What a comparison says, in sentences, and no more than its repeats bear out."""

from __future__ import annotations

from typing import Any

from kge_torchrec.comparison.summary import Spread, ratio, triples_per_second
from kge_torchrec.comparison.tables import largest

# In learning rates: up to the first, differences are float rounding that training carried along;
# beyond the second, the contenders take other steps.  Between them either may be the reason.
ROUNDING, OTHER_STEPS = 1e-3, 0.1


def verdict(comparison: dict[str, Any]) -> list[str]:
    """Sentences: what is missing, then one a world size on parameters, metrics and speed."""
    sentences = _missing(comparison)
    world_sizes = dict.fromkeys([*comparison["training"], *comparison["speed"]])
    for world_size in world_sizes:
        said = _training(comparison, comparison["training"].get(world_size))
        said += _speed(comparison["engines"][0], comparison["speed"].get(world_size, {}))
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
    """How far one contender's parameters lie from the first's, from start to end."""
    start, end = measured[0], measured[-1]
    if largest(start) != 0:
        by = "not numbers" if largest(start) is None else f"{_about(largest(start))} apart"
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


def _speed(first: str, by_name: dict[str, list[dict[str, Any]]]) -> list[str]:
    base = by_name.get(first)
    return [
        _faster(name, ours, first, base)
        for name, ours in by_name.items()
        if name != first and ours and base
    ]


def _faster(name: str, ours: list[dict], first: str, base: list[dict]) -> str:
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
            f"no difference in speed stands out from the spread, {_range(mine)} triples/s of "
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

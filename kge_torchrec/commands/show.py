"""``show``: the results of runs side by side, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated, Any, Literal

from kge_torchrec.commands import RunPath
from kge_torchrec.config import ConfigError
from kge_torchrec.reports.folders import RunFacts, differences, names_of, value_of
from kge_torchrec.seeds import SeedRuns, is_seeds
from kge_torchrec.tables import Cell, Shown, amount, cut, seconds, table

LONGEST = 40  # characters of the value of a setting
_UNITS: Shown = {"epochs": ".4g", "time": seconds, "triples/s": ",.0f", "size": amount}


def show(
    runs: Annotated[Sequence[RunPath], "RUN"],
    *,
    format: Literal["table", "json", "csv"] = "table",
) -> int:
    """Show the results of runs side by side, and the settings that differ.

    It reads folders only: of runs in any state, of exports, and of train --seeds, whose runs are
    one line of means and standard deviations. JSON and CSV have seconds and bytes.
    The verb report writes an HTML page about runs.

    Examples:
      kge-torchrec show runs/*
      kge-torchrec show runs/umls-complex runs/umls-rotate --format csv

    Args:
        runs: the folders of runs, folders of train --seeds, or exports
    """
    paths = [Path(run) for run in runs]
    rows: list[dict[str, Cell]] = []
    settings: list[dict[str, Any]] = []
    graphs: dict[str, list[str]] = {}
    for path, name in zip(paths, names_of(paths), strict=True):
        if is_seeds(path):
            several = SeedRuns(path)
            found = [
                RunFacts.read(several.folder(seed).path, name)
                for seed in several.seeds
                if several.folder(seed).holds_run
            ]
            if not found:
                raise ConfigError(f"{path}: none of its seeds has begun")
            rows.append(_row_of_seeds(found, len(several.seeds)))
            # The seeds may share a race of defaults, which decided their settings.
            settings.append({**found[0].settings, "seed": several.seeds})
        else:
            found = [RunFacts.read(path, name)]
            rows.append(_row(found[0]))
            settings.append(found[0].settings)
        graphs.setdefault(found[0].triples, []).append(name)
    changed = differences(settings)
    if all(row["selected by"] == "mrr" for row in rows):
        rows = [{key: cell for key, cell in row.items() if key != "test mrr"} for row in rows]
    if format != "table":
        shown: list[dict[str, Any]] = [
            {**row, **{key: values.get(key) for key in changed}}
            for row, values in zip(rows, settings, strict=True)
        ]
        print(table(shown, format))
        return 0
    print(table(rows, shown=_UNITS))
    if len(known := [names for graph, names in graphs.items() if graph]) > 1:
        listed = " | ".join(", ".join(names) for names in known)
        print(f"\ndifferent triples, so the metrics do not compare: {listed}")
    defaults = " from the defaults" if len(rows) == 1 else ""
    print(f"\nsettings that differ{defaults}{'' if changed else ': none'}")
    named = [(str(row["run"]), values) for row, values in zip(rows, settings, strict=True)]
    if changed:
        print(
            table([{"key": x, **{run: _text(v.get(x, "-")) for run, v in named}} for x in changed])
        )
    return 0


def _row(run: RunFacts) -> dict[str, Cell]:
    return {
        "run": run.name,
        "state": run.state,
        "data": run.data,
        "model": run.model,
        "epochs": run.epochs,
        "selected by": run.metric,
        "valid": run.best,
        "test": value_of(run.test, run.metric),
        "test mrr": value_of(run.test, "mrr"),
        "time": (run.results.get("train") or {}).get("seconds", run.seconds("epoch")),
        "triples/s": run.speed,
        "size": run.size,
    }


def _row_of_seeds(runs: Sequence[RunFacts], planned: int) -> dict[str, Cell]:
    """Return means and standard deviations over the runs that are done."""
    done = [run for run in runs if run.results] or runs
    rows = [_row(run) for run in done]
    merged: dict[str, Cell] = {}
    for name, first in rows[0].items():
        numbers = [x for row in rows if isinstance(x := row[name], int | float)]
        merged[name] = first
        if numbers and name != "size":
            merged[name] = mean(numbers), stdev(numbers) if len(numbers) > 1 else None
    trained = sum(bool(run.results) for run in runs)
    merged["state"] = f"{planned} seeds" if trained == planned else f"{trained} of {planned} seeds"
    return merged


def _text(value: Any) -> str:
    return "null" if value is None else cut(str(value), LONGEST)

"""What a run's folder says of it, without its model: config, curves, results, layout, times."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kge_torchrec.config import Config, all_keys
from kge_torchrec.errors import KGEError
from kge_torchrec.training.run_folder import RunFolder

# What differs between any two runs, and says nothing of them.
_OF_A_START = ("run.", "threads", "device")


class ReportError(KGEError):
    """A report that cannot be made."""


@dataclass(frozen=True)
class RunFacts:
    """Of one run.

    metrics: the lines of metrics.jsonl; results: results.json, or None while it trains; layout:
        plan.txt.
    """

    name: str
    path: Path
    config: Config
    metrics: list[dict[str, Any]]
    results: dict[str, Any] | None
    layout: str

    @classmethod
    def read(cls, path: str | Path, name: str) -> RunFacts:
        """Raises ConfigError unless a run is there."""
        folder = RunFolder(path)
        config = folder.load_config()
        plan = folder.path / "plan.txt"
        return cls(
            name=name,
            path=folder.path,
            config=config,
            metrics=_lines(folder.metrics),
            results=_json(folder.results),
            layout=plan.read_text(encoding="utf-8") if plan.is_file() else "",
        )

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Lines of "step", "epoch" or "valid"; of an epoch that was trained twice the last."""
        return list({line["step"]: line for line in self.metrics if line["kind"] == kind}.values())

    def losses(self) -> tuple[list[float], list[float]]:
        """Steps and their losses."""
        lines = [line for line in self.of_kind("step") if line["loss"] is not None]
        return [line["step"] for line in lines], [line["loss"] for line in lines]

    def valid_mrr(self) -> tuple[list[float], list[float]]:
        """Epochs and the realistic filtered MRR of both sides after each."""
        lines = self.of_kind("valid")
        return [x["epoch"] for x in lines], [x["both"]["realistic"]["mrr"] for x in lines]

    def seconds(self) -> dict[str, float]:
        """Of training, and of validation where the log has it."""
        return {
            "training": sum(line["seconds"] for line in self.of_kind("epoch")),
            "validation": sum(line.get("seconds", 0.0) for line in self.of_kind("valid")),
        }

    def groups(self, by: str) -> dict[str, Any] | None:
        """What ``evaluate --by`` has written of test, if it did."""
        return _json(self.path / f"evaluation-test-by-{by}.json")


def names_of(paths: list[Path]) -> list[str]:
    """Short and different names of folders: as many of their last parts as that takes.

    Raises ReportError for a folder that is given twice.
    """
    resolved = [path.resolve() for path in paths]
    for path in resolved:
        if resolved.count(path) > 1:
            raise ReportError(f"{path} is given twice; name each run once")
    longest = max(len(path.parts) for path in resolved)
    for length in range(1, longest + 1):
        names = ["/".join(path.parts[-length:]) for path in resolved]
        if len(set(names)) == len(names):
            break
    return names


def differences(runs: list[RunFacts]) -> list[tuple[str, list[Any]]]:
    """Keys whose values differ among the runs, or of one run alone from the default, with both."""
    configs = [run.config for run in runs]
    values = [_flat(config) for config in (configs if len(runs) > 1 else [*configs, Config()])]
    keys = [key for key in all_keys() if not key.startswith(_OF_A_START)]
    return [
        (key, [of_run[key] for of_run in values])
        for key in keys
        if any(of_run[key] != values[0][key] for of_run in values)
    ]


def _flat(config: Config) -> dict[str, Any]:
    nested = config.to_dict()
    flat = {}
    for key in all_keys():
        value: Any = nested
        for part in key.split("."):
            value = value[part]
        flat[key] = value
    return flat


def _lines(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        return []
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:  # a kill cut it short
            continue
    return found


def _json(file: Path) -> dict[str, Any] | None:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None

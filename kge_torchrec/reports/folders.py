"""What the folders of runs say, for ``report`` and ``show``.  It loads no torch.

The state of a run is a word:

    done       results.json is of the newest checkpoint
    resumed    the same, after a stop, a kill or with more epochs
    extended   the same, of a run that ``extend`` made
    training   a process trains it now
    stopped    a signal stopped it
    killed     its process was killed
    failed     training ended with an error
    export     the folder is an export of a run
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kge_torchrec import files
from kge_torchrec.config import Config, ConfigError
from kge_torchrec.errors import first_line
from kge_torchrec.training.run_folder import RunFolder

# Keys that describe where a run ran, not what it trained.
_PLACE_KEYS = ("run.", "threads", "device", "timeout")


@dataclass(frozen=True)
class RunFacts:
    """The contents of a run's folder, or of an export."""

    name: str
    path: Path
    state: str
    settings: dict[str, Any]  # by key; those of the model only for an export
    results: dict[str, Any]  # results.json, if it is of the newest checkpoint; {} otherwise
    metrics: list[dict[str, Any]] = field(default_factory=list)  # the lines of metrics.jsonl
    damaged: str = ""  # why results.json cannot be read

    @classmethod
    def read(cls, path: str | Path, name: str) -> RunFacts:
        """Read the folder of a run or an export; raise ConfigError if it holds neither."""
        if (Path(path) / "config.json").is_file():
            return cls._of_export(Path(path), name)
        folder, results, damaged = RunFolder(path), {}, ""
        settings, metrics = _settings(folder.config_file()), folder.load_metrics()
        # A resumed run drops the line of its earlier results, before it trains on.
        if folder.results.is_file():
            try:
                results = folder.load_results()
            except ConfigError as error:
                damaged = str(error)
            if metrics and all(line["kind"] != "test" for line in metrics):
                results = {}
        return cls(name, folder.path, _state(folder, results), settings, results, metrics, damaged)

    @classmethod
    def _of_export(cls, path: Path, name: str) -> RunFacts:
        try:
            description = json.loads((path / "config.json").read_text(encoding="utf-8"))
            settings = _flat({"model": description["model"]})
            return cls(name, path, "export", settings, description.get("results") or {})
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path / 'config.json'} is damaged ({error})") from error

    @property
    def data(self) -> str:
        """The name of the graph; "-" for an export."""
        return Path(self.settings.get("data.path", "-")).name

    @property
    def model(self) -> str:
        """The scorer and the dim."""
        return f"{self.settings['model.scorer']} {self.settings['model.dim']}"

    @property
    def layout(self) -> str:
        """How the table is placed on the ranks; "" until training has begun."""
        plan = self.path / "plan.txt"
        return plan.read_text(encoding="utf-8") if plan.is_file() else ""

    @property
    def metric(self) -> str:
        """The metric that selected the checkpoint."""
        valid = self.results.get("valid") or {}
        return str(valid.get("metric", self.settings.get("evaluation.metric", "mrr")))

    @property
    def test(self) -> dict[str, Any]:
        """The metrics of test; {} without."""
        return self.results.get("test") or {}

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Return lines of "step", "epoch" or "valid"; of an epoch trained twice, the last line."""
        return list({line["step"]: line for line in self.metrics if line["kind"] == kind}.values())

    def losses(self) -> tuple[list[int], list[float]]:
        """Return steps and their losses."""
        lines = [line for line in self.of_kind("step") if line["loss"] is not None]
        return [line["step"] for line in lines], [line["loss"] for line in lines]

    def validations(self) -> tuple[list[int], list[float]]:
        """Return epochs, and the metric of selection after each."""
        found = [(line["epoch"], value_of(line, self.metric)) for line in self.of_kind("valid")]
        known = [(epoch, value) for epoch, value in found if value is not None]
        return [epoch for epoch, _ in known], [value for _, value in known]

    @property
    def best(self) -> float | None:
        """The best value of the metric of selection on valid, so far."""
        best = (self.results.get("valid") or {}).get("best")
        pick = min if self.metric == "mr" else max
        return best if self.results else pick(self.validations()[1], default=None)

    @property
    def epochs(self) -> int | None:
        """The number of epochs so far; None for an export without results."""
        trained = self.of_kind("epoch")
        known = self.results.get("train") or {}
        return known.get("epochs", trained[-1]["epoch"] if trained else None)

    def seconds(self, kind: str) -> float | None:
        """Return the seconds of all "epoch" or "valid" lines; None without a line."""
        lines = [line.get("seconds", 0.0) for line in self.of_kind(kind)]
        return sum(lines) if lines else None

    @property
    def speed(self) -> float | None:
        """Triples (or queries) per second of training."""
        lines = self.of_kind("epoch")
        known = self.results.get("train") or {}
        return known.get("triples_per_second", lines[-1]["triples_per_second"] if lines else None)

    @property
    def size(self) -> int | None:
        """The bytes of the ranked (or newest) checkpoint, or of the export; None without one."""
        folder = self.path
        if self.state != "export":
            complete = sorted(x.parent for x in folder.glob("checkpoints/step-*/manifest.json"))
            ranked = (self.results.get("checkpoint") or {}).get("name")
            chosen = [x for x in complete if x.name == ranked] or complete[-1:]
            if not chosen:
                return None
            folder = chosen[0]
        return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())

    @property
    def triples(self) -> str:
        """The fingerprint of the run's triples, which tells data sets apart; "" if unknown."""
        store = None
        if self.state != "export":
            store = RunFolder(self.path).find_store(self.settings["data.path"])
        if store is None:
            return ""
        return str(json.loads((store / "meta.json").read_text(encoding="utf-8"))["fingerprint"])


def value_of(results: dict[str, Any], metric: str) -> float | None:
    """Return a metric of ranks or of recommendations in the results of a split; None without."""
    found = results.get("both", {}).get("realistic", {}) | results.get("recommendation", {})
    return found.get(metric)


def _state(folder: RunFolder, results: dict[str, Any]) -> str:
    lock, holder = folder.path / ".lock", ""
    if lock.is_file():
        with lock.open(encoding="utf-8") as file:
            holder = file.read()
            # A process that was killed left its name in the file, and no lock.
            if holder and not files.lock(file):
                return "training"
    if results:
        return "extended" if folder.extension.is_file() else "done"
    if folder.stopped.is_file():
        return "stopped"
    return "killed" if holder else "failed"


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return a distinct name per folder: as many of its last parts as needed.

    Raises:
        ConfigError: A folder is named twice.
    """
    resolved = [path.resolve() for path in paths]
    for path in resolved:
        if resolved.count(path) > 1:
            raise ConfigError(f"{path} is named twice; name each run once")
    names: list[str] = []
    for length in range(1, max(len(path.parts) for path in resolved) + 1):
        names = ["/".join(path.parts[-length:]) for path in resolved]
        if len(set(names)) == len(names):
            break
    return names


def differences(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values differ among runs, or from the defaults for a single one."""
    compared = [*runs, _DEFAULTS] if len(runs) == 1 else runs
    changed = []
    for key in dict.fromkeys(key for values in compared for key in values):
        # An export has the keys of the model only.
        known = [x for x in compared if "train.epochs" in x or key.startswith("model.")]
        is_place = key.startswith(_PLACE_KEYS)
        if not is_place and any(x.get(key) != known[0].get(key) for x in known):
            changed.append(key)
    return changed


def _settings(file: Path) -> dict[str, Any]:
    """Return the values of config.yaml by key, unchecked: the checks load torch."""
    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        return _DEFAULTS | _flat(yaml.load(file.read_text(encoding="utf-8"), loader))
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not valid YAML: {first_line(error)}") from error
    except (ValueError, AttributeError) as error:
        raise ConfigError(
            f"{file} is no config of a run: it should have keys and values"
        ) from error


def _flat(values: Mapping[str, Any], start: str = "") -> dict[str, Any]:
    """Return nested values by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{start}{key}.")
        else:
            flat[f"{start}{key}"] = value
    return flat


_DEFAULTS = _flat(json.loads(json.dumps(Config().to_dict())))

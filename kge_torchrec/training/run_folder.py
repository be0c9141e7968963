"""A run's folder: resolved config, metrics, TensorBoard, checkpoints, results.

It holds:
    config.yaml      every setting of the run
    plan.txt         how the table is laid out over the ranks, what they hold, send and take
    plan.json        the same, to train another run with (run.plan)
    store/           the prepared triples, unless the config names a store
    metrics.jsonl    one object a step interval, an epoch, a validation
    tensorboard/     the same, for TensorBoard
    checkpoints/     see kge_torchrec.training.checkpoints
    results.json     final results
"""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from kge_torchrec.config import Config, ConfigError
from kge_torchrec.config_parser import Overrides, load_config


class RunFolder:
    """Paths and files of one run.  Only rank 0 writes."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    @classmethod
    def new(cls, config: Config) -> RunFolder:
        """The folder that ``config`` names, or runs/SCORER-TIME."""
        name = f"runs/{config.model.scorer}-{time.strftime('%Y%m%d-%H%M%S')}"
        return cls(config.run.dir or name)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def store(self) -> Path:
        return self.path / "store"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def results(self) -> Path:
        return self.path / "results.json"

    def create(self, config: Config) -> None:
        """Makes the folder and writes the config.  Raises ConfigError if a run is in it."""
        if (self.path / "config.yaml").exists():
            raise ConfigError(
                f"run.dir: {self.path} holds a run already; continue it with "
                f"`train --resume {self.path}` or name another folder"
            )
        if self.store.exists():
            # Neither trained on in place of data.path, nor removed if this run cannot start.
            raise ConfigError(
                f"run.dir: {self.store} exists already, and a run keeps its own triples there; "
                "name another folder for the run"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        config.save(self.path / "config.yaml")

    def load_config(self, overrides: Overrides = ()) -> Config:
        """The config of the run, with overrides.  Raises ConfigError if the folder holds none."""
        file = self.path / "config.yaml"
        if not file.is_file():
            raise ConfigError(f"{self.path} is no run folder: it has no config.yaml")
        return load_config(file, overrides)

    def write_results(self, results: dict[str, Any]) -> None:
        """Writes results.json, whole or not at all."""
        partial = self.results.with_suffix(".partial")
        partial.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, self.results)


class MetricsLog:
    """metrics.jsonl and TensorBoard."""

    def __init__(self, folder: RunFolder, tensorboard: bool, resumed_at: int | None = None):
        if resumed_at is not None:
            _drop_after(folder.metrics, resumed_at)
        self._file = folder.metrics.open("a", encoding="utf-8")
        self._board = _board(folder, resumed_at) if tensorboard else None

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Appends one line {"kind": ..., "step": ..., ...} and flushes it."""
        line = {"kind": kind, "step": step, **values}
        self._file.write(json.dumps(_finite(line)) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in _scalars(values):
                self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Closes both."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def _board(folder: RunFolder, resumed_at: int | None):
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder.path / "tensorboard"), purge_step=resumed_at)


def _drop_after(file: Path, step: int) -> None:
    """Drops what a resumed run writes again, and a line that a kill cut short."""
    if not file.is_file():
        return
    kept = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            values = json.loads(line)
            again = values["step"] > step or values["kind"] == "test"
        except (ValueError, KeyError):
            continue
        if not again:
            kept.append(line)
    partial = file.with_suffix(".partial")
    partial.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    os.replace(partial, file)


def _scalars(values: dict[str, Any], prefix: str = ""):
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _scalars(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield prefix + key, value


def _finite(value: Any) -> Any:
    """JSON has no NaN: null instead."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value

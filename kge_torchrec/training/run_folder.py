"""The folder of a run, and a lock against a second training process.

docs/reference/verbs.md lists its files.  Only rank 0 writes them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np

from kge_torchrec import files
from kge_torchrec.config import Config, ConfigError, all_keys
from kge_torchrec.config.checks import check_no_url
from kge_torchrec.config.parser import Overrides, read_run_config, values_of
from kge_torchrec.data.store import META
from kge_torchrec.errors import StoreError

log = logging.getLogger(__name__)

# What a run writes, config.yaml late: a folder without it that has a store is no run and not free.
FILES = ("race", "race.json", "metrics.jsonl", "tensorboard", "trackers.json", "plan.txt",
         "checkpoints", "results.json", "stopped.json", "parts", "copy.json",
         "store", "frozen.npy", "extended.json", "config.yaml")  # fmt: skip


class RunFolder:
    """Paths and files of one run."""

    given: ClassVar[dict[str, Any]] = {}  # keys that every run is read with, of the command line

    def __init__(self, path: str | Path):
        check_no_url(path)
        self.path = path = Path(path)
        self.checkpoints, self.store, self.metrics = (
            path / name for name in ("checkpoints", "store", "metrics.jsonl")
        )
        self.results, self.stopped = path / "results.json", path / "stopped.json"
        self.race, self.racers = path / "race.json", path / "race"
        self.extension, self.frozen = path / "extended.json", path / "frozen.npy"
        self.parts = path / "parts"  # the files of a table on disk, while the run trains
        self.is_own = False  # whether this start made the folder
        self.copier: Any = None  # a Copier, on rank 0 of a run that is copied while it trains

    @classmethod
    def new(cls, config: Config) -> RunFolder:
        """Return the folder that ``config`` names, or make runs/SCORER-TIME (runs/default-TIME)."""
        if config.run.dir is not None:
            return cls(config.run.dir)
        named = config.model.scorer if config.decided_by else "default"
        name = f"runs/{named}-{time.strftime('%Y%m%d-%H%M%S')}"
        for number in itertools.count(1):  # another start may take the name in the same second
            made = cls(f"{name}-{number}" if number > 1 else name)
            try:
                made.path.mkdir(parents=True)
            except FileExistsError:
                continue
            made.is_own = True
            break
        return made

    def find_store(self, data: str) -> Path | None:
        """Return data.path or store/, if it is a store; that of a trained run may lie beside it."""
        home, path = Path(os.path.abspath(self.path)), Path(data)
        homes = (home, home.parent) if self.has_checkpoint else ()
        beside = (folder / name for folder in homes for name in (path, path.name))
        return next((x for x in (path, self.store, *beside) if (x / META).is_file()), None)

    def store_of(self, data: str) -> Path:
        """Return the path of the run's store; raise StoreError if it is missing."""
        found = self.find_store(data)
        if found is None:
            raise StoreError(
                f"{self.path}: the triples of the run are missing: its data.path, {data}, is no "
                f"store, and {self.store} is none. Name the store by --data.path PATH (in Python "
                "open_run(RUN, data=PATH)), or move it beside the run"
            )
        return found

    @property
    def holds_run(self) -> bool:
        """Whether a run was started in this folder."""
        return (self.path / "config.yaml").is_file()

    @property
    def is_half_extended(self) -> bool:
        """Whether ``extend`` was killed before the store of a run in this folder was complete."""
        starts = self.extension.is_file() and not self.has_checkpoint
        return starts and not (self.store / META).is_file()

    @property
    def has_checkpoint(self) -> bool:
        """Whether the folder has a complete checkpoint."""
        return any(self.checkpoints.glob("step-*/manifest.json"))

    @property
    def has_race(self) -> bool:
        """Whether a race of defaults has a complete checkpoint of one of its settings."""
        return any(RunFolder(path).has_checkpoint for path in self.racers.glob("*"))

    @property
    def is_abandoned(self) -> bool:
        """Whether a start in this folder ended before the first checkpoint of its run."""
        kept = self.has_checkpoint or self.has_race or self.results.exists()
        if kept or not self.holds_run or (self.path / "study.json").exists():
            return False
        with contextlib.suppress(ConfigError):
            # A run writes every key, and a user's own config is not to be removed.
            written = values_of(self.path / "config.yaml")
            return set(all_keys()) <= set(written) and not self.last_written
        return False

    @property
    def last_written(self) -> str | None:
        """Name of the newest checkpoint that the run has written, according to its metrics."""
        lines = (line for line in self.load_metrics() if line["kind"] == "checkpoint")
        return max((line["name"] for line in lines), default=None)

    def create(self, config: Config) -> None:
        """Make the folder and write the config; raise ConfigError if it is not free."""
        self._check_complete()
        self.check_free()
        self._make()
        self.save_config(config)

    def _make(self) -> None:
        if not self.path.is_dir():
            self.path.mkdir(parents=True, exist_ok=True)
            self.is_own = True

    def clear(self) -> None:
        """Remove the files of a run, so that another one may start."""
        self.remove(*FILES, *(path.name for path in self.path.glob(".*.partial-*")))

    def remove(self, *names: str) -> None:
        """Remove files and folders of this folder."""
        for name in names:
            path = self.path / name
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def check_free(self) -> None:
        """Raise ConfigError if the folder has a run, a store or checkpoints."""
        if self.holds_run:
            raise ConfigError(
                f"run.dir: {self.path} already holds a run; resume the run with "
                f"`train --resume {self.path}` (or --run.resume auto to repeat the same "
                "command), or name another folder"
            )
        if self.store.exists():
            # Refuse it: the run must not train on it, nor remove it if the run cannot start.
            raise ConfigError(
                f"run.dir: {self.store} already exists, and a run keeps its own triples there; "
                "name another folder for the run"
            )
        if self.checkpoints.exists():
            # Refuse them: they belong to another run, so this one must not resume or remove them.
            raise ConfigError(
                f"run.dir: {self.checkpoints} already exists without a config.yaml; restore "
                "config.yaml, or name another folder for the run"
            )

    def _check_complete(self) -> None:
        if (self.path / "study.json").is_file():  # its config.yaml is what its trials change
            raise ConfigError(
                f"{self.path} is a study of `tune` and no run; train its best config with "
                f"`train {self.path}/best.yaml`, or name another folder"
            )
        if self.is_half_extended:
            raise ConfigError(
                f"{self.path} is no run yet: `kge-torchrec extend` was killed before "
                "its triples were complete; repeat the same command, which starts over"
            )

    def save_config(self, config: Config) -> None:
        """Write config.yaml atomically."""
        config.save(self.path / "config.yaml")

    def config_file(self) -> Path:
        """Return the file of the run's config; raise ConfigError if the folder has no run."""
        self._check_complete()
        file = self.path / "config.yaml"
        if not file.is_file():
            what = "no run folder: it has no config.yaml"
            if (self.path / "config.json").is_file():
                what = "an export; name the run that it was made from"
            if (self.path / "seeds.json").is_file():
                what = (
                    f"a folder of several seeds; name one of its runs, {self.path}/seed-... "
                    "(`show` has their mean and deviation)"
                )
            raise ConfigError(f"{self.path} is {what}")
        return file

    def load_config(self, overrides: Overrides = ()) -> Config:
        """Return the config of the run, with overrides."""
        return read_run_config(self.config_file(), self.given, overrides)

    def load_results(self) -> dict[str, Any]:
        """Return results.json; raise ConfigError if it is missing or damaged."""
        try:
            results = json.loads(self.results.read_text(encoding="utf-8"))
            if not isinstance(results, dict) or not isinstance(
                results.get("test", {}), dict | None
            ):
                raise ValueError("the file holds no results")
            return results
        except FileNotFoundError:
            raise ConfigError(f"{self.path} has no results yet: training has not ended") from None
        except ValueError as error:
            raise ConfigError(
                f"{self.results} is damaged ({error}); `train --resume {self.path}` writes it again"
            ) from error

    def load_metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl, without a line that a kill cut short."""
        if not self.metrics.is_file():
            return []
        values = []
        for line in self.metrics.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                values.append(json.loads(line))
        return values

    def save_frozen(self, frozen: np.ndarray) -> None:
        """Write frozen.npy, (N,) bool, atomically."""
        self._make()
        with files.replacing(self.frozen) as partial, partial.open("wb") as file:
            np.save(file, frozen)

    def load_extension(self) -> dict[str, Any]:
        """Return extended.json: {"from", "checkpoint"}."""
        values: dict[str, Any] = json.loads(self.extension.read_text(encoding="utf-8"))
        return values

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder, and lock it against other training processes until this one ends.

        Raises ConfigError, with the host and process of the one that has the lock.
        """
        self._make()
        with (self.path / ".lock").open("a+", encoding="utf-8") as file:
            _lock(file, self.path)
            file.truncate(0)
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            holder = {"host": socket.gethostname(), "process": os.getpid(), "since": since}
            file.write(json.dumps(holder))
            file.flush()
            try:
                yield
            finally:
                file.truncate(0)


def _lock(file: IO[str], folder: Path) -> None:
    try:
        if files.lock(file):
            return
    except OSError as error:
        log.warning("%s cannot be locked (%s); do not start a second run in it", folder, error)
        return
    file.seek(0)
    try:
        holder = "process {process} on {host}, since {since}".format(**json.load(file))
    except (ValueError, KeyError):
        holder = "another process"
    raise ConfigError(
        f"run.dir: {folder} is being trained by {holder}; wait until the process ends, or "
        "name another folder"
    )

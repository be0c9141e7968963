"""Where a run's metrics go: metrics.jsonl, TensorBoard and Weights & Biases.

Each tracker takes {"kind/metric": value} of a step.  A resumed run continues the same run of W&B,
whose id is in trackers.json.  W&B is not used any more once it fails, for example without a
network, at the start or later; metrics.jsonl still gets all metrics.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kge_torchrec import files
from kge_torchrec.config import Config, ConfigError, RunConfig
from kge_torchrec.config.training import Trackers
from kge_torchrec.training.run_folder import RunFolder

log = logging.getLogger(__name__)


def check_trackers(run: RunConfig) -> None:
    """Raise ConfigError if ``run`` names a tracker whose package is not installed."""
    chosen = {"tensorboard": run.trackers.tensorboard, "wandb": run.trackers.wandb is not None}
    for name, wanted in chosen.items():
        if wanted and find_spec(name) is None:
            raise ConfigError(
                f"run.trackers.{name} needs the package {name}: pip install -e '.[{name}]'"
            )


class TensorBoard:
    """A tracker that writes TensorBoard event files; it overwrites steps after ``resumed_at``."""

    def __init__(self, folder: Path, resumed_at: int):
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard drops what it has from this step on; the last step of before stays.
        self._writer = SummaryWriter(str(folder), purge_step=resumed_at + 1)

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A Weights & Biases run in a project; WANDB_MODE=offline works as well.

    The package may raise any type of error.  None of them ends training.
    """

    def __init__(self, project: str, folder: Path, config: Config):
        self._run: Any = None
        self._takes = False
        with self._warning("gets no metrics of this run"):
            import wandb

            file = folder / "trackers.json"
            before = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
            self._run = wandb.init(
                project=project,
                name=folder.name,
                dir=str(folder),
                config=config.to_dict(),
                id=before.get("wandb"),
                resume="allow",
            )
            files.write_json(file, {"wandb": self._run.id})
            # A resumed run may repeat steps, which W&B's own step counter does not allow.
            self._run.define_metric("*", step_metric="step")
            self._takes = True

    def log(self, step: int, values: dict[str, float]) -> None:
        if self._takes:
            with self._warning("takes no more metrics of this run"):
                self._run.log({"step": step, **values})

    def close(self) -> None:
        if self._run is not None:
            with self._warning("was not closed"):
                self._run.finish()

    @contextlib.contextmanager
    def _warning(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._takes = False
            log.warning("wandb %s: %s", what, error)


class MetricsLog:
    """Writes metrics to metrics.jsonl and to the trackers of a config.  Only rank 0 has one.

    Lines after ``resumed_at``, the global step from which the run goes on, are dropped.
    """

    def __init__(self, folder: RunFolder, config: Config | None = None, resumed_at: int = 0):
        if folder.metrics.is_file():  # results are written again as well
            lines = folder.load_metrics()
            kept = [x for x in lines if x["step"] <= resumed_at and x["kind"] != "test"]
            files.write_text(folder.metrics, "".join(f"{json.dumps(x)}\n" for x in kept))
        self._file = folder.metrics.open("a", encoding="utf-8")
        self._trackers: list[TensorBoard | WandB] = []
        chosen = Trackers(False) if config is None else config.run.trackers
        if chosen.tensorboard:
            self._trackers.append(TensorBoard(folder.path / "tensorboard", resumed_at))
        if chosen.wandb is not None:
            assert config is not None
            self._trackers.append(WandB(chosen.wandb, folder.path, config))

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Append one line {"kind": ..., "step": ..., ...} and flush it."""
        line = {"kind": kind, "step": step, **values}
        self._file.write(json.dumps(files.finite(line)) + "\n")
        self._file.flush()
        prefix = "" if kind == "test" else f"{kind}/"  # the results have names of their own
        scalars = {f"{prefix}{name}": value for name, value in _scalars(values)}
        for tracker in self._trackers:
            tracker.log(step, scalars)

    def close(self) -> None:
        """Close the file and the trackers."""
        with contextlib.suppress(OSError):
            self._file.close()
        for tracker in self._trackers:
            tracker.close()


def _scalars(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _scalars(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield prefix + key, value

"""Trackers of a run's metrics besides metrics.jsonl: TensorBoard, Weights & Biases, MLflow.

Each tracker takes {"kind/metric": value} of a step.  A resumed run continues the same tracker runs,
whose ids are in trackers.json.  A W&B or MLflow tracker that fails, for example without a network,
is not used any more; metrics.jsonl still gets all metrics.
"""

from __future__ import annotations

import json
import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from kge_torchrec import files
from kge_torchrec.config import Config, ConfigError, RunConfig

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """A receiver of a run's metrics."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Record the values of a step.  Steps increase, but a resumed run may repeat some."""

    def close(self) -> None:
        """Finish: the run has ended or stopped."""


def check_trackers(run: RunConfig) -> None:
    """Raise ConfigError if a tracker in ``run`` needs a package that is not installed."""
    for key in ("wandb", "mlflow"):
        if getattr(run.tracker_options, key) is not None and find_spec(key) is None:
            raise ConfigError(
                f"run.trackers.{key} needs the package {key}: pip install 'kge-torchrec[{key}]'"
            )


def trackers_of(folder: Path, config: Config, resumed_at: int | None) -> list[Tracker]:
    """Make the trackers that the config names.

    Args:
        folder: Folder of the run.
        config: The config.
        resumed_at: Step from which the run resumes, or None.
    """
    trackers: list[Tracker] = []
    chosen = config.run.tracker_options
    if chosen.tensorboard:
        trackers.append(TensorBoard(folder / "tensorboard", resumed_at))
    if chosen.wandb is not None:
        trackers.append(_Forgiving("wandb", WandB(chosen.wandb, folder, config)))
    if chosen.mlflow is not None:
        trackers.append(_Forgiving("mlflow", MLflow(chosen.mlflow, folder, config)))
    return trackers


class TensorBoard:
    """A tracker that writes TensorBoard event files; it overwrites steps after ``resumed_at``."""

    def __init__(self, folder: Path, resumed_at: int | None):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resumed_at)

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A Weights & Biases run in a project; WANDB_MODE=offline works as well."""

    def __init__(self, project: str, folder: Path, config: Config):
        import wandb

        ids = _Ids(folder)
        self._run = wandb.init(
            project=project,
            name=folder.name,
            dir=str(folder),
            config=config.to_dict(),
            id=ids.get("wandb"),
            resume="allow",
        )
        ids.set("wandb", self._run.id)
        # A resumed run may repeat steps, which W&B's own step counter does not allow.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """An MLflow run in an experiment, at MLFLOW_TRACKING_URI."""

    def __init__(self, experiment: str, folder: Path, config: Config):
        from mlflow.tracking import MlflowClient

        self._client, ids = MlflowClient(), _Ids(folder)
        run = ids.get("mlflow")
        if run is None:
            known = self._client.get_experiment_by_name(experiment)
            number = known.experiment_id if known else self._client.create_experiment(experiment)
            run = self._client.create_run(number, run_name=folder.name).info.run_id
            for name, value in _flat(config.to_dict()).items():
                self._client.log_param(run, name, str(value)[:500])
            ids.set("mlflow", run)
        else:
            self._client.update_run(run, status="RUNNING")
        self._run = run

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run, name.replace("@", "_at_"), value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run)


class _Forgiving:
    """A wrapper that disables a tracker when it fails, so that training continues."""

    def __init__(self, name: str, tracker: Tracker):
        self._name, self._tracker = name, tracker
        self._failed = False

    def log(self, step: int, values: dict[str, float]) -> None:
        if self._failed:
            return
        try:
            self._tracker.log(step, values)
        except Exception as error:  # the tracker's package may raise any type
            self._failed = True
            log.warning("%s takes no more metrics of this run: %s", self._name, error)

    def close(self) -> None:
        try:
            self._tracker.close()
        except Exception as error:
            log.warning("%s was not closed: %s", self._name, error)


class _Ids:
    """The file trackers.json: the trackers' ids of a run."""

    def __init__(self, folder: Path):
        self._file = folder / "trackers.json"

    def get(self, name: str) -> str | None:
        return self._all().get(name)

    def set(self, name: str, value: str) -> None:
        files.write_json(self._file, self._all() | {name: value})

    def _all(self) -> dict[str, str]:
        if not self._file.is_file():
            return {}
        return json.loads(self._file.read_text(encoding="utf-8"))


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        nested = isinstance(value, dict) and value
        flat |= _flat(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return flat

"""Where a run's metrics go besides metrics.jsonl: TensorBoard, Weights & Biases, MLflow.

Each takes {"kind/metric": value} of a step.  A run that is resumed goes on in the same run of each,
whose ids lie in its folder as trackers.json.  One that fails on the way, such as for lack of a
network, is left alone from then on: metrics.jsonl has everything.
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
    """Takes a run's metrics."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Values of a step; steps rise, but for those that a resumed run takes again."""

    def close(self) -> None:
        """The run ends, or stops for now."""


def check_trackers(run: RunConfig) -> None:
    """Raises ConfigError if a package is missing that a key of ``run`` needs."""
    for key in ("wandb", "mlflow"):
        if getattr(run, key) is not None and find_spec(key) is None:
            raise ConfigError(
                f"run.{key} needs the package {key}: pip install 'kge-torchrec[{key}]'"
            )


def trackers_of(folder: Path, config: Config, resumed_at: int | None) -> list[Tracker]:
    """Those that the config asks for.  resumed_at: the step that a run goes on from."""
    found: list[Tracker] = []
    if config.run.tensorboard:
        found.append(TensorBoard(folder / "tensorboard", resumed_at))
    for key, kind in (("wandb", WandB), ("mlflow", MLflow)):
        if getattr(config.run, key) is not None:
            found.append(_Forgiving(key, kind(folder, config)))
    return found


class TensorBoard:
    """Event files in the folder; steps after ``resumed_at`` are written again."""

    def __init__(self, folder: Path, resumed_at: int | None):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resumed_at)

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run of the project that ``run.wandb`` names; WANDB_MODE=offline works as well."""

    def __init__(self, folder: Path, config: Config):
        import wandb

        ids = _Ids(folder)
        self._run = wandb.init(
            project=config.run.wandb,
            name=folder.name,
            dir=str(folder),
            config=config.to_dict(),
            id=ids.get("wandb"),
            resume="allow",
        )
        ids.set("wandb", self._run.id)
        # A resumed run may take steps again, which W&B's own counter would not let it.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of the experiment that ``run.mlflow`` names, at MLFLOW_TRACKING_URI."""

    def __init__(self, folder: Path, config: Config):
        from mlflow.tracking import MlflowClient

        assert config.run.mlflow is not None
        self._client, ids = MlflowClient(), _Ids(folder)
        run = ids.get("mlflow")
        if run is None:
            experiment = self._client.get_experiment_by_name(config.run.mlflow)
            number = (
                self._client.create_experiment(config.run.mlflow)
                if experiment is None
                else experiment.experiment_id
            )
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
    """A tracker whose failure ends itself and not the training."""

    def __init__(self, name: str, tracker: Tracker):
        self._name, self._tracker = name, tracker
        self._failed = False

    def log(self, step: int, values: dict[str, float]) -> None:
        if self._failed:
            return
        try:
            self._tracker.log(step, values)
        except Exception as error:  # of whatever kind its package raises
            self._failed = True
            log.warning("%s takes no more metrics of this run: %s", self._name, error)

    def close(self) -> None:
        try:
            self._tracker.close()
        except Exception as error:
            log.warning("%s was not closed: %s", self._name, error)


class _Ids:
    """What a tracker calls the run of a folder."""

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

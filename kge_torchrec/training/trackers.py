"""Trackers of a run's metrics besides metrics.jsonl: TensorBoard and Weights & Biases.

Each tracker takes {"kind/metric": value} of a step.  A resumed run continues the same run of W&B,
whose id is in trackers.json.  W&B is not used any more once it fails, for example without a
network, at the start or later; metrics.jsonl still gets all metrics.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kge_torchrec import files
from kge_torchrec.config import Config, ConfigError, RunConfig

log = logging.getLogger(__name__)


def check_trackers(run: RunConfig) -> None:
    """Raise ConfigError if W&B is named in ``run`` and not installed."""
    if run.tracker_options.wandb is not None and find_spec("wandb") is None:
        raise ConfigError(
            "run.trackers.wandb needs the package wandb: pip install 'kge-torchrec[wandb]'"
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
        trackers.append(WandB(chosen.wandb, folder, config))
    return trackers


class TensorBoard:
    """A tracker that writes TensorBoard event files; it overwrites steps after ``resumed_at``."""

    def __init__(self, folder: Path, resumed_at: int | None):
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard drops what it has from this step on; the last step of before stays.
        purged = None if resumed_at is None else resumed_at + 1
        self._writer = SummaryWriter(str(folder), purge_step=purged)

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

    @contextmanager
    def _warning(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._takes = False
            log.warning("wandb %s: %s", what, error)


Tracker = TensorBoard | WandB

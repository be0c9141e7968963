"""Settings of checkpoints and the run folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from kge_torchrec.config.checks import NonNegativeInt, PositiveInt, check_url
from kge_torchrec.config.keys import PER_START, Resume, Section, fixed, key


@dataclass(frozen=True)
class Intervals(Section, prefix="checkpoint.every."):
    """Intervals of checkpoints."""

    epochs: NonNegativeInt = 1
    """Epochs between checkpoints; 0: only the best and the last."""
    steps: NonNegativeInt = 0
    """Steps between checkpoints within an epoch; 0: none."""


@dataclass(frozen=True)
class SavingOptions(Section, prefix="checkpoint.options."):
    """How checkpoints are written."""

    background: bool = True
    """Write a checkpoint of 64 MiB per rank or more while training continues: a thread writes a
    copy of table and optimizer state, if one fits into free main memory. Otherwise training
    waits."""
    copy_to: Annotated[str, check_url] | None = None
    """URL of fsspec (s3://bucket/runs/x, gs://..., file:///mnt/nas/x) that the run is copied to
    while it trains; `run.resume: auto` on another machine resumes it from there; null: none."""


@dataclass(frozen=True)
class CheckpointConfig(Section, prefix="checkpoint."):
    """The checkpoints of a run."""

    every: Intervals = key(Intervals)
    options: SavingOptions = key(SavingOptions)
    keep: PositiveInt = 2
    """Checkpoints kept besides the best one."""


@dataclass(frozen=True)
class Trackers(Section, prefix="run.trackers."):
    """Trackers of a run's metrics."""

    tensorboard: bool = key(False, resume=PER_START)
    """Write TensorBoard events beside metrics.jsonl."""
    wandb: str | None = key(None, resume=PER_START)
    """Project of Weights & Biases that gets the metrics too; null: none."""


@dataclass(frozen=True)
class RunConfig(Section, prefix="run."):
    """The run folder."""

    dir: str | None = key(
        None, resume=fixed("a run stays in its folder; move the folder, or start a new run")
    )
    """Folder for config, metrics, checkpoints and results; null: runs/SCORER-TIME (with a race
    runs/default-TIME)."""
    resume: Literal["never", "auto", "require"] = key(
        "never",
        resume=Resume(
            "no",
            "`train --resume` resumes in any case; leave it out",
            lambda before, after: True,
            per_start=True,
        ),
    )
    """Where run.dir holds a run already: never refuses; auto resumes it if its config is the same;
    require refuses to start a new one."""
    progress: bool = key(True, resume=PER_START)
    """Show progress bars on rank 0; the lines of epochs and validations stay."""
    trackers: Trackers = key(Trackers)

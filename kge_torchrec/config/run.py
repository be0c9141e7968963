"""Settings of checkpoints and the run folder."""

from __future__ import annotations

from dataclasses import dataclass, field

from kge_torchrec.config.checks import check_url, choice, least
from kge_torchrec.config.keys import PER_START, Resume, Section, fixed, key


@dataclass(frozen=True)
class Intervals:
    """Intervals of checkpoints."""

    epochs: int = key(
        1, "Epochs between checkpoints; 0: only the best and the last.", check=least(0)
    )
    steps: int = key(0, "Steps between checkpoints within an epoch; 0: none.", check=least(0))


@dataclass(frozen=True)
class SavingOptions:
    """How checkpoints are written."""

    background: bool = key(
        True,
        "Write a checkpoint of 64 MiB per rank or more while training continues: a thread writes a "
        "copy of table and optimizer state, if one fits into free main memory. Otherwise training "
        "waits.",
    )
    copy_to: str | None = key(
        None,
        "URL of fsspec (s3://bucket/runs/x, gs://..., file:///mnt/nas/x) that the run is copied to "
        "while it trains, from which another machine can resume it; null: none.",
        check=check_url,
    )


@dataclass(frozen=True)
class CheckpointConfig(Section):
    """The checkpoints of a run."""

    prefix = "checkpoint."

    every: Intervals = field(default_factory=Intervals)
    options: SavingOptions = field(default_factory=SavingOptions)
    keep: int = key(2, "Checkpoints kept besides the best one.", check=least(1))


@dataclass(frozen=True)
class Trackers:
    """Trackers of a run's metrics."""

    tensorboard: bool = key(
        False, "Write TensorBoard events beside metrics.jsonl.", resume=PER_START
    )
    wandb: str | None = key(
        None, "Project of Weights & Biases that gets the metrics too; null: none.", resume=PER_START
    )


@dataclass(frozen=True)
class RunConfig(Section):
    """The run folder."""

    prefix = "run."

    dir: str | None = key(
        None,
        "Folder for config, metrics, checkpoints and results; null: runs/SCORER-TIME (with a race "
        "runs/default-TIME).",
        resume=fixed("a run stays in its folder; move the folder, or start a new run"),
    )
    resume: str = key(
        "never",
        "Where run.dir holds a run already: never refuses; auto resumes it if its config is the "
        "same; require refuses to start a new one.",
        check=choice("never", "auto", "require"),
        resume=Resume(
            "no",
            "`train --resume` resumes in any case; leave it out",
            lambda before, after: True,
            per_start=True,
        ),
    )
    progress: bool = key(
        True,
        "Show progress bars on rank 0; the lines of epochs and validations stay.",
        resume=PER_START,
    )
    trackers: Trackers = field(default_factory=Trackers)

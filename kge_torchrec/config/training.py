"""Settings of the loop, of ranking, of checkpoints and of the run folder."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from kge_torchrec.config.checks import (
    Check,
    ConfigError,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Share,
    check_url,
)
from kge_torchrec.config.keys import (
    PER_START,
    Condition,
    Part,
    Resume,
    Section,
    fixed,
    key,
    only_with,
    only_without,
)
from kge_torchrec.config.registry import KINDS, part_name

OPTIMIZER_NAMES = tuple(KINDS["table_optimizer"].ours)
RANK_METRICS = ("mrr", "mr", "hits@1", "hits@3", "hits@10")
_OF_LISTS = re.compile(r"(recall|ndcg|hit_rate|precision|map|coverage)@([1-9]\d*)")


def cutoff_of(metric: str) -> int | None:
    """Return the k of a metric of recommendations, 20 for auc; None for a metric of ranks."""
    match = _OF_LISTS.fullmatch(metric)
    return int(match[2]) if match else 20 if metric == "auc" else None


_METRIC = Check(
    f"{', '.join(RANK_METRICS)}, auc, or recall, ndcg, hit_rate, precision, map or coverage at a "
    "k >= 1, such as recall@20",
    lambda metric: metric in RANK_METRICS or cutoff_of(metric) is not None,
)
_PATIENCE = Check(
    "an integer >= 0, or a share of the training between 0 and 1",
    lambda patience: 0 < patience < 1 or (isinstance(patience, int) and patience >= 0),
)


def _is_extended(config: Any) -> bool:
    """Return whether data.path is a store that `extend` made, as far as it can be read."""
    try:
        meta = json.loads((Path(config.data.path) / "meta.json").read_bytes())
        return "extends" in meta["report"]
    except (OSError, ValueError, LookupError, TypeError):
        return False


_EXTENDED = Condition("a run that `extend` made", _is_extended)
_VALIDATES = only_without("evaluation.every", 0, "evaluation.every above 0")
SELECTION = Resume(
    "without validations so far",
    "validations so far are by it; start a new run with model.init_from RUN",
    lambda before, _: before.evaluation.every != 0,
)
_EMA = only_with("train.averaging", "ema")


@dataclass(frozen=True)
class AveragingOptions(Section, prefix="train.averaging_options."):
    """Options of the average of the weights."""

    decay: Share = key(0.9, acts=_EMA)
    """Share of the average that stays when new weights come in; smaller for the first ones."""
    every_steps: NonNegativeInt = key(0, acts=_EMA)
    """Steps between weights that come in; 0: those at the end of each epoch."""


@dataclass(frozen=True)
class Clip(Section, prefix="train.clip."):
    """Bounds of a step's gradient."""

    norm: PositiveFloat | None = None
    """Largest norm of a step's gradient, table and dense together; null: no bound."""
    value: PositiveFloat | None = None
    """Largest absolute element of a step's gradient; null: no bound."""


@dataclass(frozen=True)
class Extension(Section, prefix="train.extension."):
    """Options of how an extended run treats what it extends."""

    freeze: Literal["none", "old"] = key("none", acts=_EXTENDED)
    """old trains only rows of new entities and relations; none trains all."""


@dataclass(frozen=True)
class TrainConfig(Section, prefix="train."):
    """The loop and its optimizers."""

    epochs: NonNegativeInt = key(None)
    """Passes over what negatives.regime trains on; null: from 100 of few triples to 10 of many."""
    batch_size: PositiveInt = key(None, resume=fixed())
    """Triples per step over all ranks; queries with kvsall, allvsall and kvssample. null: 128 to
    1024, by number of triples, more on GPUs."""
    optimizer: Annotated[str, part_name("table_optimizer")] = key("adagrad", resume=fixed())
    """Optimizer of entities: adam, rowwise_adam, adagrad, rowwise_adagrad, sgd or
    package.module:Class; relations take the form without row-wise state."""
    lr: PositiveFloat = key(None)
    """Learning rate; null: what suits the optimizer (0.1, adam 0.003, sgd 0.5)."""
    relation_lr: PositiveFloat | None = None
    """Learning rate of relations; null: train.lr."""
    optimizer_options: dict[str, Any] = key(dict, part=Part("table_optimizer", "optimizer"))
    """Options of the optimizer, such as {beta1: 0.8} of adam; `kge-torchrec list table_optimizer`
    lists them."""
    schedule: Annotated[str, part_name("schedule")] = "constant"
    """Schedule of the learning rate: constant, linear (to 0), cosine (to 0), exponential, plateau,
    or package.module:Class."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly from 0."""
    schedule_options: dict[str, Any] = key(dict, part=Part("schedule", "schedule"))
    """Options of the schedule: decay (exponential, plateau), patience and threshold (plateau);
    `kge-torchrec list schedule` lists them."""
    averaging: Literal["none", "ema"] = key("none", resume=fixed())
    """Average of the weights that is validated, ranked and exported: none or ema (exponential
    moving average)."""
    averaging_options: AveragingOptions = key(AveragingOptions)
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """Precision of scorer and gradients: fp32, tf32 (fp32, and CUDA rounds the factors of products
    to 10 bits), bf16, or fp16 with dynamic loss scaling; losses, parameters and optimizer state are
    fp32. auto: bf16 where products score all entities on a CPU with AVX512-BF16 or AMX, otherwise
    fp32."""
    accumulation: PositiveInt = 1
    """Micro-batches per step, for less memory; the result is that of one batch."""
    clip: Clip = key(Clip)
    pipeline: Literal["auto", "sparse_dist", "loop", "graph"] = "auto"
    """sparse_dist (TorchRec's pipeline), loop (the same steps one after another), or graph (loop
    with a CUDA graph on one GPU). auto: graph where it can, sparse_dist for engine torchrec on
    several GPUs or several hosts."""
    batches: Literal["auto", "cpu", "device"] = key(
        "auto", acts=only_with("negatives.regime", "sampled")
    )
    """Where batches are made: cpu; device (it holds all triples, the ids are the same); auto:
    device on CUDA if triples take at most an eighth of its memory and half of what is free."""
    log_every: PositiveInt = 100
    """Steps between lines of metrics.jsonl and checks for a non-finite loss."""
    extension: Extension = key(Extension)

    @property
    def computes_in_16_bits(self) -> bool:
        """Whether scores and gradients have 16 bits."""
        return self.precision in ("bf16", "fp16")

    @property
    def clips(self) -> bool:
        """Whether a step's gradient has a bound."""
        return self.clip != Clip()

    @property
    def averages(self) -> int:
        """Number of copies of the weights that averaging keeps."""
        return int(self.averaging == "ema")

    @property
    def steps_on_sums(self) -> bool:
        """Whether a step needs the sum of several gradients, or the clipped gradients."""
        return self.accumulation > 1 or self.clips


@dataclass(frozen=True)
class EvaluationConfig(Section, prefix="evaluation."):
    """Filtered ranking, during training and at its end."""

    every: NonNegativeInt = key(None)
    """Epochs between validations; 0: never, null: about ten times."""
    metric: Annotated[str, _METRIC] = key("mrr", acts=_VALIDATES, resume=SELECTION)
    """Metric of early stopping and of the best checkpoint: mrr, mr, hits@1, hits@3 or hits@10 (both
    sides, realistic). Or one of recommended tails: auc, or recall, ndcg, hit_rate, precision, map
    or coverage at a k, such as recall@20."""
    patience: Annotated[int | float, _PATIENCE] = key(None, acts=_VALIDATES)
    """Validations without a better one before training stops, or, between 0 and 1, the last share
    of the training so far that gained less than 0.2 percent; 0: never stops early, null: 3."""
    max_triples: NonNegativeInt = key(None, acts=_VALIDATES, resume=SELECTION)
    """Validation triples ranked while training, a fixed random sample, of whole users with a metric
    of recommendations; 0: all, null: as many as take about a minute."""
    batch_size: PositiveInt = 512
    """Queries scored at once."""
    candidates: Literal["all", "seen", "types", "fixed"] = key(None, resume=SELECTION)
    """Entities to rank among: all; seen (with the relation and side in train); types (seen, or
    sharing a type with these); fixed (a list per triple, as OGB has them); null: types where every
    entity has one type, otherwise all. Results name the choice."""
    candidate_file: str | None = key(None, acts=only_with("evaluation.candidates", "fixed"))
    """NumPy file (.npz) with head_neg and tail_neg, the fixed candidates of each triple."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.candidates == "fixed" and self.candidate_file is None:
            raise ConfigError(
                "evaluation.candidates fixed needs evaluation.candidate_file (evaluate "
                "--candidate-file), the candidates of each triple"
            )
        if cutoff_of(self.metric) is not None:
            self.check_recommends()

    def check_recommends(self) -> None:
        """Raise ConfigError if ``candidates`` are lists of single triples, not of users."""
        if self.candidates == "fixed":
            raise ConfigError(
                "evaluation.candidates fixed: these are candidates of single triples, "
                "and recommendations are lists of users; use all, seen or types, or a metric of "
                "ranks such as mrr"
            )


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

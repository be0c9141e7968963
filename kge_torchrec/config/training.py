"""Settings of the loop, of ranking, checkpoints and the run folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from kge_torchrec.config.checks import (
    PICKED,
    ConfigError,
    PickedFloat,
    PickedInt,
    at_least,
    check,
    not_negative,
    one_of,
    positive,
)
from kge_torchrec.config.options import parse_options
from kge_torchrec.config.registry import KINDS, check_name, resolve

OPTIMIZER_NAMES = tuple(KINDS["table_optimizer"].ours)
PRECISIONS = ("fp32", "bf16", "fp16")
CANDIDATES = ("all", "seen", "types")


@dataclass(frozen=True)
class TrainConfig:
    """The loop and its optimizers.

    Args:
        epochs: Passes over the training triples, or over what negatives.regime makes of them; null
            takes 100 of few triples to 10 of many.
        batch_size: Triples a step, over all ranks; distinct queries with kvsall, allvsall and
            kvssample.  null takes 128 of few triples to 1024 of many; where sampled candidates are
            trained on GPUs 8192 a rank, but no more than leave an epoch 100 steps.
        optimizer: adam, rowwise_adam, adagrad, rowwise_adagrad or sgd, for entities; relations
            take the form without row-wise state.  Or package.module:Class.
        lr: Learning rate; null takes what suits the optimizer (0.1, of adam 0.003).
        relation_lr: Learning rate of relations; null takes lr.
        beta1: Of adam and rowwise_adam.
        beta2: Of adam and rowwise_adam.
        eps: Added outside the root, in every optimizer.
        weight_decay: Decoupled for adam and rowwise_adam, L2 for rowwise_adagrad; touched rows
            only.
        schedule: constant, linear (to 0), cosine (to 0), exponential or plateau.
        warmup_steps: Steps over which the learning rate rises linearly from 0.
        decay: Factor an epoch (exponential) or at a plateau.
        plateau_patience: Validations without progress before a plateau decays.
        plateau_threshold: Share of the best value that a validation has to add to be progress
            (torch's ReduceLROnPlateau, as LibKGE has it).
        precision: Of scorer and gradients: fp32, bf16, or fp16 with dynamic loss scaling.  Losses,
            parameters and optimizer state are fp32; with all entities as candidates both are those
            of their scores.
        tf32: Let CUDA round the factors of fp32 products to 10 bits of mantissa.
        accumulation: Micro-batches that a step is cut into, for less memory; the result is that of
            one batch.
        clip_norm: Largest norm of a step's gradient, table and dense together; null does not clip.
        clip_value: Largest absolute number in a step's gradient; null does not clip.
        pipeline: sparse_dist (TorchRec's pipeline), loop (the same steps one after another), or
            auto: sparse_dist where the engine is torchrec and there are several GPUs or several
            hosts.
        log_every: Steps between metrics.jsonl lines and checks for a non-finite loss.
        optimizer_options: Settings of an optimizer that is not one of those named.
        freeze: Of an extended run: old keeps everything that the run before it had bit for bit, so
            that rows of new entities and relations alone are trained; none trains all.
        replay: Of an extended run: share of the old triples in an epoch, drawn anew every epoch,
            beside all new ones; of negatives.regime sampled and 1vsall.
    """

    epochs: PickedInt = PICKED
    batch_size: PickedInt = PICKED
    optimizer: str = "adagrad"
    lr: PickedFloat = PICKED
    relation_lr: Optional[float] = None  # noqa: UP045
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    schedule: str = "constant"
    warmup_steps: int = 0
    decay: float = 0.95
    plateau_patience: int = 3
    plateau_threshold: float = 1e-4
    precision: str = "fp32"
    tf32: bool = False
    accumulation: int = 1
    clip_norm: Optional[float] = None  # noqa: UP045
    clip_value: Optional[float] = None  # noqa: UP045
    pipeline: str = "auto"
    log_every: int = 100
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    freeze: str = "none"
    replay: float = 1.0

    def __post_init__(self) -> None:
        at_least("train.epochs", self.epochs, 0)
        at_least("train.batch_size", self.batch_size, 1)
        check_name("table_optimizer", self.optimizer)
        positive("train.lr", self.lr)
        if self.relation_lr is not None:
            positive("train.relation_lr", self.relation_lr)
        for key in ("beta1", "beta2"):
            value = getattr(self, key)
            check(0 <= value < 1, f"train.{key}", "in [0, 1)", value)
            small = value < 1 - 2**-25  # what is not rounds to 1 in float32, where steps are taken
            check(small, f"train.{key}", "at most 0.99999994, the float32 before 1", value)
        positive("train.eps", self.eps)
        not_negative("train.weight_decay", self.weight_decay)
        if self.optimizer not in OPTIMIZER_NAMES:
            self._check_foreign()
        elif self.weight_decay and resolve("table_optimizer", self.optimizer).weight_decay is None:
            raise ConfigError(
                f"train.weight_decay: FBGEMM's {self.optimizer} has none; use loss.l2, or one of "
                "adam, rowwise_adam, rowwise_adagrad"
            )
        schedules = ("constant", "linear", "cosine", "exponential", "plateau")
        one_of("train.schedule", self.schedule, schedules)
        at_least("train.warmup_steps", self.warmup_steps, 0)
        check(0 < self.decay <= 1, "train.decay", "in (0, 1]", self.decay)
        at_least("train.plateau_patience", self.plateau_patience, 0)
        not_negative("train.plateau_threshold", self.plateau_threshold)
        one_of("train.precision", self.precision, PRECISIONS)
        at_least("train.accumulation", self.accumulation, 1)
        for key in ("clip_norm", "clip_value"):
            if getattr(self, key) is not None:
                positive(f"train.{key}", getattr(self, key))
        one_of("train.pipeline", self.pipeline, ("auto", "sparse_dist", "loop"))
        at_least("train.log_every", self.log_every, 1)
        one_of("train.freeze", self.freeze, ("none", "old"))
        check(0 <= self.replay <= 1, "train.replay", "in [0, 1]", self.replay)
        if self.optimizer_options:
            self.row_optimizer_options()

    def _check_foreign(self) -> None:
        """An optimizer that is not ours takes its own step, with settings of its own."""
        if self.weight_decay:
            raise ConfigError(
                f"train.weight_decay is of our optimizers; {self.optimizer} takes its settings "
                "from train.optimizer_options"
            )
        self.row_optimizer_options()

    def row_optimizer_options(self) -> Any:
        """The ``Options`` of the optimizer: none of ours has any."""
        owner = resolve("table_optimizer", self.optimizer)
        return parse_options(owner, self.optimizer_options, "train.optimizer_options")

    @property
    def steps_on_sums(self) -> bool:
        """Whether a step has to wait for the sum of several gradients, or for what it is cut to."""
        return self.accumulation > 1 or self.clip_norm is not None or self.clip_value is not None

    @property
    def needs_whole_gradient(self) -> bool:
        """Whether no row can step before the gradients of all are known, on all ranks."""
        return self.steps_on_sums or self.precision == "fp16"


@dataclass(frozen=True)
class EvaluationConfig:
    """Exact filtered ranking, during training and at its end.

    Args:
        every: Epochs between validations; 0 validates never, null about ten times.
        metric: Early stopping and the best checkpoint follow this (both sides, realistic).
        patience: Validations without progress before training stops; 0 never stops early, null
            takes 3.
        max_triples: Rank at most this many validation triples while training (a fixed random
            sample, labelled so); 0 ranks them all, null as many as take about a minute.
        batch_size: Queries scored at once.
        candidates: all entities; seen, those that the relation has been seen with on that side in
            train; or types, these and all that share a type with one of them.  The last two give
            ranks that compare with nobody else's, and are labelled so.
        types: Of candidates types: a file of lines entity, tab, type; null takes those that the
            store has by data.types_from.
    """

    every: PickedInt = PICKED
    metric: str = "mrr"
    patience: PickedInt = PICKED
    max_triples: PickedInt = PICKED
    batch_size: int = 512
    candidates: str = "all"
    types: Optional[str] = None  # noqa: UP045

    def __post_init__(self) -> None:
        at_least("evaluation.every", self.every, 0)
        one_of("evaluation.metric", self.metric, ("mrr", "mr", "hits@1", "hits@3", "hits@10"))
        at_least("evaluation.patience", self.patience, 0)
        at_least("evaluation.max_triples", self.max_triples, 0)
        at_least("evaluation.batch_size", self.batch_size, 1)
        one_of("evaluation.candidates", self.candidates, CANDIDATES)
        if self.candidates != "types" and self.types is not None:
            raise ConfigError(
                f"evaluation.types is not read with evaluation.candidates {self.candidates}; set "
                "that to types, or leave the file out"
            )


@dataclass(frozen=True)
class CheckpointConfig:
    """What a run keeps.

    Args:
        every_epochs: Epochs between checkpoints; 0 writes only the best and the last.
        every_steps: Steps between checkpoints within an epoch; 0 writes none.
        keep: Checkpoints kept besides the best one; 0 writes none at all, neither the best nor the
            last: test is ranked with the parameters as they are at the end, and then they are gone.
    """

    every_epochs: int = 1
    every_steps: int = 0
    keep: int = 2

    def __post_init__(self) -> None:
        at_least("checkpoint.every_epochs", self.every_epochs, 0)
        at_least("checkpoint.every_steps", self.every_steps, 0)
        at_least("checkpoint.keep", self.keep, 0)


@dataclass(frozen=True)
class RunConfig:
    """The run folder.

    Args:
        dir: Folder for config, metrics, checkpoints and results; null makes runs/NAME-TIME.
        resume: Where run.dir holds a run already: never goes on with it, auto goes on if it was
            started with the same config, require wants one to go on with.
        progress: Progress bars on rank 0.
        tensorboard: Write TensorBoard events.
        wandb: Project of Weights & Biases that gets the metrics as well; null for none.
        mlflow: Experiment of MLflow that gets the metrics as well; null for none.
        plan: A plan that `kge-torchrec plan --output` wrote, to lay the table out by; null plans at
            the start.
    """

    dir: Optional[str] = None  # noqa: UP045
    resume: str = "never"
    progress: bool = True
    tensorboard: bool = True
    wandb: Optional[str] = None  # noqa: UP045
    mlflow: Optional[str] = None  # noqa: UP045
    plan: Optional[str] = None  # noqa: UP045

    def __post_init__(self) -> None:
        one_of("run.resume", self.resume, ("never", "auto", "require"))
        if self.resume != "never" and self.dir is None:
            raise ConfigError(f"run.resume {self.resume} needs run.dir, the folder to look in")

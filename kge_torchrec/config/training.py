"""Settings of the loop, of ranking, checkpoints and the run folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

from kge_torchrec.config.checks import (
    PICKED,
    ConfigError,
    PickedFloat,
    PickedInt,
    between,
    check,
    choice,
    least,
    not_negative,
    positive,
)
from kge_torchrec.config.keys import (
    PER_START,
    Condition,
    Resume,
    check_values,
    documented,
    fixed,
    key,
    only_with,
    only_without,
)
from kge_torchrec.config.options import parse_options
from kge_torchrec.config.registry import KINDS, check_name, resolve

OPTIMIZER_NAMES = tuple(KINDS["table_optimizer"].ours)
PRECISIONS = ("fp32", "bf16", "fp16")
CANDIDATES = ("all", "seen", "types")


SCHEDULES = ("constant", "linear", "cosine", "exponential", "plateau")
_ADAM = only_with("train.optimizer", "adam", "rowwise_adam")
_PLATEAU = only_with("train.schedule", "plateau")
_VALIDATES = only_without("evaluation.every", 0, "evaluation.every above 0")
_EXTENDED = Condition("a run that `extend` made", lambda _, facts: facts.extended)


def _decay_rate(key: str, value: float) -> None:
    check(0 <= value < 1, key, "in [0, 1)", value)
    small = value < 1 - 2**-25  # what is not rounds to 1 in float32, where steps are taken
    check(small, key, "at most 0.99999994, the float32 before 1", value)


@documented
@dataclass(frozen=True)
class TrainConfig:
    """The loop and its optimizers."""

    epochs: PickedInt = key(
        PICKED,
        "Passes over what negatives.regime trains on; null: from 100 of few triples to 10 of many.",
        check=least(0),
    )
    batch_size: PickedInt = key(
        PICKED,
        "Triples per step over all ranks, or distinct queries with kvsall, allvsall and kvssample; "
        "null: 128 of few triples to 1024 of many, more on GPUs.",
        check=least(1),
        resume=fixed(),
    )
    optimizer: str = key(
        "adagrad",
        "Optimizer of entities: adam, rowwise_adam, adagrad, rowwise_adagrad, sgd or "
        "package.module:Class; relations take the form without row-wise state.",
        resume=fixed(),
    )
    lr: PickedFloat = key(
        PICKED,
        "Learning rate; null: what suits the optimizer (0.1, adam 0.003, sgd 0.5).",
        check=positive,
    )
    relation_lr: Optional[float] = key(  # noqa: UP045
        None, "Learning rate of relations; null: train.lr.", check=positive
    )
    beta1: float = key(
        0.9,
        "Decay rate of the first moment in adam and rowwise_adam.",
        check=_decay_rate,
        acts=_ADAM,
    )
    beta2: float = key(
        0.999,
        "Decay rate of the second moment in adam and rowwise_adam.",
        check=_decay_rate,
        acts=_ADAM,
    )
    eps: float = key(
        1e-8,
        "Epsilon of the optimizer, added outside the root.",
        check=positive,
        acts=only_without(
            "train.optimizer", "sgd", "train.optimizer adam, rowwise_adam, adagrad or "
            "rowwise_adagrad"
        ),
    )  # fmt: skip
    weight_decay: float = key(
        0.0,
        "Weight decay of touched rows, decoupled for adam and rowwise_adam, L2 for "
        "rowwise_adagrad.",
        check=not_negative,
    )
    schedule: str = key(
        "constant",
        "Schedule of the learning rate: constant, linear (to 0), cosine (to 0), exponential or "
        "plateau.",
        check=choice(*SCHEDULES),
    )
    warmup_steps: int = key(
        0, "Steps over which the learning rate rises linearly from 0.", check=least(0)
    )
    decay: float = key(
        0.95,
        "Factor of the learning rate per epoch (exponential) or at a plateau.",
        check=between("in (0, 1]", lambda factor: 0 < factor <= 1),
        acts=only_with("train.schedule", "exponential", "plateau"),
    )
    plateau_patience: int = key(
        3,
        "Validations without progress before a plateau decays.",
        check=least(0),
        acts=(_PLATEAU, _VALIDATES),
    )
    plateau_threshold: float = key(
        1e-4,
        "Relative gain over the best value that counts as progress (torch's ReduceLROnPlateau).",
        check=not_negative,
        acts=(_PLATEAU, _VALIDATES),
    )
    precision: str = key(
        "fp32",
        "Precision of scorer and gradients: fp32, bf16, or fp16 with dynamic loss scaling; losses, "
        "parameters and optimizer state are fp32.",
        check=choice(*PRECISIONS),
    )
    tf32: bool = key(
        False,
        "Let CUDA round the factors of fp32 products to 10 bits of mantissa.",
        acts=Condition("CUDA (device cuda)", lambda _, facts: facts.on_cuda),
    )
    accumulation: int = key(
        1,
        "Micro-batches per step, for less memory; the result is that of one batch.",
        check=least(1),
    )
    clip_norm: Optional[float] = key(  # noqa: UP045
        None,
        "Largest norm of a step's gradient, table and dense together; null: no clipping.",
        check=positive,
    )
    clip_value: Optional[float] = key(  # noqa: UP045
        None, "Largest absolute element of a step's gradient; null: no clipping.", check=positive
    )
    pipeline: str = key(
        "auto",
        "sparse_dist (TorchRec's pipeline), loop (the same steps one after another), or auto: "
        "sparse_dist for engine torchrec on several GPUs or several hosts.",
        check=choice("auto", "sparse_dist", "loop"),
    )
    log_every: int = key(
        100,
        "Steps between lines of metrics.jsonl and checks for a non-finite loss.",
        check=least(1),
    )
    optimizer_options: dict[str, Any] = key(
        dict, "Options of an optimizer that is package.module:Class."
    )
    freeze: str = key(
        "none",
        "old trains only rows of new entities and relations of an extended run; none trains all.",
        check=choice("none", "old"),
        acts=_EXTENDED,
    )
    replay: float = key(
        1.0,
        "Share of the old triples in an epoch of an extended run, drawn anew every epoch, besides "
        "all new ones.",
        check=between("in [0, 1]", lambda share: 0 <= share <= 1),
        acts=_EXTENDED,
    )

    def __post_init__(self) -> None:
        check_values(self, "train.")
        check_name("table_optimizer", self.optimizer)
        if self.optimizer not in OPTIMIZER_NAMES:
            self._check_foreign()
        elif self.weight_decay and resolve("table_optimizer", self.optimizer).weight_decay is None:
            raise ConfigError(
                f"train.weight_decay: FBGEMM's {self.optimizer} has none; use loss.l2, or one of "
                "adam, rowwise_adam, rowwise_adagrad"
            )
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


@documented
@dataclass(frozen=True)
class EvaluationConfig:
    """Exact filtered ranking, during training and at its end."""

    every: PickedInt = key(
        PICKED, "Epochs between validations; 0: never, null: about ten times.", check=least(0)
    )
    metric: str = key(
        "mrr",
        "Metric of early stopping and of the best checkpoint (both sides, realistic): mrr, mr, "
        "hits@1, hits@3 or hits@10.",
        check=choice("mrr", "mr", "hits@1", "hits@3", "hits@10"),
        acts=_VALIDATES,
    )
    patience: PickedInt = key(
        PICKED,
        "Validations without progress before training stops; 0: never stops early, null: 3.",
        check=least(0),
        acts=_VALIDATES,
        silent=(0,),
    )
    max_triples: PickedInt = key(
        PICKED,
        "Validation triples ranked while training, a fixed random sample; 0: all, null: as many "
        "as take about a minute.",
        check=least(0),
        acts=_VALIDATES,
        silent=(0,),
    )
    batch_size: int = key(512, "Queries scored at once.", check=least(1))
    candidates: str = key(
        "all",
        "Entities to rank among: all; seen (with the relation and side in train); or types (seen, "
        "or sharing a type with these). Ranks among fewer are labeled so.",
        check=choice(*CANDIDATES),
    )
    types: Optional[str] = key(  # noqa: UP045
        None,
        "File of lines entity, tab, type; null: the types that the store has by data.types_from.",
        acts=only_with("evaluation.candidates", "types"),
    )

    def __post_init__(self) -> None:
        check_values(self, "evaluation.")


_KEEPS = only_without("checkpoint.keep", 0, "checkpoint.keep above 0")


@documented
@dataclass(frozen=True)
class CheckpointConfig:
    """The checkpoints of a run."""

    every_epochs: int = key(
        1,
        "Epochs between checkpoints; 0: only the best and the last.",
        check=least(0),
        acts=_KEEPS,
        silent=(0,),
    )
    every_steps: int = key(
        0, "Steps between checkpoints within an epoch; 0: none.", check=least(0), acts=_KEEPS
    )
    keep: int = key(
        2,
        "Checkpoints kept besides the best one; 0 writes none at all: test is ranked at the end, "
        "and then the parameters are gone.",
        check=least(0),
    )

    def __post_init__(self) -> None:
        check_values(self, "checkpoint.")


@documented
@dataclass(frozen=True)
class RunConfig:
    """The run folder."""

    dir: Optional[str] = key(  # noqa: UP045
        None,
        "Folder for config, metrics, checkpoints and results; null: runs/SCORER-TIME.",
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
    progress: bool = key(True, "Show progress bars on rank 0.", resume=PER_START)
    tensorboard: bool = key(True, "Write TensorBoard events.", resume=PER_START)
    wandb: Optional[str] = key(  # noqa: UP045
        None,
        "Project of Weights & Biases that gets the metrics too; null: none.",
        resume=PER_START,
    )
    mlflow: Optional[str] = key(  # noqa: UP045
        None, "Experiment of MLflow that gets the metrics too; null: none.", resume=PER_START
    )
    plan: Optional[str] = key(  # noqa: UP045
        None,
        "Plan of `kge-torchrec plan --output` that lays the table out; null: planned at the start.",
    )

    def __post_init__(self) -> None:
        check_values(self, "run.")
        if self.resume != "never" and self.dir is None:
            raise ConfigError(f"run.resume {self.resume} needs run.dir, the folder to look in")

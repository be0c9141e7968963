"""Every setting of a run: one frozen dataclass a concern, read from YAML with dotted overrides.

The defaults are sensible for any data; ``configs/default.yaml`` lists them all.  Errors name the
key and say what would be right.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Optional

import yaml

from kge_torchrec.entities.handrolled.options import FBGEMM, SparseOptions, choose
from kge_torchrec.models.scorer_options import (
    DECLARATIONS,
    ScorerOptions,
    check_scorer,
    chosen_options,
)


class ConfigError(ValueError):
    """A setting is unknown or out of range; the message names its key."""


def _check(ok: bool, key: str, expected: str, value: Any) -> None:
    if not ok:
        raise ConfigError(f"{key} must be {expected}, got {value!r}")


def _positive(key: str, value: float) -> None:
    _check(math.isfinite(value) and value > 0, key, "a number > 0", value)


def _not_negative(key: str, value: float) -> None:
    _check(math.isfinite(value) and value >= 0, key, "a number >= 0", value)


def _at_least(key: str, value: int, least: int) -> None:
    _check(value >= least, key, f"an integer >= {least}", value)


def _one_of(key: str, value: str, choices: Sequence[str]) -> None:
    if value in choices:
        return
    close = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.7)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"{key} must be one of {', '.join(choices)}, got {value!r}{hint}")


@dataclass(frozen=True)
class DataConfig:
    """Where the triples come from.

    Args:
        path: "countries" (the graph inside the package), a prepared store, a directory with
            train/valid/test files, or a single file of triples.
        ratio: Shares of train, valid and test when there is only one file.
        has_header: Whether the files start with a header; null finds out.
        allow_unseen_relations: Accept relations that occur in valid or test only.
    """

    path: str = "countries"
    ratio: tuple[float, float, float] = (0.9, 0.05, 0.05)
    has_header: Optional[bool] = None  # noqa: UP045 - jsonargparse on Python 3.10
    allow_unseen_relations: bool = False

    def __post_init__(self) -> None:
        for share in self.ratio:
            _not_negative("data.ratio", share)
        _check(abs(sum(self.ratio) - 1) < 1e-6, "data.ratio", "shares that sum to 1", self.ratio)


SCORER_NAMES = tuple(DECLARATIONS)
INIT_NAMES = ("normal", "uniform", "xavier_normal", "xavier_uniform")


@dataclass(frozen=True)
class ModelConfig:
    """The scorer and its parameters.

    Args:
        scorer: transe_l1, transe_l2, transh, distmult, complex, rotate, simple, rescal, tucker,
            qmult, quate, omult, duale, keci, ckeci, decal, mure, pairre, house, pyke, conve,
            conex, aconex, convq, convo, coke, shallom or lfmult.
        dim: Real numbers an entity, whatever the scorer makes of them (complex: dim / 2 complex
            numbers).
        reciprocal: Give every relation a twin for head queries (Lacroix et al. 2018).
        init: Distribution of the start: normal, uniform, xavier_normal or xavier_uniform.
        init_scale: Standard deviation (normal) or half width (uniform) of the start.
        normalization: none; unit (entities have Euclidean length 1); or layer (a LayerNorm of
            entities, another of relations).
        input_dropout: Share of the numbers of a query's entity and relation that are dropped.
        hidden_dropout: Share of the numbers of a folded query that are dropped; of networks, of
            their hidden layers too.
        options: Settings of single scorers.
    """

    scorer: str = "complex"
    dim: int = 128
    reciprocal: bool = True
    init: str = "normal"
    init_scale: float = 1e-3
    normalization: str = "none"
    input_dropout: float = 0.0
    hidden_dropout: float = 0.0
    options: ScorerOptions = field(default_factory=ScorerOptions)

    def __post_init__(self) -> None:
        name = self.scorer.lower().replace("-", "_")
        object.__setattr__(self, "scorer", "transe_l1" if name == "transe" else name)
        _one_of("model.scorer", self.scorer, SCORER_NAMES)
        _at_least("model.dim", self.dim, 1)
        _one_of("model.init", self.init, INIT_NAMES)
        _positive("model.init_scale", self.init_scale)
        _one_of("model.normalization", self.normalization, ("none", "unit", "layer"))
        for key in ("input_dropout", "hidden_dropout"):
            value = getattr(self, key)
            _check(0 <= value < 1, f"model.{key}", "in [0, 1)", value)
        if self.hidden_dropout and DECLARATIONS[self.scorer].is_distance:
            raise ConfigError(
                f"model.hidden_dropout has no meaning for {self.scorer}, whose query is a point"
            )
        try:
            check_scorer(self.scorer, self.dim, self.reciprocal, self.scorer_options())
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def scorer_options(self) -> dict[str, Any]:
        """The scorer's own options, with its defaults for those that are null."""
        return chosen_options(self.scorer, self.options)


@dataclass(frozen=True)
class LossConfig:
    """The loss of a query and the penalties on touched rows.

    Args:
        name: softmax (cross-entropy over the candidates), bce (logistic), margin or
            self_adversarial.
        margin: Of margin and self_adversarial.
        temperature: Of self_adversarial.
        label_smoothing: Of softmax and bce, in [0, 1).
        n3: Weight of the nuclear 3-norm penalty.
        l2: Weight of the squared-norm penalty.
    """

    name: str = "softmax"
    margin: float = 9.0
    temperature: float = 1.0
    label_smoothing: float = 0.0
    n3: float = 0.0
    l2: float = 0.0

    def __post_init__(self) -> None:
        _one_of("loss.name", self.name, ("softmax", "bce", "margin", "self_adversarial"))
        for key in ("margin", "temperature", "n3", "l2"):
            _not_negative(f"loss.{key}", getattr(self, key))
        smooth = self.label_smoothing
        _check(0 <= smooth < 1, "loss.label_smoothing", "in [0, 1)", smooth)
        if smooth and self.name not in ("softmax", "bce"):
            raise ConfigError(f"loss.label_smoothing has no meaning for loss.name {self.name!r}")


@dataclass(frozen=True)
class NegativesConfig:
    """Which entities a positive is compared with.

    Args:
        count: Negatives a chunk and side.
        chunk_size: Triples that share their negatives: 1 gives each triple its own, 0 shares
            them over the whole batch (one matrix product scores them).
        sides: both, tail or head: which ends are corrupted.
        sampling: uniform, or degree (in proportion to degree ** degree_power).
        degree_power: Exponent of degree sampling.
        filtered: Never use a known training fact as a negative.
    """

    count: int = 512
    chunk_size: int = 0
    sides: str = "both"
    sampling: str = "uniform"
    degree_power: float = 0.75
    filtered: bool = False

    def __post_init__(self) -> None:
        _at_least("negatives.count", self.count, 1)
        _at_least("negatives.chunk_size", self.chunk_size, 0)
        _one_of("negatives.sides", self.sides, ("both", "tail", "head"))
        _one_of("negatives.sampling", self.sampling, ("uniform", "degree"))
        _not_negative("negatives.degree_power", self.degree_power)


ENGINE_NAMES = ("torchrec", "handrolled")


@dataclass(frozen=True)
class EntitiesConfig:
    """The engine that holds the entity table.

    Args:
        engine: torchrec, or handrolled (own all_to_all exchange and sparse optimizer, to compare
            with).
        deduplicate: Look every entity of a batch up once; false sends duplicates as well.
        preset: Of handrolled: fbgemm, dicee or dgl, what the keys below are when null.
        duplicates: sum or mean of the gradients of one row.
        bias_correction: Steps that adam counts: table, row or shard.
        epsilon: outside or inside the root, or uncorrected (adam).
        state_dtype: fp32 or bf16 optimizer state.
        state_rounding: Of bf16: stochastic or nearest.
        state_device: same (as the table) or cpu.
        async_step: Step in a thread while the next batch is loaded.
    """

    engine: str = "torchrec"
    deduplicate: bool = True
    preset: str = "fbgemm"
    duplicates: Optional[str] = None  # noqa: UP045
    bias_correction: Optional[str] = None  # noqa: UP045
    epsilon: Optional[str] = None  # noqa: UP045
    state_dtype: Optional[str] = None  # noqa: UP045
    state_rounding: Optional[str] = None  # noqa: UP045
    state_device: Optional[str] = None  # noqa: UP045
    async_step: Optional[bool] = None  # noqa: UP045

    def __post_init__(self) -> None:
        _one_of("entities.engine", self.engine, ENGINE_NAMES)

    def sparse_options(self, optimizer: str) -> SparseOptions:
        """The preset with the keys that are set.

        Raises ConfigError, naming the key, when they contradict each other, the optimizer or the
        engine.
        """
        keys = {name: getattr(self, name) for name in asdict(FBGEMM)}
        try:
            options = choose(self.preset, optimizer, **keys)
        except ValueError as error:
            raise ConfigError(f"entities.{error}") from None
        if self.engine == "torchrec" and options != FBGEMM:
            _refuse_for_fbgemm(self.preset, options)
        return options


def _refuse_for_fbgemm(preset: str, options: SparseOptions) -> None:
    if preset != "fbgemm":
        raise ConfigError(
            f"entities.preset {preset!r} is of the hand-rolled engine; "
            "set entities.engine handrolled"
        )
    ours, theirs = asdict(options), asdict(FBGEMM)
    key = next(name for name in ours if ours[name] != theirs[name])
    raise ConfigError(
        f"entities.{key} {ours[key]!r}: FBGEMM's kernel, which the torchrec engine runs, has "
        f"{theirs[key]!r} only; set entities.engine handrolled"
    )


OPTIMIZER_NAMES = ("adam", "rowwise_adam", "adagrad", "rowwise_adagrad", "sgd")


@dataclass(frozen=True)
class TrainConfig:
    """The loop and its optimizers.

    Args:
        epochs: Passes over the training triples.
        batch_size: Triples a step, over all ranks.
        optimizer: adam, rowwise_adam, adagrad, rowwise_adagrad or sgd, for entities; relations
            take the form without row-wise state.
        lr: Learning rate.
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
        pipeline: sparse_dist (TorchRec's pipeline), loop (the same steps one after another), or
            auto: sparse_dist where the engine is torchrec.
        log_every: Steps between metrics.jsonl lines and checks for a non-finite loss.
    """

    epochs: int = 50
    batch_size: int = 1024
    optimizer: str = "adagrad"
    lr: float = 0.1
    relation_lr: Optional[float] = None  # noqa: UP045
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    schedule: str = "constant"
    warmup_steps: int = 0
    decay: float = 0.95
    plateau_patience: int = 3
    pipeline: str = "auto"
    log_every: int = 100

    def __post_init__(self) -> None:
        _at_least("train.epochs", self.epochs, 0)
        _at_least("train.batch_size", self.batch_size, 1)
        _one_of("train.optimizer", self.optimizer, OPTIMIZER_NAMES)
        _positive("train.lr", self.lr)
        if self.relation_lr is not None:
            _positive("train.relation_lr", self.relation_lr)
        for key in ("beta1", "beta2"):
            value = getattr(self, key)
            _check(0 <= value < 1, f"train.{key}", "in [0, 1)", value)
        _positive("train.eps", self.eps)
        _not_negative("train.weight_decay", self.weight_decay)
        if self.weight_decay and self.optimizer in ("adagrad", "sgd"):
            raise ConfigError(
                f"train.weight_decay: FBGEMM's {self.optimizer} has none; use loss.l2, or one of "
                "adam, rowwise_adam, rowwise_adagrad"
            )
        schedules = ("constant", "linear", "cosine", "exponential", "plateau")
        _one_of("train.schedule", self.schedule, schedules)
        _at_least("train.warmup_steps", self.warmup_steps, 0)
        _check(0 < self.decay <= 1, "train.decay", "in (0, 1]", self.decay)
        _at_least("train.plateau_patience", self.plateau_patience, 0)
        _one_of("train.pipeline", self.pipeline, ("auto", "sparse_dist", "loop"))
        _at_least("train.log_every", self.log_every, 1)


@dataclass(frozen=True)
class EvaluationConfig:
    """Exact filtered ranking, during training and at its end.

    Args:
        every: Epochs between validations; 0 validates never.
        metric: Early stopping and the best checkpoint follow this (both sides, realistic).
        patience: Validations without progress before training stops; 0 never stops early.
        max_triples: Rank at most this many validation triples while training (a fixed random
            sample, labelled so); 0 ranks them all.
        batch_size: Queries scored at once.
    """

    every: int = 5
    metric: str = "mrr"
    patience: int = 0
    max_triples: int = 0
    batch_size: int = 512

    def __post_init__(self) -> None:
        _at_least("evaluation.every", self.every, 0)
        _one_of("evaluation.metric", self.metric, ("mrr", "mr", "hits@1", "hits@3", "hits@10"))
        _at_least("evaluation.patience", self.patience, 0)
        _at_least("evaluation.max_triples", self.max_triples, 0)
        _at_least("evaluation.batch_size", self.batch_size, 1)


@dataclass(frozen=True)
class CheckpointConfig:
    """What a run keeps.

    Args:
        every_epochs: Epochs between checkpoints; 0 writes only the best and the last.
        every_steps: Steps between checkpoints within an epoch; 0 writes none.
        keep: Checkpoints kept besides the best one.
    """

    every_epochs: int = 1
    every_steps: int = 0
    keep: int = 2

    def __post_init__(self) -> None:
        _at_least("checkpoint.every_epochs", self.every_epochs, 0)
        _at_least("checkpoint.every_steps", self.every_steps, 0)
        _at_least("checkpoint.keep", self.keep, 1)


@dataclass(frozen=True)
class RunConfig:
    """The run folder.

    Args:
        dir: Folder for config, metrics, checkpoints and results; null makes runs/NAME-TIME.
        progress: Progress bars on rank 0.
        tensorboard: Write TensorBoard events.
    """

    dir: Optional[str] = None  # noqa: UP045
    progress: bool = True
    tensorboard: bool = True


@dataclass(frozen=True)
class Config:
    """A whole run.

    Args:
        seed: The start, the data order and the negatives are functions of it.
        device: auto, cpu or cuda.
        threads: CPU threads a rank; 0 shares the cores out among the ranks of a host.
    """

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    negatives: NegativesConfig = field(default_factory=NegativesConfig)
    entities: EntitiesConfig = field(default_factory=EntitiesConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    run: RunConfig = field(default_factory=RunConfig)
    seed: int = 0
    device: str = "auto"
    threads: int = 0

    def __post_init__(self) -> None:
        _at_least("seed", self.seed, 0)
        _one_of("device", self.device, ("auto", "cpu", "cuda"))
        _at_least("threads", self.threads, 0)
        self.entities.sparse_options(self.train.optimizer)
        if self.train.weight_decay and self.entities.preset != "fbgemm":
            raise ConfigError(
                f"train.weight_decay: {self.entities.preset}'s table optimizer has none; use "
                "loss.l2, or entities.preset fbgemm"
            )
        if self.train.pipeline == "sparse_dist" and self.entities.engine != "torchrec":
            raise ConfigError(
                "train.pipeline sparse_dist is TorchRec's; with entities.engine "
                f"{self.entities.engine} use auto or loop"
            )

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, as YAML and JSON take them."""
        out = asdict(self)
        out["data"]["ratio"] = list(self.data.ratio)
        return out

    def save(self, path: Path) -> None:
        """Writes the resolved config as YAML."""
        path.write_text(yaml.safe_dump(self.to_dict(), sort_keys=False), encoding="utf-8")


def all_keys(of: Any = Config, prefix: str = "") -> list[str]:
    """Every dotted key, in order."""
    keys: list[str] = []
    for item in fields(of):
        default = item.default_factory if callable(item.default_factory) else None
        nested = default if is_dataclass(default) else None
        keys += all_keys(nested, f"{prefix}{item.name}.") if nested else [prefix + item.name]
    return keys

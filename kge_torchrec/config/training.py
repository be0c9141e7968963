"""Settings of the loop and of ranking."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from kge_torchrec.config.checks import (
    PICKED,
    ConfigError,
    PickedFloat,
    PickedInt,
    PickedNumber,
    between,
    choice,
    least,
    positive,
)
from kge_torchrec.config.keys import Condition, Part, Section, fixed, key, only_with, only_without
from kge_torchrec.config.registry import KINDS, check_name

OPTIMIZER_NAMES = tuple(KINDS["table_optimizer"].ours)
RANK_METRICS = ("mrr", "mr", "hits@1", "hits@3", "hits@10")
_OF_LISTS = re.compile(r"(recall|ndcg|hit_rate|precision|map|coverage)@([1-9]\d*)")


def cutoff_of(metric: str) -> int | None:
    """Return the k of a metric of recommendations, 20 for auc; None for a metric of ranks."""
    match = _OF_LISTS.fullmatch(metric)
    return int(match[2]) if match else 20 if metric == "auc" else None


_EXTENDED = Condition("a run that `extend` made", lambda _, facts: facts.extended)
_VALIDATES = only_without("evaluation.every", 0, "evaluation.every above 0")
_EMA = only_with("train.averaging", "ema")


@dataclass(frozen=True)
class AveragingOptions:
    """Options of the average of the weights."""

    decay: float = key(
        0.9,
        "Share of the average that stays when new weights come in; smaller for the first ones.",
        check=between("in [0, 1)", lambda decay: 0 <= decay < 1),
        acts=_EMA,
    )
    every_steps: int = key(
        0,
        "Steps between weights that come in; 0: those at the end of each epoch.",
        check=least(0),
        acts=_EMA,
    )


@dataclass(frozen=True)
class Clip:
    """Bounds of a step's gradient."""

    norm: float | None = key(
        None,
        "Largest norm of a step's gradient, table and dense together; null: no bound.",
        check=positive,
    )
    value: float | None = key(
        None, "Largest absolute element of a step's gradient; null: no bound.", check=positive
    )


@dataclass(frozen=True)
class Extension:
    """Options of how an extended run treats what it extends."""

    freeze: str = key(
        "none",
        "old trains only rows of new entities and relations; none trains all.",
        check=choice("none", "old"),
        acts=_EXTENDED,
    )


@dataclass(frozen=True)
class TrainConfig(Section):
    """The loop and its optimizers."""

    prefix = "train."

    epochs: PickedInt = key(
        PICKED,
        "Passes over what negatives.regime trains on; null: from 100 of few triples to 10 of many.",
        check=least(0),
    )
    batch_size: PickedInt = key(
        PICKED,
        "Triples per step over all ranks; queries with kvsall, allvsall and kvssample. null: "
        "128 to 1024, by number of triples, more on GPUs.",
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
    relation_lr: float | None = key(
        None, "Learning rate of relations; null: train.lr.", check=positive
    )
    optimizer_options: dict[str, Any] = key(
        dict,
        "Options of the optimizer, such as {beta1: 0.8} of adam; `kge-torchrec list "
        "table_optimizer` lists them.",
        part=Part("table_optimizer", "optimizer"),
    )
    schedule: str = key(
        "constant",
        "Schedule of the learning rate: constant, linear (to 0), cosine (to 0, also in cycles), "
        "exponential, plateau, or package.module:Class.",
    )
    warmup_steps: int = key(
        0, "Steps over which the learning rate rises linearly from 0.", check=least(0)
    )
    schedule_options: dict[str, Any] = key(
        dict,
        "Options of the schedule: cycles (cosine), decay (exponential, plateau), patience and "
        "threshold (plateau); `kge-torchrec list schedule` lists them.",
        part=Part("schedule", "schedule"),
    )
    averaging: str = key(
        "none",
        "Average of the weights that is validated, ranked and exported: none or ema (exponential "
        "moving average).",
        check=choice("none", "ema"),
    )
    averaging_options: AveragingOptions = field(default_factory=AveragingOptions)
    precision: str = key(
        "auto",
        "Precision of scorer and gradients: fp32, tf32 (fp32, and CUDA rounds the factors of "
        "products to 10 bits), bf16, or fp16 with dynamic loss scaling; losses, parameters and "
        "optimizer state are fp32. auto: bf16 where products score all entities on a CPU with "
        "AVX512-BF16 or AMX, otherwise fp32.",
        check=choice("auto", "fp32", "tf32", "bf16", "fp16"),
        acts=Condition(
            "tf32 on CUDA (device cuda), others everywhere",
            lambda config, facts: config.train.precision != "tf32" or facts.on_cuda,
        ),
    )
    accumulation: int = key(
        1,
        "Micro-batches per step, for less memory; the result is that of one batch.",
        check=least(1),
    )
    clip: Clip = field(default_factory=Clip)
    pipeline: str = key(
        "auto",
        "sparse_dist (TorchRec's pipeline), loop (the same steps one after another), or graph "
        "(loop with a CUDA graph on one GPU). auto: graph where it can, sparse_dist for engine "
        "torchrec on several GPUs or several hosts.",
        check=choice("auto", "sparse_dist", "loop", "graph"),
    )
    batches: str = key(
        "auto",
        "Where batches are made: cpu; device (it holds all triples, the ids are the same); auto: "
        "device on CUDA if triples take at most an eighth of its memory and half of what is free.",
        check=choice("auto", "cpu", "device"),
        acts=only_with("negatives.regime", "sampled"),
    )
    log_every: int = key(
        100,
        "Steps between lines of metrics.jsonl and checks for a non-finite loss.",
        check=least(1),
    )
    extension: Extension = field(default_factory=Extension)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("table_optimizer", self.optimizer)
        if self.optimizer not in OPTIMIZER_NAMES:
            self.row_optimizer_options()
        check_name("schedule", self.schedule)

    def row_optimizer_options(self) -> Any:
        """Return the optimizer's ``Options``."""
        return self.options_in("optimizer_options")

    def scheduler_options(self) -> Any:
        """Return the schedule's ``Options``."""
        return self.options_in("schedule_options")

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
class CandidateOptions:
    """Options of ``evaluation.candidates``."""

    types: str | None = key(
        None,
        "File of lines entity, tab, type; null: the types that the store has by data.types.",
        acts=only_with("evaluation.candidates", "types"),
    )
    file: str | None = key(
        None,
        "NumPy file (.npz) with head_neg and tail_neg, the candidates of each triple.",
        acts=only_with("evaluation.candidates", "fixed"),
    )


@dataclass(frozen=True)
class EvaluationConfig(Section):
    """Filtered ranking, during training and at its end."""

    prefix = "evaluation."

    every: PickedInt = key(
        PICKED, "Epochs between validations; 0: never, null: about ten times.", check=least(0)
    )
    metric: str = key(
        "mrr",
        "Metric of early stopping and of the best checkpoint: mrr, mr, hits@1, hits@3 or hits@10 "
        "(both sides, realistic). Or one of recommended tails: auc, or recall, ndcg, hit_rate, "
        "precision, map or coverage at a k, such as recall@20.",
        check=between(
            f"{', '.join(RANK_METRICS)}, auc, or recall, ndcg, hit_rate, precision, map or "
            "coverage at a k >= 1, such as recall@20",
            lambda metric: metric in RANK_METRICS or cutoff_of(metric) is not None,
        ),
        acts=_VALIDATES,
    )
    patience: PickedNumber = key(
        PICKED,
        "Validations without a better one before training stops, or, between 0 and 1, the last "
        "share of the training so far that gained less than 0.2 percent; 0: never stops early, "
        "null: 3.",
        check=between(
            "an integer >= 0, or a share of the training between 0 and 1",
            lambda patience: 0 < patience < 1 or (isinstance(patience, int) and patience >= 0),
        ),
        acts=_VALIDATES,
    )
    max_triples: PickedInt = key(
        PICKED,
        "Validation triples ranked while training, a fixed random sample, of whole users with a "
        "metric of recommendations; 0: all, null: as many as take about a minute.",
        check=least(0),
        acts=_VALIDATES,
    )
    batch_size: int = key(512, "Queries scored at once.", check=least(1))
    candidates: str | None = key(
        None,
        "Entities to rank among: all; seen (with the relation and side in train); types (seen, "
        "or sharing a type with these); fixed (a list per triple, as OGB has them); null: types "
        "where every entity has one type, otherwise all. Results name the choice.",
        check=choice("all", "seen", "types", "fixed"),
    )
    candidates_options: CandidateOptions = field(default_factory=CandidateOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.candidates == "fixed" and self.candidates_options.file is None:
            raise ConfigError(
                "evaluation.candidates fixed needs evaluation.candidates_options.file (evaluate "
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

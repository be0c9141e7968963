"""The config of a run: one frozen dataclass per section, read from YAML and dotted overrides.

The defaults suit any data; docs/reference/keys.md lists them. An error names the key to change.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from kge_torchrec import files
from kge_torchrec.config.checks import Check, ConfigError, NonNegativeInt, PositiveInt
from kge_torchrec.config.data import DataConfig, NegativesConfig
from kge_torchrec.config.entities import EntitiesConfig
from kge_torchrec.config.keys import (
    PER_START,
    Condition,
    Section,
    declared,
    fixed,
    key,
)
from kge_torchrec.config.model import SCORER_NAMES, DenseConfig, LossConfig, ModelConfig
from kge_torchrec.config.registry import is_built_in
from kge_torchrec.config.rules import check_rules
from kge_torchrec.config.sizing import (
    GraphSize,
    decided_by,
    filled,
    is_raced,
    settled,
)
from kge_torchrec.config.training import (
    OPTIMIZER_NAMES,
    CheckpointConfig,
    EvaluationConfig,
    RunConfig,
    TrainConfig,
)

__all__ = [
    "OPTIMIZER_NAMES",
    "RESOLVED_KEYS",
    "SCORER_NAMES",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "DenseConfig",
    "EntitiesConfig",
    "EvaluationConfig",
    "GraphSize",
    "LossConfig",
    "ModelConfig",
    "NegativesConfig",
    "RunConfig",
    "TrainConfig",
    "all_keys",
]

_THREADS = Check("an integer from 0 to 1,024", lambda threads: 0 <= threads <= 1024)
_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # the same, several times as fast


def _leaves_open(config: Any) -> bool:
    """Return whether ``size`` still decides something."""
    open_count = config.negatives.count is None and not config.negatives.is_full
    return open_count or config.model.dim is None or config.train.epochs is None


_CHOSEN = fixed("what it chose is in config.yaml; change those keys, or start a new run")


@dataclass(frozen=True)
class Config(Section):
    """The config of a run, with one field per section."""

    data: DataConfig = key(DataConfig)
    model: ModelConfig = key(ModelConfig)
    loss: LossConfig = key(LossConfig)
    negatives: NegativesConfig = key(NegativesConfig)
    entities: EntitiesConfig = key(EntitiesConfig)
    dense: DenseConfig = key(DenseConfig)
    train: TrainConfig = key(TrainConfig)
    evaluation: EvaluationConfig = key(EvaluationConfig)
    checkpoint: CheckpointConfig = key(CheckpointConfig)
    run: RunConfig = key(RunConfig)
    size: Literal["small", "base", "large"] = key(
        "base",
        acts=Condition("model.dim, negatives.count or train.epochs null", _leaves_open),
        resume=_CHOSEN,
    )
    """small (a first look), base or large (the last digits): what model.dim, negatives.count and
    train.epochs are chosen for where they are null."""
    default: Literal["race", "rules"] = key("race", resume=_CHOSEN)
    """What completes a config that leaves training open: race (short trainings of several settings;
    the best one continues) or rules (from the graph's counts)."""
    seed: NonNegativeInt = key(0, resume=fixed())
    """Seed of the initial values, the order of the data and the negatives."""
    device: Literal["auto", "cpu", "cuda"] = key("auto", resume=PER_START)
    """auto, cpu or cuda."""
    threads: Annotated[int, _THREADS] = key(0, resume=PER_START)
    """CPU threads per rank, at most 1,024; 0: the cores of a host shared among its ranks."""
    timeout: PositiveInt = key(1800, resume=PER_START)
    """Seconds that a rank waits for other ranks, at the start and in each collective, before it
    fails. Preparing a large store counts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rules(self)

    @property
    def freezes(self) -> bool:
        """Whether some rows are frozen."""
        return self.train.extension.freeze != "none" or self.model.init_options.frozen

    def captures(self, on_cuda: bool, world_size: int, has_features: bool) -> bool:
        """Return whether a CUDA graph holds the scores of a step; with auto, wherever one can."""
        may = self.train.pipeline in ("auto", "graph")
        return may and not self.capture_problem(on_cuda, world_size, has_features)

    def capture_problem(self, on_cuda: bool, world_size: int, has_features: bool) -> str:
        """Return why no CUDA graph can hold the scores of a step; empty if one can.

        A graph has fixed shapes, fixed memory and fixed numbers of the host.
        """
        train, dense = self.train, self.dense
        parts = [("scorer", self.model.scorer), ("loss", self.loss.name)]
        parts += [("regularizer", name) for name in self.loss.regularizers]
        foreign = [name for kind, name in parts if not is_built_in(kind, name)]
        problems = {
            "a CUDA graph needs a GPU": not on_cuda,
            "entities have features, in other numbers each step": has_features,
            f"{world_size} ranks exchange rows in other numbers each step": world_size > 1,
            f"entities.engine {self.entities.engine} reads ids on the host": (
                self.entities.engine != "torchrec"
            ),
            f"batches of negatives.regime {self.negatives.regime} differ in size": (
                self.negatives.regime != "sampled"
            ),
            "train.accumulation sums gradients, which a graph overwrites": train.accumulation > 1,
            "train.precision fp16 scales the loss by a number of the host": (
                train.precision == "fp16"
            ),
            f"dense.wrapper {dense.wrapper} acts within backward": (
                dense.wrapper not in ("auto", "none")
            ),
            f"{', '.join(foreign)} may compute on the host": bool(foreign),
        }
        return next((problem for problem, holds in problems.items() if holds), "")

    def check_device(self, on_cuda: bool) -> None:
        """Raise ConfigError for settings that the device does not have."""
        if self.entities.cache_ratio and not on_cuda:
            raise ConfigError(
                f"entities.placement {self.entities.placement}: a GPU caches the rows, and here is "
                "a CPU; use memory, or disk"
            )
        if not on_cuda or self.entities.engine != "torchrec":
            return
        named = {"train.optimizer": self.train.optimizer}
        for kind in self.entities.tables or {}:
            own = self.entities.table_of(kind, self.train, self.model).optimizer
            named[f"entities.tables.{kind}.optimizer"] = own
        for name, optimizer in named.items():
            if optimizer not in OPTIMIZER_NAMES:
                raise ConfigError(
                    f"{name} {optimizer}: on GPUs entities.engine torchrec steps inside FBGEMM's "
                    f"kernel, which has {', '.join(OPTIMIZER_NAMES)} only; set entities.engine "
                    "handrolled"
                )

    decided_by = property(decided_by)
    settled = settled

    def filled_from(self, other: Config, raced: bool = False) -> Config:
        """Return the config with the values of another one where this one leaves them open.

        Those of a race fill every key that a race decides.
        """
        chosen = [x for x in declared(Config) if raced and is_raced(x) and not self.decided_by]
        values = {key: attrgetter(key)(other) for key in (*RESOLVED_KEYS, *chosen)}
        return filled(self, values, replaced=chosen)

    def to_dict(self) -> dict[str, Any]:
        """Return nested plain values, for YAML and JSON."""
        return asdict(self)

    def save(self, path: Path) -> None:
        """Write a config file with every key."""
        files.write_text(path, yaml.dump(self.to_dict(), Dumper=_Dumper, sort_keys=False))


RESOLVED_KEYS = tuple(name for name, item in declared(Config).items() if item.is_chosen)


def all_keys() -> list[str]:
    """Return every dotted key, in order."""
    return list(declared(Config))

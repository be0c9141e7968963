"""Settings of the entity table: backend, exchange between ranks, place, tables per type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from kge_torchrec.config.checks import (
    Check,
    ConfigError,
    PositiveFloat,
    PositiveInt,
    checked_type,
    least,
)
from kge_torchrec.config.keys import Resume, Section, fixed, key, only_with, parse_options
from kge_torchrec.config.registry import part_name, resolve
from kge_torchrec.config.sizing import SCALES, Distribution, rate_of

# What ``compare`` compares: entities.engine and entities.preset
VARIANTS = {
    "torchrec": ("torchrec", "fbgemm"),
    "handrolled": ("handrolled", "fbgemm"),
    "dicee": ("handrolled", "dicee"),
    "dgl": ("handrolled", "dgl"),
}


def check_variants(names: Sequence[str]) -> None:
    """Raise ConfigError unless these are two or more different names of ``VARIANTS``."""
    for name in names:
        if name not in VARIANTS:
            raise ConfigError(f"--engines: {name!r} is none of {', '.join(VARIANTS)}")
        if list(names).count(name) > 1:
            raise ConfigError(f"--engines names {name} twice; a variant takes part once")
    if len(names) < 2:
        raise ConfigError(f"--engines needs at least two of {', '.join(VARIANTS)}")


def _without_rates(config: Any) -> dict[str, dict[str, Any]] | None:
    tables = config.entities.tables
    if tables is None:
        return None
    return {
        kind: {name: value for name, value in (own or {}).items() if name != "lr"}
        for kind, own in tables.items()
    }


_LOOKED_UP = only_with("negatives.regime", "sampled", "kvssample")


@dataclass(frozen=True)
class Exchange(Section, prefix="entities.exchange."):
    """Options of how rows travel between ranks."""

    dtype: Literal["fp32", "fp16", "bf16", "int8"] = key("fp32", acts=_LOOKED_UP)
    """What rows and gradients travel as: fp32, fp16, bf16, or int8 (each row has its own range)."""


_AT_EPOCH_END = Resume("between two epochs", "")
TwoOrMore = Annotated[int, least(2)]
_ON_DISK = only_with("entities.placement", "disk")
_RATIO = Check("a number between 0 and 1", lambda ratio: 0 < ratio < 1)
MANAGED = "managed_caching"  # FBGEMM's name of the place


@dataclass(frozen=True)
class PlacementOptions(Section, prefix="entities.placement_options."):
    """Which share of a table lies in the fastest memory that it uses."""

    parts: TwoOrMore = key(16, acts=_ON_DISK, resume=_AT_EPOCH_END)
    """Parts that the table is cut into. Epochs with more parts read and write more."""
    buffer: TwoOrMore = key(4, acts=_ON_DISK, resume=_AT_EPOCH_END)
    """Parts in memory at a time, at most as many as there are."""
    passes: PositiveInt = key(1, acts=_ON_DISK, resume=_AT_EPOCH_END)
    """Times that an epoch goes through all parts, each time with another share of the triples. More
    mix the triples better, and read and write as many times as much."""
    cache_ratio: Annotated[float, _RATIO] = key(
        0.2, acts=only_with("entities.placement", MANAGED), resume=_AT_EPOCH_END
    )
    """Share of the rows in the cache on the GPU."""


@dataclass(frozen=True)
class TypeTable:
    """Settings of the entities of one type."""

    optimizer: Annotated[str, part_name("table_optimizer")] = key(None)
    """Optimizer of the table; null: train.optimizer."""
    lr: PositiveFloat = key(None)
    """Learning rate; null: train.lr, or what suits an optimizer that is given here."""
    optimizer_options: dict[str, Any] = key(dict)
    """Options of the optimizer; null: those of train, unless an optimizer is given here."""
    init: Distribution = key(None)
    """Distribution of the initial values; null: model.init."""
    init_scale: PositiveFloat = key(None)
    """Scale of the initial values; null: model.init_scale, or what is usual for an init that is
    given here."""


@dataclass(frozen=True)
class EntitiesConfig(Section, prefix="entities."):
    """The backend that holds the entity table."""

    engine: Literal["torchrec", "handrolled"] = "torchrec"
    """torchrec, or handrolled (own all_to_all exchange and sparse optimizer, to compare with)."""
    preset: Literal["fbgemm", "dicee", "dgl"] = key(
        "fbgemm",
        acts=only_with("entities.engine", "handrolled"),
        resume=fixed("it changes what the states of the optimizer mean; start a new run"),
    )
    """The system whose table optimizer handrolled imitates: fbgemm, dicee (adam), or dgl (adam and
    adagrad)."""
    exchange: Exchange = key(Exchange)
    placement: Literal["memory", "disk", "managed_caching"] = key("memory", resume=_AT_EPOCH_END)
    """Where the table and its optimizer's state lie: memory (of the GPU, on CUDA), disk, or
    managed_caching. disk: some parts are in memory at a time, and candidates are entities of these
    parts. managed_caching: main memory that a GPU reads, with a cache of rows on the GPU."""
    placement_options: PlacementOptions = key(PlacementOptions)
    tables: dict[str, Any] | None = key(
        None,
        resume=Resume(
            "learning rates only",
            "types keep their optimizers and initial values; start a new run",
            lambda before, after: _without_rates(before) != _without_rates(after),
        ),
    )
    """Settings of node types, each with a table of its own: {user: {optimizer: adam, lr: 0.01},
    item: {}}; settings: optimizer, lr, optimizer_options, init, init_scale. Types without settings
    have those of train and model. null: one table of all entities."""

    @property
    def on_disk(self) -> bool:
        """Whether the table lies on disk, with some parts in memory."""
        return self.placement == "disk"

    @property
    def cache_ratio(self) -> float:
        """Share of the rows that a GPU caches of a table in main memory; 0 for other places."""
        return self.placement_options.cache_ratio if self.placement == MANAGED else 0.0

    def table_of(self, kind: str, train: Any, model: Any) -> TypeTable:
        """Return the settings of a node type's table, with those of train and model where null.

        Raises ConfigError for a setting that is unknown or out of range.
        """
        name = f"entities.tables.{kind}"
        values = checked_type((self.tables or {}).get(kind), dict[str, Any] | None, name)
        own: TypeTable = parse_options(TypeTable, values or {}, name)
        same = own.optimizer in (None, train.optimizer)
        optimizer = train.optimizer if own.optimizer is None else own.optimizer
        options = own.optimizer_options or (train.optimizer_options if same else {})
        init = model.init if own.init is None else own.init
        scale = model.init_scale if init == model.init else SCALES[init]
        return replace(
            own,
            optimizer=optimizer,
            lr=own.lr or (train.lr if same else rate_of(optimizer)),
            optimizer_options=parse_options(
                resolve("table_optimizer", optimizer), options, f"{name}.optimizer_options"
            ),
            init=init,
            init_scale=own.init_scale or scale,
        )

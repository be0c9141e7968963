"""Settings of the engine that holds the entity table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Optional

from kge_torchrec.config.checks import ConfigError, one_of
from kge_torchrec.entities.handrolled.options import FBGEMM, SparseOptions, choose

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
        one_of("entities.engine", self.engine, ENGINE_NAMES)

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

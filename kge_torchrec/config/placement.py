"""Which settings go with a place of the entity table: disk, or main memory with a cache."""

from __future__ import annotations

from typing import Any

from kge_torchrec.config.checks import ConfigError

Config = Any  # kge_torchrec.config.Config, whose file imports this one


def check_placement(config: Config) -> None:
    """Raise ConfigError for settings that do not go with the place of the table."""
    needs: dict[str, tuple[bool, str]] = {}
    if config.entities.on_disk:
        needs = _needs_of_disk(config)
    elif config.entities.cache_ratio:
        needs = _needs_of_cache(config)
    for name, (holds, remedy) in needs.items():
        if not holds:
            raise ConfigError(
                f"{name}: entities.placement {config.entities.placement} does not go with this; "
                f"use {remedy}"
            )


def _needs_of_cache(config: Config) -> dict[str, tuple[bool, str]]:
    """Return whether settings go with rows that a GPU caches, and others that do, by key."""
    return {
        "entities.engine": (
            config.entities.engine == "torchrec",
            "torchrec: the cache is FBGEMM's",
        ),
        "negatives.regime": (
            not config.negatives.is_full,
            "sampled or kvssample: otherwise every step reads and updates all rows",
        ),
        "entities.tables": (
            config.entities.tables is None,
            "null: tables of node types are one block of the GPU's memory",
        ),
        "train.averaging": (
            config.train.averaging == "none",
            "none: an average would need a second table",
        ),
    }


def _needs_of_disk(config: Config) -> dict[str, tuple[bool, str]]:
    """Return whether settings go with a table on disk, and others that do, by key."""
    negatives, train = config.negatives, config.train
    why = "every entity is a candidate, and only some are in memory"
    return {
        "negatives.regime": (negatives.regime == "sampled", f"sampled: otherwise {why}"),
        "negatives.sampling": (
            negatives.sampling == "uniform",
            "uniform: candidates are entities of the parts in memory, all alike",
        ),
        "negatives.among": (
            negatives.among in (None, "all"),
            "all: candidates are entities of the parts in memory, of any type",
        ),
        "negatives.log_q": (
            not negatives.log_q,
            "false: chances are known for the whole graph, not for the parts in memory",
        ),
        "entities.tables": (config.entities.tables is None, "null: parts are cut from one table"),
        "train.extension.freeze": (
            not config.freezes,
            "none: rows change their places in memory",
        ),
        "train.averaging": (
            train.averaging == "none",
            "none: an average would need a second table",
        ),
        "train.pipeline": (
            train.pipeline in ("auto", "loop"),
            "auto or loop: a batch that is sent ahead may need parts that are not there yet",
        ),
        "train.batches": (train.batches in ("auto", "cpu"), "auto or cpu"),
    }

"""Who takes part in a comparison: names, and what each changes in the config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kge_torchrec.config import Config, ConfigError

# name -> (entities.engine, entities.preset)
CONTENDERS = {
    "torchrec": ("torchrec", "fbgemm"),
    "handrolled": ("handrolled", "fbgemm"),
    "dicee": ("handrolled", "dicee"),
    "dgl": ("handrolled", "dgl"),
}
_DECIDED = ("entities.engine", "entities.preset")
# To load a config with: takes all that any contender takes, so that what one of them does not take
# is refused in that one's name.
NEUTRAL = ("--entities.engine=handrolled", "--entities.preset=fbgemm")


def check_names(names: Sequence[str], overrides: Sequence[str] = ()) -> None:
    """Raises ConfigError unless the names are at least two different contenders.

    overrides: arguments of the command line, among which there may be no engine and no preset,
    since the names say both.
    """
    for name in names:
        if name not in CONTENDERS:
            raise ConfigError(f"--engines: {name!r} is none of {', '.join(CONTENDERS)}")
        if names.count(name) > 1:
            raise ConfigError(f"--engines names {name} twice; a contender takes part once")
    if len(names) < 2:
        raise ConfigError(f"--engines needs at least two of {', '.join(CONTENDERS)}")
    for argument in overrides:
        key = argument.lstrip("-").split("=")[0]
        if key in _DECIDED:
            raise ConfigError(f"{key}: --engines says it for each contender; leave it out")


def contenders(config: Config, names: Sequence[str]) -> dict[str, Config]:
    """The config of each contender: ``config`` with its engine and preset.

    Raises ConfigError, naming the contender and the key, where another setting contradicts them.
    """
    check_names(names)
    if config.train.schedule == "plateau":
        raise ConfigError(
            "train.schedule plateau follows validation, and a comparison validates at its end "
            "only; use constant, linear, cosine or exponential"
        )
    found = {}
    for name in names:
        engine, preset = CONTENDERS[name]
        entities = replace(config.entities, engine=engine, preset=preset)
        try:
            found[name] = replace(config, entities=entities)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
    return found

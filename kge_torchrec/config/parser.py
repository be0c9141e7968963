"""From a YAML file and dotted overrides to a Config, with errors that name the key."""

from __future__ import annotations

import difflib
import os
import re
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser, DefaultHelpFormatter

from kge_torchrec.config import Config, ConfigError, all_keys
from kge_torchrec.config.keys import check_effects
from kge_torchrec.config.options import wrong_type
from kge_torchrec.config.sizing import KEYS as PICKED
from kge_torchrec.config.yaml_file import read_yaml

Overrides = Sequence[str] | dict[str, Any]  # ["--train.lr", "0.1"] or {"train.lr": 0.1}
# Also nested or dotted values, a YAML file or the name of one in configs/, None for the defaults.
AnyConfig = Config | dict[str, Any] | str | Path | None
# The published configs: a wheel has them inside the package, a checkout beside it.
_INSTALLED = Path(__file__).resolve().parents[1] / "configs"
CONFIGS = _INSTALLED if _INSTALLED.is_dir() else _INSTALLED.parents[1] / "configs"


class _Help(RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """jsonargparse's, that leaves the description's lines as they are."""


def build_parser(
    prog: str = "kge-torchrec train", usage: str | None = None, description: str | None = None
) -> ArgumentParser:
    """The parser of every key; its --help lists them with their meaning and default."""
    parser = ArgumentParser(
        prog=prog,
        usage=usage or f"{prog} CONFIG [--key.sub value]",
        description=description,
        formatter_class=_Help,
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", help="YAML file with any of the keys below.")
    parser.add_class_arguments(Config, None)
    return parser


@cache  # building it takes longer than reading a config
def _parser() -> ArgumentParser:
    return build_parser()


def load_config(path: str | Path | None = None, overrides: Overrides = ()) -> Config:
    """Reads a config.

    path: YAML file, the name of one in ``configs/`` ("demo"), or None for the defaults.
    overrides: ["--train.lr", "0.1", ...] or {"train.lr": 0.1, ...}; they win over the file.
    Raises ConfigError on an unknown key, a wrong type, a value out of range, or a key that was set
    and has no effect.
    """
    config = read_config(path, overrides)
    # The config.yaml of a run has numbers for keys that were null, whether they act or not.
    check_effects(config, keys=[k for k in all_keys() if k not in PICKED or is_set(k, overrides)])
    return config


def read_config(path: str | Path | None = None, overrides: Overrides = ()) -> Config:
    """Reads a config as ``load_config``, with keys that have no effect, as earlier runs may."""
    arguments = []
    if path is not None:
        file = _find(path)
        _check_file(file)
        arguments = ["--config", str(file)]
    try:
        # Without defaults, which it would check with everything: that takes twenty times as long.
        given = _parser().parse_args([*arguments, *_as_arguments(overrides)], defaults=False)
    except ArgumentError as error:
        raise ConfigError(_explain(str(error))) from None
    except RecursionError:
        raise ConfigError("a value is nested too deeply; flatten it") from None
    return _made_of(given.as_dict())


def _made_of(values: dict[str, Any]) -> Config:
    """A Config of what is given, and of defaults."""
    sections: dict[str, Any] = {field.name: field.default_factory for field in fields(Config)}
    made: dict[str, Any] = {}
    for name, value in values.items():
        if name != "config":
            made[name] = sections[name](**value) if isinstance(value, dict) else value
    return Config(**made)


def config_from_dict(values: dict[str, Any], overrides: Overrides = ()) -> Config:
    """A Config from nested values, as ``Config.to_dict`` gives them, with overrides."""
    return read_config(None, [*_as_arguments(_flatten(values)), *_as_arguments(overrides)])


def as_config(config: AnyConfig) -> Config:
    """A Config itself, or what ``load_config`` or ``config_from_dict`` make one of."""
    if isinstance(config, Config):
        return config
    if isinstance(config, dict):
        return config_from_dict(config)
    return load_config(config)


def is_set(key: str, overrides: Overrides) -> bool:
    """Whether overrides name a key."""
    return any(re.match(rf"--{re.escape(key)}(=|$)", word) for word in _as_arguments(overrides))


def _as_arguments(overrides: Overrides) -> list[str]:
    if not isinstance(overrides, dict):
        return list(overrides)
    return [f"--{key}={_as_text(value)}" for key, value in overrides.items()]


def _as_text(value: Any) -> str:
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)  # as typed on the command line: quotes would become part of it
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()


def published() -> list[str]:
    """Names of the configs that come with the package."""
    return sorted(file.stem for file in CONFIGS.rglob("*.yaml"))


def _find(path: str | Path) -> Path:
    homes = CONFIGS, CONFIGS / "recipes"
    candidates = [Path(path), *(home / f"{path}{end}" for home in homes for end in ("", ".yaml"))]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    known = published()
    hint = f"; there are {', '.join(known)}" if known else ""
    raise ConfigError(f"no config file {str(path)!r}{hint}")


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"train": {"lr": 1}} -> {"train.lr": 1}; keys that hold a dict keep it whole."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        nested = isinstance(value, dict) and key not in all_keys()
        flat.update(_flatten(value, f"{key}.") if nested else {key: value})
    return flat


def _check_file(path: Path) -> None:
    """Raises ConfigError unless the file is YAML of known keys."""
    values = read_yaml(path)
    if values is None:
        raise ConfigError(f"{path} is empty; it should hold keys, such as 'seed: 1'")
    if not isinstance(values, dict):
        raise ConfigError(f"{path} should hold 'key: value' pairs, not a {type(values).__name__}")
    keys, defaults = all_keys(), _flatten(Config().to_dict())
    for key, value in _flatten(values).items():
        if key in keys:
            if value is None and defaults[key] is not None:
                raise ConfigError(f"{key} has no value in {path}")
            continue
        if any(k.startswith(key + ".") for k in keys):
            raise ConfigError(f"{key} in {path} is a group of keys and needs nested 'key: value'")
        raise ConfigError(f"unknown key {key} in {path}{_closest(key, keys)}")


def _explain(message: str) -> str:
    """The parser's message in the words of the other errors."""
    unknown = re.search(r"unrecognized arguments: --?([\w.-]+)", message)
    if unknown:
        return f"unknown key {unknown[1]}{_closest(unknown[1], all_keys())}"
    stray = re.search(r"unrecognized arguments: (.+)", message)
    if stray:
        return f"settings are given as --key value, got {stray[1]!r}"
    group = re.match(r'Parser key "([\w.]+)":\nUnable to load config', message)
    if group:
        one = next(key for key in all_keys() if key.startswith(group[1] + "."))
        return f"{group[1]} is a group of keys; set them one by one, such as --{one}"
    of_type = wrong_type(message)
    if of_type:
        return of_type
    return message.replace('Parser key "', 'key "').replace(":\n  ", ": ")


def _closest(key: str, keys: list[str]) -> str:
    same_name = [k for k in keys if k.split(".")[-1] == key.split(".")[-1]]  # in a wrong place
    close = difflib.get_close_matches(key, same_name, n=1, cutoff=0.0)
    close = close or difflib.get_close_matches(key, keys, n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else "; see --help for all keys"

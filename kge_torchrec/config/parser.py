"""Parse a YAML file and dotted overrides into a Config; errors name the key."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from kge_torchrec.config import Config, ConfigError, DataConfig, all_keys
from kge_torchrec.config.keys import Facts, check_effects
from kge_torchrec.config.options import wrong_type
from kge_torchrec.config.registry import check_imports
from kge_torchrec.config.sizing import KEYS as PICKED
from kge_torchrec.config.sizing import is_raced
from kge_torchrec.config.yaml_file import read_yaml

Overrides = Sequence[str] | dict[str, Any]  # ["--train.lr", "0.1"] or {"train.lr": 0.1}
# Also nested or dotted values, a YAML file, a run, the name of a file in configs/, None: defaults.
AnyConfig = Config | dict[str, Any] | str | Path | None
# The published configs: a wheel has them inside the package, a checkout beside it.
_INSTALLED = Path(__file__).resolve().parents[1] / "configs"
CONFIGS = _INSTALLED if _INSTALLED.is_dir() else _INSTALLED.parents[1] / "configs"


# What a run writes beside its config.yaml, and what another run does not take over from there.
_BESIDE = (".lock", "checkpoints", "metrics.jsonl", "results.json", "store", "race")
_OF_A_RUN = ("--run.dir=null", "--run.resume=never", "--checkpoint.options.copy_to=null")


def build_parser() -> ArgumentParser:
    """Return the parser of every key; its --help lists them with their meaning and default."""
    parser = ArgumentParser(prog="kge-torchrec train", exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--config", action="config", help="YAML file with any of the keys below.")
    parser.add_class_arguments(Config, None)
    return parser


@cache  # building it takes longer than reading a config
def _parser() -> ArgumentParser:
    return build_parser()


def load_config(path: str | Path | None = None, overrides: Overrides = ()) -> Config:
    """Read a config.

    Args:
        path: YAML file, the name of one in ``configs/`` ("demo"), the folder of a run, or None for
            the defaults.
        overrides: ["--train.lr", "0.1", ...] or {"train.lr": 0.1, ...}; they win over the file.

    Raises:
        ConfigError: A key is unknown, a value has a wrong type or is out of range, or a key was
            set and has no effect.
    """
    file = {} if path is None else values_of(path)
    given = overrides
    if path is not None and is_of_run(path):
        check_imports(file, find_config(path))
        given = [*_OF_A_RUN, *words_of(overrides)]
    config = _decided(read_config(path, given), file, overrides)
    # The config.yaml of a run has numbers for keys that were null, whether they act or not.
    check_effects(config, keys=[k for k in all_keys() if k not in PICKED or is_set(k, overrides)])
    return config


def _decided(config: Config, file: Collection[str], overrides: Overrides) -> Config:
    """Return the config with default rules if a key was given that a race would decide.

    Keys count as given even at their default. The key ``default`` itself says otherwise.

    Args:
        config: The config.
        file: The keys of its file.
        overrides: The overrides.

    Raises:
        ConfigError: The overrides ask for a race, and a key that it would decide is given.
    """
    words = [word.partition("=")[0] for word in words_of(overrides)]
    keys = _keys_of(word.removeprefix("--") for word in words if word.startswith("--"))
    from_file = _keys_of(file)
    named = sorted(filter(is_raced, keys if "default" in from_file else keys | from_file))
    if "default" not in keys:
        return replace(config, default="rules") if named else config
    why = f"{named[0]} is given" if named else config.decided_by
    if config.default == "race" and why is not None:
        raise ConfigError(f"default race has no effect here: {why}; leave one of them out")
    return config


def _keys_of(names: Iterable[str]) -> set[str]:
    """Return the keys among names; for an option, the key that holds it."""
    dotted = [f"{name}." for name in names]
    return {key for key in all_keys() if any(name.startswith(f"{key}.") for name in dotted)}


def read_run_config(file: Path, overrides: Overrides = ()) -> Config:
    """Read the config of a run, which somebody else may have written, with overrides.

    Raises:
        ConfigError: As ``read_config``, or the config names classes of modules that were not
            imported so far.
    """
    check_imports(_flatten(_values_of(file)), file.parent)
    return read_config(file, overrides)


def is_of_run(path: str | Path) -> bool:
    """Return whether a config is that of a run, and not one that the user wrote.

    It is named by its folder, or other files of a run lie beside it.
    """
    file = find_config(path)
    beside = file.name == "config.yaml" and any((file.parent / x).exists() for x in _BESIDE)
    return beside or Path(path).is_dir()


def read_config(path: str | Path | None = None, overrides: Overrides = ()) -> Config:
    """Read a config as ``load_config`` does, but accept keys without effect."""
    arguments = []
    if path is not None:
        file = find_config(path)
        _check_file(file)
        arguments = ["--config", str(file)]
    try:
        # Without defaults, which it would check with everything: that takes twenty times as long.
        parsed = _parser().parse_args([*arguments, *words_of(overrides)], defaults=False)
    except ArgumentError as error:
        raise ConfigError(_explain(str(error))) from None
    except RecursionError:
        raise ConfigError("a value is nested too deeply; flatten it") from None
    return _made_of(parsed.as_dict())


def _made_of(values: dict[str, Any]) -> Config:
    """Return the Config with some values, and defaults for the others."""
    sections: dict[str, Any] = {field.name: field.default_factory for field in fields(Config)}
    made: dict[str, Any] = {}
    for name, value in values.items():
        if name != "config":
            made[name] = sections[name](**value) if isinstance(value, dict) else value
    return Config(**made)


def config_from_dict(values: dict[str, Any], overrides: Overrides = ()) -> Config:
    """Return the Config of nested values, such as those of ``Config.to_dict``, with overrides."""
    return read_config(None, [*words_of(_flatten(values)), *words_of(overrides)])


def as_config(config: AnyConfig) -> Config:
    """Return a Config as it is, or make one of values, a file or the name of a config."""
    if isinstance(config, Config):
        return config
    if isinstance(config, dict):
        return _decided(config_from_dict(config), _flatten(config), ())
    return load_config(config)


def data_config(data: DataConfig | Mapping[str, Any] | None) -> DataConfig:
    """Return the section ``data`` of nested or dotted values, with or without "data." before them.

    Raises:
        ConfigError: As ``load_config``.
    """
    if not isinstance(data, DataConfig):
        values = {f"data.{key.removeprefix('data.')}": value for key, value in (data or {}).items()}
        data = config_from_dict(values).data
    keys = [key for key in all_keys() if key.startswith("data.")]
    check_effects(Config(data=data), Facts(is_store=False), keys)
    return data


def is_set(key: str, overrides: Overrides) -> bool:
    """Return whether overrides name a key."""
    option = re.compile(rf"--{re.escape(key)}(=|$)")
    return any(option.match(word) for word in words_of(overrides))


def words_of(overrides: Overrides) -> list[str]:
    """Return overrides as they were typed."""
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


def values_of(path: str | Path) -> dict[str, Any]:
    """Return the flat values of a config file, or of a published config by name."""
    return _check_file(find_config(path))


def find_config(path: str | Path) -> Path:
    """Return the file of a config: a path, the config.yaml of a run, or a published one by name."""
    homes = CONFIGS, CONFIGS / "recipes", CONFIGS / "portfolio"
    if (Path(path) / "study.json").is_file():
        raise ConfigError(f"{path} is a study; name its best config, {path}/best.yaml")
    candidates = [
        Path(path),
        Path(path) / "config.yaml",
        *(home / f"{path}{end}" for home in homes for end in ("", ".yaml")),
    ]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    known = published()
    hint = f"; there are {', '.join(known)}" if known else ""
    raise ConfigError(f"no config file {str(path)!r}{hint}")


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten {"train": {"lr": 1}} to {"train.lr": 1}; keys whose value is a dict keep it."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        nested = isinstance(value, dict) and key not in all_keys()
        flat.update(_flatten(value, f"{key}.") if nested else {key: value})
    return flat


def _values_of(path: Path) -> dict[str, Any]:
    """Return what a YAML file holds. Raises ConfigError unless that is a mapping."""
    values = read_yaml(path)
    if values is None:
        raise ConfigError(f"{path} is empty; it should hold keys, such as 'seed: 1'")
    if not isinstance(values, dict):
        raise ConfigError(f"{path} should hold 'key: value' pairs, not a {type(values).__name__}")
    return values


def _check_file(path: Path) -> dict[str, Any]:
    """Return the flat values of a file. Raises ConfigError unless it is YAML of known keys."""
    flat = _flatten(_values_of(path))
    keys, defaults = all_keys(), _flatten(Config().to_dict())
    for key, value in flat.items():
        if key in keys:
            if value is None and defaults[key] is not None:
                raise ConfigError(f"{key} has no value in {path}; write one, or remove the key")
            continue
        if any(k.startswith(key + ".") for k in keys):
            raise ConfigError(f"{key} in {path} is a group of keys and needs nested 'key: value'")
        raise ConfigError(f"unknown key {key} in {path}{_closest(key, keys)}")
    return flat


def _explain(message: str) -> str:
    """Return the parser's message in the words of the other errors."""
    unknown = re.search(r"unrecognized arguments: --?([\w.-]+)", message)
    if unknown:
        return f"unknown key {unknown[1]}{_closest(unknown[1], all_keys())}"
    stray = re.search(r"unrecognized arguments: (.+)", message)
    if stray:
        return f"settings are given as --key value, got {stray[1]!r}"
    group = re.match(r'Parser key "([\w.]+)":\nUnable to load config', message)
    if group:
        example = next(key for key in all_keys() if key.startswith(group[1] + "."))
        return f"{group[1]} is a group of keys; set them one by one, such as --{example}"
    type_error = wrong_type(message)
    if type_error:
        return type_error
    return message.replace('Parser key "', 'key "').replace(":\n  ", ": ")


def _closest(key: str, keys: list[str]) -> str:
    same_name = [k for k in keys if k.split(".")[-1] == key.split(".")[-1]]  # in a wrong place
    close = difflib.get_close_matches(key, same_name, n=1, cutoff=0.0)
    close = close or difflib.get_close_matches(key, keys, n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else "; see --help for all keys"

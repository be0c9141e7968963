"""From a YAML file and dotted overrides to a Config, with errors that name the key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from kge_torchrec.config import Config, ConfigError, all_keys

Overrides = Sequence[str] | dict[str, Any]  # ["--train.lr", "0.1"] or {"train.lr": 0.1}
CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def build_parser(prog: str = "kge-torchrec train") -> ArgumentParser:
    """The parser of every key; its --help lists them with their meaning and default."""
    usage = f"{prog} CONFIG [--key.sub value]"
    parser = ArgumentParser(prog=prog, exit_on_error=False, usage=usage)
    parser.add_argument("--config", action="config", help="YAML file with any of the keys below.")
    parser.add_class_arguments(Config, None)
    return parser


def load_config(path: str | Path | None = None, overrides: Overrides = ()) -> Config:
    """Reads a config.

    path: YAML file, the name of one in ``configs/`` ("demo"), or None for the defaults.
    overrides: ["--train.lr", "0.1", ...] or {"train.lr": 0.1, ...}; they win over the file.
    Raises ConfigError on an unknown key, a wrong type or a value out of range.
    """
    arguments = []
    if path is not None:
        file = _find(path)
        _check_file(file)
        arguments = ["--config", str(file)]
    try:
        parser = build_parser()
        parsed = parser.instantiate(parser.parse_args([*arguments, *_as_arguments(overrides)]))
    except ArgumentError as error:
        raise ConfigError(_explain(str(error))) from None
    values = vars(parsed)
    values.pop("config", None)
    return Config(**values)


def config_from_dict(values: dict[str, Any], overrides: Overrides = ()) -> Config:
    """A Config from nested values, as ``Config.to_dict`` gives them, with overrides."""
    return load_config(None, [*_as_arguments(_flatten(values)), *_as_arguments(overrides)])


def _as_arguments(overrides: Overrides) -> list[str]:
    if not isinstance(overrides, dict):
        return list(overrides)
    return [f"--{key}={_as_text(value)}" for key, value in overrides.items()]


def _as_text(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()


def _find(path: str | Path) -> Path:
    candidates = [Path(path), CONFIGS / path, CONFIGS / f"{path}.yaml"]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    known = sorted(p.stem for p in CONFIGS.glob("*.yaml"))
    hint = f"; there are {', '.join(known)}" if known else ""
    raise ConfigError(f"no config file {str(path)!r}{hint}")


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"train": {"lr": 1}} -> {"train.lr": 1}"""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        nested = isinstance(value, dict)
        flat.update(_flatten(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value})
    return flat


def _check_file(path: Path) -> None:
    """Raises ConfigError unless the file is YAML of known keys."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if values is None:
        raise ConfigError(f"{path} is empty; it should hold keys such as 'train:\n  lr: 0.1'")
    if not isinstance(values, dict):
        raise ConfigError(f"{path} should hold 'key: value' pairs, not a {type(values).__name__}")
    keys = all_keys()
    for key in _flatten(values):
        if key in keys:
            continue
        if any(k.startswith(key + ".") for k in keys):
            raise ConfigError(f"{key} in {path} is a group of keys and needs nested 'key: value'")
        raise ConfigError(f"unknown key {key} in {path}{_closest(key, keys)}")


def _explain(message: str) -> str:
    """The parser's message, with the closest key when one is unknown."""
    unknown = re.search(r"unrecognized arguments: --?([\w.]+)", message)
    if unknown:
        return f"unknown key {unknown[1]}{_closest(unknown[1], all_keys())}"
    return message.replace('Parser key "', 'key "').replace(":\n  ", ": ")


def _closest(key: str, keys: list[str]) -> str:
    close = difflib.get_close_matches(key, keys, n=1)
    if not close:  # a right name in the wrong place
        close = [k for k in keys if k.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]][:1]
    return f"; did you mean {close[0]}?" if close else "; see --help for all keys"

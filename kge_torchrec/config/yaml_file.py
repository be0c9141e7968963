"""Read YAML that people wrote: errors in words, and the line of every key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from kge_torchrec.config.checks import ConfigError

_MOST_DEPTH = 50
_TOO_DEEP = f"values are nested more than {_MOST_DEPTH} deep"
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same, ten times as fast


class Lined(dict[Any, Any]):
    """A mapping of a file, with the line of each key."""

    lines: dict[Any, int]


class _Wrong(Exception):
    """A problem and its line."""


class _LinedLoader(_Loader):
    """A loader that keeps lines and rejects repeated keys; plain YAML keeps the last value."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, OverflowError) as error:  # such as the date 2024-13-01
            problem = f"a value cannot be read: {error}; quote it if it is text"
            raise _Wrong(problem, node.start_mark.line + 1) from None

    def construct_lined(self, node: yaml.MappingNode) -> Iterator[Lined]:
        values = Lined()
        values.lines = {}
        yield values
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in values.lines:
                first = values.lines[key.value]
                problem = f"the key {key.value} stands here and in line {first}; keep one of them"
                raise _Wrong(problem, line)
            values.lines[key.value] = line
        values.update(self.construct_mapping(node))


_LinedLoader.add_constructor("tag:yaml.org,2002:map", _LinedLoader.construct_lined)


def read_yaml(path: str | Path) -> Any:
    """Return what a YAML file holds.

    Raises ConfigError, naming the file, for what is no YAML, a key that stands twice, an anchor
    inside itself, and values nested more than 50 deep.
    """
    return plain(read_lined(path))


def read_lined(path: str | Path) -> Any:
    """Return what ``read_yaml`` returns, with mappings that know their lines."""
    try:
        return _load(Path(path).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except _Wrong as error:
        problem, line = error.args
        raise ConfigError(f"{path}:{line}: {problem}") from None


def parse_yaml(text: str) -> Any:
    """Return what YAML text holds. Raises yaml.YAMLError or, like ``read_yaml``, ConfigError."""
    try:
        return plain(_load(str(text)))  # of a subclass of str too
    except _Wrong as error:
        raise ConfigError(error.args[0]) from None


def plain(values: Any) -> Any:
    """Return a copy of nested values whose mappings are plain dicts."""
    if isinstance(values, dict):
        return {name: plain(value) for name, value in values.items()}
    return [plain(value) for value in values] if isinstance(values, list) else values


def _load(text: str) -> Any:
    try:
        values = yaml.load(text, _LinedLoader)
    except RecursionError:
        raise ConfigError(f"{_TOO_DEEP}; flatten them") from None
    check_depth(values)
    return values


def check_depth(values: Any, depth: int = 0) -> None:
    """Raise ConfigError for values that contain themselves or are nested too deeply."""
    if depth > _MOST_DEPTH:
        raise ConfigError(f"{_TOO_DEEP}, or an anchor stands inside itself; flatten them")
    if isinstance(values, dict | list):
        for value in values.values() if isinstance(values, dict) else values:
            check_depth(value, depth + 1)

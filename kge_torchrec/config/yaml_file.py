"""Read YAML that people wrote: errors in words, and the line of every key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from kge_torchrec.errors import ConfigError

_MOST_DEPTH = 50
_TOO_DEEP = f"values are nested more than {_MOST_DEPTH} deep"


class _Wrong(Exception):
    """A problem and its line; 0: none."""


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # C: 10x faster
    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, OverflowError) as error:  # such as the date 2024-13-01
            problem = f"a value cannot be read: {error}; quote it if it is text"
            raise _Wrong(problem, node.start_mark.line + 1) from None


def read_yaml(path: str | Path) -> tuple[Any, dict[str, int]]:
    """Return what a YAML file holds, and the line of every key by its dotted name.

    Raises ConfigError, naming the file, for what is no YAML, a key that stands twice, an anchor
    inside itself, and values nested more than 50 deep.
    """
    try:
        return _load(Path(path).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    except _Wrong as error:
        problem, line = error.args
        raise ConfigError(f"{path}{f':{line}' if line else ''}: {problem}") from None


def parse_yaml(text: str) -> Any:
    """Return what YAML text holds. Raises yaml.YAMLError or, like ``read_yaml``, ConfigError."""
    try:
        return _load(str(text))[0]  # of a subclass of str too
    except _Wrong as error:
        raise ConfigError(error.args[0]) from None


def _load(text: str) -> tuple[Any, dict[str, int]]:
    loader, lines = _Loader(text), dict[str, int]()
    try:
        node = loader.get_single_node()
        _find_lines(node, "", lines)
        return None if node is None else loader.construct_document(node), lines
    except RecursionError:
        raise _Wrong(f"{_TOO_DEEP}; flatten them", 0) from None
    finally:
        loader.dispose()


def _find_lines(node: Any, prefix: str, lines: dict[str, int], depth: int = 0) -> None:
    """Add the lines of the keys of a node; reject repeated ones, of which YAML keeps the last."""
    if depth > _MOST_DEPTH:
        raise _Wrong(f"{_TOO_DEEP}, or an anchor stands inside itself; flatten them", 0)
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            _find_lines(item, f"{prefix}{number}.", lines, depth + 1)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name, line = f"{prefix}{key.value}", key.start_mark.line + 1
            if name in lines:
                first = lines[name]
                problem = f"the key {name} stands here and in line {first}; keep one of them"
                raise _Wrong(problem, line)
            lines[name] = line
            _find_lines(value, f"{name}.", lines, depth + 1)

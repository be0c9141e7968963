"""Read YAML that people wrote: errors in words for all that no config can hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from kge_torchrec.config.checks import ConfigError

_MOST_DEPTH = 50
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same, ten times as fast


class _UniqueKeys(_Loader):
    """A loader that rejects repeated keys in a mapping; plain YAML keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in lines:
                raise ConfigError(
                    f"the key {key.value} stands in line {lines[key.value]} and again in line "
                    f"{line}; keep one of them"
                )
            lines[key.value] = line
        return super().construct_mapping(node, deep)


def read_yaml(path: str | Path) -> Any:
    """Return what a YAML file holds.

    Raises ConfigError, naming the file, for what is no YAML, a key that stands twice, an anchor
    inside itself, and values nested more than 50 deep.
    """
    try:
        return parse_yaml(Path(path).read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None


def parse_yaml(text: str) -> Any:
    """Return what YAML text holds. Raises yaml.YAMLError or, like ``read_yaml``, ConfigError."""
    try:
        values = yaml.load(text, _UniqueKeys)
    except RecursionError:
        raise ConfigError(f"values are nested more than {_MOST_DEPTH} deep; flatten them") from None
    except (ConfigError, yaml.YAMLError):
        raise
    except (ValueError, OverflowError) as error:  # such as the date 2024-13-01
        raise ConfigError(f"a value cannot be read: {error}; quote it if it is text") from None
    check_depth(values)
    return values


def check_depth(values: Any, depth: int = 0) -> None:
    """Raise ConfigError for values that contain themselves or are nested too deeply."""
    if depth > _MOST_DEPTH:
        raise ConfigError(
            f"values are nested more than {_MOST_DEPTH} deep, or an anchor stands inside itself; "
            "flatten them"
        )
    if isinstance(values, dict | list):
        for value in values.values() if isinstance(values, dict) else values:
            check_depth(value, depth + 1)

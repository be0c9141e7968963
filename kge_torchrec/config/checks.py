"""Values of files and command lines in the types of their keys, and checks of them."""

from __future__ import annotations

import contextlib
import difflib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml

from kge_torchrec.config.yaml_file import parse_yaml
from kge_torchrec.errors import ConfigError as ConfigError


def check(ok: bool, key: str, expected: str, value: Any) -> None:
    """Raise ConfigError unless a value is as expected."""
    if not ok:
        raise ConfigError(f"{key} must be {expected}, got {value!r}")


def at_least(key: str, value: int | None, least: int) -> None:
    """Raise ConfigError unless a value is null or at least ``least``."""
    if value is not None:
        check(value >= least, key, f"an integer >= {least}", value)


def one_of(key: str, value: str, choices: Sequence[str]) -> None:
    """Raise ConfigError unless a value is one of the choices."""
    if value in choices:
        return
    close = difflib.get_close_matches(str(value).lower(), choices, n=1, cutoff=0.7)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"{key} must be one of {', '.join(choices)}, got {value!r}{hint}")


def check_no_url(path: Any) -> None:
    """Raise ConfigError for the URL of a run: its copy is downloaded first."""
    if isinstance(path, str) and "://" in path:
        check_url("the URL of a run", path)
        raise ConfigError(
            f'{path} is no folder; download the run first, such as by `python -c "import fsspec; '
            f"fs, path = fsspec.url_to_fs('{path}'); fs.get(path, 'RUN', recursive=True)\"`, and "
            "name its folder"
        )


def check_url(key: str, value: str) -> None:
    """Raise ConfigError unless a value is a URL of fsspec without a password."""
    protocol, _, place = value.partition("://")
    if "?" in value or ":" in place.partition("/")[0].rpartition("@")[0]:
        raise ConfigError(
            f"{key} must have no password and no ?, since configs and logs would show it: got "
            f"{protocol}://...; the library of the file system reads them from the environment or "
            "from its own files"
        )
    example = "a URL such as s3://bucket/runs/x or file:///mnt/nas/runs/x"
    is_whole = bool(protocol and place) and (protocol != "file" or place.startswith("/"))
    check(is_whole and "::" not in value, key, example, value)


@dataclass(frozen=True, eq=False)
class Check:
    """A check of a value, as in ``Annotated[int, least(1)]``; null is good."""

    expected: str  # in words
    holds: Callable[[Any], bool]
    schema: dict[str, Any] = field(default_factory=dict)  # what a JSON schema says of good values

    def __call__(self, key: str, value: Any) -> None:
        """Raise ConfigError for a bad value of a key."""
        check(value is None or self.holds(value), key, self.expected, value)


def least(bound: int) -> Check:
    """Return the check that an integer is at least this."""
    return Check(f"an integer >= {bound}", lambda value: value >= bound, {"minimum": bound})


positive = Check(
    "a number > 0", lambda value: math.isfinite(value) and value > 0, {"exclusiveMinimum": 0}
)
not_negative = Check(
    "a number >= 0", lambda value: math.isfinite(value) and value >= 0, {"minimum": 0}
)
check_share = Check(
    "in [0, 1)", lambda share: 0 <= share < 1, {"minimum": 0, "exclusiveMaximum": 1}
)
NonNegativeInt = Annotated[int, least(0)]
PositiveInt = Annotated[int, least(1)]
NonNegativeFloat = Annotated[float, not_negative]
PositiveFloat = Annotated[float, positive]
Share = Annotated[float, check_share]

# Types

_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list",
    tuple: "a list",
    dict: "a mapping",
    NoneType: "null",
}


class Typed(str):
    """Text as a user typed it on a command line; the type of its key says what it means."""


def in_words(hint: Any) -> str:
    """Return a type in words."""
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    kinds = members(hint)
    if len(kinds) > 1:
        return " or ".join(map(in_words, kinds))
    return _NAMES.get(get_origin(kinds[0]) or kinds[0], str(kinds[0]))


def as_yaml(value: Any) -> str:
    """Return a value in a line, as a config file writes it; text is not quoted."""
    if isinstance(value, str | float):
        return str(value)
    plain = list(value) if isinstance(value, tuple) else value
    try:
        text = yaml.safe_dump(plain, default_flow_style=True, width=10**6)
    except yaml.YAMLError:  # a Python value that YAML has no form for
        return str(value)
    return text.removesuffix("...\n").strip()


def checked_type(value: Any, hint: Any, key: str) -> Any:
    """Return the value of a key in its type; raise ConfigError for a wrong one."""
    kinds = members(hint)
    try:
        converted = _converted(value, kinds)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None
    except TypeError:
        pass
    else:
        for check in checks_of(hint) if converted is not None else ():
            check(key, converted)
        return converted
    if value is None:
        raise ConfigError(f"{key} has no value; write one, or leave the key out")
    for kind in kinds:
        if get_origin(kind) is Literal and isinstance(value, str):
            one_of(key, value, get_args(kind))
    quote = ""
    if str in kinds and not isinstance(value, str | list | dict):
        quote = "; write text in quotes"
    raise ConfigError(f"{key} must be {in_words(hint)}, got {as_yaml(value)}{quote}")


@cache
def members(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the type itself, without their checks."""
    if get_origin(hint) is Annotated:
        return members(hint.__origin__)
    if get_origin(hint) in (Union, UnionType):
        return tuple(kind for part in get_args(hint) for kind in members(part))
    return (hint,)


@cache
def checks_of(hint: Any) -> tuple[Check, ...]:
    """Return the checks of a type."""
    if get_origin(hint) is Annotated:
        return hint.__metadata__
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else ()
    return tuple(check for part in parts for check in checks_of(part))


def _converted(value: Any, kinds: tuple[Any, ...]) -> Any:
    """Return a value in one of some types; raise TypeError if it has none of them.

    A typed text is text where the key takes only text, and otherwise what YAML reads, if it can be.
    """
    if isinstance(value, Typed):
        text = str(value)
        if NoneType in kinds and text in ("null", "~"):
            return None
        others = tuple(kind for kind in kinds if kind not in (str, NoneType))
        if others:
            with contextlib.suppress(yaml.YAMLError, TypeError):
                return _converted(parse_yaml(text), others)
            with contextlib.suppress(TypeError):
                return _converted(text, others)
        value = text
        kinds = tuple(kind for kind in kinds if kind is str)
    for kind in kinds:
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            return _one_converted(value, get_origin(kind) or kind, get_args(kind))
    raise TypeError


def _one_converted(value: Any, kind: Any, arguments: tuple[Any, ...]) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is Any or (kind is Literal and value in arguments):
        return value
    if kind is float and (is_number or isinstance(value, str)):
        return float(value)  # YAML reads 1e-3 as text
    if kind is int and is_number and isinstance(value, int):
        return int(value)
    if kind in (list, tuple) and isinstance(value, list | tuple):
        if not arguments:
            return kind(value)
        return kind(_converted(item, members(arguments[0])) for item in value)
    if kind is dict and isinstance(value, Mapping):
        of = members(arguments[1] if arguments else Any)
        return {name: _converted(item, of) for name, item in value.items()}
    if kind is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(kind, type) and kind not in (int, float) and isinstance(value, kind):
        return value
    raise TypeError

"""Turn values of files and command lines into the types of their keys: ``checked_type``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml

from kge_torchrec.config.checks import Check, ConfigError, one_of
from kge_torchrec.config.yaml_file import parse_yaml

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
    """Return the value of a key in its type.

    Raises:
        ConfigError: It has another type, or a check of the type refuses it.
    """
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

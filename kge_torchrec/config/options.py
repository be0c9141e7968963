"""Turn values of files and command lines into dataclasses: ``converted``, ``parse_options``.

A part that a config names, such as a scorer, has its options in a dataclass ``Options``, which is
the only place of their types, defaults and help texts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import yaml

from kge_torchrec.config.checks import ConfigError
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
hints = cache(get_type_hints)  # {field: type} of a dataclass


class Typed(str):
    """Text as a user typed it on a command line; the type of its key says what it means."""


def in_words(hint: Any) -> str:
    """Return a type in words."""
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(in_words, get_args(hint)))
    return _NAMES.get(get_origin(hint) or hint, str(hint))


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
        ConfigError: It has another type.
    """
    try:
        return converted(value, hint)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None
    except TypeError:
        pass
    if value is None:
        raise ConfigError(f"{key} has no value; write one, or leave the key out")
    quote = ""
    if str in members(hint) and not isinstance(value, str | list | dict):
        quote = "; write text in quotes"
    raise ConfigError(f"{key} must be {in_words(hint)}, got {as_yaml(value)}{quote}")


def converted(value: Any, hint: Any) -> Any:
    """Return a value in a type.

    Raises:
        TypeError: The value has another type.
    """
    kinds = members(hint)
    if isinstance(value, Typed):
        return _meant(value, hint, kinds)
    if hint is Any:
        return value
    exact = [one for one in kinds if (get_origin(one) or one) is type(value)]
    for one in (*exact, *kinds):
        try:
            return _one_converted(value, get_origin(one) or one, get_args(one))
        except (TypeError, ValueError, OverflowError):
            continue
    raise TypeError


def members(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _meant(text: Typed, hint: Any, kinds: tuple[Any, ...]) -> Any:
    """Return what a text of the command line means: text where the key takes only text."""
    if NoneType in kinds and text in ("null", "~"):
        return None
    others = tuple(one for one in kinds if one not in (str, NoneType))
    if others:
        try:
            plain = parse_yaml(text)
        except yaml.YAMLError:
            plain = str(text)
        for value in (plain, str(text)):
            try:
                return converted(value, Union[others])  # noqa: UP007 - of a tuple
            except TypeError:
                continue
    if str in kinds:
        return str(text)
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
        if kind is tuple and Ellipsis not in arguments:
            return tuple(converted(*pair) for pair in zip(value, arguments, strict=True))
        return kind(converted(item, arguments[0]) for item in value)
    if kind is dict and isinstance(value, Mapping):
        of = arguments[1] if arguments else Any
        return {name: converted(item, of) for name, item in value.items()}
    if kind is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(kind, type) and kind not in (int, float) and isinstance(value, kind):
        return value
    raise TypeError


def settings_of(owner: Any) -> Any:
    """Return the dataclass with the options of a class: its ``Options``, or the class itself."""
    return getattr(owner, "Options", owner)


def parse_options(owner: Any, values: Mapping[str, Any], key: str) -> Any:
    """Return the options of a class with some values; null takes the default.

    Args:
        owner: The class that owns the options.
        values: {name: value}, as a config holds them.
        key: The key that holds the values, for messages.

    Raises:
        ConfigError: An option is unknown, required and missing, of a wrong type or out of range.
    """
    settings: Any = settings_of(owner)
    of = getattr(owner, "name", "") or owner.__name__
    if not hasattr(settings, "__dataclass_fields__"):
        raise ConfigError(f"{key}: {of}.Options must be a dataclass")
    chosen = {name: value for name, value in values.items() if value is not None}
    known = [item.name for item in fields(settings)]
    for name in sorted(chosen.keys() - set(known), key=str):
        has = f"has {', '.join(known)}" if known else "has none"
        raise ConfigError(f"{key}.{name} is no option of {of}, which {has}")
    for item in fields(settings):
        if item.name not in chosen and item.default is item.default_factory is MISSING:
            raise ConfigError(f"{key}.{item.name}: {of} has no default for it; set it")
    for name, value in chosen.items():
        chosen[name] = checked_type(value, hints(settings)[name], f"{key}.{name}")
    try:
        options = settings(**chosen)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None
    for item in fields(settings):
        value, rules = getattr(options, item.name), item.metadata.get("key")
        if rules is not None and rules.check is not None and value is not None:
            rules.check(f"{key}.{item.name}", value)
    return options


class Option(NamedTuple):
    """One field of an Options class, for people."""

    name: str
    kind: str  # "integer", "number or null", ...
    default: str  # as a config has it
    help: str


def options_help(owner: Any) -> list[Option]:
    """Return the options of a class, with the help of their keys or of the docstring."""
    settings = settings_of(owner)
    said = _arguments_in(settings.__doc__ or "")
    options = []
    for item in fields(settings):
        text = item.metadata["key"].help if "key" in item.metadata else said.get(item.name, "")
        kind = re.sub(r"\ban? ", "", in_words(hints(settings)[item.name]))
        options.append(Option(item.name, kind, _default(item), text))
    return options


def _arguments_in(docstring: str) -> dict[str, str]:
    """Return {name: text} of the section Args of a docstring in Google's style."""
    lines = iter(docstring.expandtabs().splitlines())
    indent = next((len(x) - len(x.lstrip()) for x in lines if x.strip() == "Args:"), None)
    said: dict[str, str] = {}
    name, first = "", None
    for line in lines:
        depth = len(line) - len(line.lstrip())
        if indent is None or (line.strip() and depth <= indent):
            break
        first = depth if first is None else first
        if depth == first and ": " in line:
            name, _, line = line.strip().partition(": ")
        said[name] = f"{said.get(name, '')} {line.strip()}".strip()
    return said


def _default(item: Field[Any]) -> str:
    """Return the default of a field as a config file writes it."""
    if item.default is MISSING and item.default_factory is MISSING:
        return "none, must be set"
    value = item.default if item.default_factory is MISSING else item.default_factory()
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)

"""Read the options of a class, its dataclass ``Options``, from values of a config.

The dataclass is the only place of their types, defaults and help texts.
"""

from __future__ import annotations

import pickle
import re
from argparse import ArgumentError
from copy import deepcopy
from dataclasses import MISSING, Field, fields
from functools import cache
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from kge_torchrec.config.checks import ConfigError

if TYPE_CHECKING:  # the import takes a tenth of a second
    from jsonargparse import ArgumentParser

_KINDS = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping",
    "NoneType": "null",
}


class Option(NamedTuple):
    """One field of an Options class, for people."""

    name: str
    kind: str  # "integer", "number or null", ...
    default: str  # as a config has it
    help: str


def settings_of(owner: Any) -> Any:
    """Return the dataclass with the options of a class: its ``Options``, or the class itself."""
    return getattr(owner, "Options", owner)


def parse_options(owner: Any, values: dict[str, Any], key: str) -> Any:
    """Return the options of a class with some values; null takes the default.

    Args:
        owner: The class that owns the options.
        values: {name: value}, as a config holds them.
        key: The key that holds the values, for messages.

    Raises:
        ConfigError: An option is unknown, required and missing, of a wrong type or out of range.
    """
    settings: Any = settings_of(owner)
    if not hasattr(settings, "__dataclass_fields__"):
        raise ConfigError(f"{key}: {_name_of(owner)}.Options must be a dataclass")
    chosen = {name: value for name, value in values.items() if value is not None}
    known = [item.name for item in fields(settings)]
    for name in sorted(chosen.keys() - set(known)):
        has = f"has {', '.join(known)}" if known else "has none"
        raise ConfigError(f"{key}.{name} is no option of {_name_of(owner)}, which {has}")
    for item in fields(settings):
        if item.name not in chosen and item.default is item.default_factory is MISSING:
            raise ConfigError(f"{key}.{item.name}: {_name_of(owner)} has no default for it; set it")
    try:
        options = settings(**_typed(settings, chosen)) if chosen else settings()
    except ArgumentError as error:
        raise ConfigError(_of_option(str(error), owner, chosen, key)) from None
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None
    for item in fields(settings):
        value, rules = getattr(options, item.name), item.metadata.get("key")
        if rules is not None and rules.check is not None and value is not None:
            rules.check(f"{key}.{item.name}", value)
    return options


def options_help(owner: Any) -> list[Option]:
    """Return the options of a class, for its help text."""
    from docstring_parser import parse as parse_docstring

    settings = settings_of(owner)
    said = {p.arg_name: p.description for p in parse_docstring(settings.__doc__ or "").params}
    hints = get_type_hints(settings)
    options = []
    for item in fields(settings):
        text = item.metadata["key"].help if "key" in item.metadata else said.get(item.name) or ""
        text = " ".join(text.split())
        options.append(Option(item.name, _kind(hints[item.name]), _default(item), text))
    return options


def wrong_type(message: str) -> str | None:
    """Return the parser's message about a wrong type in the words of the other errors."""
    key = re.search(r'Parser key "([\w.]+)"', message)
    kinds = [_KINDS.get(kind, kind) for kind in re.findall(r"Expected a <class '(\w+)'>", message)]
    value = re.search(r"(?:Got|Given) value: (.*)$", message)
    if key and kinds and value:
        return f"{key[1]} must be {' or '.join(kinds)}, got {value[1]}"
    return None


def _default(item: Field[Any]) -> str:
    """Return the default of a field as a config file writes it."""
    if item.default is MISSING and item.default_factory is MISSING:
        return "none, must be set"
    value = item.default if item.default_factory is MISSING else item.default_factory()
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _of_option(message: str, owner: Any, chosen: dict[str, Any], key: str) -> str:
    """Return the parser's message about an option in the words of the other errors."""
    named = re.search(r'Parser key "(\w+)', message)
    if not named:
        return f"{key}: {message}"
    name = named[1]
    wanted = _wanted(get_type_hints(settings_of(owner))[name])
    return f"{key}.{name} must be {wanted}, got {chosen[name]}"


def _typed(settings: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return values in the types of the fields; the same values are parsed once per process."""
    try:
        key = settings, pickle.dumps(values)
    except (pickle.PicklingError, TypeError, AttributeError):  # such as a function
        return _parse(settings, values)
    if key not in _parsed:
        _parsed[key] = _parse(settings, values)
    return deepcopy(_parsed[key])


_parsed: dict[tuple[Any, bytes], dict[str, Any]] = {}


def _parse(settings: Any, values: dict[str, Any]) -> dict[str, Any]:
    parser = _parser_of(settings)
    return vars(parser.instantiate(parser.parse_object(values)))


@cache
def _parser_of(options: Any) -> ArgumentParser:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(options, None)
    return parser


def _kind(hint: Any) -> str:
    return " or ".join(
        word.removeprefix("an ").removeprefix("a ") for word in _wanted(hint).split(" or ")
    )


def _wanted(hint: Any) -> str:
    """Return an annotation in words."""
    origin = get_origin(hint)
    if origin is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    if origin in (Union, UnionType):
        return " or ".join(map(_wanted, get_args(hint)))
    plain = origin or hint
    return _KINDS.get(getattr(plain, "__name__", ""), str(hint))


def _name_of(owner: Any) -> str:
    return getattr(owner, "name", "") or owner.__name__

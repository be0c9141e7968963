"""Settings that a class of any module owns: its ``Options``, a dataclass, from values of a config.

Types, defaults and help texts are the dataclass's own, so that whoever writes a class writes them
once.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, Field, fields, is_dataclass
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

if TYPE_CHECKING:  # a tenth of a second, which whoever prepares a store need not wait for
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


def parse_options(owner: Any, values: dict[str, Any], key: str) -> Any:
    """The owner's Options with these values; what is null or not given takes its default.

    key: where the values stand in the config, for messages.
    Raises ConfigError for an option that the owner does not have, one without default that is not
    given, a wrong type, and what the dataclass itself refuses.
    """
    if not is_dataclass(owner.Options):
        raise ConfigError(f"{key}: {_name_of(owner)}.Options must be a dataclass")
    settings: Any = owner.Options
    chosen = {name: value for name, value in values.items() if value is not None}
    known = [item.name for item in fields(settings)]
    for name in sorted(chosen.keys() - set(known)):
        has = f"has {', '.join(known)}" if known else "has none"
        raise ConfigError(f"{key}.{name} is no option of {_name_of(owner)}, which {has}")
    for item in fields(settings):
        if item.name not in chosen and item.default is item.default_factory is MISSING:
            raise ConfigError(f"{key}.{item.name}: {_name_of(owner)} has no default for it; set it")
    from jsonargparse import ArgumentError

    try:
        parser = _parser_of(settings)
        typed = vars(parser.instantiate(parser.parse_object(chosen)))
        return settings(**typed)
    except ArgumentError as error:
        raise ConfigError(_of_option(str(error), owner, chosen, key)) from None
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None


def options_help(owner: Any) -> list[Option]:
    """The options that a class has, as its help text lists them."""
    from docstring_parser import parse as parse_docstring

    said = {p.arg_name: p.description for p in parse_docstring(owner.Options.__doc__ or "").params}
    hints = get_type_hints(owner.Options)
    found = []
    for item in fields(owner.Options):
        text = " ".join((said.get(item.name) or "").split())
        found.append(Option(item.name, _kind(hints[item.name]), _default(item), text))
    return found


def wrong_type(message: str, prefix: str = "") -> str | None:
    """The parser's message about a value of the wrong type in the words of the other errors."""
    key = re.search(r'Parser key "([\w.]+)"', message)
    kinds = [_KINDS.get(kind, kind) for kind in re.findall(r"Expected a <class '(\w+)'>", message)]
    value = re.search(r"(?:Got|Given) value: (.*)$", message)
    if key and kinds and value:
        return f"{prefix}{key[1]} must be {' or '.join(kinds)}, got {value[1]}"
    return None


def _default(item: Field[Any]) -> str:
    """Return the default of a field as a config file writes it."""
    if item.default is MISSING and item.default_factory is MISSING:
        return "none, to be given"
    value = item.default if item.default_factory is MISSING else item.default_factory()
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _of_option(message: str, owner: Any, chosen: dict[str, Any], key: str) -> str:
    """The parser's message about the value of an option in the words of the other errors."""
    named = re.search(r'Parser key "(\w+)', message)
    if not named:
        return f"{key}: {message}"
    name = named[1]
    wanted = _wanted(get_type_hints(owner.Options)[name])
    return f"{key}.{name} must be {wanted}, got {chosen[name]}"


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
    """An annotation in words."""
    origin = get_origin(hint)
    if origin is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    if origin in (Union, UnionType):
        return " or ".join(map(_wanted, get_args(hint)))
    plain = origin or hint
    return _KINDS.get(getattr(plain, "__name__", ""), str(hint))


def _name_of(owner: Any) -> str:
    return getattr(owner, "name", "") or owner.__name__

"""Settings that a class of any module owns: its ``Options``, a dataclass, from values of a config.

Types, defaults and help texts are the dataclass's own, so that whoever writes a class writes them
once.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, NamedTuple, get_type_hints

from docstring_parser import parse as parse_docstring
from jsonargparse import ArgumentError, ArgumentParser

from kge_torchrec.config.checks import ConfigError

_KINDS = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "tuple": "a list",
    "NoneType": "null",
}


class Option(NamedTuple):
    """One field of an Options class, for people."""

    name: str
    kind: str  # "integer", "number or null", ...
    default: Any
    help: str


def parse_options(owner: Any, values: dict[str, Any], key: str) -> Any:
    """The owner's Options with these values; what is null or not given takes its default.

    key: where the values stand in the config, for messages.
    Raises ConfigError for an option that the owner does not have, a wrong type, and what the
    dataclass itself refuses.
    """
    chosen = {name: value for name, value in values.items() if value is not None}
    known = [item.name for item in fields(owner.Options)]
    for name in sorted(chosen.keys() - set(known)):
        has = f"has {', '.join(known)}" if known else "has none"
        raise ConfigError(f"{key}.{name} is no option of {_name_of(owner)}, which {has}")
    try:
        parser = _parser_of(owner.Options)
        typed = vars(parser.instantiate(parser.parse_object(chosen)))
        return owner.Options(**typed)
    except ArgumentError as error:
        message = wrong_type(str(error), f"{key}.") or f"{key}: {error}"
        raise ConfigError(message) from None
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None


def options_help(owner: Any) -> list[Option]:
    """The options that a class has, as its help text lists them."""
    said = {p.arg_name: p.description for p in parse_docstring(owner.Options.__doc__ or "").params}
    hints = get_type_hints(owner.Options)
    found = []
    for item in fields(owner.Options):
        default = None if item.default is MISSING else item.default
        text = " ".join((said.get(item.name) or "").split())
        found.append(Option(item.name, _kind(hints[item.name]), default, text))
    return found


def wrong_type(message: str, prefix: str = "") -> str | None:
    """The parser's message about a value of the wrong type in the words of the other errors."""
    key = re.search(r'Parser key "([\w.]+)"', message)
    kinds = [_KINDS.get(kind, kind) for kind in re.findall(r"Expected a <class '(\w+)'>", message)]
    value = re.search(r"(?:Got|Given) value: (.*)$", message)
    if key and kinds and value:
        return f"{prefix}{key[1]} must be {' or '.join(kinds)}, got {value[1]}"
    return None


@cache
def _parser_of(options: type) -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(options, None)
    return parser


def _kind(hint: Any) -> str:
    members = getattr(hint, "__args__", (hint,))
    words = [_KINDS.get(getattr(m, "__name__", str(m)), str(m)) for m in members]
    return " or ".join(word.removeprefix("an ").removeprefix("a ") for word in words)


def _name_of(owner: Any) -> str:
    return getattr(owner, "name", "") or owner.__name__

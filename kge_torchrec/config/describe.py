"""Describe the keys of the config: help for a terminal, a page, and a JSON schema for editors."""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from functools import cache
from itertools import pairwise
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin

from kge_torchrec.config import Config
from kge_torchrec.config.keys import Part, declared, default_of, group_of, key_of, owner_of
from kge_torchrec.config.options import as_yaml, checks_of, hints, in_words, members, settings_of
from kge_torchrec.config.registry import KINDS, resolve

_COLUMNS = """\
| key | default | meaning | acts only with | may change on resume |
|---|---|---|---|---|"""


def _sections() -> dict[str, dict[str, Field[Any]]]:
    """Return the keys of each section; those without one are "the rest"."""
    sections: dict[str, dict[str, Field[Any]]] = {}
    for name, item in declared(Config).items():
        section = name.partition(".")[0] if "." in name else "the rest"
        sections.setdefault(section, {})[name] = item
    return sections


def keys_help(first: str = "") -> str:
    """Return the help of keys for a terminal: of all, or of those that begin with ``first``."""
    lines = []
    for section, keys in _sections().items():
        if not first:
            lines.append(f"{section}:")
        for name, item in keys.items():
            if name.startswith(first) and (not first or name != "data.path"):
                owner, own = owner_of(Config, name)
                kind, default = in_words(hints(owner)[own]), as_yaml(default_of(item))
                lines.append(f"  --{name} VALUE ({kind}, default {default or 'empty'})")
                lines += textwrap.wrap(
                    help_of(Config, name), 98, initial_indent=" " * 8, subsequent_indent=" " * 8
                )
    return "\n".join(lines)


def keys_tables() -> str:
    """Return a table of keys for each section, in Markdown."""
    parts = []
    for section, keys in _sections().items():
        parts += [f"## {section}\n", _COLUMNS]
        for name, item in keys.items():
            rules = key_of(item)
            parts.append(_row(name, item, help_of(Config, name), rules.resume.answer))
            for option, text, owners in _options_of(rules.part).values():
                text = f"{', '.join(owners)}: {text}"
                parts.append(_row(f"{name}.{option.name}", option, text, rules.resume.answer))
        parts[-1] += "\n"
    return "\n".join(parts).rstrip()


def _row(name: str, item: Field[Any], text: str, resume: str) -> str:
    acts = "; ".join(condition.words for condition in key_of(item).acts)
    default = as_yaml(default_of(item)) or "''"
    cells = (f"`{name}`", f"`{default}`", text, acts, resume)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _options_of(part: Part | None) -> Mapping[str, tuple[Field[Any], str, list[str]]]:
    """Return the options of parts that have a text below, and the parts that have them."""
    rows: dict[str, tuple[Field[Any], str, list[str]]] = {}
    for name in KINDS[part.kind].ours if part is not None else ():
        settings = settings_of(resolve(part.kind, name))  # type: ignore[union-attr]
        for item in fields(settings):
            if item.name in texts_below(settings):
                text = texts_below(settings)[item.name]
                rows.setdefault(item.name, (item, text, []))[2].append(name)
    return rows


@cache
def texts_below(cls: Any) -> dict[str, str]:
    """Return {field: the text below it} of a dataclass and its bases."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        texts |= _texts_in(base.__module__).get(base.__qualname__, {})
    return texts


@cache
def _texts_in(module: str) -> dict[str, dict[str, str]]:
    """Return the texts below fields in the source of a module, by class."""
    texts: dict[str, dict[str, str]] = {}

    def read(node: ast.Module | ast.ClassDef, prefix: str) -> None:
        for above, below in pairwise(node.body):
            if isinstance(above, ast.AnnAssign) and isinstance(below, ast.Expr):
                text = " ".join(ast.literal_eval(below.value).split())
                text = text.replace("SCORER_NAMES", ", ".join(KINDS["scorer"].ours))
                texts.setdefault(prefix.rstrip("."), {})[ast.unparse(above.target)] = text
        for inner in node.body:
            if isinstance(inner, ast.ClassDef):
                read(inner, f"{prefix}{inner.name}.")

    with contextlib.suppress(OSError, TypeError):  # a class of a session has no source
        read(ast.parse(inspect.getsource(sys.modules[module])), "")
    return texts


def help_of(cls: Any, name: str) -> str:
    """Return the help of a dotted key."""
    owner, own = owner_of(cls, name)
    return texts_below(owner).get(own, "")


class Option(NamedTuple):
    """One field of an Options class, for people."""

    name: str
    kind: str  # "integer", "number or null", ...
    default: str  # as a config has it
    help: str


def options_help(owner: Any) -> list[Option]:
    """Return the options of a class, with the help of their keys or of the docstring."""
    settings = settings_of(owner)
    said = _arguments_in(settings.__doc__ or "") | texts_below(settings)
    options = []
    for item in fields(settings):
        kind = re.sub(r"\ban? ", "", in_words(hints(settings)[item.name]))
        has_none = item.default is item.default_factory is MISSING
        default = "none, must be set" if has_none else as_yaml(default_of(item))
        options.append(Option(item.name, kind, default, said.get(item.name, "")))
    return options


def _arguments_in(docstring: str) -> dict[str, str]:
    """Return {name: text} of the section Args of a docstring in Google's style."""
    _, _, arguments = inspect.cleandoc(docstring).partition("\nArgs:\n")
    found = re.finditer(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", arguments, re.MULTILINE)
    return {entry[1]: " ".join(entry[2].split()) for entry in found}


# The JSON schema: editors complete and check a config file by it

_NAMES = {int: "integer", float: "number", bool: "boolean", str: "string", NoneType: "null"}
_TYPES = {list: "array", tuple: "array", dict: "object"}
_DOTTED: dict[str, Any] = {r"^\w+(\.\w+)+$": {}}  # train.lr is the same as lr within train
_BY_KEY = {of.key: kind for kind, of in KINDS.items()}


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a config file; the options of a part depend on its name."""
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "kge_torchrec config"}
    return schema | _schema_of(Config, "")


def _schema_of(cls: Any, prefix: str) -> dict[str, Any]:
    """Return the schema of a group of keys, or of the options of a part."""
    properties: dict[str, Any] = {}
    depends: list[Any] = []
    said = {option.name: option.help for option in options_help(cls)}
    for item in fields(cls):
        name, group = f"{prefix}{item.name}", group_of(item)
        if group is not None:
            title = (group.__doc__ or "").partition("\n")[0]
            properties[item.name] = {"description": title, **_schema_of(group, f"{name}.")}
            continue
        own = _type_schema(hints(cls)[item.name]) | {"description": said[item.name]}
        if item.default is not MISSING:
            own["default"] = list(item.default) if isinstance(item.default, tuple) else item.default
        if (part := key_of(item).part) is not None:
            depends += _options_by_name(item.name, part, cls)
        kind = _BY_KEY.get(name)
        if kind is not None and own.get("type") == "object":  # a weight or options for each name
            number = {"type": "number"}
            own["properties"] = {
                part: {"anyOf": [number, _schema_of(settings_of(resolve(kind, part)), "")]}
                for part in KINDS[kind].ours
            }
        elif kind is not None:  # complete names, and accept import paths
            own["anyOf"] = [{"enum": list(KINDS[kind].ours)}, {"type": own.pop("type")}]
        properties[item.name] = own
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    if depends:
        schema["allOf"] = depends
    return schema | ({"patternProperties": _DOTTED} if cls is Config else {})


def _type_schema(hint: Any) -> dict[str, Any]:
    for kind in members(hint):
        if get_origin(kind) is Literal:
            return {"enum": [*get_args(kind), *[None] * (NoneType in members(hint))]}
    kinds = [get_origin(kind) or kind for kind in members(hint)]
    names = [(_NAMES | _TYPES).get(kind) for kind in kinds]
    if not all(names):
        return {}
    schema: dict[str, Any] = {"type": names[0] if len(names) == 1 else names}
    if "array" in names and get_args(members(hint)[0]):
        schema["items"] = _type_schema(get_args(members(hint)[0])[0])
    for check in checks_of(hint):
        schema |= getattr(check, "schema", {})
    return schema


def _options_by_name(key: str, part: Part, cls: Any) -> list[Any]:
    """Return conditions: where a part is named, or the default, the key has its options."""
    names: dict[Any, list[str]] = {}
    for name in KINDS[part.kind].ours:
        names.setdefault(settings_of(resolve(part.kind, name)), []).append(name)
    default = default_of(cls.__dataclass_fields__[part.field])
    return [
        {
            "if": {
                "properties": {part.field: {"enum": owners}},
                **({} if default in owners else {"required": [part.field]}),
            },
            "then": {"properties": {key: _schema_of(settings, "")}},
        }
        for settings, owners in names.items()
    ]

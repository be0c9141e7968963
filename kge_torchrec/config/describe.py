"""Describe the keys of the config and the parts that it names.

For a terminal, for a page, and as a JSON schema for editors.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, fields
from functools import cache
from itertools import groupby, pairwise
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from kge_torchrec.config import Config
from kge_torchrec.config.keys import Key, Part, declared, group_of
from kge_torchrec.config.options import as_yaml, checks_of, in_words, members
from kge_torchrec.config.registry import KINDS, resolve

_COLUMNS = """\
| key | default | meaning | acts only with | may change on resume |
|---|---|---|---|---|"""


def keys_help(first: str = "") -> str:
    """Return the help of keys for a terminal: of all, or of those that begin with ``first``."""
    lines: list[str] = []
    for section, keys in _sections():
        lines += [] if first else [f"{section}:"]
        for key in keys:
            if key.name.startswith(first) and (not first or key.name != "data.path"):
                lines += _entry(key.name, key)
    return "\n".join(lines)


def parts_help(kind: str, name: str | None = None) -> str:
    """Describe every part of a kind, or one part by name or import path, for a terminal.

    Raises:
        ConfigError: The name is unknown.
    """
    named = KINDS[kind].key
    holders = [key.name for key in declared(Config).values() if key.part and key.part.kind == kind]
    lines = [f"{named}: one of these, or package.module:Class", ""]
    for part in KINDS[kind].ours if name is None else [name]:
        cls = resolve(kind, part)
        first_sentence = (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ")
        lines += [part, *_wrapped(getattr(cls, "formula", "") or first_sentence, 4)]
        for option, key in declared(cls.Options).items():
            lines += _entry(f"{holders[0] if holders else f'{named}.{part}'}.{option}", key)
        lines.append("")
    return "\n".join(lines)


def keys_tables() -> str:
    """Return a table of keys for each section, in Markdown."""
    parts = []
    for section, keys in _sections():
        parts += [f"## {section}\n", _COLUMNS]
        for key in keys:
            parts.append(_row(key.name, key, help_of(key), key.resume.answer))
            parts += _rows_of_options(key)
        parts[-1] += "\n"
    return "\n".join(parts).rstrip()


def _sections() -> Iterator[tuple[str, Iterator[Key]]]:
    """Return the keys of each section; those without one are "the rest"."""
    return groupby(
        declared(Config).values(),
        lambda key: key.name.partition(".")[0] if "." in key.name else "the rest",
    )


def _rows_of_options(holder: Key) -> Iterator[str]:
    """Yield a row of the table for each option that a key may hold; equal ones share a row."""
    rows: dict[tuple[str, str, str], tuple[Key, list[str]]] = {}
    if holder.part is None:
        return
    for part in KINDS[holder.part.kind].ours:
        for name, key in declared(resolve(holder.part.kind, part).Options).items():
            same = name, help_of(key), as_yaml(key.default)
            rows.setdefault(same, (key, []))[1].append(part)
    for (name, text, _), (key, owners) in rows.items():
        said = f"{', '.join(owners)}: {text}"
        yield _row(f"{holder.name}.{name}", key, said, holder.resume.answer)


def _entry(name: str, key: Key) -> list[str]:
    default = "none, must be set" if key.default is MISSING else as_yaml(key.default) or "empty"
    head = f"  --{name} VALUE ({in_words(key.type)}, default {default})"
    return [head, *_wrapped(help_of(key), 8)]


def _wrapped(text: str, indent: int) -> list[str]:
    blanks = " " * indent
    return textwrap.wrap(text, 98, initial_indent=blanks, subsequent_indent=blanks)


def _row(name: str, key: Key, text: str, resume: str) -> str:
    acts = "; ".join(condition.words for condition in key.acts)
    cells = (f"`{name}`", f"`{as_yaml(key.default) or repr('')}`", text, acts, resume)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def help_of(key: Key) -> str:
    """Return the text below the field of a key, in its class or a base of it."""
    own = key.name.rpartition(".")[2]
    texts = (_texts_in(base.__module__).get(base.__qualname__, {}) for base in key.owner.__mro__)
    return next((found[own] for found in texts if own in found), "")


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


# The JSON schema: editors complete and check a config file by it

_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string", NoneType: "null",
          list: "array", tuple: "array", dict: "object"}  # fmt: skip
_DOTTED: dict[str, Any] = {r"^\w+(\.\w+)+$": {}}  # train.lr is the same as lr within train
_BY_KEY = {of.key: kind for kind, of in KINDS.items()}


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a config file; the options of a part depend on its name."""
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "kge_torchrec config"}
    return {**schema, **_schema_of(Config, ""), "patternProperties": _DOTTED}


def _schema_of(cls: Any, prefix: str) -> dict[str, Any]:
    """Return the schema of a group of keys, or of the options of a part."""
    properties: dict[str, Any] = {}
    depends: list[Any] = []
    for item in fields(cls):
        name, group = f"{prefix}{item.name}", group_of(item)
        if group is not None:
            title = (group.__doc__ or "").partition("\n")[0]
            properties[item.name] = {"description": title, **_schema_of(group, f"{name}.")}
            continue
        key = declared(cls)[item.name]
        own = _type_schema(key.type) | {"description": help_of(key)}
        if item.default is not MISSING:
            own["default"] = list(item.default) if isinstance(item.default, tuple) else item.default
        if key.part is not None:
            depends += _options_by_name(item.name, key.part, cls)
        kind = _BY_KEY.get(name)
        if kind is not None and own.get("type") == "object":  # a weight or options for each name
            number = {"type": "number"}
            own["properties"] = {
                part: {"anyOf": [number, _schema_of(resolve(kind, part).Options, "")]}
                for part in KINDS[kind].ours
            }
        elif kind is not None:  # complete names, and accept import paths
            own["anyOf"] = [{"enum": list(KINDS[kind].ours)}, {"type": own.pop("type")}]
        properties[item.name] = own
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return schema | ({"allOf": depends} if depends else {})


def _type_schema(hint: Any) -> dict[str, Any]:
    for kind in members(hint):
        if get_origin(kind) is Literal:
            return {"enum": [*get_args(kind), *[None] * (NoneType in members(hint))]}
    names = [_TYPES.get(get_origin(kind) or kind) for kind in members(hint)]
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
        names.setdefault(resolve(part.kind, name).Options, []).append(name)
    default = declared(cls)[part.field].default
    return [
        {
            "if": {
                "properties": {part.field: {"enum": owners}},
                **({} if default in owners else {"required": [part.field]}),
            },
            "then": {"properties": {key: _schema_of(options, "")}},
        }
        for options, owners in names.items()
    ]

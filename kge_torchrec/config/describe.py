"""Describe the keys of the config and the parts that it names.

For a terminal, for a page, and as a JSON schema for editors.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, fields
from functools import cache
from itertools import groupby, pairwise
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from kge_torchrec.config import Config, ConfigError
from kge_torchrec.config.checks import as_yaml, checks_of, in_words, members
from kge_torchrec.config.keys import Key, declared, group_of
from kge_torchrec.config.registry import KINDS, resolve

_COLUMNS = """\
| key | default | meaning | acts only with | may change on resume |
|---|---|---|---|---|"""


def keys_help(first: str = "") -> str:
    """Return the help of keys for a terminal: of all, or of those that begin with ``first``."""
    lines: list[str] = []
    for section, keys in _sections():
        shown = [
            line for key in keys if key.name.startswith(first) for line in _entry(key.name, key)
        ]
        lines += [f"{section}:", *shown] if shown else []
    if not lines:
        raise ConfigError(f"no key begins with {first!r}")
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
            for option, text, owners in _options(key.part.kind) if key.part else ():
                said = f"{', '.join(owners)}: {text}"
                parts.append(_row(f"{key.name}.{option.name}", option, said, key.resume.answer))
        parts[-1] += "\n"
    return "\n".join(parts).rstrip()


def _sections() -> Iterator[tuple[str, Iterator[Key]]]:
    """Return the keys of each section; those without one are "the rest"."""
    return groupby(
        declared(Config).values(),
        lambda key: key.name.partition(".")[0] if "." in key.name else "the rest",
    )


def _options(kind: str) -> list[tuple[Key, str, list[str]]]:
    """Return each option of the parts of a kind, its help and owners; equal ones share an entry."""
    options: dict[tuple[str, str, str], tuple[Key, str, list[str]]] = {}
    for part in KINDS[kind].ours:
        for name, key in declared(resolve(kind, part).Options).items():
            same = name, help_of(key), as_yaml(key.default)
            options.setdefault(same, (key, same[1], []))[2].append(part)
    return list(options.values())


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
    return next((texts[own] for base in key.owner.__mro__ if own in (texts := _texts_in(base))), "")


@cache
def _texts_in(cls: type) -> dict[str, str]:
    """Return the texts below fields in the source of a class."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError):  # a class of a session has no source
        return {}
    assert isinstance(tree, ast.ClassDef)
    texts: dict[str, str] = {}
    for above, below in pairwise(tree.body):
        if isinstance(above, ast.AnnAssign) and isinstance(below, ast.Expr):
            text = " ".join(ast.literal_eval(below.value).split())
            names = ", ".join(KINDS["scorer"].ours)
            texts[ast.unparse(above.target)] = text.replace("SCORER_NAMES", names)
    return texts


# The JSON schema: editors complete and check a config file by it

_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string", NoneType: "null",
          list: "array", tuple: "array", dict: "object"}  # fmt: skip
_DOTTED: dict[str, Any] = {r"^\w+(\.\w+)+$": {}}  # train.lr is the same as lr within train
_BY_KEY = {of.key: kind for kind, of in KINDS.items()}


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a config file."""
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "kge_torchrec config"}
    return {**schema, **_schema_of(Config, ""), "patternProperties": _DOTTED}


def _schema_of(cls: Any, prefix: str) -> dict[str, Any]:
    """Return the schema of a group of keys, or of the options of a part."""
    properties: dict[str, Any] = {}
    for item in fields(cls):
        name, group = f"{prefix}{item.name}", group_of(item)
        if group is not None:
            title = (group.__doc__ or "").partition("\n")[0]
            properties[item.name] = {"description": title, **_schema_of(group, f"{name}.")}
            continue
        key = declared(cls)[item.name]
        own = properties[item.name] = _key_schema(key, help_of(key))
        kind = _BY_KEY.get(name)
        if key.part is not None:  # the options of every part, which another key names
            options = own["properties"] = {}
            for option, text, owners in _options(key.part.kind):
                found = options.setdefault(option.name, _key_schema(option, ""))
                said = f"{found['description']} {', '.join(owners)}: {text}"
                found["description"] = said.strip()
        elif kind is not None and own.get("type") == "object":  # a weight or options for each name
            number = {"type": "number"}
            own["properties"] = {
                part: {"anyOf": [number, _schema_of(resolve(kind, part).Options, "")]}
                for part in KINDS[kind].ours
            }
        elif kind is not None:  # complete names, and accept import paths
            own["anyOf"] = [{"enum": list(KINDS[kind].ours)}, {"type": own.pop("type")}]
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _key_schema(key: Key, text: str) -> dict[str, Any]:
    schema = _type_schema(key.type) | {"description": text}
    if key.default is not MISSING:
        is_tuple = isinstance(key.default, tuple)
        schema["default"] = list(key.default) if is_tuple else key.default
    return schema


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

"""``kge-torchrec list``: the keys of a config, and the parts that it can name with their options.

The names, formulas, types, defaults and help texts come from the classes.
"""

from __future__ import annotations

import inspect
import json
import textwrap
from typing import Any, Literal

from kge_torchrec.config import ConfigError
from kge_torchrec.config.describe import Option, json_schema, keys_help, keys_tables, options_help
from kge_torchrec.config.registry import KINDS, resolve

Listed = Literal[
    "keys", "scorer", "loss", "regularizer", "table_optimizer", "schedule", "reader",
    "negative_sampler",
]  # fmt: skip


def list_parts(
    kind: Listed,
    name: str | None = None,
    /,
    *,
    format: Literal["text", "markdown", "json-schema"] = "text",
) -> int:
    """List the keys of a config, or the scorers, losses and other parts that it can name.

    Args:
        kind: keys of a config, or a kind of part
        name: name of a part, or package.module:Class
        format: markdown: a table; json-schema: for editors that complete keys of a config
    """
    if kind == "keys":
        if name is not None:
            raise ConfigError("list keys lists all of them; leave the name out")
        texts = {"text": keys_help, "markdown": keys_tables}
        print(texts[format]() if format in texts else json.dumps(json_schema(), indent=1))
        return 0
    if format == "json-schema" or (format == "markdown" and name is not None):
        raise ConfigError(f"--format {format} has no effect here; leave it out")
    print(listing(kind, name) if format == "text" else options_table(kind))
    return 0


def listing(kind: str, name: str | None = None) -> str:
    """Describe every part of a kind, or one part by name or import path, as indented text.

    Raises:
        ConfigError: The name is unknown.
    """
    names = list(KINDS[kind].ours) if name is None else [name]
    key = KINDS[kind].key
    texts = [_text(part, resolve(kind, part)) for part in names]
    return "\n".join([f"{key}: one of these, or package.module:Class", "", *texts])


def options_table(kind: str) -> str:
    """Return the options of built-in parts as a Markdown table; equal options share a row."""
    owners: dict[Option, list[str]] = {}
    for name in KINDS[kind].ours:
        for option in options_help(resolve(kind, name)):
            owners.setdefault(option, []).append(f"`{name}`")
    rows = ["| name | option | type | default | meaning |", "|---|---|---|---|---|"]
    for option, names in owners.items():
        cells = f"`{option.name}`", option.kind, option.default, option.help
        rows.append(f"| {', '.join(names)} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _text(name: str, part: Any) -> str:
    first_sentence = (inspect.getdoc(part) or "").split("\n\n")[0].replace("\n", " ")
    lines = [name, *_wrapped(getattr(part, "formula", "") or first_sentence, 4)]
    for option in options_help(part):
        described = f"{option.name} ({option.kind}, default {option.default}): {option.help}"
        lines += _wrapped(described, 8)
    return "\n".join([*lines, ""])


def _wrapped(text: str, indent: int) -> list[str]:
    """Return indented lines; those after the first by ``indent``."""
    return textwrap.wrap(text, 100, initial_indent=" " * 4, subsequent_indent=" " * indent)

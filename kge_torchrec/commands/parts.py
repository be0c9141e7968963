"""``kge-torchrec list``: what a config can name, with the options of each.

All of it is said by the classes themselves: names, formula, types, defaults, help.
"""

from __future__ import annotations

import argparse
import inspect
import textwrap
from typing import Any

from kge_torchrec.config.options import Option, options_help
from kge_torchrec.config.registry import KINDS, names_of, resolve


def add(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    verb.add_argument("kind", choices=tuple(KINDS))
    verb.add_argument("name", nargs="?", help="one of them, or package.module:Class")


def run(parsed: argparse.Namespace) -> int:
    """Run the verb; return the exit code."""
    print(listing(parsed.kind, parsed.name))
    return 0


def listing(kind: str, name: str | None = None) -> str:
    """Every part of a kind, or one by name or import path, as indented text.

    Raises ConfigError for a name that there is not.
    """
    names = names_of(kind) if name is None else [name]
    key = KINDS[kind].key
    texts = [_text(each, resolve(kind, each)) for each in names]
    return "\n".join([f"{key}: one of these, or package.module:Class", "", *texts])


def options_table(kind: str) -> str:
    """The options of our parts of a kind as rows of a Markdown table; what is the same is one."""
    owners: dict[Option, list[str]] = {}
    for name in KINDS[kind].ours:
        for option in options_help(resolve(kind, name)):
            owners.setdefault(option, []).append(f"`{name}`")
    rows = ["| name | option | type | default | meaning |", "|---|---|---|---|---|"]
    for option, names in owners.items():
        said = f"`{option.name}`", option.kind, option.default, option.help
        rows.append(f"| {', '.join(names)} | {' | '.join(said)} |")
    return "\n".join(rows)


def _text(name: str, part: Any) -> str:
    lines = [name, *_wrapped(getattr(part, "formula", "") or _first_sentence(part), "    ")]
    for option in options_help(part):
        lines += _wrapped(_said(option), "    ", "        ")
    return "\n".join([*lines, ""])


def _said(option: Option) -> str:
    return f"{option.name} ({option.kind}, default {option.default}): {option.help}"


def _first_sentence(part: Any) -> str:
    return (inspect.getdoc(part) or "").split("\n\n")[0].replace("\n", " ")


def _wrapped(text: str, first: str, following: str | None = None) -> list[str]:
    return textwrap.wrap(text, 100, initial_indent=first, subsequent_indent=following or first)

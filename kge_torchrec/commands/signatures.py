"""The parser of a verb, made of the signature of its function."""

from __future__ import annotations

import inspect
import re
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

# The help of arguments that mean the same in every verb.
_SHARED_HELP = {
    "format": "how results are written",
    "output": "file to write (default: print)",
    "names": "file of labels and readable names, which are shown beside the labels",
    "log_format": "json: one object per line on stderr, without bars",
}


class VerbParser(ArgumentParser):
    """The parser of a verb: it has a value only for what the user gave.

    An argument before ``/`` is positional, and others are options; ``output`` is also ``-o``.

    - ``str``, ``int``, ``float`` take a value; ``Literal`` takes one of some words.
    - ``bool`` is a switch: ``--name`` if its default is False, ``--no-name`` if it is True.
    - ``Sequence[...]`` takes one or more values.
    - ``Annotated[..., "FILE"]`` says how the value is written in --help. Another word "repeated"
      marks an option that takes one value and may be repeated, "positive" an integer from 1 on, and
      "run" a run; a verb with one also takes --data.path, --threads and --allow-import.
    - ``settings: Settings`` takes all words ``--key.sub value`` as a list ["--key.sub=value"].

    Args:
        name: The verb.
        function: What it calls; the docstring is its help.
        related: Lines about related verbs, for the end of --help.
        keys: The first words of the keys that --help lists; None: it lists none.

    Attributes:
        takes_keys: Whether words such as ``--train.lr 0.1`` are settings.
        runs: Names of the arguments that are runs.
        positive: The flags of options that take integers from 1 on, by name.
    """

    def __init__(
        self, name: str, function: Callable[..., int], related: str, keys: str | None
    ) -> None:
        text, _, arguments = (inspect.getdoc(function) or "").partition("\n\nArgs:\n")
        super().__init__(
            prog=f"kge-torchrec {name}",
            description=text,
            epilog=f"related verbs:\n{related}" if related else None,
            formatter_class=RawDescriptionHelpFormatter,
            allow_abbrev=False,
            argument_default=SUPPRESS,
        )
        self.function, self.keys, self.takes_keys = function, keys, False
        self.runs: list[str] = []
        self.positive: dict[str, str] = {}
        found = re.finditer(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", arguments, re.MULTILINE)
        helps = {entry[1]: " ".join(entry[2].replace("%", "%%").split()) for entry in found}
        usage, needed = [self.prog], []
        hints = get_type_hints(function, include_extras=True)
        for item in inspect.signature(function).parameters.values():
            if item.name == "settings":
                self.takes_keys = True
                continue
            flags, options, marks = _option(item, hints[item.name])
            options["help"] = (_SHARED_HELP | helps).get(item.name, "") + options["help"]
            self.add_argument(*flags, **options)
            self.runs += [item.name] if "run" in marks else []
            self.positive |= {item.name: flags[-1]} if "positive" in marks else {}
            if item.kind is item.POSITIONAL_ONLY:
                few = "|".join(options.get("choices", ()))
                shown = options.get("metavar") or (few if len(few) < 20 else item.name.upper())
                shown += " ..." if options.get("nargs") in ("+", "*") else ""
                usage.append(f"[{shown}]" if options.get("nargs") in ("?", "*") else shown)
            elif item.default is item.empty:
                needed.append(f"{flags[0]} {options['metavar']}")
        if self.runs and not self.takes_keys:
            help = "the store of the run's triples, if it is no longer where the run trained"
            self.add_argument("--data.path", metavar="STORE", help=help)
            help = "number of CPU threads per process (default: all cores, shared by the processes)"
            self.add_argument("--threads", type=int, metavar="N", help=help)
            self.positive["threads"] = "--threads"
        if self.runs:
            help = (
                "import this module for a run or export that names a class of it: its code runs "
                "(repeatable)"
            )
            self.add_argument("--allow-import", action="append", metavar="MODULE", help=help)
        ending = ["[--key.sub value ...]"] if self.takes_keys else []
        self.usage = " ".join([*usage, *needed, "[options]", *ending])

    def format_help(self) -> str:
        """Return the help, with the keys that the verb takes."""
        if self.keys is None:
            return super().format_help()
        from kge_torchrec.config.describe import keys_help
        from kge_torchrec.config.parser import published

        head = f"configs:\n  {', '.join(published())}\n"
        if self.keys:
            short = "may be left out, as in --columns for --data.columns"
            head = f"keys ({self.keys} {short}):"
        return f"{super().format_help()}\n{head}\n{keys_help(self.keys)}\n"


def _option(item: inspect.Parameter, hint: Any) -> tuple[list[str], dict[str, Any], set[str]]:
    """Return the flags of an argument, its options for argparse, and the marks of its type."""
    words: list[str] = []
    several = False
    while (origin := get_origin(hint)) not in (None, Literal):
        if origin is Annotated:
            words += hint.__metadata__
            hint = hint.__origin__
        elif origin in (Union, UnionType):
            hint = next(part for part in get_args(hint) if part is not type(None))
        else:
            several, hint = True, get_args(hint)[0]
    marks = {"run", "repeated", "positive"} & set(words)
    shown = [word for word in words if word not in marks]
    options: dict[str, Any] = {"help": ""}
    if get_origin(hint) is Literal:
        options["choices"] = get_args(hint)
    elif hint is bool:
        options["action"] = "store_false" if item.default else "store_true"
    else:
        metavar = shown[-1] if shown else {int: "N", float: "X"}.get(hint, item.name.upper())
        options |= {"type": hint, "metavar": metavar}
    if not (item.default in (item.empty, None, ()) or isinstance(item.default, bool)):
        default = " ".join(map(str, item.default)) if several else item.default
        options["help"] = f" (default: {default})"
    is_needed = item.default is item.empty
    if item.kind is item.POSITIONAL_ONLY:
        if several or not is_needed:
            options["nargs"] = ("+" if is_needed else "*") if several else "?"
        return [item.name], options, marks
    options |= {"dest": item.name, "required": is_needed}
    if "repeated" in marks:
        options["action"] = "append"
    elif several:
        options |= {"action": "extend", "nargs": "+"}
    flag = f"--{'no-' if item.default is True else ''}{item.name.replace('_', '-')}"
    return [*(["-o"] if item.name == "output" else []), flag], options, marks

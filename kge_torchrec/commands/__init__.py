"""The verbs of the command line: their table, how one is run, and the functions that they share.

A verb is two functions in a module of this folder: ``add(verb)`` declares its options, and
``run(parsed)`` does the work and returns the exit code. Related verbs share a module, where these
functions end with the verb's name. Only the module of the called verb is imported, and
``kge-torchrec --help`` imports none.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kge_torchrec.environment import check_packages, loading_torch

if TYPE_CHECKING:
    from kge_torchrec.answers import AnsweringModel
    from kge_torchrec.answers.batch_inference import FileReport
    from kge_torchrec.config import Config
    from kge_torchrec.trained_run import Run

GROUPS = ("Train", "Look", "Use", "Share")


class Verb(NamedTuple):
    """A verb of the command line.

    Attributes:
        place: Heading in ``kge-torchrec --help``, or the verb whose --help lists this verb.
        does: One line of help.
        one_process: Whether it refuses to run as several processes of torchrun.
        takes_keys: Whether it takes CONFIG as its first word, and ``--key.sub value`` among its
            options. They arrive as ``parsed.config`` and ``parsed.overrides``.
    """

    place: str
    does: str
    one_process: bool = False
    takes_keys: bool = False


VERBS = {
    "prepare": Verb("Train", "turn files of triples into a store for many runs", one_process=True),
    "train": Verb("Train", "train a model and rank the test triples with it", takes_keys=True),
    "extend": Verb("Train", "add triples, with new entities and relations, to a run"),
    "tune": Verb("Train", "search for good settings by many runs", takes_keys=True),
    "data": Verb("Look", "check a graph for leaks, repeats and unseen entities", one_process=True),
    "list": Verb("Look", "list scorers, losses and other parts of a config"),
    "plan": Verb("Look", "estimate memory and step time without devices", takes_keys=True),
    "evaluate": Verb("Look", "rank the triples of a split with a trained run"),
    "compare": Verb("Look", "train and measure several engines side by side", takes_keys=True),
    "report": Verb("Look", "write an HTML page about one run or several", one_process=True),
    "predict": Verb("Use", "list the best answers to a triple with one part missing"),
    "recommend": Verb("predict", "list the best tails of a relation for one head or many"),
    "score": Verb("predict", "score the triples of a file"),
    "nearest": Verb("predict", "list the entities nearest to one"),
    "calibrate": Verb("Use", "fit probabilities to a run's scores"),
    "export": Verb("Share", "write a trained run as files that other programs read"),
    "serve": Verb("Share", "answer queries about a run over HTTP", one_process=True),
}  # fmt: skip


# The module of a verb, if it has another name.
MODULES = {
    "data": "prepare", "extend": "train", "list": "parts",
    "report": "evaluate", "calibrate": "evaluate",
    "recommend": "predict", "score": "predict", "nearest": "predict",
    "export": "share", "serve": "share",
}  # fmt: skip


class VerbParser(argparse.ArgumentParser):
    """The parser of a verb. ``ending`` returns a text for the end of --help, if there is one."""

    ending: Callable[[], str] | None = None

    def format_help(self) -> str:
        return super().format_help() + ("" if self.ending is None else self.ending())


def lines_of(place: str) -> str:
    """Return a line per verb of a place: its name and what it does."""
    return "\n".join(
        f"  {name:<11}{verb.does}" for name, verb in VERBS.items() if verb.place == place
    )


def closest(word: str, known: Sequence[str]) -> str:
    """Return "; did you mean ...?" for a word close to a known word, otherwise nothing."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else ""


def parser_of(name: str) -> VerbParser:
    """Return the parser of a verb."""
    verb, related = VERBS[name], lines_of(name)
    parser = VerbParser(
        prog=f"kge-torchrec {name}",
        description=f"{verb.does[0].upper()}{verb.does[1:]}.",
        epilog=f"related verbs:\n{related}" if related else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=not verb.takes_keys,
    )
    _function(name, "add")(parser)
    takes_run = any(_is_run(action) for action in parser._actions)
    if takes_run and not verb.takes_keys:
        parser.add_argument(
            "--data.path",
            dest="data_path",
            metavar="STORE",
            help="the store of the run's triples, if it is no longer where the run trained",
        )
    if verb.takes_keys or takes_run:
        parser.add_argument(
            "--allow-import",
            action="append",
            default=[],
            metavar="MODULE",
            help="import this module for a run or export that names a class of it: its code runs "
            "(repeatable)",
        )
    return parser


def run_verb(name: str, words: Sequence[str]) -> int:
    """Run a verb with its arguments; return the exit code."""
    from kge_torchrec.config.checks import ConfigError

    verb, parser, words = VERBS[name], parser_of(name), list(words)
    if verb.takes_keys and not words:
        parser.print_usage(sys.stderr)
        print(f"\nSee kge-torchrec {name} --help.", file=sys.stderr)
        return 2
    # A parser cannot tell CONFIG from the value of an override, so CONFIG comes first.
    config = words.pop(0) if verb.takes_keys and not words[0].startswith("-") else None
    parsed, unparsed = parser.parse_known_args(words)
    check_packages()
    _check_known(parser, unparsed, verb.takes_keys)
    if verb.takes_keys:
        parsed.config, parsed.overrides = config, unparsed
    _import_named(words, config, getattr(parsed, "allow_import", ()))
    _fetch_runs(parser, parsed)
    ranks = os.environ.get("WORLD_SIZE", "1")
    if verb.one_process and ranks != "1":
        raise ConfigError(f"{name} runs in one process, not {ranks} ranks: run it without torchrun")
    data = getattr(parsed, "data_path", None)
    if data is not None:
        from kge_torchrec.training.run_folder import RunFolder

        RunFolder.data = data
    try:
        code: int = _function(name, "run")(parsed)
    finally:
        if data is not None:
            RunFolder.data = None
    return code


def _import_named(words: Sequence[str], config: str | None, allowed: Sequence[str]) -> None:
    """Let Python find the modules that the user names, and import those of --allow-import.

    The command line names modules of the working directory, and a config those beside it.
    The config of a run names none.
    """
    from kge_torchrec.config.registry import find_modules, import_modules

    named = [*words, *(f"{module}:Any" for module in allowed)]
    find_modules("\n".join(named), Path.cwd())
    if config is not None:
        from kge_torchrec.config.parser import find_config, is_of_run

        file = find_config(config)
        if not is_of_run(config):
            find_modules(file.read_text(encoding="utf-8", errors="replace"), file.resolve().parent)
    if allowed:
        with loading_torch():
            import_modules(allowed)


def _is_run(action: argparse.Action) -> bool:
    return str(action.metavar).startswith("RUN")


def _fetch_runs(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> None:
    """Replace the URLs of runs by folders in the user's cache.

    A verb gets a folder, except for ``train --resume``, which names another one for training.
    """
    from kge_torchrec.config.checks import is_url

    def folder(run: str) -> str:
        if not is_url(run):
            return run
        from kge_torchrec.training.remote_runs import folder_of

        return str(folder_of(run).path)

    for action in parser._actions:
        runs = getattr(parsed, action.dest, None)
        if _is_run(action) and action.dest != "resume" and runs:
            folders = list(map(folder, runs)) if isinstance(runs, list) else folder(runs)
            setattr(parsed, action.dest, folders)


def _function(name: str, kind: str) -> Callable[[Any], Any]:
    """Return the function ``add`` or ``run`` of a verb."""
    module = import_module(f"kge_torchrec.commands.{MODULES.get(name, name)}")
    function: Callable[[Any], Any]
    function = getattr(module, f"{kind}_{name}", None) or getattr(module, kind)
    return function


def _check_known(parser: VerbParser, words: Sequence[str], takes_keys: bool) -> None:
    """Refuse words that are neither options of the verb nor keys of a config (if it takes them)."""
    options = [option for action in parser._actions for option in action.option_strings]
    for word in words:
        option = word.partition("=")[0]
        hint = closest(option, options)
        if takes_keys and (not hint or "." in option or _is_key(option.removeprefix("--"))):
            continue  # the config reports keys that it does not know
        if option.startswith("-"):
            parser.error(f"unknown option {option}{hint}")
        parser.error(f"unexpected argument {word!r}")


def _is_key(name: str) -> bool:
    from kge_torchrec.config import all_keys

    return name in all_keys()


def add_format(verb: argparse.ArgumentParser, *more: str) -> None:
    """Add --format: table, json, or one of ``more``."""
    verb.add_argument(
        "--format", choices=("table", "json", *more), default="table", help="default: table"
    )


def add_log(verb: argparse.ArgumentParser) -> None:
    """Add --log, for what is said while a run trains."""
    verb.add_argument(
        "--log",
        choices=("text", "json"),
        default="text",
        help="json: one object per line on stderr, without bars (default: text)",
    )


def take_log(parsed: argparse.Namespace) -> list[str]:
    """Follow --log; return the settings of a config that belong to it."""
    if parsed.log == "text":
        return []
    from kge_torchrec.lines import show_as_json

    show_as_json()
    return ["--run.progress=false"]


def add_output(verb: argparse.ArgumentParser) -> None:
    """Add --format and -o, for rows that are printed or written to a file."""
    add_format(verb, "tsv", "parquet")
    verb.add_argument("-o", "--output", metavar="FILE", help="file to write (default: print)")
    verb.add_argument(
        "--names",
        metavar="FILE",
        help="file of labels and readable names, which are shown beside the labels",
    )


def write_records(parsed: argparse.Namespace, records: Sequence[Any], kind: type) -> None:
    """Print or write instances of a dataclass, as --format and -o say."""
    if not is_first_rank():
        return
    from kge_torchrec.answers.tables import check_output, record_rows, written

    check_output(parsed.format, parsed.output)
    with written(parsed.format, parsed.output, parsed.names) as write:
        write(record_rows(records, kind))


def print_problems(report: FileReport, path: str) -> int:
    """Print the lines that were not answered; return the exit code: 1 if there are any."""
    if is_first_rank():
        for line, reason in report.problems:
            print(f"{path}:{line}: {reason}", file=sys.stderr)
        if report.problems:
            lines = report.answered + len(report.problems)
            print(f"{len(report.problems):,} of {lines:,} lines not answered", file=sys.stderr)
    return int(bool(report.problems))


def is_first_rank() -> bool:
    """Return whether this process is rank 0, which prints for all ranks."""
    return os.environ.get("RANK", "0") == "0"


def opened(folder: str) -> Run:
    """Open the run in a folder, like ``open_run``."""
    with loading_torch():
        config = config_of(folder)
        from kge_torchrec.trained_run import Run

    return Run(folder, config)


def answering(folder: str) -> AbstractContextManager[Run | AnsweringModel]:
    """Open the run or the export in a folder."""
    if not (Path(folder) / "model.json").is_file():
        return opened(folder)
    with loading_torch():
        from kge_torchrec.export.plain_model import load_model

    return nullcontext(load_model(folder))


def config_of(folder: str) -> Config:
    """Return the config of the run in a folder.  It does not load torch, which takes seconds.

    Raises:
        ConfigError: The folder has no run.
    """
    from kge_torchrec.training.run_folder import RunFolder

    return RunFolder(folder).load_config()

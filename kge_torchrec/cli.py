"""The command line: a table of verbs, their options, and errors as sentences.

A verb is a typed function of a module in ``commands``. Its signature declares what the verb takes,
and its docstring is the help:

    def nearest(run: RunPath, entity: str, /, *, top: Annotated[int, "K"] = 10) -> int:
        '''List the entities nearest to one.  (Then an "Args:" section in Google's style.)'''

``kge-torchrec nearest RUN ENTITY [--top K]`` calls it. `VerbParser` says how a type becomes an
option. ``kge-torchrec --help`` imports no verb, and a verb imports torch only when it needs it.
``main`` serves one process and every process of torchrun.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import inspect
import logging
import os
import select
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from kge_torchrec.commands import is_first_rank
from kge_torchrec.commands.signatures import VerbParser
from kge_torchrec.environment import check_packages, loading_torch, prepare_process, versions
from kge_torchrec.errors import KGEError, first_line
from kge_torchrec.files import in_words
from kge_torchrec.lines import say_error


class Verb(NamedTuple):
    """A verb of the command line.

    Attributes:
        place: Heading in ``kge-torchrec --help``, or the verb whose --help lists this verb.
        does: One line of help.
        function: Its function, as "module:name" in ``commands``.
        one_process: Whether it refuses to run as several processes of torchrun.
        lists_keys: The first words of the keys that its --help lists; None: it lists none.
    """

    place: str
    does: str
    function: str
    one_process: bool = False
    lists_keys: str | None = None


GROUPS = ("Train", "Look", "Use", "Share")
VERBS = {
    "prepare": Verb("Train", "turn files of triples into a store for many runs", "prepare:prepare",
                    one_process=True, lists_keys="data."),
    "train": Verb("Train", "train a model and rank the test triples with it", "train:train",
                  lists_keys=""),
    "extend": Verb("Train", "add triples, with new entities and relations, to a run",
                   "train:extend"),
    "tune": Verb("Train", "search for good settings by many runs", "tune:tune"),
    "data": Verb("Look", "check a graph for leaks, repeats and unseen entities", "prepare:data",
                 one_process=True, lists_keys="data."),
    "list": Verb("Look", "list keys of a config, scorers, losses and other parts",
                 "parts:list_parts"),
    "plan": Verb("Look", "estimate memory and step time without devices", "plan:plan"),
    "evaluate": Verb("Look", "rank the triples of a split with a trained run",
                     "evaluate:evaluate"),
    "compare": Verb("Look", "train and measure several engines side by side", "compare:compare"),
    "show": Verb("Look", "show results of runs and settings that differ", "show:show",
                 one_process=True),
    "report": Verb("show", "write an HTML page about one run or several", "evaluate:report",
                   one_process=True),
    "predict": Verb("Use", "list the best answers to a triple with one part missing",
                    "predict:predict"),
    "recommend": Verb("Use", "list the best tails of a relation for one head or many",
                      "predict:recommend"),
    "nearest": Verb("Use", "list the entities nearest to one", "predict:nearest"),
    "score": Verb("predict", "score the triples of a file", "predict:score"),
    "calibrate": Verb("Use", "fit probabilities to a run's scores", "evaluate:calibrate"),
    "export": Verb("Share", "write a trained run as files that other programs read",
                   "share:export"),
    "serve": Verb("Share", "answer queries about a run over HTTP", "share:serve",
                  one_process=True),
}  # fmt: skip

STDOUT = 1
READER_GONE = 141  # the exit code of programs that a closed pipe ends: 128 + SIGPIPE

_DESCRIPTION = """\
Knowledge-graph embeddings on TorchRec.

examples:
  kge-torchrec train demo
  kge-torchrec train umls --data.path DIRECTORY --train.lr 0.05
  kge-torchrec predict RUN --head Austria --relation borders
"""
_EPILOG = "See kge-torchrec VERB --help for the options of a verb."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb and return the exit code.  Errors are a sentence on stderr, not a traceback."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    prepare_process()
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    # kernels log when they compile
    logging.getLogger("kge_torchrec.kernels").setLevel(logging.INFO)
    try:
        code = _run(arguments)
        sys.stdout.flush()  # Python's own flush, at its exit, would print a traceback
        return code
    except KeyboardInterrupt as error:
        if is_first_rank():
            say_error(f"kge-torchrec: {str(error) or 'interrupted'}")
        return 130
    except (KGEError, OSError, MemoryError, RuntimeError) as error:
        message: object = error
        if not isinstance(error, KGEError):
            if _is_out_of_memory(error):
                say_error(
                    f"kge-torchrec: not enough memory: {first_line(error)}; reduce model.dim, "
                    "negatives.count, train.batch_size or evaluation.batch_size"
                )
                return 1
            if not isinstance(error, OSError):
                raise
            if isinstance(error, BrokenPipeError) and _reader_has_gone():
                os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)  # for what is still buffered
                return READER_GONE
            message = in_words(error)
        # Rank 0 speaks for all ranks if all of them have the error.
        if is_first_rank():
            say_error(f"kge-torchrec: {message}")
        elif not getattr(error, "on_every_rank", False):
            say_error(f"kge-torchrec: rank {os.environ['RANK']}: {message}")
        return error.exit_code if isinstance(error, KGEError) else 1


def _reader_has_gone() -> bool:
    """Return whether stdout is a pipe that nothing reads any more, as after ``| head``."""
    poll = select.poll()
    poll.register(STDOUT, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether the system, numpy, torch on the CPU or CUDA could not allocate memory."""
    words = ("can't allocate memory", "CUDA out of memory", "not enough memory")
    is_full = isinstance(error, OSError) and error.errno == errno.ENOMEM
    return is_full or isinstance(error, MemoryError) or any(word in str(error) for word in words)


def _run(arguments: list[str]) -> int:
    groups = "\n\n".join(f"{group}:\n{_lines_of(group)}" for group in GROUPS)
    parser = argparse.ArgumentParser(
        prog="kge-torchrec",
        usage="kge-torchrec [-h] [--version] VERB ...",
        description=f"{_DESCRIPTION}\n{groups}",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    help = "show the versions of this program, torch, torchrec and fbgemm"
    parser.add_argument("--version", action="store_true", help=help)
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    if arguments[0].startswith("-"):
        parser.parse_args(arguments)  # exits for --help and for errors
        from kge_torchrec import __version__

        packages = (f"{name} {version or 'missing'}" for name, version in versions().items())
        print(f"kge-torchrec {__version__} ({', '.join(packages)})")
        return 0
    if arguments[0] not in VERBS:
        parser.error(f"there is no verb {arguments[0]!r}{_closest(arguments[0], VERBS)}")
    return run_verb(arguments[0], arguments[1:])


def _lines_of(place: str) -> str:
    """Return a line per verb of a place: its name and what it does."""
    return "\n".join(
        f"  {name:<11}{verb.does}" for name, verb in VERBS.items() if verb.place == place
    )


def _closest(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" for a word close to a known word, otherwise nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)
    close = close or [name for name in known if len(word) > 3 and name.startswith(word)]
    return f"; did you mean {close[0]}?" if close else ""


def parser_of(name: str) -> VerbParser:
    """Return the parser of a verb."""
    verb = VERBS[name]
    module, _, function = verb.function.partition(":")
    found = getattr(import_module(f"kge_torchrec.commands.{module}"), function)
    return VerbParser(name, found, _lines_of(name), verb.lists_keys)


def run_verb(name: str, words: Sequence[str]) -> int:
    """Run a verb with its arguments; return the exit code."""
    from kge_torchrec.config.checks import ConfigError, at_least

    parser = parser_of(name)
    if not words:
        parser.print_usage(sys.stderr)
        print(f"\nSee kge-torchrec {name} --help.", file=sys.stderr)
        return 2
    settings, others = _split(parser, words)
    parsed, unknown = parser.parse_known_intermixed_args(others)
    for word in unknown:
        hint = _closest(word, parser._option_string_actions)
        is_option = word.startswith("-")
        parser.error(
            f"unknown option {word}{hint}" if is_option else f"unexpected argument {word!r}"
        )
    check_packages()
    values = vars(parsed)
    for option, flag in parser.positive.items():
        at_least(flag, values.get(option), 1)
    _find_modules(parser, words, values.get("config"), values.pop("allow_import", []))
    ranks = os.environ.get("WORLD_SIZE", "1")
    if VERBS[name].one_process and ranks != "1":
        raise ConfigError(f"{name} runs in one process, not {ranks} ranks: run it without torchrun")
    given: dict[str, Any] = {}
    if parser.takes_keys:
        values["settings"] = settings
    elif parser.runs:  # keys of every run that the verb reads
        given = {key: values.pop(key) for key in ("data.path", "threads") if key in values}
    parameters = inspect.signature(parser.function).parameters.values()
    positional = [item for item in parameters if item.kind is item.POSITIONAL_ONLY]
    first = [values.pop(item.name, item.default) for item in positional]
    if not given:
        return parser.function(*first, **values)
    from kge_torchrec.training.run_folder import RunFolder

    if "threads" in given:  # an export has no key
        with loading_torch():
            import torch
        torch.set_num_threads(given["threads"])
    RunFolder.given = given
    try:
        return parser.function(*first, **values)
    finally:
        RunFolder.given = {}


def _split(parser: VerbParser, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the settings among the words of a command line, as "--key=value", and the others."""
    options = parser._option_string_actions
    settings, others, left = [], [], iter(words)
    for word in left:
        key, equals, _ = word.partition("=")
        if not (parser.takes_keys and key.startswith("--") and key != "--") or key in options:
            others.append(word)
            continue
        if "." not in key and (hint := _closest(key, options)):
            from kge_torchrec.config import all_keys

            if not {key[2:], f"{parser.keys or ''}{key[2:]}"} & set(all_keys()):
                parser.error(f"unknown option {key}{hint}")
        value = None if equals else next(left, None)  # without one, the config says what is missing
        settings.append(word if value is None else f"{word}={value}")
    return settings, others


def _find_modules(
    parser: VerbParser, words: Sequence[str], config: str | None, allowed: Sequence[str]
) -> None:
    """Let Python find the modules that the user names, and import those of --allow-import.

    A verb that takes settings finds modules of the working directory that the command line names,
    and those beside a config. Any other verb finds those of --allow-import only: neither a run nor
    a label may name the code that it runs.
    """
    from kge_torchrec.config.registry import find_modules, import_modules

    named = [f"{module}:Any" for module in allowed]
    if parser.takes_keys or not parser.runs:
        named += words
    find_modules("\n".join(named), Path.cwd())
    if config is not None:
        from kge_torchrec.config.parser import find_config, is_of_run

        if not is_of_run(config):
            file = find_config(config)
            find_modules(file.read_text(encoding="utf-8", errors="replace"), file.resolve().parent)
    if allowed:
        with loading_torch():
            import_modules(allowed)


if __name__ == "__main__":
    sys.exit(main())

"""The command line: a table of verbs, their options, and errors as sentences.

A verb is a typed function of a module in ``commands``. Its signature declares what the verb takes,
and its docstring is the help:

    def nearest(run: RunPath, entity: str, *, top: Annotated[int, "K"] = 10) -> int:
        '''List the entities nearest to one.  (Then an "Args:" section in Google's style.)'''

``kge-torchrec nearest RUN ENTITY [--top K]`` calls it. ``kge-torchrec --help`` imports no verb, and
a verb imports torch only when it needs it. ``main`` also serves every process of torchrun.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import inspect
import logging
import os
import re
import select
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from kge_torchrec.commands import is_first_rank
from kge_torchrec.environment import check_packages, loading_torch, prepare_process, versions
from kge_torchrec.errors import KGEError, first_line
from kge_torchrec.files import in_words
from kge_torchrec.lines import say_error


class Verb(NamedTuple):
    """A verb of the command line."""

    group: str  # heading in ``kge-torchrec --help``; "" where another verb's --help names it
    does: str  # one line of help
    function: str  # "module:name" in ``commands``
    one_process: bool = False  # whether it refuses to run as several processes of torchrun


GROUPS = ("Train", "Look", "Use", "Share")
VERBS = {
    "prepare": Verb("Train", "turn files of triples into a store for many runs", "prepare:prepare",
                    one_process=True),
    "train": Verb("Train", "train a model and rank the test triples with it", "train:train"),
    "extend": Verb("Train", "add triples, with new entities and relations, to a run",
                   "train:extend"),
    "tune": Verb("Train", "search for good settings by many runs", "tune:tune"),
    "data": Verb("Look", "check a graph for leaks, repeats and unseen entities", "prepare:data",
                 one_process=True),
    "list": Verb("Look", "list keys of a config, scorers, losses and other parts",
                 "parts:list_parts"),
    "plan": Verb("Look", "estimate memory and step time without devices", "plan:plan"),
    "evaluate": Verb("Look", "rank the triples of a split with a trained run",
                     "evaluate:evaluate"),
    "compare": Verb("Look", "train and measure several engines side by side", "compare:compare"),
    "show": Verb("Look", "show results of runs and settings that differ", "show:show",
                 one_process=True),
    "report": Verb("", "write an HTML page about one run or several", "evaluate:report",
                   one_process=True),
    "predict": Verb("Use", "list the best answers to a triple with one part missing",
                    "predict:predict"),
    "recommend": Verb("Use", "list the best tails of a relation for one head or many",
                      "predict:recommend"),
    "nearest": Verb("Use", "list the entities nearest to one", "predict:nearest"),
    "score": Verb("", "score the triples of a file", "predict:score"),
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
    lines = {group: f"{group}:" for group in GROUPS}
    for name, verb in VERBS.items():
        if verb.group:
            lines[verb.group] += f"\n  {name:<11}{verb.does}"
    groups = "\n\n".join(lines.values())
    parser = argparse.ArgumentParser(
        prog="kge-torchrec",
        usage="kge-torchrec [-h] [--version] VERB ...",
        description=f"{_DESCRIPTION}\n{groups}",
        epilog="See kge-torchrec VERB --help for the options of a verb.",
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


def _closest(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" for a word close to a known word, otherwise nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)
    close = close or [name for name in known if len(word) > 3 and name.startswith(word)]
    return f"; did you mean {close[0]}?" if close else ""


# The help of arguments that mean the same in every verb.
_SHARED_HELP = {
    "config": "a YAML file, the name of a published one, or the folder of a run",
    "run": "the folder of a run, or an export",
    "seed": "seed of the split",
    "threads": "number of CPU threads that read (default: all cores, at most 4 for a file)",
    "format": "how results are written",
    "log_format": "json: one object per line on stderr, without bars",
    "output": "file to write (default: print)",
    "names": "file of labels and readable names, which are shown beside the labels",
}


class VerbParser(argparse.ArgumentParser):
    """The parser of a verb, made of the signature of its function: a value for what the user gave.

    An argument after ``*`` is an option, and others are positional; ``output`` is also ``-o``.

    - ``str``, ``int``, ``float`` take a value; ``Literal`` takes one of some words.
    - ``bool`` is a switch: ``--name`` if its default is False, ``--no-name`` if it is True.
    - ``Sequence[...]`` takes one or more values, and may be repeated.
    - ``Annotated[..., "FILE"]`` says how the value is written in --help. Another word "positive"
      marks an integer from 1 on, and "run" a run; a verb with one also takes --data.path, --threads
      and --allow-import.
    - ``settings: Settings`` takes all words ``--key.sub value`` as a list ["--key.sub=value"].

    Attributes:
        function: What the verb calls; the docstring is its help.
        takes_keys: Whether words such as ``--train.lr 0.1`` are settings.
        runs: Names of the arguments that are runs.
    """

    def __init__(self, name: str):
        module, _, function = VERBS[name].function.partition(":")
        self.function: Callable[..., int] = getattr(
            import_module(f"kge_torchrec.commands.{module}"), function
        )
        text, _, arguments = (inspect.getdoc(self.function) or "").partition("\n\nArgs:\n")
        super().__init__(
            prog=f"kge-torchrec {name}",
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
        )
        self.takes_keys, self.runs = False, list[str]()
        found = re.finditer(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", arguments, re.MULTILINE)
        helps = {entry[1]: " ".join(entry[2].replace("%", "%%").split()) for entry in found}
        usage, needed = [self.prog], []
        hints = get_type_hints(self.function, include_extras=True)
        for item in inspect.signature(self.function).parameters.values():
            if item.name == "settings":
                self.takes_keys = True
                continue
            flags, options, is_run = _option(item, hints[item.name])
            options["help"] = (_SHARED_HELP | helps).get(item.name, "") + options["help"]
            self.add_argument(*flags, **options)
            self.runs += [item.name] if is_run else []
            if item.kind is not item.KEYWORD_ONLY:
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
            self.add_argument("--threads", type=_threads, metavar="N", help=help)
        if self.runs:
            help = (
                "import this module for a run or export that names a class of it: its code runs "
                "(repeatable)"
            )
            self.add_argument("--allow-import", action="append", metavar="MODULE", help=help)
        ending = ["[--key.sub value ...]"] if self.takes_keys else []
        self.usage = " ".join([*usage, *needed, "[options]", *ending])


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text}")
    return int(text)


def _threads(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1024:  # as the key; each takes memory
        raise argparse.ArgumentTypeError(f"must be an integer from 1 to 1,024, got {text}")
    return int(text)


def _option(item: inspect.Parameter, hint: Any) -> tuple[list[str], dict[str, Any], bool]:
    """Return the flags of an argument, its options for argparse, and whether it is a run."""
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
    options: dict[str, Any] = {"help": ""}
    if get_origin(hint) is Literal:
        options["choices"] = get_args(hint)
    elif hint is bool:
        options["action"] = "store_false" if item.default else "store_true"
    else:
        shown = [word for word in words if word not in ("run", "positive", "threads")]
        usual = {int: "N", float: "X"}.get(hint, item.name.upper())
        options["metavar"] = shown[-1] if shown else usual
        types = {"positive": _positive, "threads": _threads}
        options["type"] = next((types[word] for word in words if word in types), hint)
    if not (item.default in (item.empty, None, ()) or isinstance(item.default, bool)):
        default = " ".join(map(str, item.default)) if several else item.default
        options["help"] = f" (default: {default})"
    is_needed = item.default is item.empty
    if item.kind is not item.KEYWORD_ONLY:
        if several or not is_needed:
            options["nargs"] = ("+" if is_needed else "*") if several else "?"
        return [item.name], options, "run" in words
    options |= {"dest": item.name, "required": is_needed}
    if several:
        options |= {"action": "extend", "nargs": "+"}
    flag = f"--{'no-' if item.default is True else ''}{item.name.replace('_', '-')}"
    return [*(["-o"] if item.name == "output" else []), flag], options, "run" in words


def run_verb(name: str, words: Sequence[str]) -> int:
    """Run a verb with its arguments; return the exit code."""
    from kge_torchrec.config.checks import ConfigError

    parser = VerbParser(name)
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
    _find_modules(parser, words, values.get("config"), values.pop("allow_import", []))
    ranks = os.environ.get("WORLD_SIZE", "1")
    if VERBS[name].one_process and ranks != "1":
        raise ConfigError(f"{name} runs in one process, not {ranks} ranks: run it without torchrun")
    if parser.takes_keys:
        return parser.function(**values, settings=settings)
    keys: tuple[str, ...] = ("data.path", "threads") if parser.runs else ()
    given = {key: values.pop(key) for key in keys if key in values}  # for every run that is read
    if not given:
        return parser.function(**values)
    from kge_torchrec.training.run_folder import RunFolder

    if "threads" in given:  # an export has no key
        with loading_torch():
            import torch
        torch.set_num_threads(given["threads"])
    RunFolder.given = given
    try:
        return parser.function(**values)
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

            if not {key[2:], f"data.{key[2:]}"} & set(all_keys()):
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

"""The command line: a verb, its options, and errors as a sentence each.

The same ``main`` serves one process and, through scripts/train.py, every process of torchrun.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from kge_torchrec.commands import (
    as_flag,
    ask,
    calibrate,
    classify,
    data,
    encode,
    evaluate,
    export,
    extend,
    is_first_rank,
    nearest,
    parts,
    predict,
    prepare,
    report,
    score,
    serve,
)
from kge_torchrec.environment import check_packages, prepare_process, versions
from kge_torchrec.errors import KGEError
from kge_torchrec.files import in_words

_DESCRIPTION = """\
Knowledge-graph embeddings on TorchRec.

examples:
  kge-torchrec train demo
  kge-torchrec train umls --data.path DIRECTORY --train.lr 0.05
  kge-torchrec predict RUN --head Austria --relation borders
"""
_EPILOG = "kge-torchrec VERB --help says more of a verb."
# These take the config's keys too, and read their arguments themselves.
_WITH_KEYS = {
    "train": "kge_torchrec.commands.train",
    "plan": "kge_torchrec.planning.command",
    "compare": "kge_torchrec.comparison.command",
    "tune": "kge_torchrec.tuning.command",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a verb; returns the exit code.  Errors are a sentence on stderr, not a traceback."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    prepare_process()
    if os.getcwd() not in sys.path:  # configs may name classes of modules that lie here
        sys.path.append(os.getcwd())
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    logging.getLogger("kge_torchrec.kernels").setLevel(logging.INFO)  # reports that it compiles
    try:
        return _run(arguments)
    except (KGEError, OSError) as error:
        _tell(error)
        return getattr(error, "exit_code", 1)
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        print(
            f"kge-torchrec: not enough memory: {str(error).splitlines()[0] if str(error) else ''}; "
            "smaller values of model.dim, negatives.count, train.batch_size or "
            "evaluation.batch_size need less",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt as error:
        if is_first_rank():
            print(f"kge-torchrec: {error or 'interrupted'}", file=sys.stderr)
        return 130


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether numpy, torch on the CPU or CUDA could not allocate what was needed."""
    words = ("can't allocate memory", "CUDA out of memory", "not enough memory")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def _tell(error: KGEError | OSError) -> None:
    """Says what went wrong, once for all ranks where they all know."""
    if isinstance(error, KGEError):
        error.spell(as_flag)
    message = in_words(error) if isinstance(error, OSError) else error
    if is_first_rank():
        print(f"kge-torchrec: {message}", file=sys.stderr)
    elif not getattr(error, "on_every_rank", False):
        print(f"kge-torchrec: rank {os.environ['RANK']}: {message}", file=sys.stderr)


def _run(arguments: list[str]) -> int:
    if not arguments:
        _parser().print_help(sys.stderr)
        return 2
    verb, rest = arguments[0], arguments[1:]
    if verb in _WITH_KEYS:
        if rest and not _asks_for_help(rest):
            check_packages()
        return import_module(_WITH_KEYS[verb]).run(rest)
    parsed = _parser().parse_args(arguments)
    check_packages()
    return parsed.run(parsed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kge-torchrec",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=_Formatter,
    )
    parser.add_argument(
        "--version",
        action="version",
        version=_version(),
        help="show the versions of this program, torch, torchrec and fbgemm",
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB", title="verbs")
    prepare.add(verbs)
    data.add(verbs)
    encode.add(verbs)
    verbs.add_parser("train", help="train a model and rank the test triples with it")
    extend.add(verbs)
    evaluate.add(verbs)
    predict.add(verbs)
    score.add(verbs)
    nearest.add(verbs)
    ask.add(verbs)
    calibrate.add(verbs)
    classify.add(verbs)
    export.add(verbs)
    report.add(verbs)
    serve.add(verbs)
    verbs.add_parser("plan", help="see without devices whether a run fits, and what a step costs")
    verbs.add_parser("compare", help="train and measure engines side by side, with a report")
    verbs.add_parser("tune", help="search for settings by many runs, poor ones dropped early")
    parts.add(verbs)
    return parser


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Leaves room for the longest verb, which argparse does not measure with its indentation."""

    def start_section(self, heading: str | None) -> None:
        super().start_section(heading)
        self._action_max_length = max(self._action_max_length, len("    calibrate"))


def _version() -> str:
    from kge_torchrec import __version__

    others = ", ".join(f"{name} {version or 'missing'}" for name, version in versions().items())
    return f"kge-torchrec {__version__} ({others})"


def _asks_for_help(arguments: list[str]) -> bool:
    return bool({"-h", "--help"} & set(arguments))


if __name__ == "__main__":
    sys.exit(main())

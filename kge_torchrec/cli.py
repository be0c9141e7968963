"""The command line: parses a verb and its options, runs it, and prints errors as sentences.

The same ``main`` serves one process and every process of torchrun.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import sys
from collections.abc import Sequence

from kge_torchrec.commands import GROUPS, VERBS, closest, is_first_rank, lines_of, run_verb
from kge_torchrec.environment import prepare_process, versions
from kge_torchrec.errors import KGEError, first_line
from kge_torchrec.files import in_words
from kge_torchrec.lines import say_error

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
    logging.getLogger("kge_torchrec.kernels").setLevel(
        logging.INFO
    )  # kernels log when they compile
    try:
        return _run(arguments)
    except KGEError as error:
        _print_error(error)
        return error.exit_code
    except (OSError, MemoryError, RuntimeError) as error:
        if _is_out_of_memory(error):
            say_error(
                f"kge-torchrec: not enough memory: {first_line(error)}; reduce model.dim, "
                "negatives.count, train.batch_size or evaluation.batch_size"
            )
            return 1
        if not isinstance(error, OSError):
            raise
        _print_error(error)
        return 1
    except KeyboardInterrupt as error:
        if is_first_rank():
            say_error(f"kge-torchrec: {error or 'interrupted'}")
        return 130


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether the system, numpy, torch on the CPU or CUDA could not allocate memory."""
    words = ("can't allocate memory", "CUDA out of memory", "not enough memory")
    is_full = isinstance(error, OSError) and error.errno == errno.ENOMEM
    return is_full or isinstance(error, MemoryError) or any(word in str(error) for word in words)


def _print_error(error: KGEError | OSError) -> None:
    """Print an error; rank 0 prints for all ranks if all of them have it."""
    message = in_words(error) if isinstance(error, OSError) else error
    if is_first_rank():
        say_error(f"kge-torchrec: {message}")
    elif not getattr(error, "on_every_rank", False):
        say_error(f"kge-torchrec: rank {os.environ['RANK']}: {message}")


def _run(arguments: list[str]) -> int:
    parser = _parser()
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    if arguments[0].startswith("-"):
        parser.parse_args(arguments)  # exits for --help and for errors
        print(_version())
        return 0
    if arguments[0] not in VERBS:
        parser.error(f"there is no verb {arguments[0]!r}{closest(arguments[0], list(VERBS))}")
    return run_verb(arguments[0], arguments[1:])


def _parser() -> argparse.ArgumentParser:
    groups = "\n\n".join(f"{group}:\n{lines_of(group)}" for group in GROUPS)
    parser = argparse.ArgumentParser(
        prog="kge-torchrec",
        usage="kge-torchrec [-h] [--version] VERB ...",
        description=f"{_DESCRIPTION}\n{groups}",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    help = "show the versions of this program, torch, torchrec and fbgemm"
    parser.add_argument("--version", action="store_true", help=help)
    return parser


def _version() -> str:
    from kge_torchrec import __version__

    packages = ", ".join(f"{name} {version or 'missing'}" for name, version in versions().items())
    return f"kge-torchrec {__version__} ({packages})"


if __name__ == "__main__":
    sys.exit(main())

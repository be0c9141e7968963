"""The verbs of the command line, one file each, and the functions that several verbs share."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kge_torchrec.environment import loading_torch

if TYPE_CHECKING:
    from kge_torchrec.answers import AnsweringModel
    from kge_torchrec.answers.batch_inference import FileReport
    from kge_torchrec.config import Config
    from kge_torchrec.trained_run import Run


def add_format(verb: argparse.ArgumentParser, *more: str) -> argparse.Action:
    """Add --format: table, json, or one of ``more``."""
    return verb.add_argument(
        "--format", choices=("table", "json", *more), default="table", help="default: table"
    )


def add_output(verb: argparse.ArgumentParser) -> tuple[argparse.Action, argparse.Action]:
    """Add --format and -o, for rows that are printed or written to a file."""
    form = add_format(verb, "tsv", "parquet")
    return form, verb.add_argument(
        "-o", "--output", metavar="FILE", help="file to write (default: print)"
    )


def write_records(parsed: argparse.Namespace, records: Sequence[Any], kind: type) -> None:
    """Print or write instances of a dataclass, as --format and -o say."""
    if not is_first_rank():
        return
    from kge_torchrec.answers.tables import check_output, record_rows, written

    check_output(parsed.format, parsed.output)
    with written(parsed.format, parsed.output) as write:
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


def check_top(parsed: argparse.Namespace) -> None:
    """Raise ConfigError for a --top below 1, before the model is loaded."""
    if parsed.top is not None and parsed.top < 1:
        from kge_torchrec.config.checks import ConfigError

        raise ConfigError(f"--top must be an integer >= 1, got {parsed.top}")


def as_flag(name: str, value: Any) -> str:
    """Format an argument of the Python interface as an option of a verb."""
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{option}" if value else f"--no-{option}"
    if isinstance(value, list):
        value = ",".join(map(str, value))
    return f"--{option} {value}"


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

"""The verbs of the command line: typed functions that ``kge_torchrec.cli`` calls.

No module of this folder imports torch before a verb does its work.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from kge_torchrec.environment import loading_torch

if TYPE_CHECKING:
    from kge_torchrec.answers import AnsweringModel
    from kge_torchrec.answers.bulk import FileReport
    from kge_torchrec.config import Config
    from kge_torchrec.trained_run import Run

ConfigName = Annotated[str, "CONFIG", "run"]  # a YAML file, the name of a published one, or a run
RunPath = Annotated[str, "RUN", "run"]  # a folder
File = Annotated[str, "FILE"]
Count = Annotated[int, "K", "positive"]
Threads = Annotated[int | None, "N", "threads"]
Settings = Sequence[str]  # ["--key.sub=value", ...]
Log = Literal["text", "json"]
Table = Literal["table", "json"]
Rows = Literal["table", "json", "tsv", "parquet"]


def follow_log(log: Log) -> list[str]:
    """Follow --log-format; return the settings of a config that belong to it."""
    if log == "text":
        return []
    from kge_torchrec.lines import show_as_json

    show_as_json()
    return ["--run.progress=false"]


def write_records(
    records: Sequence[Any], kind: type, format: Rows, output: str | None, names: str | None
) -> None:
    """Print instances of a dataclass, or write them to the file ``output``."""
    if not is_first_rank():
        return
    from kge_torchrec.answers.output import record_rows, written

    with written(format, output, names) as write:
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
    if not (Path(folder) / "config.json").is_file():
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

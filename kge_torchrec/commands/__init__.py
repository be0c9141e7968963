"""Verbs of the command line, a file each: ``add`` says its options, ``run`` does it.

The verbs that take the keys of a config (train, and in rooms of their own plan, compare and tune)
have only ``run``, with all their arguments.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from kge_torchrec.environment import loading_torch

if TYPE_CHECKING:
    from kge_torchrec.config import Config
    from kge_torchrec.trained_run import Run

    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]


def add_verb(
    verbs: Verbs, name: str, does: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """The parser of a new verb that calls ``run``."""
    verb = verbs.add_parser(name, help=does, description=f"{does[0].upper()}{does[1:]}.")
    verb.set_defaults(run=run)
    return verb


def add_format(verb: argparse.ArgumentParser, *more: str) -> None:
    """--format, of what is printed: a table or JSON, or one of ``more``."""
    verb.add_argument(
        "--format", choices=("table", "json", *more), default="table", help="default: table"
    )


def is_first_rank() -> bool:
    """Whether this process prints for all of torchrun's."""
    return os.environ.get("RANK", "0") == "0"


def opened(folder: str) -> Run:
    """The run in a folder, as ``open_run`` gives it."""
    with loading_torch():
        config = config_of(folder)
        from kge_torchrec.trained_run import Run

    return Run(folder, config)


def config_of(folder: str) -> Config:
    """Raises ConfigError unless the folder holds a run, before torch is loaded for seconds."""
    from kge_torchrec.training.run_folder import RunFolder

    return RunFolder(folder).load_config()

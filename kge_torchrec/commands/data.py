"""``kge-torchrec data check``: what is wrong with a graph, before training."""

from __future__ import annotations

import argparse
import json

from kge_torchrec.commands import add_format, as_flag
from kge_torchrec.commands.prepare import add_reading, reading_of
from kge_torchrec.environment import loading_torch


def add(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    verb.add_argument("check", choices=("check",), help="what to do")
    verb.add_argument(
        "data",
        nargs="+",
        metavar="DATA",
        help="a store; or a directory, files or a graph by name, as prepare takes them",
    )
    verb.add_argument(
        "-o", "--output", metavar="DIR", help="write data-check.json and degrees.png there"
    )
    verb.add_argument(
        "--threshold",
        type=float,
        default=0.8,
        metavar="SHARE",
        help="of the triples of either that makes two relations inverses or duplicates "
        "(default: 0.8)",
    )
    add_format(verb)
    add_reading(verb)


def run(parsed: argparse.Namespace) -> int:
    """Run the verb; return the exit code."""
    with loading_torch():
        from kge_torchrec.reports.data_check import check_data, table

    data = parsed.data[0] if len(parsed.data) == 1 else parsed.data
    stats = check_data(
        data, parsed.output, parsed.threshold, spell=as_flag, **reading_of(parsed, parsed.data)
    )
    print(json.dumps(stats) if parsed.format == "json" else table(stats))
    return 0

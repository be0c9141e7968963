"""``kge-torchrec prepare`` and ``data check``: stores, and checks of a graph."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from kge_torchrec.commands import add_format

if TYPE_CHECKING:
    from kge_torchrec.config import DataConfig


def add(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "sources",
        nargs="+",
        metavar="DIR_OR_FILE",
        help="a directory with train, valid and test files, files, or a description of edge files "
        "(YAML); a data set such as pykeen:fb15k237 or hf:ORGANIZATION/NAME; or countries (built "
        "in)",
    )
    verb.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="STORE",
        help="folder of the new store, for --data.path",
    )
    add_keys(verb)
    verb.add_argument(
        "--memory",
        type=float,
        metavar="GIB",
        help="memory for the triples that are compared or sorted at a time (default: half of this "
        "machine's)",
    )
    verb.add_argument("--overwrite", action="store_true", help="replace an existing store")
    verb.add_argument("--no-progress", action="store_true", help="show no progress bar")


def add_keys(verb: argparse.ArgumentParser) -> None:
    """Add --seed, and the keys of ``data`` that say how triples are read and split."""
    from kge_torchrec.config import DataConfig
    from kge_torchrec.config.keys import declared, key_of

    verb.add_argument("--seed", type=int, default=0, help="seed of the split (default: 0)")
    group = verb.add_argument_group(
        "keys of data",
        "How triples are read and split, with values as in a config; --data.KEY is the same as "
        "--KEY.",
        argument_default=argparse.SUPPRESS,
    )
    for name, item in declared(DataConfig).items():
        owner = key_of(item).options
        parts = {name: item}
        if isinstance(owner, type):
            parts = {f"{name}.{own}": option for own, option in declared(owner).items()}
        for key, option in parts.items():
            if key != "path":
                help = key_of(option).help.replace("%", "%%")
                group.add_argument(f"--{key}", dest=f"data.{key}", metavar="VALUE", help=help)
                group.add_argument(f"--data.{key}", metavar="VALUE", help=argparse.SUPPRESS)


def data_of(parsed: argparse.Namespace) -> DataConfig:
    """Return the section ``data`` with the keys of `add_keys` that were given."""
    from kge_torchrec.config.parser import read_config

    given = [f"--{key}={value}" for key, value in vars(parsed).items() if key.startswith("data.")]
    return read_config(None, given).data


def run(parsed: argparse.Namespace) -> int:
    from kge_torchrec.data.prepare import prepare
    from kge_torchrec.data.report import notes

    sources = parsed.sources[0] if len(parsed.sources) == 1 else parsed.sources
    store = prepare(
        sources,
        parsed.output,
        data_of(parsed),
        seed=parsed.seed,
        memory=parsed.memory,
        overwrite=parsed.overwrite,
        progress=not parsed.no_progress,
        log_notes=False,
    )
    print(store)
    for note in notes(store):
        print(f"note: {note}")
    return 0


def add_data(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("check", choices=("check",), help="what to do")
    verb.add_argument(
        "data",
        nargs="+",
        metavar="DATA",
        help="a store, or a source of triples like in prepare",
    )
    verb.add_argument("-o", "--output", metavar="DIR", help="folder for data-check.json")
    verb.add_argument(
        "--threshold",
        type=float,
        default=0.8,
        metavar="SHARE",
        help="share of common triples from which two relations count as inverses or duplicates "
        "(default: 0.8)",
    )
    add_format(verb)
    add_keys(verb)


def run_data(parsed: argparse.Namespace) -> int:
    from kge_torchrec.reports.data_check import check_data, table

    data = parsed.data[0] if len(parsed.data) == 1 else parsed.data
    stats = check_data(data, parsed.output, parsed.threshold, data_of(parsed), seed=parsed.seed)
    print(json.dumps(stats) if parsed.format == "json" else table(stats))
    return 0

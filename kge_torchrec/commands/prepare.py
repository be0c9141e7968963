"""``kge-torchrec prepare`` and ``data check``: stores, and checks of a graph."""

from __future__ import annotations

import argparse
import json
from typing import Any

from kge_torchrec.commands import add_format, as_flag
from kge_torchrec.environment import loading_torch


def add(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "sources",
        nargs="+",
        metavar="DIR_OR_FILE",
        help="a directory with train, valid and test files, or files; a data set such as "
        "pykeen:fb15k237 or hf:ORGANIZATION/NAME; or countries (built in)",
    )
    verb.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="STORE",
        help="folder of the new store, for --data.path",
    )
    add_reading(verb)
    verb.add_argument(
        "--allow-unseen-relations",
        action="store_true",
        help="accept relations that occur in valid or test only",
    )
    verb.add_argument(
        "--spread",
        type=int,
        default=1,
        metavar="RANKS",
        help="lay out the ids so that as many ranks have equal shares of each node type "
        "(default: 1, all entities of a type one after the other)",
    )
    verb.add_argument(
        "--memory",
        type=float,
        metavar="GIB",
        help="memory to use; larger graphs are prepared on disk, where the same command resumes "
        "after a kill (default: half of this machine's)",
    )
    verb.add_argument("--overwrite", action="store_true", help="replace an existing store")
    verb.add_argument("--no-progress", action="store_true", help="show no progress bar")


def add_reading(verb: argparse.ArgumentParser) -> None:
    """Add the options of how files are read; an option that is left out stays unset."""
    from kge_torchrec.config.data import SPLITTERS

    reading = verb.add_argument_group("how files are read", argument_default=argparse.SUPPRESS)
    reading.add_argument(
        "--split-by",
        choices=(*SPLITTERS,),
        help="split of files without splits: at random; at random within each head; by time, the "
        "latest to test; or the last triples of each head to test (default: random)",
    )
    reading.add_argument(
        "--ratio",
        nargs=3,
        type=float,
        metavar=("TRAIN", "VALID", "TEST"),
        help="shares of the splits, except by last (default: 0.9 0.05 0.05)",
    )
    reading.add_argument(
        "--count",
        type=int,
        metavar="K",
        help="by last, triples of each head in test and as many in valid (default: 1)",
    )
    reading.add_argument(
        "--time-column",
        metavar="NAME",
        help="name of the column of times (default: time, timestamp, date or datetime)",
    )
    reading.add_argument("--seed", type=int, help="seed of the split (default: 0)")
    reading.add_argument(
        "--has-header",
        action=argparse.BooleanOptionalAction,
        default=argparse.SUPPRESS,
        help="whether text files start with a header (default: detected from its words)",
    )
    reading.add_argument(
        "--literals",
        choices=("drop", "keep"),
        help="RDF triples whose object is a literal: drop them, or make literals entities "
        "(default: drop)",
    )
    reading.add_argument(
        "--columns",
        type=lambda text: text.split(","),
        metavar="HEAD,RELATION,TAIL[,WEIGHT]",
        help="names of the columns to read from text and Parquet files (default: detected from "
        "their header)",
    )
    reading.add_argument(
        "--weights",
        action=argparse.BooleanOptionalAction,
        default=argparse.SUPPRESS,
        help="whether to read weights from a fourth column (default: if the header calls a column "
        "weight, confidence, ...)",
    )
    reading.add_argument(
        "--types-from",
        metavar="RELATION",
        help="relation from entities to their types, such as rdf:type, for negatives.among and "
        "evaluation.candidates types",
    )
    reading.add_argument(
        "--types",
        metavar="prefix|FILE",
        help="gives every entity one type: prefix (of labels such as user:17), or a file of lines "
        "entity, tab, type",
    )
    reading.add_argument(
        "--features",
        metavar="FILE",
        help="lines entity, tab, feature, and perhaps a tab and a weight: vectors of features are "
        "added to those of entities",
    )
    reading.add_argument(
        "--type-triples",
        choices=("drop", "keep"),
        help="triples of the --types-from relation: drop or keep them (default: drop)",
    )
    reading.add_argument(
        "--reader",
        metavar="MODULE:CLASS",
        help="class that reads the files (default: chosen from their names)",
    )
    reading.add_argument(
        "--reader-options",
        type=_yaml_dict,
        metavar="{NAME: VALUE}",
        help="options of the reader",
    )


_READING = ("split_by", "ratio", "count", "time_column", "seed", "has_header", "literals",
            "columns", "weights", "types_from", "type_triples", "types", "features")  # fmt: skip


def reading_of(parsed: argparse.Namespace, sources: list[str]) -> dict[str, Any]:
    """Return the options of `add_reading` that were set, as arguments of `prepare`.

    Raises:
        ConfigError: An option has no effect on these sources.
    """
    from kge_torchrec.config.checks import ConfigError
    from kge_torchrec.data.datasets import ACTS_ON, unread_options
    from kge_torchrec.data.readers import make_reader

    options = vars(parsed)
    reading = {name: options[name] for name in _READING if name in options}
    if "seed" in reading and reading.get("split_by") == "time":
        raise ConfigError("--seed: a split by time draws nothing; leave it out")
    if "reader_options" in options and "reader" not in options:
        raise ConfigError("--reader-options are those of --reader; give both")
    reader_options = options.get("reader_options", {})
    reader = make_reader(options.get("reader"), reader_options, "--reader-options")
    if reader is not None:
        reading["reader"] = reader
    unread = unread_options(sources[0] if len(sources) == 1 else sources, reader)
    for name in sorted(unread):
        if name in reading:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{flag} has no effect here: it acts only on {ACTS_ON[name]}; leave {flag} out"
            )
    return reading


def _yaml_dict(text: str) -> dict[str, Any]:
    import yaml

    from kge_torchrec.config.checks import ConfigError
    from kge_torchrec.config.yaml_file import parse_yaml

    try:
        values = parse_yaml(text)
    except (yaml.YAMLError, ConfigError) as error:
        raise argparse.ArgumentTypeError(f"must be {{name: value}}: {error}") from None
    if not isinstance(values, dict):
        raise argparse.ArgumentTypeError(f"must be {{name: value}}, got {text}")
    return values


def run(parsed: argparse.Namespace) -> int:
    from kge_torchrec.data.prepare import prepare
    from kge_torchrec.data.report import notes

    sources = parsed.sources[0] if len(parsed.sources) == 1 else parsed.sources
    store = prepare(
        sources,
        parsed.output,
        **reading_of(parsed, parsed.sources),
        allow_unseen_relations=parsed.allow_unseen_relations,
        spread=parsed.spread,
        memory=parsed.memory,
        overwrite=parsed.overwrite,
        progress=not parsed.no_progress,
        log_notes=False,
    )
    print(store)
    for note in notes(store, as_flag):
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
    add_reading(verb)


def run_data(parsed: argparse.Namespace) -> int:
    with loading_torch():
        from kge_torchrec.reports.data_check import check_data, table

    data = parsed.data[0] if len(parsed.data) == 1 else parsed.data
    stats = check_data(
        data, parsed.output, parsed.threshold, spell=as_flag, **reading_of(parsed, parsed.data)
    )
    print(json.dumps(stats) if parsed.format == "json" else table(stats))
    return 0

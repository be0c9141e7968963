"""``kge-torchrec prepare``: files of triples become a store."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from kge_torchrec.commands import add_verb

if TYPE_CHECKING:
    from kge_torchrec.commands import Verbs


def add(verbs: Verbs) -> None:
    does = "turn files of triples into a memory-mapped store, once for many runs"
    prepare = add_verb(verbs, "prepare", does, run, alone=True)
    prepare.add_argument(
        "sources",
        nargs="+",
        metavar="DIR_OR_FILE",
        help="a directory with train, valid and test files, or files; or a library's data set, "
        "such as pykeen:fb15k237, ogb:ogbl-wikikg2 or hf:ORGANIZATION/NAME; or countries, the "
        "graph inside the package",
    )
    prepare.add_argument(
        "-o", "--output", required=True, metavar="STORE", help="the store, for --data.path"
    )
    prepare.add_argument(
        "--ratio",
        nargs=3,
        type=float,
        default=(0.9, 0.05, 0.05),
        metavar=("TRAIN", "VALID", "TEST"),
        help="shares, where the files name no split (default: 0.9 0.05 0.05)",
    )
    prepare.add_argument("--seed", type=int, default=0, help="of the split by ratio")
    prepare.add_argument(
        "--header",
        choices=("auto", "yes", "no"),
        default="auto",
        help="whether text files start with a header (default: auto, known by its words)",
    )
    prepare.add_argument(
        "--allow-unseen-relations",
        action="store_true",
        help="accept relations that occur in valid or test only",
    )
    prepare.add_argument(
        "--literals",
        choices=("drop", "keep"),
        default="drop",
        help="of RDF: leave out triples whose object is a literal, or make entities of "
        "literals (default: drop)",
    )
    prepare.add_argument(
        "--columns",
        type=lambda text: text.split(","),
        metavar="HEAD,RELATION,TAIL[,WEIGHT]",
        help="what the header of text and Parquet files calls them; others are left out (default: "
        "known by their words)",
    )
    prepare.add_argument(
        "--weights",
        action=argparse.BooleanOptionalAction,
        help="every training triple has a weight, a fourth column with or without a name; or none "
        "is read (default: one that the header calls weight, confidence, ...)",
    )
    prepare.add_argument(
        "--types-from",
        metavar="RELATION",
        help="its tails are types of its heads, such as rdf:type, for negatives.among and "
        "evaluation.candidates types",
    )
    prepare.add_argument(
        "--type-triples",
        choices=("drop", "keep"),
        default="drop",
        help="take its triples out of the graph, or leave them in (default: drop)",
    )
    prepare.add_argument(
        "--reader", metavar="MODULE:CLASS", help="reads the files (default: by their names)"
    )
    prepare.add_argument(
        "--reader-options",
        type=_yaml_dict,
        default={},
        metavar="{NAME: VALUE}",
        help="settings of that reader",
    )
    prepare.add_argument("--overwrite", action="store_true", help="replace an existing store")
    prepare.add_argument("--no-progress", action="store_true", help="show no progress bar")


def _yaml_dict(text: str) -> dict[str, Any]:
    import yaml

    values = yaml.safe_load(text)
    if not isinstance(values, dict):
        raise argparse.ArgumentTypeError(f"not of the form {{name: value}}: {text}")
    return values


def run(parsed: argparse.Namespace) -> int:
    from kge_torchrec.data.prepare import prepare
    from kge_torchrec.data.readers import make_reader

    sources = parsed.sources[0] if len(parsed.sources) == 1 else parsed.sources
    store = prepare(
        sources,
        parsed.output,
        ratio=parsed.ratio,
        seed=parsed.seed,
        has_header={"auto": None, "yes": True, "no": False}[parsed.header],
        allow_unseen_relations=parsed.allow_unseen_relations,
        literals=parsed.literals,
        columns=parsed.columns,
        weights=parsed.weights,
        types_from=parsed.types_from,
        type_triples=parsed.type_triples,
        reader=make_reader(parsed.reader, parsed.reader_options, "--reader-options"),
        overwrite=parsed.overwrite,
        progress=not parsed.no_progress,
    )
    from kge_torchrec.data.report import notes

    print(store)
    for note in notes(store.report, "--literals keep"):
        print(f"note: {note}")
    return 0

"""``kge-torchrec nearest``: the neighbours of an entity, and an index to search for them."""

from __future__ import annotations

import argparse
import sys

from kge_torchrec.commands import (
    add_output,
    answering,
    check_top,
    is_first_rank,
    write_records,
)
from kge_torchrec.commands.verbs import acts_with
from kge_torchrec.config import ConfigError
from kge_torchrec.environment import announced


def add(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    verb.add_argument("folder", metavar="RUN", help="the folder of a run, or of an export")
    verb.add_argument("entity", metavar="ENTITY", nargs="?", help="label of an entity")
    top = verb.add_argument("--top", type=int, default=10, metavar="K", help="default: 10")
    verb.add_argument(
        "--index",
        metavar="FILE",
        help="write a FAISS index of all entities, in order of id, in place of a list, and "
        "FILE.json, which says what it holds; needs pip install 'kge-torchrec[index]'",
    )
    kind = verb.add_argument(
        "--kind",
        default="HNSW32",
        metavar="NAME",
        help="of the index, as faiss.index_factory has them: Flat (exact), HNSW32, IVF4096,PQ32 "
        "and more (default: HNSW32)",
    )
    acts_with(kind, "--index", lambda parsed: parsed.index is not None)
    for option in (top, *add_output(verb)):
        acts_with(option, "an ENTITY", lambda parsed: parsed.entity is not None)


def run(parsed: argparse.Namespace) -> int:
    """Run the verb; return the exit code."""
    if (parsed.entity is None) == (parsed.index is None):
        raise ConfigError("nearest takes an ENTITY, or --index FILE")
    check_top(parsed)
    with answering(parsed.folder) as trained:
        if parsed.index is not None:
            with announced("writing the index"):
                about = trained.write_index(parsed.index, parsed.kind)
            if is_first_rank():
                print(f"{about['entities']:,} entities, {about['metric']}: {parsed.index}")
            return 0
        with announced("searching"):
            results = trained.nearest(parsed.entity, parsed.top)
        meaning = trained.nearness
    from kge_torchrec.answers.nearest import Neighbour

    write_records(parsed, results, Neighbour)
    if is_first_rank() and parsed.format == "table":
        print(f"score: {meaning}", file=sys.stderr)
    return 0

"""``kge-torchrec classify``: triple classification, with a threshold for each relation."""

from __future__ import annotations

import argparse
import json
from typing import Any

from kge_torchrec.commands import add_format, is_first_rank, opened
from kge_torchrec.commands.calibrate import add_sample
from kge_torchrec.environment import announced


def add(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    verb.add_argument("folder", metavar="RUN", help="the folder of a run")
    verb.add_argument(
        "--among",
        choices=("seen", "all"),
        default="seen",
        help="draw corruptions from the entities that the relation has on that side in train, or "
        "from all, most of which are plainly wrong (default: seen)",
    )
    add_sample(verb, 100_000)
    add_format(verb)


def run(parsed: argparse.Namespace) -> int:
    """Run the verb; return the exit code."""
    with opened(parsed.folder) as trained, announced("classifying"):
        results = trained.classify(parsed.among, parsed.seed, parsed.limit)
    if is_first_rank():
        if parsed.format == "json":
            print(json.dumps(results))
        else:
            _print_table(results)
    return 0


def _print_table(results: dict[str, Any]) -> None:
    import pyarrow as pa

    from kge_torchrec.answers.tables import written

    by_size = sorted(results["relations"].items(), key=lambda one: -one[1]["triples"])
    columns = {"relation": pa.array([label for label, _ in by_size], pa.string())}
    for name in ("triples", "threshold", "accuracy"):
        columns[name] = pa.array([values[name] for _, values in by_size])
    with written("table", None) as write:
        write(pa.table(columns))
    drawn = {"seen": "entities seen with the relation", "all": "all entities"}[results["among"]]
    print(
        f"accuracy {results['accuracy']:.4f} of {results['triples']:,} test triples, each beside a "
        f"corruption of its\nhead and one of its tail from {drawn}"
    )

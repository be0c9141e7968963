"""``kge-torchrec classify``: triple classification, with a threshold for each relation."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from kge_torchrec.commands import add_format, add_verb, is_first_rank, opened
from kge_torchrec.commands.calibrate import add_sample

if TYPE_CHECKING:
    from kge_torchrec.commands import Verbs


def add(verbs: Verbs) -> None:
    does = "tell true triples from false: a threshold a relation from valid, accuracy on test"
    classify = add_verb(verbs, "classify", does, run)
    classify.add_argument("folder", metavar="RUN", help="the folder of a run")
    classify.add_argument(
        "--among",
        choices=("seen", "all"),
        default="seen",
        help="draw corruptions from the entities that the relation has on that side in train, or "
        "from all, most of which are plainly wrong (default: seen)",
    )
    add_sample(classify, 100_000)
    add_format(classify)


def run(parsed: argparse.Namespace) -> int:
    with opened(parsed.folder) as trained:
        found = trained.classify(parsed.among, parsed.seed, parsed.limit)
    if is_first_rank():
        print(json.dumps(found) if parsed.format == "json" else _table(found))
    return 0


def _table(found: dict[str, Any]) -> str:
    relations = found["relations"]
    width = max(map(len, [*relations, "relation"]))
    lines = [f"{'relation':<{width}}  {'triples':>8}  {'threshold':>10}  {'accuracy':>8}"]
    by_size = sorted(relations.items(), key=lambda one: -one[1]["triples"])
    for label, values in by_size:
        lines.append(
            f"{label:<{width}}  {values['triples']:>8,}  {values['threshold']:>10.4f}  "
            f"{values['accuracy']:>8.4f}"
        )
    drawn = {"seen": "entities seen with the relation", "all": "all entities"}[found["among"]]
    lines.append(
        f"accuracy {found['accuracy']:.4f} of {found['triples']:,} test triples, each beside a "
        f"corruption of its head and one of its tail from {drawn}"
    )
    return "\n".join(lines)

"""``kge-torchrec ask``: answers to questions of several steps."""

from __future__ import annotations

import argparse

from kge_torchrec.commands import add_output, answering, check_top, write_records
from kge_torchrec.environment import announced

_FORM = """\
A query is one of these, where Q stands for any of them:

  "Austria"                               an entity
  {"relation": "borders", "from": Q}      tails of (Q, borders, ?)
  {"relation": "locatedin", "to": Q}      heads of (?, locatedin, Q)
  {"and": [Q, Q, {"not": Q}]}             members of all, and of none under "not"
  {"or": [Q, Q]}                          members of any
"""


def add(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    verb.epilog = _FORM
    verb.add_argument("folder", metavar="RUN", help="the folder of a run, or of an export")
    verb.add_argument("query", metavar="FILE", help="a JSON file with the query")
    verb.add_argument("--top", type=int, default=10, metavar="K", help="default: 10")
    verb.add_argument(
        "--beam", type=int, default=64, metavar="B",
        help="entities that a step from many is taken from (default: 64)",
    )  # fmt: skip
    verb.add_argument(
        "--t-norm",
        choices=("product", "min"),
        default="product",
        help="what and multiplies or takes the smaller of (default: product)",
    )
    verb.add_argument(
        "--facts",
        choices=("all", "train", "none"),
        default="all",
        help="the splits whose triples are certain (default: all)",
    )
    add_output(verb)


def run(parsed: argparse.Namespace) -> int:
    """Run the verb; return the exit code."""
    check_top(parsed)
    with answering(parsed.folder) as trained, announced("answering"):
        results = trained.ask(
            parsed.query,
            k=parsed.top,
            beam=parsed.beam,
            t_norm=parsed.t_norm,
            facts=parsed.facts,
        )
    from kge_torchrec.answers.fuzzy_answers import Member

    write_records(parsed, results, Member)
    return 0

"""``kge-torchrec score``: scores of a file of triples."""

from __future__ import annotations

import argparse

from kge_torchrec.commands import add_output, answering, tell_problems


def add(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    verb.add_argument("folder", metavar="RUN", help="the folder of a run, or of an export")
    verb.add_argument(
        "triples",
        metavar="FILE",
        help="lines of head, relation and tail with tabs between, or JSON objects with these keys; "
        "bad lines are told and the others scored",
    )
    verb.add_argument(
        "--side",
        choices=("tail", "head"),
        default="tail",
        help="the end that is asked for: with reciprocal relations they score differently "
        "(default: tail)",
    )
    add_output(verb)


def run(parsed: argparse.Namespace) -> int:
    """Run the verb; return the exit code."""
    with answering(parsed.folder) as trained:
        report = trained.score_file(parsed.triples, parsed.output, parsed.format, parsed.side)
    return tell_problems(report, parsed.triples)

"""``kge-torchrec score``: scores of a file of triples."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kge_torchrec.commands import add_output, add_verb, answering, tell_problems

if TYPE_CHECKING:
    from kge_torchrec.commands import Verbs


def add(verbs: Verbs) -> None:
    does = "score the triples of a file, with probabilities where the run is calibrated"
    score = add_verb(verbs, "score", does, run)
    score.add_argument("folder", metavar="RUN", help="the folder of a run, or of an export")
    score.add_argument(
        "triples",
        metavar="FILE",
        help="lines of head, relation and tail with tabs between, or JSON objects with these keys; "
        "bad lines are told and the others scored",
    )
    score.add_argument(
        "--side",
        choices=("tail", "head"),
        default="tail",
        help="the end that is asked for: with reciprocal relations they score differently "
        "(default: tail)",
    )
    add_output(score)


def run(parsed: argparse.Namespace) -> int:
    with answering(parsed.folder) as trained:
        report = trained.score_file(parsed.triples, parsed.output, parsed.format, parsed.side)
    return tell_problems(report, parsed.triples)

"""``kge-torchrec predict``, with its related verbs recommend, score and nearest."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from typing import Any

from kge_torchrec.commands import (
    add_output,
    answering,
    is_first_rank,
    opened,
    print_problems,
    write_records,
)
from kge_torchrec.config import ConfigError
from kge_torchrec.config.checks import at_least
from kge_torchrec.environment import announced

_DESCRIPTION = """\
List the best answers of a trained run to a triple with one part missing.

  --head X --relation Y      (X, Y, ?): tails
  --relation Y --tail Z      (?, Y, Z): heads
  --head X --tail Z          (X, ?, Z): relations
  --queries FILE             one query per line
  --relation Y               (?, Y, ?): new links of the whole relation
"""


def add(verb: argparse.ArgumentParser) -> None:
    verb.description = _DESCRIPTION
    verb.add_argument("folder", metavar="RUN", help="the folder or URL of a run, or an export")
    verb.add_argument("--head", metavar="X", help="label of an entity")
    verb.add_argument("--relation", metavar="Y", help="label of a relation")
    verb.add_argument("--tail", metavar="Z", help="label of an entity")
    verb.add_argument(
        "--queries",
        metavar="FILE",
        help="a file of queries: head, relation and tail with tabs, ? for the missing part",
    )
    verb.add_argument(
        "--top", type=int, default=10, metavar="K", help="number of answers (default: 10)"
    )
    verb.add_argument(
        "--new", action="store_true", help="leave out answers that are already in the data"
    )
    verb.add_argument(
        "--candidates",
        choices=("all", "seen"),
        default="all",
        help="candidates for new links: all entities, or those seen with the relation on their "
        "side in train; every pair is scored (default: all)",
    )
    verb.add_argument(
        "--loops", action="store_true", help="include new links from an entity to itself"
    )
    add_output(verb)


def run(parsed: argparse.Namespace) -> int:
    at_least("--top", parsed.top, 1)
    others = {parsed.head, parsed.tail, parsed.queries}
    lists_links = parsed.relation is not None and others == {None}
    if not lists_links and (parsed.loops or parsed.candidates != "all"):
        raise ConfigError("--candidates and --loops are for new links: give --relation only")
    parts = [part for part in (parsed.head, parsed.relation, parsed.tail) if part is not None]
    if parsed.queries is not None:
        if parts:
            raise ConfigError(
                "predict takes --queries or the parts of one query, not both; leave one out"
            )
        return _file(parsed)
    if lists_links:
        return _relation(parsed)
    if len(parts) != 2:
        raise ConfigError(
            "predict takes two of --head, --relation and --tail, or only --relation, or --queries"
        )
    return _query(parsed)


def _query(parsed: argparse.Namespace) -> int:
    with answering(parsed.folder) as trained, announced("answering"):
        answers = trained.predict(
            parsed.head, parsed.relation, parsed.tail, parsed.top, not parsed.new
        )
    _print(parsed, {"tail": parsed.tail}, answers)
    return 0


def _print(parsed: argparse.Namespace, query: dict[str, str | None], answers: list[Any]) -> None:
    """Print or write the answers to a query of --head, --relation and ``query``."""
    if parsed.format != "json" or parsed.output is not None:
        from kge_torchrec.answers.predictions import Prediction

        write_records(parsed, answers, Prediction)
    elif is_first_rank():
        query = {"head": parsed.head, "relation": parsed.relation, **query}
        rows = [_without_nothing(asdict(answer)) for answer in answers]
        if parsed.names is not None:
            from kge_torchrec.answers.tables import names_by_label

            named = names_by_label(parsed.names)
            rows = [{**row, "name": named.get(row["label"], "")} for row in rows]
        print(json.dumps({"query": query, "answers": rows}))


def _without_nothing(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer without its probability if that is None."""
    return {key: x for key, x in answer.items() if not (key == "probability" and x is None)}


def _file(parsed: argparse.Namespace) -> int:
    with answering(parsed.folder) as trained:
        report = trained.answer_file(
            parsed.queries, parsed.output, parsed.format, parsed.top, not parsed.new, parsed.names
        )
    return print_problems(report, parsed.queries)


def _relation(parsed: argparse.Namespace) -> int:
    with opened(parsed.folder) as trained:
        with announced("loading the run"):
            _ = trained.model
        links = trained.new_links(parsed.relation, parsed.top, parsed.candidates, parsed.loops)
    from kge_torchrec.answers.links import Link

    write_records(parsed, links, Link)
    return 0


def add_recommend(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("folder", metavar="RUN", help="the folder or URL of a run, or an export")
    heads = verb.add_mutually_exclusive_group(required=True)
    heads.add_argument("--head", metavar="X", help="label of an entity, such as user:17")
    heads.add_argument("--heads", metavar="FILE", help="a file of labels, one per line")
    verb.add_argument("--relation", required=True, metavar="Y", help="label of a relation")
    verb.add_argument("--top", type=int, default=10, metavar="K", help="default: 10")
    verb.add_argument(
        "--exclude-known",
        action="store_true",
        help="leave out tails that train, valid or test hold; an export has no data",
    )
    verb.add_argument(
        "--candidates",
        metavar="seen|all|FILE",
        help="entities to recommend: tails of the relation in train, all entities, or those of a "
        "file of labels, one per line (default: seen; for an export, which has no data, all)",
    )
    add_output(verb)


def run_recommend(parsed: argparse.Namespace) -> int:
    from kge_torchrec.answers.recommendations import about

    options = {"exclude_known": parsed.exclude_known, "candidates": parsed.candidates}
    at_least("--top", parsed.top, 1)
    with answering(parsed.folder) as trained:
        with announced("loading the run"):
            model = trained.model
        if is_first_rank():
            print(f"candidates: {about(model, parsed.candidates)}", file=sys.stderr)
        if parsed.head is not None:
            answers = trained.recommend(parsed.head, parsed.relation, parsed.top, **options)
            _print(parsed, {}, answers)
            return 0
        output = parsed.output, parsed.format, parsed.top
        start = time.perf_counter()
        report = trained.recommend_file(
            parsed.heads, parsed.relation, *output, **options, names=parsed.names
        )
        seconds = time.perf_counter() - start
    if is_first_rank() and parsed.output is not None:
        speed = f"{report.answered / seconds:,.0f} heads/s"
        print(f"{report.answered:,} heads in {seconds:,.1f} s ({speed})", file=sys.stderr)
    return print_problems(report, parsed.heads)


def add_score(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("folder", metavar="RUN", help="the folder or URL of a run, or an export")
    verb.add_argument(
        "triples",
        metavar="FILE",
        help="a file of triples: head, relation and tail with tabs between; bad lines are "
        "reported, and the others scored",
    )
    verb.add_argument(
        "--side",
        choices=("tail", "head"),
        default="tail",
        help="missing side of the queries; with reciprocal relations the two "
        "scores differ (default: tail)",
    )
    add_output(verb)


def run_score(parsed: argparse.Namespace) -> int:
    with answering(parsed.folder) as trained:
        report = trained.score_file(
            parsed.triples, parsed.output, parsed.format, parsed.side, parsed.names
        )
    return print_problems(report, parsed.triples)


def add_nearest(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("folder", metavar="RUN", help="the folder or URL of a run, or an export")
    verb.add_argument("entity", metavar="ENTITY", help="label of an entity")
    verb.add_argument("--top", type=int, default=10, metavar="K", help="default: 10")
    add_output(verb)


def run_nearest(parsed: argparse.Namespace) -> int:
    at_least("--top", parsed.top, 1)
    with answering(parsed.folder) as trained:
        with announced("searching"):
            results = trained.nearest(parsed.entity, parsed.top)
        meaning = trained.nearness
    from kge_torchrec.answers.nearest import Neighbour

    write_records(parsed, results, Neighbour)
    if is_first_rank() and parsed.format == "table":
        print(f"score: {meaning}", file=sys.stderr)
    return 0

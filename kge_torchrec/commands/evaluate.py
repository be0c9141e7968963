"""``kge-torchrec evaluate`` and ``report``: the results of runs."""

from __future__ import annotations

import argparse
import json

from kge_torchrec.commands import add_format, is_first_rank, opened
from kge_torchrec.commands.verbs import acts_with
from kge_torchrec.environment import announced, loading_torch


def add(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    verb.add_argument("folder", metavar="RUN", help="the folder of a run")
    what = verb.add_mutually_exclusive_group()
    what.add_argument(
        "--split", choices=("test", "valid", "train"), default="test", help="default: test"
    )
    what.add_argument(
        "--triples",
        metavar="FILE",
        help="rank the triples of a file instead of a split: head, relation and tail with tabs, "
        "or JSON objects",
    )
    verb.add_argument(
        "--by",
        nargs="+",
        action="extend",
        default=[],
        choices=("relation", "category", "frequency"),
        help="also report groups: by relation, its category (1-1, 1-N, N-1, N-N), or the "
        "frequency of the answer; writes tables and pictures to RUN",
    )
    verb.add_argument(
        "--candidates",
        choices=("all", "seen", "types", "fixed", "sampled"),
        help="rank among all entities, entities seen with the relation on that side, entities of "
        "the same types, fixed lists per triple (as OGB has them), or random entities (default: "
        "the run's evaluation.candidates)",
    )
    types = verb.add_argument(
        "--types", metavar="FILE", help="for --candidates types: a file of lines entity, tab, type"
    )
    acts_with(types, "--candidates types", lambda parsed: parsed.candidates in (None, "types"))
    file = verb.add_argument(
        "--candidate-file",
        metavar="FILE",
        help="for --candidates fixed: a .npz file with head_neg and tail_neg (default: the lists "
        "of an OGB data set)",
    )
    acts_with(file, "--candidates fixed", lambda parsed: parsed.candidates in (None, "fixed"))
    for name, meaning in (("count", "candidates per query (default: 500)"), ("seed", "seed (0)")):
        option = verb.add_argument(
            f"--candidate-{name}",
            type=int,
            metavar="N",
            help=f"for --candidates sampled: {meaning}",
        )
        acts_with(
            option, "--candidates sampled", lambda parsed: parsed.candidates in (None, "sampled")
        )
    add_format(verb)


def run(parsed: argparse.Namespace) -> int:
    """Run the verb; return the exit code."""
    options = {
        "types": parsed.types,
        "file": parsed.candidate_file,
        "count": parsed.candidate_count,
        "seed": parsed.candidate_seed,
    }
    chosen = {name: value for name, value in options.items() if value is not None}
    with opened(parsed.folder) as trained:
        results = trained.evaluate(
            parsed.split,
            parsed.by,
            parsed.candidates,
            triples=parsed.triples,
            candidates_options=chosen,
        )

    if not is_first_rank():
        return 0
    if parsed.format == "json":
        print(json.dumps(results))
        return 0
    from kge_torchrec.ranking.metrics import results_table

    by, counts = results.pop("by", {}), results.pop("triples", None)
    print(results_table(results))
    if counts is not None:
        splits = ", ".join(f"{counts[name]:,} in {name}" for name in ("train", "valid", "test"))
        print(f"{counts['count']:,} triples of {parsed.triples}; of them {splits}")
    if by:
        from kge_torchrec.ranking.group_tables import table

        for name, stats in by.items():
            print(f"\n{table(name, stats)}")
        split = parsed.split if parsed.triples is None else "triples"
        print(f"\nfiles and pictures: {trained.path}/evaluation-{split}-by-*")
    return 0


def add_report(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    verb.add_argument("folders", nargs="+", metavar="RUN", help="the folders of runs")
    verb.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="file of the page (default: report.html in the first run)",
    )
    verb.add_argument(
        "--no-models",
        action="store_true",
        help="load no model: no examples, no map of entities, and ranks by relation only if "
        "evaluate --by relation wrote them",
    )


def run_report(parsed: argparse.Namespace) -> int:
    """Run the verb; return the exit code."""
    with loading_torch():
        from kge_torchrec.reports.page import report

    output = parsed.output or f"{parsed.folders[0]}/report.html"
    with announced("writing the report"):
        page = report(parsed.folders, output, with_models=not parsed.no_models)
    print(page)
    return 0

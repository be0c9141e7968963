"""``evaluate``, ``report`` and ``calibrate``: what trained runs are worth."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from kge_torchrec.commands import add_format, is_first_rank, opened
from kge_torchrec.environment import announced, loading_torch

if TYPE_CHECKING:
    from kge_torchrec.answers.calibration import Calibration


def add(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("folder", metavar="RUN", help="the folder or URL of a run")
    what = verb.add_mutually_exclusive_group()
    what.add_argument(
        "--split", choices=("test", "valid", "train"), default="test", help="default: test"
    )
    what.add_argument(
        "--triples",
        metavar="FILE",
        help="rank the triples of a file instead of a split: head, relation and tail with tabs",
    )
    verb.add_argument(
        "--by",
        nargs="+",
        action="extend",
        default=[],
        choices=("relation", "category", "frequency", "popularity"),
        help="also report groups: by relation, its category (1-1, 1-N, N-1, N-N), or the "
        "frequency (popularity) of the answer; writes files to RUN",
    )
    verb.add_argument(
        "--recommend",
        nargs="+",
        type=int,
        default=[],
        metavar="K",
        help="evaluate lists of K recommended tails per (head, relation) instead of ranks: recall, "
        "NDCG, hit rate, precision, MAP and coverage at each K, and AUC",
    )
    verb.add_argument(
        "--side", choices=("tail", "head"), default="tail", help="the side to recommend (tail)"
    )
    verb.add_argument(
        "--candidates",
        choices=("all", "seen", "types", "fixed"),
        help="rank among all entities, entities seen with the relation on that side, entities of "
        "the same types, or fixed lists per triple (as OGB has them; default: the run's "
        "evaluation.candidates)",
    )
    verb.add_argument(
        "--types", metavar="FILE", help="for --candidates types: a file of lines entity, tab, type"
    )
    verb.add_argument(
        "--candidate-file",
        metavar="FILE",
        help="for --candidates fixed: a .npz file with head_neg and tail_neg",
    )
    add_format(verb)


def run(parsed: argparse.Namespace) -> int:
    options = {"types": parsed.types, "file": parsed.candidate_file}
    chosen = {name: value for name, value in options.items() if value is not None}
    with opened(parsed.folder) as trained:
        results = trained.evaluate(
            parsed.split,
            parsed.by,
            parsed.candidates,
            triples=parsed.triples,
            candidates_options=chosen,
            recommend=parsed.recommend,
            side=parsed.side,
        )

    if not is_first_rank():
        return 0
    if parsed.format == "json":
        print(json.dumps(results))
        return 0
    from kge_torchrec.ranking.metrics import results_table
    from kge_torchrec.ranking.recommendation import recommendation_table

    by, counts = results.pop("by", {}), results.pop("triples", None)
    print((recommendation_table if parsed.recommend else results_table)(results))
    if counts is not None:
        splits = ", ".join(f"{counts[name]:,} in {name}" for name in ("train", "valid", "test"))
        print(f"{counts['count']:,} triples of {parsed.triples}; of them {splits}")
    if by:
        from kge_torchrec.ranking.group_tables import table

        for name, stats in by.items():
            print(f"\n{table(name, stats)}")
        split = parsed.split if parsed.triples is None else "triples"
        split += "-recommendations" if parsed.recommend else ""
        if any(trained.path.glob(f"evaluation-{split}-by-*")):  # none in a read-only folder
            print(f"\nfiles: {trained.path}/evaluation-{split}-by-*")
    return 0


def add_report(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("folders", nargs="+", metavar="RUN", help="the folders or URLs of runs")
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
    with loading_torch():
        from kge_torchrec.reports.page import report

    output = parsed.output or f"{parsed.folders[0]}/report.html"
    with announced("writing the report"):
        page = report(parsed.folders, output, with_models=not parsed.no_models)
    print(page)
    return 0


def add_calibrate(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("folder", metavar="RUN", help="the folder or URL of a run")
    verb.add_argument(
        "--top",
        type=int,
        default=10,
        metavar="K",
        help="number of listed answers per query (default: 10)",
    )
    verb.add_argument(
        "--limit",
        type=int,
        default=10_000,
        metavar="N",
        help="largest number of queries per split and missing part (default: 10000)",
    )
    verb.add_argument("--seed", type=int, default=0, help="seed of the sample (default: 0)")
    add_format(verb)


def run_calibrate(parsed: argparse.Namespace) -> int:
    with opened(parsed.folder) as trained:
        with announced("loading the run"):
            _ = trained.model
        made = trained.calibrate(parsed.top, parsed.limit, parsed.seed)
    if is_first_rank():
        print(json.dumps(made.about) if parsed.format == "json" else _summary(made))
    return 0


def _summary(made: Calibration) -> str:
    about = made.about
    queries = f"{about['valid_queries']:,} queries of valid"
    lines = [f"{made.method}, fitted to the {about['top']} best answers to {queries}"]
    for part, curve in made.curves.items():
        if made.method == "platt":
            lines.append(f"  {part}: p = sigmoid({curve.slope:.6g} score {curve.intercept:+.6g})")
        else:
            lines.append(f"  {part}: {len(curve.scores):,} points")
    if "test" in about:
        test = about["test"]
        title = f"test: {test['queries']:,} queries, {about['top']} best answers each"
        lines.append(f"{title:<50} sigmoid(score)  calibrated")
        for name, words in (
            ("mean_probability", f"mean probability ({test['true']:.4f} are true)"),
            ("expected_calibration_error", "expected calibration error"),
            ("brier_score", "Brier score"),
        ):
            errors = test[name]
            lines.append(f"  {words:<48} {errors['before']:>14.4f}{errors['after']:>12.4f}")
    return "\n".join(lines)

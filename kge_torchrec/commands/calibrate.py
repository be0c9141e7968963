"""``kge-torchrec calibrate`` and ``classify``: probabilities, and thresholds per relation."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kge_torchrec.commands import add_format, is_first_rank, opened
from kge_torchrec.commands.verbs import acts_with
from kge_torchrec.environment import announced

if TYPE_CHECKING:
    from kge_torchrec.answers.calibration import Calibration


def add(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    verb.add_argument("folder", metavar="RUN", help="the folder of a run")
    verb.add_argument(
        "--method",
        choices=("platt", "isotonic"),
        help="curve: a sigmoid, or an ascending step function (default: isotonic from 1,000 "
        "scores on, otherwise platt)",
    )
    verb.add_argument(
        "--among",
        choices=("listed", "seen", "all"),
        default="listed",
        help="fit to the answers that predict lists for valid, or to triples and corruptions from "
        "the relation's entities (seen) or all entities (default: listed)",
    )
    top = verb.add_argument(
        "--top", type=int, metavar="K", help="listed answers per query (default: 10)"
    )
    corruptions = verb.add_argument(
        "--corruptions",
        type=int,
        metavar="N",
        help="with --among seen or all: corruptions per triple and side (default: 4)",
    )
    share = verb.add_argument(
        "--positive-share",
        type=float,
        metavar="P",
        help="with --among seen or all: expected share of true triples in later queries "
        "(default: 0.5)",
    )
    acts_with(top, "--among listed", lambda parsed: parsed.among == "listed")
    for option in (corruptions, share):
        acts_with(option, "--among seen or all", lambda parsed: parsed.among != "listed")
    add_sample(verb, 10_000)
    add_format(verb)


def add_sample(verb: argparse.ArgumentParser, limit: int) -> None:
    """Add --limit and --seed, which choose the triples to use."""
    verb.add_argument(
        "--limit", type=int, default=limit, metavar="N",
        help=f"largest number of triples to use per split (default: {limit})",
    )  # fmt: skip
    verb.add_argument("--seed", type=int, default=0, help="seed of the sample (default: 0)")


def run(parsed: argparse.Namespace) -> int:
    """Run the verb; return the exit code."""
    with opened(parsed.folder) as trained:
        with announced("loading the run"):
            _ = trained.model
        made = trained.calibrate(
            method=parsed.method,
            among=parsed.among,
            top=parsed.top,
            corruptions=parsed.corruptions,
            positive_share=parsed.positive_share,
            limit=parsed.limit,
            seed=parsed.seed,
        )
    if is_first_rank():
        print(json.dumps(made.about) if parsed.format == "json" else _summary(made))
    return 0


def _summary(made: Calibration) -> str:
    about = made.about
    lines = [f"{made.method}, fitted to {_fitted_to(about)}"]
    for part, curve in made.curves.items():
        if made.method == "platt":
            lines.append(f"  {part}: p = sigmoid({curve.slope:.6g} score {curve.intercept:+.6g})")
        else:
            lines.append(f"  {part}: {len(curve.scores):,} points")
    if "test" in about:
        top = about["top"] or 10
        lines += _errors(
            about["test"], f"test: {about['test']['queries']:,} queries, {top} best answers each"
        )
    if "test_corruptions" in about:
        triples = about["test_corruptions"]["triples"]
        lines += _errors(about["test_corruptions"], f"test: {triples:,} triples and corruptions")
    return "\n".join(lines)


def _fitted_to(about: Mapping[str, Any]) -> str:
    if about["among"] == "listed":
        return f"the {about['top']} best answers to {about['valid_queries']:,} queries of valid"
    return (
        f"{about['valid_triples']:,} triples of valid and {about['corruptions']} corruptions each"
    )


def _errors(results: Mapping[str, Any], title: str) -> list[str]:
    lines = [f"{title:<50} sigmoid(score)  calibrated"]
    for name, words in (
        ("mean_probability", f"mean probability ({results['true']:.4f} are true)"),
        ("expected_calibration_error", "expected calibration error"),
        ("brier_score", "Brier score"),
    ):
        before, after = results[name]["before"], results[name]["after"]
        lines.append(f"  {words:<48} {before:>14.4f}{after:>12.4f}")
    return lines


def add_classify(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    verb.add_argument("folder", metavar="RUN", help="the folder of a run")
    verb.add_argument(
        "--among",
        choices=("seen", "all"),
        default="seen",
        help="draw corruptions from entities seen with the relation on that side in train, or "
        "from all entities, which are easier to tell apart (default: seen)",
    )
    add_sample(verb, 100_000)
    add_format(verb)


def run_classify(parsed: argparse.Namespace) -> int:
    """Run the verb; return the exit code."""
    with opened(parsed.folder) as trained, announced("classifying"):
        results = trained.classify(parsed.among, parsed.seed, parsed.limit)
    if is_first_rank():
        if parsed.format == "json":
            print(json.dumps(results))
        else:
            _print_classify(results)
    return 0


def _print_classify(results: dict[str, Any]) -> None:
    import pyarrow as pa

    from kge_torchrec.answers.tables import written

    by_size = sorted(results["relations"].items(), key=lambda item: -item[1]["triples"])
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

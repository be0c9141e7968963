"""``kge-torchrec calibrate``: probabilities of scores, kept in the run's folder."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from kge_torchrec.commands import add_format, add_verb, is_first_rank, opened

if TYPE_CHECKING:
    from kge_torchrec.answers.calibration import Calibration
    from kge_torchrec.commands import Verbs


def add(verbs: Verbs) -> None:
    does = "fit probabilities to a run's scores on valid; predict and score then print them"
    calibrate = add_verb(verbs, "calibrate", does, run)
    calibrate.add_argument("folder", metavar="RUN", help="the folder of a run")
    calibrate.add_argument(
        "--method",
        choices=("platt", "isotonic"),
        default="platt",
        help="a sigmoid of two numbers, or ascending steps (default: platt)",
    )
    calibrate.add_argument(
        "--corruptions",
        type=int,
        default=4,
        metavar="N",
        help="of each triple and side, default: 4",
    )
    add_among(calibrate)
    calibrate.add_argument(
        "--positive-share",
        type=float,
        default=0.5,
        metavar="P",
        help="of true triples among those you will ask about (default: 0.5)",
    )
    add_format(calibrate)


def add_among(verb: argparse.ArgumentParser) -> None:
    """What corruptions are drawn from, and how."""
    verb.add_argument(
        "--among",
        choices=("seen", "all"),
        default="seen",
        help="draw corruptions from the entities that the relation has on that side in train, or "
        "from all, most of which are plainly wrong (default: seen)",
    )
    verb.add_argument(
        "--limit", type=int, default=100_000, metavar="N",
        help="triples of valid and of test that are used at most (default: 100000)",
    )  # fmt: skip
    verb.add_argument("--seed", type=int, default=0, help="of the corruptions (default: 0)")


def run(parsed: argparse.Namespace) -> int:
    with opened(parsed.folder) as trained:
        made = trained.calibrate(
            method=parsed.method,
            corruptions=parsed.corruptions,
            among=parsed.among,
            positive_share=parsed.positive_share,
            limit=parsed.limit,
            seed=parsed.seed,
        )
    if is_first_rank():
        print(json.dumps(made.about) if parsed.format == "json" else _summary(made))
    return 0


def _summary(made: Calibration) -> str:
    about = made.about
    lines = [f"{made.method}, fitted to {about['valid_triples']:,} triples of valid"]
    for side, curve in made.curves.items():
        if made.method == "platt":
            lines.append(f"  {side}: p = sigmoid({curve.slope:.6g} score {curve.intercept:+.6g})")
        else:
            lines.append(f"  {side}: {len(curve.scores):,} points")
    if "test" in about:
        test = about["test"]
        lines.append(f"on {test['triples']:,} triples of test   sigmoid(score)  calibrated")
        for name, words in (
            ("expected_calibration_error", "expected calibration error"),
            ("brier_score", "Brier score"),
        ):
            before, after = test[name]["before"], test[name]["after"]
            lines.append(f"  {words:<28}{before:>14.4f}{after:>12.4f}")
    return "\n".join(lines)

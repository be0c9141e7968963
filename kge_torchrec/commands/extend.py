"""``kge-torchrec extend``: add new triples, entities and relations to a finished run."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kge_torchrec.commands import config_of, is_first_rank
from kge_torchrec.commands.verbs import acts_with
from kge_torchrec.environment import loading_torch

if TYPE_CHECKING:
    from kge_torchrec.trained_run import Run


def add(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    verb.add_argument(
        "folder", metavar="RUN", help="the folder of a run; extend does not change it"
    )
    verb.add_argument(
        "triples",
        nargs="+",
        metavar="NEW_TRIPLES",
        help="a directory or files in a format of prepare",
    )
    verb.add_argument(
        "-o", "--output", required=True, metavar="NEWRUN", help="folder of the new run"
    )
    verb.add_argument(
        "--place",
        action="store_true",
        help="first fit the rows of new entities and relations to their triples, others fixed",
    )
    verb.add_argument(
        "--epochs",
        type=int,
        metavar="N",
        help="epochs to train (default: a tenth of the run's epochs; 0 with --place)",
    )
    freeze = verb.add_argument(
        "--freeze",
        action="store_true",
        help="train only the rows of new entities and relations; all other rows stay unchanged",
    )
    replay = verb.add_argument(
        "--replay",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="share of the old triples per epoch, in addition to all new triples (default: 1)",
    )
    for option in (freeze, replay):
        acts_with(option, "--epochs above 0 (--place without --epochs trains none)", _trains)
    verb.add_argument(
        "--checkpoint",
        default="best",
        metavar="NAME",
        help="checkpoint of RUN to start from: best, newest or a name (default: best)",
    )
    verb.add_argument(
        "--allow-unseen-relations",
        action="store_true",
        help="accept new relations that occur in valid or test only",
    )
    verb.add_argument(
        "--set",
        action="append",
        type=_setting,
        default=[],
        metavar="KEY=VALUE",
        help="another key of the config, such as train.lr=0.01; may be repeated",
    )


def _setting(text: str) -> str:
    key, equals, _ = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} must be KEY=VALUE, such as train.lr=0.01")
    return text


def _trains(parsed: argparse.Namespace) -> bool:
    return not parsed.place if parsed.epochs is None else parsed.epochs != 0


def run(parsed: argparse.Namespace) -> int:
    """Run the verb; return the exit code."""
    with loading_torch():
        config_of(parsed.folder)
        from kge_torchrec.api import extend

    made = extend(
        parsed.folder,
        parsed.triples[0] if len(parsed.triples) == 1 else parsed.triples,
        parsed.output,
        epochs=parsed.epochs,
        freeze=parsed.freeze,
        replay=parsed.replay,
        place=parsed.place,
        checkpoint=parsed.checkpoint,
        allow_unseen_relations=parsed.allow_unseen_relations,
        overrides=[f"--{setting}" for setting in parsed.set],
    )
    if is_first_rank():
        _report(made)
    return 0


def _report(made: Run) -> None:
    from kge_torchrec.ranking.metrics import results_table

    results = made.results
    extended = results["extended"]
    if results["test"] is not None:
        print(f"\ntest\n{results_table(results['test'])}")
    print(f"\nnew: {', '.join(f'{count:,} {what}' for what, count in extended['new'].items())}")
    placed, drift, train = extended["placed"], extended["drift"], results["train"]
    if placed is not None:
        print(
            f"placed {placed['entities']:,} entities and {placed['relation_rows']:,} rows of "
            f"relations by {placed['triples']:,} triples in {placed['seconds']:.1f} s"
        )
    if train["epochs"]:
        epochs = f"{train['epochs']} epoch{'s' * (train['epochs'] != 1)}"
        print(f"trained {epochs} in {train['seconds']:.1f} s")
    if drift is not None:
        print(
            f"old entities: {drift['unchanged']:,} of {drift['rows']:,} rows unchanged, moved by "
            f"{drift['mean']:.2%} of their length on average, {drift['max']:.2%} at most, cosine "
            f"{drift['cosine']:.4f}"
        )
    print(f"run folder: {made.path}")

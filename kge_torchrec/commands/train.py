"""``train`` and ``extend``: start or resume a run, or add new triples to one, and print results."""

from __future__ import annotations

import argparse
import textwrap
from typing import TYPE_CHECKING

from kge_torchrec.commands import add_log, config_of, is_first_rank, take_log
from kge_torchrec.config import ConfigError
from kge_torchrec.config.checks import is_url
from kge_torchrec.environment import loading_torch

if TYPE_CHECKING:
    from kge_torchrec.commands import VerbParser
    from kge_torchrec.trained_run import Run

_USAGE = """\
kge-torchrec train CONFIG [--key.sub value ...]
       kge-torchrec train --resume RUN [--force] [--key.sub value ...]"""
_DESCRIPTION = """\
Trains, ranks the test triples with the best model and writes the folder of the run, which
evaluate, predict and export take.

  CONFIG              a YAML file, or the name of a published one:
{published}
  --key.sub value     changes a key of it; all keys, with meaning and default, are below

examples:
  kge-torchrec train demo
  kge-torchrec train umls --data.path DIRECTORY --train.lr 0.05 --run.dir runs/mine
  kge-torchrec train --resume runs/mine --train.epochs 200
  torchrun --standalone --nproc_per_node=4 -m kge_torchrec train CONFIG
"""
_INDENT = " " * 22


def add(verb: VerbParser) -> None:
    from kge_torchrec.config.parser import published

    names = textwrap.fill(
        ", ".join(published()), width=98, initial_indent=_INDENT, subsequent_indent=_INDENT
    )
    verb.usage, verb.description = _USAGE, _DESCRIPTION.format(published=names)
    verb.ending = _keys
    verb.add_argument(
        "--resume",
        metavar="RUN",
        help="resume the run in this folder as if it had never stopped, on any number of ranks; "
        "--key.sub changes a key from now on. The URL of a copied run is fetched into --run.dir "
        "(default: runs/NAME)",
    )
    verb.add_argument(
        "--force",
        action="store_true",
        help="start at epoch 1 if all checkpoints of RUN are missing",
    )
    add_log(verb)


def _keys() -> str:
    """Return the help of every key of a config."""
    from kge_torchrec.config.parser import build_parser

    usage_and_options = 2
    parts = build_parser().format_help().split("\n\n")
    return "\n" + "\n\n".join(parts[usage_and_options:])


def run(parsed: argparse.Namespace) -> int:
    from kge_torchrec.config.parser import load_config, read_config

    parsed.overrides += take_log(parsed)
    if parsed.resume is None:
        if parsed.force:
            raise ConfigError("--force resumes a run without checkpoints; give --resume RUN too")
        with loading_torch():  # some configs need it
            config = load_config(parsed.config, parsed.overrides)
            from kge_torchrec import api

        return _report(api.train(config))
    if parsed.config is not None:
        raise ConfigError("train --resume takes the config of the run; leave CONFIG out")
    read_config(None, parsed.overrides)  # reject unknown keys before torch is loaded
    with loading_torch():
        if not is_url(parsed.resume):
            config_of(parsed.resume)
        from kge_torchrec import api

    return _report(api.resume(parsed.resume, parsed.overrides, force=parsed.force))


def _report(run: Run) -> int:
    """Print the results and the run folder, on rank 0; return 1 if its copy is not complete."""
    from kge_torchrec.ranking.metrics import ranked_among, results_table
    from kge_torchrec.training.remote_runs import copy_problem

    if not is_first_rank():
        return 0
    results = run.results
    if results["test"] is not None:
        test = results["test"]  # the table names the candidates if they are restricted
        among = "" if "candidates" in test else f", {ranked_among(test)}"
        print(f"\ntest{among}\n{results_table(test)}")
    train = results["train"]
    epochs = f"{train['epochs']} epoch{'s' * (train['epochs'] != 1)}"
    if (early := train.get("stopped_early")) is not None:
        print(f"\nstopped after epoch {early['epoch']} of {early['of']}: {early['reason']}")
    print(
        f"\ntrained {epochs} in {train['seconds']:.1f} s, "
        f"{train['triples_per_second']:,.0f} {run.config.negatives.examples}/s, "
        f"peak memory {train['peak_memory_bytes'] / 2**20:,.0f} MiB per rank\n"
        f"run folder: {run.path}"
    )
    url = run.config.checkpoint.saving.copy_to
    if url is not None and not (problem := copy_problem(run.path)):
        print(f"copy of the run: {url}")
    return int(url is not None and bool(problem))


def add_extend(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "folder", metavar="RUN", help="the folder or URL of a run; extend does not change it"
    )
    verb.add_argument(
        "triples",
        nargs="*",
        metavar="NEW_TRIPLES",
        help="a directory or files in a format of prepare; none with --delete",
    )
    verb.add_argument(
        "--delete",
        metavar="FILE",
        help="file with one entity per line: write a run without them, their rows and triples",
    )
    verb.add_argument(
        "-o", "--output", required=True, metavar="NEWRUN", help="folder of the new run"
    )
    verb.add_argument(
        "--epochs",
        type=int,
        metavar="N",
        help="epochs to train (default: a tenth of the run's epochs; 0 with --delete)",
    )
    verb.add_argument(
        "--freeze",
        action="store_true",
        help="train only the rows of new entities and relations; all other rows stay unchanged",
    )
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
        "--features",
        metavar="FILE",
        help="lines entity, tab, feature, and perhaps a tab and a weight; entities that the file "
        "does not have keep their features",
    )
    verb.add_argument(
        "--set",
        action="append",
        type=_setting,
        default=[],
        metavar="KEY=VALUE",
        help="another key of the config, such as train.lr=0.01; may be repeated",
    )
    add_log(verb)


def _setting(text: str) -> str:
    key, equals, _ = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} must be KEY=VALUE, such as train.lr=0.01")
    return text


def run_extend(parsed: argparse.Namespace) -> int:
    if parsed.freeze and parsed.epochs == 0:
        raise ConfigError("--freeze says what is trained, and --epochs 0 trains nothing")
    with loading_torch():
        config_of(parsed.folder)
        from kge_torchrec.api import extend

    made = extend(
        parsed.folder,
        parsed.triples[0] if len(parsed.triples) == 1 else parsed.triples or None,
        parsed.output,
        delete=parsed.delete,
        epochs=parsed.epochs,
        freeze=parsed.freeze,
        checkpoint=parsed.checkpoint,
        allow_unseen_relations=parsed.allow_unseen_relations,
        features=parsed.features,
        overrides=[*(f"--{setting}" for setting in parsed.set), *take_log(parsed)],
    )
    if is_first_rank():
        _report_extension(made)
    return 0


def _report_extension(made: Run) -> None:
    from kge_torchrec.ranking.metrics import results_table

    results = made.results
    extended = results["extended"]
    if results["test"] is not None:
        print(f"\ntest\n{results_table(results['test'])}")
    if "deleted" in extended:
        deleted = extended["deleted"]
        print(
            f"\ndeleted {deleted['entities']:,} entities and {deleted['triples']:,} triples; "
            f"{extended['from']} still has them\nrun folder: {made.path}"
        )
        return
    print(f"\nnew: {', '.join(f'{count:,} {what}' for what, count in extended['new'].items())}")
    train = results["train"]
    if train["epochs"]:
        epochs = f"{train['epochs']} epoch{'s' * (train['epochs'] != 1)}"
        print(f"trained {epochs} in {train['seconds']:.1f} s")
    print(f"run folder: {made.path}")

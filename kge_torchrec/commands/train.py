"""``kge-torchrec train``: start or resume a run, and print its results."""

from __future__ import annotations

import argparse
import textwrap
from typing import TYPE_CHECKING

from kge_torchrec.commands import config_of, is_first_rank
from kge_torchrec.commands.verbs import acts_with
from kge_torchrec.config import ConfigError
from kge_torchrec.environment import loading_torch

if TYPE_CHECKING:
    from kge_torchrec.commands.verbs import VerbParser
    from kge_torchrec.trained_run import Run

_USAGE = """\
kge-torchrec train CONFIG [--key.sub value ...] [--plan plan.json]
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
    """Add the arguments of the verb."""
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
        "--key.sub changes a key from now on",
    )
    force = verb.add_argument(
        "--force",
        action="store_true",
        help="start at epoch 1 if all checkpoints of RUN are missing",
    )
    acts_with(force, "--resume", lambda parsed: parsed.resume is not None)
    verb.add_argument(
        "--plan",
        metavar="plan.json",
        help="shard the entity table by a file of `kge-torchrec plan -o`; the same as --run.plan",
    )


def _keys() -> str:
    """Return the help of every key of a config."""
    from kge_torchrec.config.parser import build_parser

    usage_and_options = 2
    parts = build_parser().format_help().split("\n\n")
    return "\n" + "\n\n".join(parts[usage_and_options:])


def run(parsed: argparse.Namespace) -> int:
    """Run the verb; return the exit code."""
    if parsed.plan is not None:
        parsed.overrides.append(f"--run.plan={parsed.plan}")
    from kge_torchrec.config.parser import load_config, read_config

    if parsed.resume is None:
        with loading_torch():  # some configs need it
            config = load_config(parsed.config, parsed.overrides)
            from kge_torchrec import api

        _report(api.train(config))
        return 0
    if parsed.config is not None:
        raise ConfigError("train --resume takes the config of the run; leave CONFIG out")
    read_config(None, parsed.overrides)  # reject unknown keys before torch is loaded
    with loading_torch():
        config_of(parsed.resume)
        from kge_torchrec import api

    _report(api.resume(parsed.resume, parsed.overrides, force=parsed.force))
    return 0


def _report(run: Run) -> None:
    """Print the results and the run folder, on rank 0."""
    from kge_torchrec.ranking.metrics import ranked_among, results_table

    if not is_first_rank():
        return
    results = run.results
    if results["test"] is not None:
        table = results_table(results["test"])  # names the candidates if they are restricted
        restricted = "candidates" in results["test"]
        print(f"\ntest{'' if restricted else f', {ranked_among({})}'}\n{table}")
    train = results["train"]
    epochs = f"{train['epochs']} epoch{'s' * (train['epochs'] != 1)}"
    print(
        f"\ntrained {epochs} in {train['seconds']:.1f} s, "
        f"{train['triples_per_second']:,.0f} {run.config.negatives.examples}/s, "
        f"peak memory {train['peak_memory_bytes'] / 2**20:,.0f} MiB per rank\n"
        f"run folder: {run.path}"
    )

"""``kge-torchrec train``: what it says of itself, starting, resuming, and the report at the end."""

from __future__ import annotations

import re
import sys
import textwrap
from typing import TYPE_CHECKING

from kge_torchrec.commands import config_of, is_first_rank
from kge_torchrec.config import ConfigError
from kge_torchrec.environment import loading_torch

if TYPE_CHECKING:
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
  --resume RUN        goes on with the run in that folder as if it had never stopped, on any
                      number of ranks; keys given besides hold from here on
  --force             with --resume: starts at epoch 1 if all checkpoints of the run are gone
  --plan plan.json    lays the table out by a file that `kge-torchrec plan -o` wrote; the same as
                      --run.plan

examples:
  kge-torchrec train demo
  kge-torchrec train umls --data.path DIRECTORY --train.lr 0.05 --run.dir runs/mine
  kge-torchrec train --resume runs/mine --train.epochs 200
  torchrun --standalone --nproc_per_node=4 -m kge_torchrec train CONFIG
"""
_INDENT = " " * 22


def run(arguments: list[str]) -> int:
    if not arguments:
        print(f"usage: {_USAGE}\n\nkge-torchrec train --help says more.", file=sys.stderr)
        return 2
    if {"-h", "--help"} & set(arguments):
        print(_help())
        return 0
    arguments = [re.sub(r"^--plan(?=$|=)", "--run.plan", word) for word in arguments]
    if arguments[0] == "--resume":
        return _resume(arguments[1:])
    from kge_torchrec.config.parser import load_config

    name, overrides = None, arguments
    if not arguments[0].startswith("-"):
        name, overrides = arguments[0], arguments[1:]
    with loading_torch():  # which some configs need
        config = load_config(name, overrides)
        from kge_torchrec import api

    _report(api.train(config))
    return 0


def _help() -> str:
    from kge_torchrec.config.parser import build_parser, published

    names = textwrap.fill(
        ", ".join(published()), width=98, initial_indent=_INDENT, subsequent_indent=_INDENT
    )
    description = _DESCRIPTION.format(published=names)
    return build_parser("kge-torchrec train", _USAGE, description).format_help()


def _resume(arguments: list[str]) -> int:
    from kge_torchrec.config.parser import read_config

    if not arguments or arguments[0].startswith("-"):
        raise ConfigError("train --resume needs the folder of a run")
    folder, overrides = arguments[0], [word for word in arguments[1:] if word != "--force"]
    read_config(None, overrides)  # complains about unknown keys before anything starts
    with loading_torch():
        config_of(folder)
        from kge_torchrec import api

    _report(api.resume(folder, overrides, force="--force" in arguments))
    return 0


def _report(run: Run) -> None:
    """The results table and where to go from here, on rank 0."""
    from kge_torchrec.ranking.metrics import ranked_among, results_table

    if not is_first_rank():
        return
    results = run.results
    if results["test"] is not None:
        table = results_table(results["test"])  # which says so where candidates are restricted
        restricted = "candidates" in results["test"]
        print(f"\ntest{'' if restricted else f', {ranked_among({})}'}\n{table}")
    train = results["train"]
    epochs = f"{train['epochs']} epoch{'s' * (train['epochs'] != 1)}"
    print(
        f"\ntrained {epochs} in {train['seconds']:.1f} s, "
        f"{train['triples_per_second']:,.0f} {run.config.negatives.examples}/s, "
        f"peak memory {train['peak_memory_bytes'] / 2**20:,.0f} MiB a rank\n"
        f"run folder: {run.path}"
    )

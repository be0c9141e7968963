"""The verb ``compare``: who takes part, its arguments, what it prints and its exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kge_torchrec.config import Config, ConfigError
from kge_torchrec.config.parser import AnyConfig, as_config, load_config
from kge_torchrec.config.verb_options import acts_with, check_options

# name -> (entities.engine, entities.preset)
VARIANTS = {
    "torchrec": ("torchrec", "fbgemm"),
    "handrolled": ("handrolled", "fbgemm"),
    "dicee": ("handrolled", "dicee"),
    "dgl": ("handrolled", "dgl"),
}
_DECIDED = ("entities.engine", "entities.preset")
# To load a config with: takes all that any variant takes, so that what one of them does not take
# is refused in that one's name.
NEUTRAL = ("--entities.engine=handrolled", "--entities.preset=fbgemm")


def check_names(names: Sequence[str], overrides: Sequence[str] = ()) -> None:
    """Raises ConfigError unless the names are at least two different variants.

    overrides: arguments of the command line, among which there may be no engine and no preset,
    since the names say both.
    """
    for name in names:
        if name not in VARIANTS:
            raise ConfigError(f"--engines: {name!r} is none of {', '.join(VARIANTS)}")
        if names.count(name) > 1:
            raise ConfigError(f"--engines names {name} twice; a variant takes part once")
    if len(names) < 2:
        raise ConfigError(f"--engines needs at least two of {', '.join(VARIANTS)}")
    for argument in overrides:
        key = argument.lstrip("-").split("=")[0]
        if key in _DECIDED:
            raise ConfigError(f"{key}: --engines says it for each variant; leave it out")


def variants(config: Config, names: Sequence[str]) -> dict[str, Config]:
    """The config of each variant: ``config`` with its engine and preset.

    Raises ConfigError, naming the variant and the key, where another setting contradicts them.
    """
    check_names(names)
    if config.train.schedule == "plateau":
        raise ConfigError(
            "train.schedule plateau follows validation, and a comparison validates at its end "
            "only; use constant, linear, cosine or exponential"
        )
    found = {}
    for name in names:
        engine, preset = VARIANTS[name]
        entities = replace(config.entities, engine=engine, preset=preset)
        try:
            found[name] = replace(config, entities=entities)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
    return found


if TYPE_CHECKING:
    from kge_torchrec.comparison.compare import Comparison

_USAGE = """\
kge-torchrec compare CONFIG [--engines NAME NAME ...] [--world-sizes W ...]
       [--repeats N] [--steps N] [--key.sub value ...]"""
_DESCRIPTION = f"""\
Trains and measures several engines from the same start on the same batches, and reports in the
folder --run.dir. CONFIG is a YAML file or the name of one in configs/; --key.sub changes its keys
as in train. All epochs are trained, and ranked at their end only.
Variants: {", ".join(VARIANTS)}."""


def compare(
    config: AnyConfig = None,
    engines: Sequence[str] = ("torchrec", "handrolled"),
    world_sizes: Sequence[int] = (1,),
    repeats: int = 3,
    steps: int = 100,
) -> dict[str, Any]:
    """Trains the same run with several engines, side by side; returns what comparison.json holds.

    config: as ``train`` takes it; run.dir gets the report.  The others are options of the verb.
    Starts processes of its own, so scripts call it under ``if __name__ == "__main__"``.  Raises
    ConfigError for settings that make no sense, DataError on bad data.
    """
    check_names(engines, ())
    return _comparison(as_config(config), engines, world_sizes, repeats, steps).run()


def run(arguments: Sequence[str]) -> int:
    """Compares, prints tables and verdict, returns the exit code: 1 if something is missing.

    Raises ConfigError for settings that make no sense, before anything starts, and DataError.
    """
    arguments = list(arguments)
    if not arguments or {"-h", "--help"} & set(arguments):
        _parser().print_help(sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    if "RANK" in os.environ:
        raise ConfigError("compare starts its own processes; call it without torchrun")
    name, rest = None, arguments
    if not arguments[0].startswith("-"):
        name, rest = arguments[0], arguments[1:]
    parser = _parser()
    options, overrides = parser.parse_known_args(rest)
    check_options(parser, options)
    check_names(options.engines, overrides)
    config = load_config(name, [*overrides, *NEUTRAL])
    comparison = _comparison(
        config, options.engines, options.world_sizes, options.repeats, options.steps
    )
    try:
        comparison.run()
    except KeyboardInterrupt:
        print("kge-torchrec: interrupted; what was measured is kept", file=sys.stderr)
        return 130
    finally:
        print(f"{comparison.text()}\n\nreport: {comparison.folder}")
    return 0 if comparison.found["complete"] else 1


def _comparison(
    config: Config, engines: Sequence[str], world_sizes: Sequence[int], repeats: int, steps: int
) -> Comparison:
    config.check_trainable()
    configs = variants(config, engines)

    from kge_torchrec.comparison.compare import Comparison, Extent  # torch takes seconds
    from kge_torchrec.comparison.speed import Timing
    from kge_torchrec.training.effects import check_start, facts_of

    check_start(config, facts_of(config))
    return Comparison(configs, Extent(tuple(world_sizes), repeats, Timing(steps=steps)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kge-torchrec compare", usage=_USAGE, description=_DESCRIPTION, allow_abbrev=False
    )
    parser.add_argument(
        "--engines",
        nargs="+",
        default=["torchrec", "handrolled"],
        metavar="NAME",
        help="variants; others are compared with the first (default: torchrec handrolled)",
    )
    parser.add_argument(
        "--world-sizes",
        nargs="+",
        type=int,
        default=[1],
        metavar="W",
        help="numbers of processes to compare with (default: 1)",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        metavar="N",
        help="speed measurements of each variant, by turns; 0 measures none (default: 3)",
    )
    steps = parser.add_argument(
        "--steps",
        type=int,
        default=100,
        metavar="N",
        help="steps of each of the 3 timed blocks of a measurement (default: 100)",
    )
    acts_with(steps, "--repeats above 0", lambda parsed: parsed.repeats > 0)
    return parser

"""``kge-torchrec compare``: train several engines side by side and measure them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kge_torchrec.config import Config, ConfigError
from kge_torchrec.config.parser import AnyConfig, as_config, load_config

if TYPE_CHECKING:
    from kge_torchrec.comparison.compare import Comparison

# name -> (entities.engine, entities.preset)
VARIANTS = {
    "torchrec": ("torchrec", "fbgemm"),
    "handrolled": ("handrolled", "fbgemm"),
    "dicee": ("handrolled", "dicee"),
    "dgl": ("handrolled", "dgl"),
}
# Options to load a config with. They accept every setting that a variant accepts, so that a setting
# that a variant refuses is refused in the name of that variant.
NEUTRAL = ("--entities.engine=handrolled", "--entities.preset=fbgemm")

_USAGE = """\
kge-torchrec compare CONFIG [--engines NAME NAME ...] [--world-sizes W ...]
       [--repeats N] [--steps N] [--key.sub value ...]"""
_DESCRIPTION = f"""\
Trains several engines with the same initial values and batches, measures them, and writes a report
to the folder --run.dir. CONFIG is a YAML file or the name of one in configs/; --key.sub changes its
keys as in train. The models are ranked once, after the last epoch.
Variants: {", ".join(VARIANTS)}."""


def add(verb: argparse.ArgumentParser) -> None:
    verb.usage, verb.description = _USAGE, _DESCRIPTION
    add, engines = verb.add_argument, ["torchrec", "handrolled"]
    help = "variants; the others are compared with the first (default: torchrec handrolled)"
    add("--engines", nargs="+", default=engines, metavar="NAME", help=help)
    help = "numbers of processes to compare with (default: 1)"
    add("--world-sizes", nargs="+", type=int, default=[1], metavar="W", help=help)
    help = "speed measurements per variant, alternating; 0 measures none (default: 3)"
    add("--repeats", type=int, default=3, metavar="N", help=help)
    help = "steps of each of the 3 timed blocks of a measurement (default: 100)"
    add("--steps", type=int, default=100, metavar="N", help=help)


def run(parsed: argparse.Namespace) -> int:
    """Compare, print tables, and return the exit code: 1 if something is missing."""
    if "RANK" in os.environ:
        raise ConfigError("compare starts its own processes; call it without torchrun")
    if not parsed.repeats and parsed.steps != 100:
        raise ConfigError("--steps: --repeats 0 measures no speed; leave one of the two out")
    check_names(parsed.engines, parsed.overrides)
    config = load_config(parsed.config, [*parsed.overrides, *NEUTRAL])
    comparison = _comparison(
        config, parsed.engines, parsed.world_sizes, parsed.repeats, parsed.steps
    )
    try:
        comparison.run()
    except KeyboardInterrupt:
        print("kge-torchrec: interrupted; the measurements so far are kept", file=sys.stderr)
        return 130
    finally:
        print(f"{comparison.text()}\n\nreport: {comparison.folder}")
    return 0 if comparison.content["complete"] else 1


def check_names(names: Sequence[str], overrides: Sequence[str] = ()) -> None:
    """Raise ConfigError for wrong names of variants, or overrides that set an engine or a preset.

    There must be at least two different names.
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
        if key in ("entities.engine", "entities.preset"):
            raise ConfigError(f"{key}: --engines sets it for each variant; leave it out")


def variants(config: Config, names: Sequence[str]) -> dict[str, Config]:
    """Return the config of each variant: ``config`` with its engine and preset.

    Raises:
        ConfigError: Another setting contradicts them; the message names the variant and the key.
    """
    check_names(names)
    if config.train.schedule == "plateau":
        raise ConfigError(
            "train.schedule plateau follows validation, and a comparison validates at its end "
            "only; use constant, linear, cosine or exponential"
        )
    if config.entities.on_disk:
        raise ConfigError(
            "entities.placement disk: a comparison trains all variants in one folder, where they "
            "would overwrite each other's parts; set entities.placement to memory"
        )
    configs = {}
    for name in names:
        engine, preset = VARIANTS[name]
        entities = replace(config.entities, engine=engine, preset=preset)
        try:
            configs[name] = replace(config, entities=entities)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
    return configs


def compare(
    config: AnyConfig = None,
    engines: Sequence[str] = ("torchrec", "handrolled"),
    world_sizes: Sequence[int] = (1,),
    repeats: int = 3,
    steps: int = 100,
) -> dict[str, Any]:
    """Train the same run with several engines, side by side.

    It starts processes of its own, so scripts call it under ``if __name__ == "__main__"``.

    Args:
        config: As for ``train``; run.dir gets the report.
        engines: Names of the variants; the others are compared with the first.
        world_sizes: Numbers of processes to compare with.
        repeats: Number of speed measurements per variant.
        steps: Number of steps per timed block.

    Returns:
        The content of comparison.json.

    Raises:
        ConfigError: The settings make no sense.
        DataError: The data is bad.
    """
    return _comparison(as_config(config), engines, world_sizes, repeats, steps).run()


def _comparison(
    config: Config, engines: Sequence[str], world_sizes: Sequence[int], repeats: int, steps: int
) -> Comparison:
    variants(config, engines)  # refuses settings before torch is loaded, which takes seconds

    from kge_torchrec.comparison.compare import Comparison, Extent
    from kge_torchrec.comparison.measurements import Timing
    from kge_torchrec.training.run_data import check_start, facts_of

    check_start(config, facts_of(config))
    return Comparison(
        variants(config, engines), Extent(tuple(world_sizes), repeats, Timing(steps=steps))
    )

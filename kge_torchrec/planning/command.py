"""The verb ``plan``: its arguments, where the sizes come from, what it prints, its exit code.

Beside ``cli`` and ``api``, not in ``planning``: it needs training's objective and data sources.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kge_torchrec.config import Config, ConfigError, GraphSize
from kge_torchrec.config.parser import AnyConfig, as_config, load_config
from kge_torchrec.config.verb_options import acts_with, check_options

if TYPE_CHECKING:
    from kge_torchrec.planning.advice import Advice, Faster
    from kge_torchrec.planning.choice import Choice
    from kge_torchrec.planning.devices import Cluster
    from kge_torchrec.planning.plan import TrainingPlan
    from kge_torchrec.planning.workload import EntityFrequency, Workload

DOES_NOT_FIT = 3  # the exit code; 1 and 2 are errors

_USAGE = """\
kge-torchrec plan [CONFIG] --devices 8xH100-80GB [--hosts 2]
       [--entities N --relations R --triples T] [--output plan.json] [--picture plan.png]
       [--all] [--key.sub value ...]"""
_DESCRIPTION = """\
Lays a run out without GPUs, processes or data: what every rank holds, what a step sends and takes,
what to change if it does not fit, and from which batch on launches no longer rule its steps. CONFIG
is a YAML file or the name of one in configs/; --key.sub changes its keys as in train. The exit code
is 0 if it fits and 3 if it does not."""


def run(arguments: Sequence[str]) -> int:
    """Plans, prints, returns the exit code.  Raises ConfigError, DataError or OSError."""
    arguments = list(arguments)
    if not arguments or {"-h", "--help"} & set(arguments):
        _parser().print_help(sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    name, rest = None, arguments
    if not arguments[0].startswith("-"):
        name, rest = arguments[0], arguments[1:]
    parser = _parser()
    options, overrides = parser.parse_known_args(rest)
    check_options(parser, options)
    config = load_config(name, overrides)
    config.check_trainable()
    return _plan(config, options)


def plan(config: AnyConfig = None, *, devices: str, **options: Any) -> dict[str, Any]:
    """Lays a run out without GPUs, processes or data: what ``plan --format json`` prints.

    config: as ``train`` takes it.  devices and options are the verb's: ``devices="8xH100-80GB",
    hosts=2, entities=86_000_000, relations=14_824, triples=338_586_276``; sizes that are not given
    are those of the config's data.  Raises ConfigError for what cannot be, TypeError for an option
    that there is not, DataError or OSError on bad data.
    """
    from kge_torchrec.planning.plan import plan_training

    given = {"devices": devices, **options}
    defaults = vars(_parser().parse_args(["--devices", devices]))
    unknown = set(given) - (set(defaults) - {"all", "output", "picture", "format"})
    if unknown:
        raise TypeError(f"plan() has no option {', '.join(sorted(unknown))}")
    config = as_config(config)
    config.check_trainable()
    return _content(plan_training(*_asked(config, argparse.Namespace(**{**defaults, **given}))))[0]


def _plan(config: Config, options: argparse.Namespace) -> int:
    # Imported here, since torch takes seconds and wrong options should not.
    from kge_torchrec.planning.plan import alternatives, plan_training

    _check_picture(options.picture)
    asked = _asked(config, options)
    if options.all:
        return _print_all(alternatives(*asked), options.format)
    return _print_one(plan_training(*asked), options)


def _asked(config: Config, options: argparse.Namespace) -> tuple[Workload, Cluster, Choice]:
    """(workload, cluster, choice)"""
    from kge_torchrec.planning.choice import Choice
    from kge_torchrec.planning.devices import PRESETS, parse_devices, read_devices

    known = read_devices(options.device_file) if options.device_file else PRESETS
    cluster = parse_devices(options.devices, options.hosts, known, options.host_memory)
    choice = Choice(**{name: getattr(options, name) for name in Choice.__dataclass_fields__})
    return _workload(config, cluster, options), cluster, choice


def _content(plan: TrainingPlan) -> tuple[dict[str, Any], list[Advice], Faster | None]:
    """What JSON holds of it; what would make it fit; what would make it faster."""
    from kge_torchrec.planning.advice import advise, faster
    from kge_torchrec.planning.plan_file import plan_content

    advice = [] if plan.fits else advise(plan)
    quicker = faster(plan) if plan.fits else None
    return plan_content(plan, advice, quicker), advice, quicker


def _print_one(plan: TrainingPlan, options: argparse.Namespace) -> int:
    from kge_torchrec.planning.picture import draw
    from kge_torchrec.planning.plan_file import write_plan
    from kge_torchrec.planning.report import report

    content, advice, quicker = _content(plan)
    if options.output:
        write_plan(options.output, content)
    if options.picture:
        draw(plan, options.picture)
    print(json.dumps(content) if options.format == "json" else report(plan, advice, quicker))
    return 0 if plan.fits else DOES_NOT_FIT


def _print_all(plans: list[TrainingPlan], form: str) -> int:
    from kge_torchrec.planning.plan_file import plan_content
    from kge_torchrec.planning.report import comparison

    print(json.dumps([plan_content(p) for p in plans]) if form == "json" else comparison(plans))
    return 0 if any(plan.fits for plan in plans) else DOES_NOT_FIT


def _check_picture(path: str | None) -> None:
    if path and Path(path).suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--picture: {path} must end with .png, .svg or .pdf")


def _workload(config: Config, cluster: Cluster, options: argparse.Namespace) -> Workload:
    """The sizes of the run: from the options, the rest from the config's data."""
    from kge_torchrec.planning.workload import TYPICAL_SKEW, EntityFrequency, Workload
    from kge_torchrec.training.assembly import build_objective

    given = [options.entities, options.relations, options.triples]
    frequency = None
    if None in given:
        found, of_data = _sizes_of_data(config, options)
        given = [own if own is not None else other
                 for own, other in zip(given, found, strict=True)]  # fmt: skip
        if options.skew is None and options.entities is None:
            frequency = of_data
    entities, relations, triples = given
    if frequency is None:
        skew = TYPICAL_SKEW if options.skew is None else options.skew
        frequency = EntityFrequency.zipf(max(1, entities), skew)  # Workload refuses none
    config.check_device(cluster.device.is_cuda)
    graph = GraphSize(entities, relations, triples)
    config = config.settled(graph, cluster.device.is_cuda, cluster.world_size)
    return Workload(config, entities, relations, triples, build_objective, frequency)


def _sizes_of_data(
    config: Config, options: argparse.Namespace
) -> tuple[tuple[int, int, int], EntityFrequency]:
    """((entities, relations, triples), frequency) of the config's data, read as training does."""
    import torch

    from kge_torchrec.data.catalogues import is_named
    from kge_torchrec.data.countries import EMBEDDED
    from kge_torchrec.distributed.processes import Processes
    from kge_torchrec.planning.workload import EntityFrequency
    from kge_torchrec.training.session import open_store

    path = config.data.path
    flags = "--entities, --relations and --triples"
    if path == EMBEDDED and options.entities is not None:
        raise ConfigError(f"give all of {flags}, or --data.path to take the others from")
    if path != EMBEDDED and not is_named(path) and not Path(path).exists():
        raise ConfigError(f"data.path: there is nothing at {path}; give {flags} to plan without")
    alone = Processes(0, 1, 1, torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(config.data, config.seed, Path(folder) / "store", alone, False)
        counts = store.num_entities, store.num_relations, len(store.train)
        return counts, EntityFrequency.of_degrees(store.degrees())


def count(text: str) -> int:
    """86_000_000, 86,000,000, 86M or 1B."""
    text = text.strip().replace(",", "")
    unit = {"k": 10**3, "m": 10**6, "b": 10**9}.get(text[-1:].lower())
    return round(float(text[:-1]) * unit) if unit else int(text)


def skew(text: str) -> float:
    """An exponent from 0 to 3."""
    value = float(text)
    if not 0 <= value <= 3:
        raise ValueError
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kge-torchrec plan", usage=_USAGE, description=_DESCRIPTION, allow_abbrev=False
    )
    where = parser.add_argument_group("devices")
    where.add_argument(
        "--devices",
        required=True,
        help="all of them, one rank each: 8xH100-80GB, 4xA100-40GB, 1xH200, 2xCPU, 4xCPU-64GB",
    )
    where.add_argument(
        "--hosts", type=int, default=1, help="over which they are spread evenly (default: 1)"
    )
    where.add_argument(
        "--device-file", metavar="YAML", help="other devices; docs/how-to/plan.md has the keys"
    )
    where.add_argument(
        "--host-memory", type=float, default=0, metavar="GIB", help="main memory of one host"
    )
    where.add_argument(
        "--reserve", type=float, default=0.05, help="share of memory left free (default: 0.05)"
    )
    what = parser.add_argument_group("sizes, where they are not to be those of the config's data")
    for name in ("entities", "relations", "triples"):
        what.add_argument(f"--{name}", type=count, metavar="N", help="such as 86_000_000 or 86M")
    what.add_argument(
        "--skew",
        type=skew,
        help="Zipf exponent of how often entities occur, 0 for uniform (default: counted in the "
        "data, 0.7 without)",
    )
    how = parser.add_argument_group("layout")
    layout = [
        how.add_argument(
            "--sharding",
            default="row_wise",
            help="row_wise, column_wise, table_wise, data_parallel",
        ),
        how.add_argument("--kernel", default="fused", help="fused, fused_uvm, fused_uvm_caching"),
        how.add_argument("--dtype", default="fp32", help="of the table: fp32, fp16, bf16"),
        how.add_argument("--replicas", type=int, default=1, help="2-D parallelism: whole tables"),
    ]
    cache = how.add_argument(
        "--cache-ratio", type=float, default=0.2, help="of the rows (default: 0.2)"
    )
    acts_with(
        cache,
        "--kernel fused_uvm_caching, or --all",
        lambda parsed: parsed.all or parsed.kernel == "fused_uvm_caching",
    )
    sync = how.add_argument(
        "--sync-every", type=int, default=100, help="steps between their averaging"
    )
    acts_with(
        sync, "--replicas above 1, or --all", lambda parsed: parsed.all or parsed.replicas > 1
    )
    how.add_argument("--all", action="store_true", help="rank all layouts by modelled step time")
    out = parser.add_argument_group("output")
    plan = out.add_argument("-o", "--output", metavar="JSON", help="the plan, for train --plan")
    picture = out.add_argument("--picture", metavar="PNG_OR_SVG", help="the ranks' memory")
    for option in (*layout, plan, picture):
        acts_with(option, "one layout, without --all", lambda parsed: not parsed.all)
    out.add_argument("--format", choices=("table", "json"), default="table")
    return parser

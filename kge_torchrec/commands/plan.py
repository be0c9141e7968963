"""``kge-torchrec plan``: estimate the memory and step time of a run."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from itertools import accumulate, pairwise, starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kge_torchrec.config import Config, ConfigError, GraphSize
from kge_torchrec.config.keys import Facts
from kge_torchrec.config.parser import AnyConfig, as_config, load_config

if TYPE_CHECKING:
    from kge_torchrec.planning.devices import Cluster
    from kge_torchrec.planning.frequency import EntityFrequency
    from kge_torchrec.planning.layout import Setup
    from kge_torchrec.planning.plan import TrainingPlan
    from kge_torchrec.planning.workload import Workload

DOES_NOT_FIT = 3  # the exit code; 1 and 2 are errors

_USAGE = """\
kge-torchrec plan [CONFIG] --devices 8xH100-80GB [--hosts 2]
       [--entities N --relations R --triples T] [--all]
       [--key.sub value ...]"""
_DESCRIPTION = """\
Plans a run without GPUs, processes or data: memory per rank, traffic and time per step, and changes
if the run does not fit. CONFIG is a YAML file or the name of one in configs/; --key.sub changes its
keys as in train. The exit code is 0 if the run fits and 3 if it does not."""


def add(verb: argparse.ArgumentParser) -> None:
    verb.usage, verb.description = _USAGE, _DESCRIPTION
    add = verb.add_argument_group("devices").add_argument
    names = (
        "all devices of the run, one rank each: 8xH100-80GB, 4xA100-40GB, 1xH200, 2xCPU, "
        "4xCPU-64GB, or any card by its memory: 8xGPU-96GB"
    )
    add("--devices", required=True, help=names)
    add("--hosts", type=int, default=1, help="hosts that share the devices evenly (default: 1)")
    add("--host-memory", type=float, metavar="GIB", help="main memory of one host")
    for place, where in (("within-host", "others on its host"), ("between-hosts", "other hosts")):
        add(
            f"--{place}",
            type=float,
            metavar="GB/S",
            help=f"speed of a rank's link to {where}, in place of the device's, such as 12.5",
        )
    add("--reserve", type=float, default=0.05, help="share of memory left free (default: 0.05)")
    add = verb.add_argument_group("sizes (default: those of the config's data)").add_argument
    add(
        "--entities",
        type=entity_counts,
        metavar="N",
        help="number of entities, such as 86M; with entities.tables those of each type: "
        "user=60M,item=26M",
    )
    for name in ("relations", "triples"):
        add(
            f"--{name}",
            type=count,
            metavar="N",
            help=f"number of {name}, such as 86_000_000 or 86M",
        )
    exponent = "Zipf exponent of entity frequencies, 0 for uniform (default: counted in the data, "
    add("--skew", type=skew, help=f"{exponent}0.7 without)")
    add = verb.add_argument_group("layout").add_argument
    add(
        "--sharding",
        default="row_wise",
        help="row_wise (as in training), column_wise, table_wise or data_parallel",
    )
    add("--all", action="store_true", help="list all layouts by estimated step time")
    add = verb.add_argument_group("output").add_argument
    add("--format", choices=("table", "json"), default="table")


def run(parsed: argparse.Namespace) -> int:
    if parsed.all and parsed.sharding != "row_wise":
        raise ConfigError("--sharding: --all lists all of them; leave one of the two out")
    config = load_config(parsed.config, parsed.overrides)
    if config.decided_by is None:
        print("default: rules; train would first race several settings", file=sys.stderr)
    setup = _setup(config, parsed)
    plans = _print_all(setup, parsed) if parsed.all else [_print_one(setup, parsed)]
    return 0 if any(plan.fits for plan in plans) else DOES_NOT_FIT


def plan(config: AnyConfig = None, *, devices: str, **options: Any) -> dict[str, Any]:
    """Plan a run without GPUs, processes or data; return what ``plan --format json`` prints.

    Args:
        config: As for ``train``.
        devices: All devices, such as "8xH100-80GB".
        options: Other options of the verb, such as ``hosts=2, entities=86_000_000,
            relations=14_824, triples=338_586_276``. Sizes that are left out come from the config's
            data.

    Raises:
        ConfigError: The run, the devices and the layout do not go together, or a key or an option
            has no effect.
        TypeError: There is no such option.
        DataError: The data is bad.
        OSError: The data cannot be read.
    """
    from kge_torchrec.training.run_data import check_start

    parser = argparse.ArgumentParser(exit_on_error=False)
    add(parser)
    known = {action.dest for action in parser._actions} - {"help", "all", "format"}
    if unknown := options.keys() - known:
        raise TypeError(f"plan() has no option {', '.join(sorted(unknown))}")
    given = {"devices": devices, **options}
    words = [f"--{k.replace('_', '-')}={v}" for k, v in given.items() if v is not None]
    try:
        parsed = parser.parse_args(words)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from None
    config = as_config(config)
    check_start(config, Facts())
    return _content(_setup(config, parsed))[0]


def _setup(config: Config, options: argparse.Namespace) -> Setup:
    """Return what the config and the options mean."""
    # Imported here, since torch takes seconds and wrong options should not.
    from kge_torchrec.planning.devices import parse_devices
    from kge_torchrec.planning.layout import Layout, Setup

    links = (options.within_host, options.between_hosts)
    cluster = parse_devices(options.devices, options.hosts, options.host_memory, *links)
    layout = Layout(options.sharding, options.reserve)
    return Setup(_workload(config, cluster, options), cluster, layout)


def _content(setup: Setup) -> tuple[dict[str, Any], str, TrainingPlan]:
    """Return the plan with its advice, as values for JSON, as text, and as it is."""
    from kge_torchrec.planning.advice import advise
    from kge_torchrec.planning.plan import plan_setup
    from kge_torchrec.planning.report import plan_content, report

    plan = plan_setup(setup)
    advice = [] if plan.fits else advise(plan)
    return plan_content(plan, advice), report(plan, advice), plan


def _print_one(setup: Setup, options: argparse.Namespace) -> TrainingPlan:
    content, text, plan = _content(setup)
    print(json.dumps(content) if options.format == "json" else text)
    return plan


def _print_all(setup: Setup, options: argparse.Namespace) -> list[TrainingPlan]:
    from kge_torchrec.planning.plan import alternatives
    from kge_torchrec.planning.report import comparison, plan_content

    plans = alternatives(setup.workload, setup.cluster, setup.layout)
    as_json = options.format == "json"
    print(json.dumps([plan_content(p) for p in plans]) if as_json else comparison(plans))
    return plans


def _workload(config: Config, cluster: Cluster, options: argparse.Namespace) -> Workload:
    """Return the run on some devices; sizes without an option are those of the config's data."""
    from kge_torchrec.data import ENTITY, FEATURES
    from kge_torchrec.data.types import PARTS
    from kge_torchrec.planning.frequency import TYPICAL_SKEW, EntityFrequency
    from kge_torchrec.planning.workload import Workload

    entities, frequency = options.entities, None
    types: tuple[tuple[str, range], ...] = ()
    if isinstance(entities, dict):
        # In parts, as `prepare` numbers typed entities.
        sizes = [-(-(n - part) // PARTS) for part in range(PARTS) for n in entities.values()]
        ends = list(accumulate(sizes, initial=0))
        runs = zip([*entities] * PARTS, starmap(range, pairwise(ends)), strict=True)
        types = tuple((kind, ids) for kind, ids in runs if ids)
        entities = ends[-1]
    counts = [entities, options.relations, options.triples]
    if None in counts:
        data_sizes, data_frequency, data_types = _sizes_of_data(config, options)
        types = types or (data_types if entities is None else ())
        counts = [b if a is None else a for a, b in zip(counts, data_sizes, strict=True)]
        if options.skew is None and options.entities is None:
            frequency = data_frequency
    entities, relations, triples = counts
    if frequency is None:
        skew = TYPICAL_SKEW if options.skew is None else options.skew
        frequency = EntityFrequency.zipf(max(1, entities), skew)  # Workload refuses 0 entities
    config.check_device(cluster.device.is_cuda)
    features = 0 if frequency.features is None else frequency.features.count
    typed = not {kind for kind, _ in types} <= {ENTITY, FEATURES}
    size = GraphSize(entities - features, relations, triples, typed=typed, features=features)
    config = config.settled(size, cluster.device.is_cuda, cluster.world_size)
    return Workload(config, entities, relations, triples, frequency, types)


def _sizes_of_data(
    config: Config, options: argparse.Namespace
) -> tuple[tuple[int, int, int], EntityFrequency, tuple[tuple[str, range], ...]]:
    """Return ((entities, relations, triples), frequency, runs of types) of the config's data."""
    from kge_torchrec.data.datasets import EMBEDDED, is_named
    from kge_torchrec.planning.frequency import EntityFrequency
    from kge_torchrec.planning.workload import types_of
    from kge_torchrec.training.run_data import open_store

    path = config.data.path
    flags = "--entities, --relations and --triples"
    if path == EMBEDDED and options.entities is not None:
        raise ConfigError(f"give all of {flags}, or --data.path to take the others from")
    if not is_named(path) and not Path(path).exists():
        raise ConfigError(f"data.path: there is nothing at {path}; give {flags} to plan without")
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(config, Path(folder))
        counts = store.num_rows, store.num_relations, len(store.train)
        return counts, EntityFrequency.of_store(store), types_of(store)


def entity_counts(text: str) -> int | dict[str, int]:
    """Return the number that a text means, or those of types: user=60M,item=26M."""
    if "=" not in text:
        return count(text)
    counts: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        if name.strip() in counts:
            raise argparse.ArgumentTypeError(f"{name.strip()} has two numbers; give one")
        counts[name.strip()] = count(number)
    return dict(sorted(counts.items()))


def count(text: str) -> int:
    """Return the number that 86_000_000, 86,000,000, 86M or 1B means."""
    digits = text.strip().replace(",", "")
    unit = {"k": 10**3, "m": 10**6, "b": 10**9}.get(digits[-1:].lower())
    try:
        return round(float(digits[:-1]) * unit) if unit else int(digits)
    except ValueError:
        message = f"{text!r} is no number; write it as 86_000_000 or 86M"
        raise argparse.ArgumentTypeError(message) from None


def skew(text: str) -> float:
    """Return an exponent from 0 to 3."""
    value = float(text)
    if not 0 <= value <= 3:
        raise ValueError
    return value

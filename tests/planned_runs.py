"""Small runs to plan, for the tests of planning."""

from __future__ import annotations

from typing import Any

from training_runs import PLAIN

from kge_torchrec.config import Config
from kge_torchrec.config.parser import config_from_dict
from kge_torchrec.data.store import TripleStore
from kge_torchrec.planning.devices import Cluster, parse_devices
from kge_torchrec.planning.plan import Plan
from kge_torchrec.planning.sizes import Sizes
from kge_torchrec.planning.step import Step

FREEBASE = (86_000_000, 14_824, 338_586_276)


def plan_of(
    devices: str,
    entities: int = 1000,
    relations: int = 7,
    triples: int = 5000,
    skew: float = 0.0,
    hosts: int = 1,
    links: dict[str, float] | None = None,
    layout: str = "row_wise",
    **keys: Any,
) -> Plan:
    """A plan for devices such as "8xH100-80GB"; ``keys`` are the config's, with __ for the dot."""
    settings = {key.replace("__", "."): value for key, value in keys.items()}
    config = config_from_dict({**PLAIN, **settings})
    sizes = Sizes.of_counts(entities, relations, triples, skew)
    # As the rules choose for one CPU, so that plans for other devices compare.
    config = config.settled(sizes.graph)
    return Plan(config, sizes, clustered(devices, hosts, **(links or {})), layout)


def freebase(devices: str, **keys: Any) -> Plan:
    """Freebase86M in sizes, with Adam."""
    return plan_of(devices, *FREEBASE, 0.7, **{"train__optimizer": "adam", **keys})


def stored(config: Config, devices: str = "1xCPU") -> Plan:
    """The plan of a run on its prepared triples."""
    sizes = Sizes.of_store(TripleStore.open(config.data.path))
    return Plan(config, sizes, clustered(devices))


def seconds(plan: Plan) -> dict[str, float]:
    """The seconds of each part of a step."""
    return Step(plan).parts


def clustered(devices: str, hosts: int = 1, **links: float | None) -> Cluster:
    """Devices with the main memory of their preset; CPUs with 64 GiB."""
    return parse_devices(devices.replace("xCPU", "xCPU-64GB", not devices.endswith("GB")), hosts,
                         **links)  # fmt: skip


def cached(ratio: float) -> dict[str, Any]:
    """Keys of rows in main memory, of which this share is cached on the GPU."""
    options = {"cache_ratio": ratio}
    return {"entities__placement": "managed_caching", "entities__placement_options": options}

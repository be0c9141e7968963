"""Small runs to plan, for the tests of planning."""

from __future__ import annotations

from typing import Any

from plain_config import PLAIN

from kge_torchrec.config import GraphSize
from kge_torchrec.config.parser import config_from_dict
from kge_torchrec.planning.devices import Cluster, parse_devices
from kge_torchrec.planning.frequency import EntityFrequency
from kge_torchrec.planning.layout import Layout
from kge_torchrec.planning.plan import TrainingPlan, plan_training
from kge_torchrec.planning.workload import Workload


def workload(
    entities: int = 1000, relations: int = 7, triples: int = 5000, skew: float = 0.0, **keys: Any
) -> Workload:
    """Sizes of a run; ``keys`` are those of the config, with __ for the dot."""
    settings = {key.replace("__", "."): value for key, value in keys.items()}
    config = config_from_dict({**PLAIN, **settings})
    config = config.settled(GraphSize(entities, relations, triples))
    popularity = EntityFrequency.zipf(max(1, entities), skew)
    return Workload(config, entities, relations, triples, popularity)


def freebase(**keys: Any) -> Workload:
    """Freebase86M in sizes, with Adam."""
    keys = {"train__optimizer": "adam", **keys}
    return workload(86_000_000, 14_824, 338_586_276, 0.7, **keys)


def planned(
    work: Workload,
    devices: str,
    hosts: int = 1,
    within: float | None = None,
    between: float | None = None,
    **choice: Any,
) -> TrainingPlan:
    """A plan for devices such as "8xH100-80GB", perhaps with other links in GB/s."""
    cluster = clustered(devices, hosts, within_host=within, between_hosts=between)
    return plan_training(work, cluster, Layout(**choice))


def clustered(devices: str, hosts: int = 1, **links: float | None) -> Cluster:
    """Devices with the main memory of their preset; CPUs with 64 GiB."""
    return parse_devices(devices.replace("xCPU", "xCPU-64GB"), hosts, **links)


def cached(ratio: float) -> dict[str, Any]:
    """Keys of rows in main memory, of which this share is cached on the GPU."""
    options = {"cache_ratio": ratio}
    return {"entities__placement": "managed_caching", "entities__placement_options": options}

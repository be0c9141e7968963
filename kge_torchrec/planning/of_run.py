"""The plan of a run that is about to start, on the ranks and devices at hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from kge_torchrec.config import Config
from kge_torchrec.data.store import TripleStore
from kge_torchrec.models.objective import Objective
from kge_torchrec.parallel.processes import Processes
from kge_torchrec.planning.choice import Choice
from kge_torchrec.planning.devices import PRESETS, Cluster, Device
from kge_torchrec.planning.dry_run import plan_training
from kge_torchrec.planning.planner import device_memory, host_memory
from kge_torchrec.planning.popularity import Popularity
from kge_torchrec.planning.training_plan import TrainingPlan
from kge_torchrec.planning.workload import Workload


def plan_run(
    config: Config,
    store: TripleStore,
    processes: Processes,
    build_objective: Callable[[Config, int], Objective],
) -> TrainingPlan:
    """What `kge-torchrec plan` would say of this run.  Not collective: one rank may ask.

    build_objective: makes scorer and loss from a config and a number of relations.
    """
    workload = Workload(
        config,
        store.num_entities,
        store.num_relations,
        len(store.train),
        build_objective,
        Popularity.of_degrees(store.degrees()),
    )
    hosts = max(1, processes.world_size // processes.local_world_size)
    cluster = Cluster(_device(processes.device.type), processes.world_size, hosts)
    return plan_training(workload, cluster, Choice())


def _device(kind: str) -> Device:
    """This machine's: its memory, and the speeds of the preset that is nearest in memory."""
    if kind == "cpu":
        return replace(PRESETS["CPU"], host_memory=host_memory())
    memory = device_memory()
    near = min(PRESETS.values(), key=lambda device: abs(device.memory - memory))
    name = torch.cuda.get_device_name()
    return replace(near, name=name, memory=memory, host_memory=host_memory())

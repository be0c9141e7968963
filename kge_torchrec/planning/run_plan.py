"""The plan of a run that is about to start, on its own ranks and devices.

It decides where the table lies for ``entities.placement: auto``.
"""

from __future__ import annotations

import shutil
from dataclasses import replace

import torch

from kge_torchrec.config import Config
from kge_torchrec.config.sizing import filled
from kge_torchrec.data.store import TripleStore
from kge_torchrec.distributed.processes import Processes, on_first_rank
from kge_torchrec.embeddings.torchrec.planner import device_memory
from kge_torchrec.environment import host_memory
from kge_torchrec.planning.devices import PRESETS, Cluster, Device
from kge_torchrec.planning.layout import IN_MEMORY, Layout, Setup
from kge_torchrec.planning.placement import Placement, choose_placement
from kge_torchrec.planning.plan import TrainingPlan, plan_setup
from kge_torchrec.planning.workload import Workload
from kge_torchrec.training.run_data import opened_store
from kge_torchrec.training.run_folder import RunFolder


def plan_run(config: Config, store: TripleStore, processes: Processes) -> TrainingPlan:
    """Return the plan of a run about to start, on its own ranks and devices. Not collective."""
    return plan_setup(setup_of_run(config, store, processes))


def setup_of_run(config: Config, store: TripleStore, processes: Processes) -> Setup:
    """Return the run, its ranks and devices, and the layout of training. Not collective."""
    hosts = max(1, processes.world_size // processes.local_world_size)
    device = _this_device(processes.device.type)
    cluster = Cluster(device, processes.world_size, hosts)
    return Setup(Workload.of_store(config, store), cluster, Layout())


def _this_device(kind: str) -> Device:
    """Return this machine's memory, with the speeds of the preset that is nearest in memory."""
    if kind == "cpu":
        return replace(PRESETS["CPU"], host_memory=host_memory())
    memory, name = device_memory(), torch.cuda.get_device_name()
    near = min(PRESETS.values(), key=lambda device: abs(device.memory - memory))
    return replace(near, name=name, memory=memory, host_memory=host_memory())


def place_run(config: Config, folder: RunFolder, ranks: Processes) -> tuple[Config, str]:
    """Choose where the table of a run lies, on its own ranks and devices.  Collective.

    Returns:
        The config with the choice, and a line about it for people.
    """
    store = opened_store(config, folder, ranks)

    def choose() -> Placement:
        on_cuda = ranks.device.type == "cuda"
        settled = config.settled(store.size, on_cuda, ranks.world_size)
        free = shutil.disk_usage(folder.path).free // ranks.local_world_size
        try:
            return choose_placement(setup_of_run(settled, store, ranks), free)
        except Exception as error:  # training needs no plan
            return Placement(IN_MEMORY, f"memory, because this run has no plan ({error})")

    choice = on_first_rank(ranks, choose)
    return filled(config, choice.settings, replaced=choice.settings), choice.words

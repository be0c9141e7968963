"""The plan of a run that is about to start, on its own ranks and devices.

It decides where the table lies for ``entities.placement: auto``, and becomes files of the run.
"""

from __future__ import annotations

import logging
import shutil
import sys
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
from kge_torchrec.planning.report import report
from kge_torchrec.planning.workload import Workload
from kge_torchrec.training.run_data import opened_store
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session

log = logging.getLogger(__name__)


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


def write_run_plan(session: Session) -> None:
    """Write plan.txt of a run and print its layout, on rank 0.

    plan.txt begins with the layout that the backend has; the rest is the plan of the run. A plan
    that cannot be made or written is a warning: training does not need it.
    """
    if not session.processes.is_first:
        return
    folder, layout = session.folder.path, session.backend.layout
    try:
        plan = plan_run(session.config, session.store, session.processes)
        (folder / "plan.txt").write_text(f"{layout}\n\n{report(plan)}\n", encoding="utf-8")
    except Exception as error:
        log.warning("this run has no plan.txt: %s", error)
    if session.show:
        print(layout, file=sys.stderr)

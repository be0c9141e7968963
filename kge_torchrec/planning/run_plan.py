"""The plan of a run about to start, on the ranks and devices at hand, beside its other files."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace

import torch

from kge_torchrec.config import Config
from kge_torchrec.data.store import TripleStore
from kge_torchrec.distributed.processes import Processes
from kge_torchrec.embeddings.torchrec.planner import device_memory, host_memory
from kge_torchrec.models.model import Objective
from kge_torchrec.planning.choice import Choice
from kge_torchrec.planning.devices import PRESETS, Cluster, Device
from kge_torchrec.planning.plan import TrainingPlan, plan_training
from kge_torchrec.planning.plan_file import plan_content, write_plan
from kge_torchrec.planning.report import report
from kge_torchrec.planning.workload import EntityFrequency, Workload
from kge_torchrec.training.assembly import build_objective
from kge_torchrec.training.session import Session


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
        EntityFrequency.of_degrees(store.degrees()),
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


log = logging.getLogger(__name__)


def write_run_plan(session: Session) -> None:
    """Writes plan.txt and plan.json, and prints the layout, on rank 0; nothing on the others.

    plan.txt begins with the layout that the backend has; the rest of both files is what a dry run
    says of the run, with which another one may train (run.plan).  Training does without a plan that
    cannot be made or written: that is a warning.
    """
    if not session.processes.is_first:
        return
    folder, layout = session.folder.path, session.backend.layout
    try:
        plan = plan_run(session.config, session.store, session.processes, build_objective)
        (folder / "plan.txt").write_text(f"{layout}\n\n{report(plan)}\n", encoding="utf-8")
        write_plan(folder / "plan.json", plan_content(plan))
    except Exception as error:
        log.warning("this run has no plan.txt: %s", error)
    if session.show:
        print(layout, file=sys.stderr)

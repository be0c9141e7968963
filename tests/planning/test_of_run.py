"""Plans and real runs: the plan of a run, and a run that is laid out by a plan file."""

from __future__ import annotations

from pathlib import Path

import pytest
from training_runs import config_of, fit, largest_difference, tiny_store
from worlds import run_world

from kge_torchrec.data.store import TripleStore
from kge_torchrec.distributed.processes import processes
from kge_torchrec.embeddings.torchrec.planner import host_memory
from kge_torchrec.files import write_json
from kge_torchrec.planning.plan_file import plan_content
from kge_torchrec.planning.run_plan import plan_run


def trained(config, plan: str):
    """On a rank: what is planned, and written to ``plan``; what is held; the parameters."""
    with processes("cpu") as ranks:
        planned = plan_run(config, TripleStore.open(config.data.path), ranks)
        if ranks.is_first:
            write_json(Path(plan), plan_content(planned))
        ranks.barrier()
        session = fit(config)
        shard = session.backend.shard()
        mine = [(s.first_row, s.rows) for s in planned.shards if s.rank == ranks.rank]
        held = (shard.first_row, shard.rows.shape[0])
    return mine, held, planned.fits, session.parameters


@pytest.mark.parametrize(
    "world_size", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 4))]
)
def test_run_with_a_plan_file_equals_the_run_without(tmp_path, world_size):
    store, plan = tiny_store(tmp_path / "store"), str(tmp_path / "plan.json")
    own, planned = (
        run_world(
            world_size,
            trained,
            config_of(
                store.path,
                tmp_path / name,
                train__epochs=1,
                train__optimizer="adam",
                run__plan=plan if name == "planned" else None,
            ),
            plan,
        )
        for name in ("own", "planned")
    )
    for (mine, held, fits, parameters), (_, same, _, others) in zip(own, planned, strict=True):
        assert mine == [held]
        assert held == same
        assert fits
        assert largest_difference(parameters, others) == 0


def test_this_machine_is_the_device(tmp_path):
    store = tiny_store(tmp_path / "store")
    with processes("cpu") as ranks:
        plan = plan_run(config_of(store.path), store, ranks)
    assert plan.cluster.device.host_memory == host_memory()
    assert plan.workload.num_entities == store.num_entities

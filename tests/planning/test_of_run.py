"""Plans and real runs: what ranks hold, and the plan of a run on this machine."""

from __future__ import annotations

import pytest
from training_runs import config_of, fit, tiny_store
from worlds import run_world

from kge_torchrec.data.store import TripleStore
from kge_torchrec.distributed.processes import processes
from kge_torchrec.embeddings.torchrec.planner import host_memory
from kge_torchrec.planning.run_plan import plan_run


def planned_and_held(config) -> tuple[list[tuple[int, int]], tuple[int, int], bool]:
    """On a rank: the rows that are planned, and those that it holds."""
    with processes("cpu") as ranks:
        planned = plan_run(config, TripleStore.open(config.data.path), ranks)
        shard = fit(config).backend.shard()
        mine = [(s.first_row, s.rows) for s in planned.shards if s.rank == ranks.rank]
    return mine, (shard.first_row, shard.rows.shape[0]), planned.fits


@pytest.mark.parametrize(
    "world_size", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 4))]
)
def test_ranks_hold_the_rows_that_are_planned(tmp_path, world_size):
    config = config_of(tiny_store(tmp_path / "store").path, tmp_path / "run", train__epochs=1)
    for mine, held, fits in run_world(world_size, planned_and_held, config):
        assert mine == [held] and fits


def test_this_machine_is_the_device(tmp_path):
    store = tiny_store(tmp_path / "store")
    with processes("cpu") as ranks:
        plan = plan_run(config_of(store.path), store, ranks)
    assert plan.cluster.device.host_memory == host_memory()
    assert plan.workload.num_entities == store.num_entities

"""Lookups per node type in a plan, against the batches of real ranks and the plan of one table."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from planned_runs import stored
from training_runs import config_of, shared_folder
from worlds import run_world

from kge_torchrec import plan
from kge_torchrec.config import Config
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.types import runs_of_types
from kge_torchrec.distributed.processes import processes, rows_by_rank
from kge_torchrec.planning.plan import Plan
from kge_torchrec.planning.report import report, type_sizes
from kge_torchrec.training.assembly import build_batches

STEPS, RANKS = 15, 4
SIZES = {"author": 40, "place": 300, "user": 260}
FEATURES = "".join(f"place:{k}\ttag {k % 7}\t1\nplace:{k}\tname {k}\t1\n" for k in range(0, 300, 2))


@functools.cache
def hot_store(with_features: bool) -> Path:
    """Most triples have an author: a small type at the start of the ids."""
    random, folder = np.random.default_rng(0), shared_folder()
    ends = [("author", "made", "place")] * 3 + [("user", "visits", "place")]
    triples = [
        (f"{head}:{random.integers(SIZES[head])}", name, f"{tail}:{random.integers(SIZES[tail])}")
        for head, name, tail in ends * 1000
    ]
    triples += [(f"user:{k}", "visits", f"place:{k}") for k in range(260)]
    (folder / "f.tsv").write_text(FEATURES)
    features = folder / "f.tsv" if with_features else None
    splits = {"train": list(dict.fromkeys(triples)), "test": []}
    data = {"types": "prefix", "features": features}
    return prepare(splits, folder / "store", data, log_notes=False).path


def hot_config(with_features: bool = False, **changes) -> Config:
    keys = {"train__batch_size": 256, "negatives__count": 32, "negatives__sides": "both"}
    return config_of(hot_store(with_features), **{**keys, **changes})


def hot_plan(config: Config, devices: str = f"{RANKS}xCPU") -> Plan:
    return stored(config, devices)


def rank_counts_ids(config: Config) -> np.ndarray:
    """Return how many rows of each table this rank looks up on each rank in a step."""
    with processes("cpu") as ranks:
        store = TripleStore.open(config.data.path)
        stream = build_batches(config, store, ranks).epoch(0)
        ids = np.concatenate([next(stream).ids.values().numpy() for _ in range(STEPS)])
    blocks, runs = rows_by_rank(store.num_rows, RANKS), runs_of_types(store)
    table = np.searchsorted([run.stop for _, run in runs], ids, side="right")
    owner = np.searchsorted([block.stop for block in blocks], ids, side="right")
    counts = np.bincount(table * RANKS + owner, minlength=len(runs) * RANKS)
    return counts.reshape(-1, RANKS) / STEPS


CASES = {
    "all": {"negatives__among": "all"},
    "types": {"negatives__among": "types"},
    "one side": {"negatives__among": "types", "negatives__sides": "head",
                 "model__reciprocal": False},
    "half of them": {"negatives__among": "types", "negatives__among_options": {"share": 0.5}},
    "features": {"negatives__among": "types", "with_features": True},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_ranks_read_as_many_rows_of_each_table_as_planned(case):
    config = hot_config(**CASES[case])
    planned = hot_plan(config)
    measured = np.stack(run_world(RANKS, rank_counts_ids, config), 1)  # (tables, from, to)
    kinds = [kind for kind, _ in runs_of_types(TripleStore.open(config.data.path))]
    of_type = np.array([[kind == name for kind in kinds] for name in dict.fromkeys(kinds)])
    busiest = of_type @ measured.sum(1)[:, planned.busiest[0]]
    assert planned.busiest[1] == pytest.approx(busiest, rel=0.12, abs=5)
    sent = measured.sum((1, 2)) - np.trace(measured, axis1=1, axis2=2)
    tables = type_sizes(planned)
    rows = [own["rows"]["sent"] for own in tables]
    assert rows == pytest.approx(of_type @ sent, rel=0.05)
    rows = [own["rows"]["deduplicated"] for own in tables]
    assert rows == pytest.approx(of_type @ measured.sum((1, 2)), rel=0.05)
    rank, _, times = planned.busiest
    loads = measured.sum((0, 1))
    assert rank == loads.argmax() or times < 1.05  # equal ranks are in any order
    assert times == pytest.approx(loads.max() / loads.mean(), rel=0.05)
    said = f"rank {rank} reads most rows: {times:.2f} times the mean of all ranks"
    assert (said in report(planned)) == (times >= 1.05)
    if case != "features":  # whose rows lie behind all entities, on the last rank
        assert times < 1.05


@pytest.mark.parametrize("devices", ["1xCPU", "2xCPU", "8xH100"])
def test_tables_add_up_to_the_plan_of_one_table(devices):
    planned = hot_plan(hot_config(negatives__among="all"), devices)
    one = replace(planned, sizes=replace(planned.sizes, runs=()))
    tables = type_sizes(planned)
    for name, rows in {
        "deduplicated": one.batch.distinct,
        "with_duplicates": one.batch.lookups,
    }.items():
        total = planned.cluster.world_size * rows.sum()
        assert sum(own["rows"][name] for own in tables) == pytest.approx(total, rel=1e-3)
    parts = planned.seconds["lookup"] + planned.seconds["table optimizer"]
    assert sum(own["seconds"] for own in tables) == pytest.approx(parts)
    assert type_sizes(one) == [] and "author" not in report(one)


def test_time_of_a_table_follows_its_optimizer_and_its_lookups():
    def of(optimizer: str) -> dict[str, float]:
        config = hot_config(entities__tables={"place": {"optimizer": optimizer}})
        return {own["type"]: own["seconds"] for own in type_sizes(hot_plan(config, "1xCPU"))}

    small, large = of("sgd"), of("adam")
    assert large["place"] > 1.5 * small["place"] and large["user"] == small["user"]
    full = hot_plan(hot_config(negatives__regime="1vsall"))
    assert [own["rows"]["sent"] for own in type_sizes(full)] == [0, 0, 0]
    assert type_sizes(full)[0]["seconds"] > 0 and full.busiest[2] == 1


def test_sizes_without_data_are_looked_up_in_proportion(tmp_path):
    config = hot_config()
    sizes = {"entities": "author=1k,place=6k,user=3k", "relations": 3, "triples": 10**5}
    planned = plan(config, devices="8xH100", **sizes)
    rows = [own["rows"]["deduplicated"] for own in planned["tables"]]
    assert np.array(rows) / sum(rows) == pytest.approx([0.1, 0.6, 0.3])
    assert any("in proportion to their number" in note for note in planned["notes"])
    counted = plan(config, devices="8xH100")
    assert not any("in proportion to their number" in note for note in counted["notes"])
    share = counted["tables"][0]["rows"]["with_duplicates"]
    assert share > 0.2 * sum(own["rows"]["with_duplicates"] for own in counted["tables"])

"""Predicted traffic, and its time, against real worlds and against arithmetic."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from planned_runs import planned, workload
from sent_bytes import WatchCollectives
from training_runs import config_of, random_triples
from worlds import run_world

from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.store import TripleStore
from kge_torchrec.distributed.processes import processes
from kge_torchrec.planning.devices import parse_devices
from kge_torchrec.planning.layout import Layout
from kge_torchrec.planning.plan import plan_training
from kge_torchrec.planning.step import ETHERNET_EFFICIENCY, LATENCY
from kge_torchrec.planning.workload import Workload
from kge_torchrec.training.assembly import build_batches

STEPS = 15


def sent(config) -> dict:
    """On a rank: bytes that it sends in a step."""
    from kge_torchrec.distributed.processes import processes
    from kge_torchrec.training.assembly import build_backend, build_batches, build_pipeline

    with processes("cpu") as ranks:
        store = TripleStore.open(config.data.path)
        engine = build_backend(config, store, ranks)
        pipeline = build_pipeline(config, engine, ranks)
        stream = build_batches(config, store, ranks).epoch(0)
        for _ in range(4):  # DDP sorts its buckets in the first steps
            pipeline.progress(stream)
        with WatchCollectives() as watch:
            for _ in range(STEPS):
                pipeline.progress(stream)
    return {kind: size / STEPS for kind, size in watch.sent.items()}


SHARED = {"negatives__count": 64}
CHUNKS = {"negatives__count": 8, "negatives__chunk_size": 32, "train__pipeline": "loop"}
DEGREE = {**SHARED, "negatives__sampling": "degree"}
HYBRID = {
    **SHARED,
    "dense__wrapper": "hybrid",
    "dense__options__replicas": 2,
    "dense__options__sharding": "grad_op",
    "train__accumulation": 2,
}


@pytest.mark.parametrize(
    ("world_size", "keys"),
    [
        (1, SHARED),
        (2, {**SHARED, "entities__exchange__dtype": "int8"}),
        (2, DEGREE),
        (2, CHUNKS),
        (4, HYBRID),
    ],
)
def test_collective_sizes_match_hand_computation(tmp_path, world_size, keys):
    """Within 5 % for every kind, summed over ranks."""
    triples = random_triples(700, 5, 6000)
    prepare({"train": triples[:5900], "valid": triples[5900:], "test": []}, tmp_path / "s")
    check_sizes(tmp_path / "s", world_size, keys)


FEATURES = "".join(
    f"e{i}\tshared {i % 13}\t1\ne{i}\town {i // 2}\t1\n" for i in range(0, 700, 3)
)  # fmt: skip


def test_features_are_looked_up_as_planned(tmp_path):
    (tmp_path / "f.tsv").write_text(FEATURES)
    triples = random_triples(700, 5, 6000)
    triples += [(f"e{3 * (i % 9)}", "r9", f"e{i}") for i in range(700)]  # popular, with features
    prepare(
        {"train": triples, "test": []},
        tmp_path / "s",
        {"features": tmp_path / "f.tsv"},
        log_notes=False,
    )
    keys = {"negatives__count": 16}
    check_sizes(tmp_path / "s", 2, keys)
    store = TripleStore.open(tmp_path / "s")
    config = config_of(store.path, train__batch_size=64, **keys)
    plan = plan_training(Workload.of_store(config, store), parse_devices("1xCPU"), Layout())
    on_gpu = plan_training(Workload.of_store(config, store), parse_devices("1xH100"), Layout())
    table = store.features()
    assert on_gpu.memory[0]["triples"].device == (
        12 * len(store.train) + 9 * store.num_entities + 12 * len(table[2])
    )
    with processes("cpu") as ranks:
        batches = [*islice(build_batches(config, store, ranks).epoch(0), STEPS)]
    looked_up = np.mean([len(b.ids.values()) for b in batches])
    assert looked_up == pytest.approx(plan.distinct, rel=0.03)
    (((batch,),),) = [plan.batches]
    assert np.mean([len(b.bags.row) for b in batches]) == pytest.approx(batch.pairs, rel=0.05)


def check_sizes(path: Path, world_size: int, keys: dict) -> None:
    config = config_of(path, train__batch_size=256, **keys)
    store = TripleStore.open(path)
    work = Workload.of_store(config, store)
    plan = plan_training(work, parse_devices(f"{world_size}xCPU"), Layout())
    ranks = run_world(world_size, sent, config)
    for kind in ("ids", "rows", "gradients", "dense"):
        measured = sum(rank[kind] for rank in ranks)
        assert sum(plan.traffic.total(kind)) == pytest.approx(measured, rel=0.05), kind


def test_single_device_sends_nothing():
    assert planned(workload(), "1xH100").traffic.total() == (0, 0)


def test_hosts_divide_what_is_sent():
    """8 ranks on 2 hosts: 3 of 7 others are on one's own host."""
    plan = planned(workload(80_000, train__batch_size=512), "8xH100", 2)
    for kind in ("rows", "gradients"):
        within, between = plan.traffic.total(kind)
        assert within / between == pytest.approx(3 / 4, rel=1e-6)
    within, between = plan.traffic.total("dense")
    assert within / between == pytest.approx(6 / 2)  # two of eight hops of the ring


def test_a_table_on_one_rank_answers_all_others():
    plan = planned(workload(8000, model__dim=64), "4xH100", sharding="table_wise")
    rows = plan.traffic.of_ranks("rows")[0]
    assert np.count_nonzero(rows) == 1
    others = sum(batch.distinct for (batch,) in plan.batches[1:])
    assert rows.sum() == pytest.approx(others * 64 * 4)


def test_columns_send_every_id_to_every_shard():
    work = workload(8000, model__dim=64)
    by_rows, by_columns = (
        planned(work, "4xH100", sharding=sharding).traffic
        for sharding in ("row_wise", "column_wise")
    )
    assert by_columns.total("ids")[0] > 3.9 * by_rows.total("ids")[0]
    assert by_columns.total("rows") == pytest.approx(by_rows.total("rows"))


def test_data_parallel_sends_the_gradient_of_the_whole_table():
    plan = planned(workload(8000, model__dim=64), "4xH100", sharding="data_parallel")
    assert plan.traffic.total("ids") == plan.traffic.total("rows") == (0, 0)
    assert plan.traffic.total("gradients")[0] == pytest.approx(4 * 2 * 3 / 4 * 8000 * 64 * 4)


def test_deduplication_saves_more_the_more_skewed_entities_are():
    saved = []
    for skew in (0.0, 0.7, 1.2):
        plan = planned(workload(10**6, triples=10**6, skew=skew, train__batch_size=8192), "4xH100")
        saved.append(1 - plan.traffic.total("rows")[0] / plan.with_duplicates.total("rows")[0])
    assert saved == sorted(saved)
    assert saved[0] < 0.03 < 0.2 < saved[2]


def test_links_change_what_they_name():
    work = workload(20_000, train__batch_size=4096)
    usual = planned(work, "8xH100", 2)
    for place, factor in (("within", 0.5), ("between", 0.1)):
        device = usual.cluster.device
        speed = factor * {"within": device.within_host, "between": device.between_hosts}[place]
        other = planned(work, "8xH100", 2, **{place: speed / 1e9})
        sends = dict(zip(("within", "between"), usual.traffic.of_ranks("rows"), strict=True))
        more = sends[place].max() / 0.7 * (1 / speed - factor / speed)
        part = "exchange of rows"
        assert other.times[part] - usual.times[part] == pytest.approx(more, rel=1e-6)
        assert other.times["scoring"] == usual.times["scoring"]


def test_ethernet_between_cpus():
    """A rank sends half of its rows to the other one, and both do so at the same time."""
    plan = planned(workload(20_000, train__batch_size=4096), "2xCPU", 2, between=0.125)
    size = plan.traffic.of_ranks("rows")[1].max()
    assert plan.times["exchange of rows"] == pytest.approx(size / 1.25e8 / ETHERNET_EFFICIENCY)


def test_a_rank_that_receives_most_decides():
    """A table on one rank: it sends the rows of the others, and receives their gradients."""
    plan = planned(workload(8000, model__dim=64), "4xH100", sharding="table_wise")
    assert plan.times["exchange of gradients"] == pytest.approx(plan.times["exchange of rows"])


def test_collectives_of_many_ranks_have_more_messages():
    work = workload(20_000, train__batch_size=4096)
    starts = [
        planned(work, f"{ranks}xCPU", ranks).times["starting collectives"] for ranks in (2, 66)
    ]
    further = 64 * (5 * 1e-4 + 2 * LATENCY["between"])
    assert starts[1] - starts[0] == pytest.approx(further)


def test_sums_against_all_entities_go_around_a_ring():
    work = workload(2000, negatives__regime="1vsall", train__batch_size=16)
    starts = [
        planned(work, f"{ranks}xCPU", ranks).times["starting collectives"] for ranks in (2, 6)
    ]
    assert starts[0] == pytest.approx(4 * LATENCY["between"])
    assert starts[1] == pytest.approx(4 * (1 + 2 * 4) * LATENCY["between"])

"""Predicted traffic, and its time, against real worlds and against arithmetic."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from planned_runs import plan_of, stored
from sent_bytes import WatchCollectives
from training_runs import config_of, random_triples
from worlds import run_world

from kge_torchrec.data.features import Features
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.store import TripleStore
from kge_torchrec.distributed.processes import processes
from kge_torchrec.planning.step import ETHERNET_SHARE, LATENCY
from kge_torchrec.training.assembly import build_batches

STEPS = 15


def sent(config) -> dict:
    """On a rank: bytes that it sends in a step."""
    from kge_torchrec.distributed.processes import processes
    from kge_torchrec.training.assembly import build_backend, build_batches, build_pipeline

    with processes("cpu") as ranks:
        store = TripleStore.open(config.data.path)
        engine = build_backend(config, store, ranks)
        pipeline = build_pipeline(config, engine, ranks, Features.of(store))
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
    plan, on_gpu = stored(config), stored(config, "1xH100")
    table = store.features()
    assert on_gpu.memory["triples"].device == (
        12 * len(store.train) + 9 * store.num_entities + 12 * len(table[2])
    )
    with processes("cpu") as ranks:
        batches = [*islice(build_batches(config, store, ranks).epoch(0), STEPS)]
    looked_up = np.mean([len(b.ids.values()) for b in batches])
    assert looked_up == pytest.approx(plan.batch.distinct.sum(), rel=0.03)
    assert np.mean([len(b.bags.row) for b in batches]) == pytest.approx(plan.batch.pairs, rel=0.05)


def check_sizes(path: Path, world_size: int, keys: dict) -> None:
    config = config_of(path, train__batch_size=256, **keys)
    plan = stored(config, f"{world_size}xCPU")
    ranks = run_world(world_size, sent, config)
    for kind in ("ids", "rows", "gradients", "dense"):
        measured = sum(rank[kind] for rank in ranks) / world_size
        assert sum(plan.sent[kind]) == pytest.approx(measured, rel=0.05), kind


@pytest.mark.parametrize(
    ("world_size", "keys"),
    [
        (1, {"negatives__regime": "kvsall"}),
        (2, {"loss__relation_weight": 0.1}),
        (2, {"negatives__regime": "kvsall"}),
        (4, {"model__scorer": "rescal", "dense__wrapper": "fsdp", "train__accumulation": 2}),
    ],
    ids=["kvsall", "relation prediction", "kvsall on two", "fsdp"],
)
@pytest.mark.parametrize("features", [False, True])
def test_sums_against_all_entities_have_the_planned_size(tmp_path, world_size, keys, features):
    if features and (world_size != 2 or "loss__relation_weight" in keys):
        pytest.skip("one case with features is enough")
    triples = random_triples(700, 5, 2000)
    (tmp_path / "f.tsv").write_text("".join(f"e{i}\tkind {i % 200}\n" for i in range(700)))
    data = {"features": tmp_path / "f.tsv"} if features else None
    prepare({"train": triples, "test": []}, tmp_path / "s", data, log_notes=False)
    keys = {"negatives__regime": "1vsall", "loss__name": "softmax", **keys}
    config = config_of(tmp_path / "s", train__batch_size=64, **keys)
    ranks = run_world(world_size, sent_in_all, config)
    planned = sum(map(sum, stored(config, f"{world_size}xCPU").sent.values()))
    assert planned == pytest.approx(sum(ranks) / world_size, rel=0.05)


def sent_in_all(config) -> float:
    return sum(sent(config).values())


def test_vectors_of_entities_with_features_take_memory(tmp_path):
    (tmp_path / "f.tsv").write_text("".join(f"e{i}\tkind {i % 200}\n" for i in range(700)))
    splits = {"train": random_triples(700, 5, 2000), "test": []}
    prepare(splits, tmp_path / "s", {"features": tmp_path / "f.tsv"}, log_notes=False)
    config = config_of(tmp_path / "s", negatives__regime="allvsall", loss__name="bce")
    plan = stored(config, "2xH100")
    plain = replace(plan, sizes=replace(plan.sizes, features=None, entities=900, runs=()))
    assert plan.examples == 2 * 700 * 5
    rows, features = 4 * 450 * 8, 4 * 200 * 8
    assert plan.memory["gradients"].device == rows and "gradients" not in plain.memory
    more = plan.memory["rows and ids"].device - plain.memory["rows and ids"].device
    assert more == rows + 2 * features


def test_single_device_sends_nothing():
    assert sum(map(sum, plan_of("1xH100").sent.values())) == 0


def test_hosts_divide_what_is_sent():
    """8 ranks on 2 hosts: 3 of 7 others are on one's own host; a ring passes both hosts."""
    plan = plan_of("8xH100", 80_000, train__batch_size=512, hosts=2)
    for kind in ("rows", "gradients"):
        within, between = plan.sent[kind]
        assert within / between == pytest.approx(3 / 4, rel=1e-6)
    assert plan.sent["dense"][0] == 0 < plan.sent["dense"][1]
    split = plan.changed({"dense.wrapper": "hybrid"})
    assert split.sent["dense"][0] > 0  # a copy is split within a host
    assert plan_of("8xH100", 80_000).sent["dense"][1] == 0


def test_layouts_send_what_they_must():
    def sent_by(layout: str):
        return plan_of("4xH100", 8000, model__dim=64, layout=layout)

    rows, columns, table, copies = map(
        sent_by, ("row_wise", "column_wise", "table_wise", "data_parallel")
    )
    assert sum(columns.sent["ids"]) > 3.9 * sum(rows.sent["ids"])
    assert columns.sent["rows"] == pytest.approx(rows.sent["rows"])
    assert copies.sent.keys() == {"gradients", "dense"}
    assert sum(copies.sent["gradients"]) == pytest.approx(2 * 3 / 4 * 8000 * 64 * 4)
    # A table on one rank: it sends the rows of all others, and receives their gradients.
    assert table.busiest[0] == 0 and table.busiest[2] == 4
    part = "exchange of rows"
    assert table.seconds[part] == pytest.approx(4 * rows.seconds[part])
    assert table.seconds["exchange of gradients"] == pytest.approx(table.seconds[part])


def test_deduplication_saves_more_the_more_skewed_entities_are():
    saved = []
    for skew in (0.0, 0.7, 1.2):
        plan = plan_of("4xH100", 10**6, triples=10**6, skew=skew, train__batch_size=8192)
        saved.append(1 - plan.sent["rows"][0] / plan.sent_with_duplicates["rows"][0])
    assert saved == sorted(saved)
    assert saved[0] < 0.03 < 0.2 < saved[2]


def test_links_change_what_they_name():
    keys = {"train__batch_size": 4096, "hosts": 2}
    usual = plan_of("8xH100", 20_000, **keys)
    for at, name in enumerate(("within_host", "between_hosts")):
        speed = getattr(usual.cluster.device, name)
        other = plan_of("8xH100", 20_000, links={name: speed / 2e9}, **keys)
        more = usual.sent["rows"][at] / 0.7 / speed
        part = "exchange of rows"
        assert other.seconds[part] - usual.seconds[part] == pytest.approx(more, rel=1e-6)
        assert other.seconds["scoring"] == usual.seconds["scoring"]


def test_ethernet_between_cpus():
    links = {"between_hosts": 0.125}
    plan = plan_of("2xCPU", 20_000, train__batch_size=4096, hosts=2, links=links)
    size = plan.sent["rows"][1]
    assert plan.seconds["exchange of rows"] == pytest.approx(size / 1.25e8 / ETHERNET_SHARE)


def test_collectives_of_many_ranks_have_more_messages():
    starts = [
        plan_of(f"{ranks}xCPU", 20_000, train__batch_size=4096, hosts=ranks)
        .seconds["starting collectives"]
        for ranks in (2, 66)
    ]  # fmt: skip
    assert starts[1] - starts[0] == pytest.approx(64 * (5 * 1e-4 + 2 * LATENCY["between"]))


def test_sums_against_all_entities_go_around_a_ring():
    keys = {"negatives__regime": "1vsall", "train__batch_size": 16}
    starts = [
        plan_of(f"{ranks}xCPU", 2000, hosts=ranks, **keys).seconds["starting collectives"]
        for ranks in (2, 6)
    ]
    assert starts[0] == pytest.approx(4 * LATENCY["between"])
    assert starts[1] == pytest.approx(4 * (1 + 2 * 4) * LATENCY["between"])

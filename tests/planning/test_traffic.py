"""Predicted traffic, and its time, against real worlds and against arithmetic."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from planned_runs import plan_of, stored
from sent_bytes import WatchCollectives
from training_runs import config_of, random_triples, shared_folder
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


FEATURES = "".join(
    f"e{i}\tshared {i % 13}\t1\ne{i}\town {i // 2}\t1\n" for i in range(0, 700, 3)
)  # fmt: skip


@functools.cache
def graph(features: bool = False) -> Path:
    """The store of 700 entities, of which popular ones may have features."""
    folder, triples, data = shared_folder(), random_triples(700, 5, 6000), None
    if features:
        (folder / "f.tsv").write_text(FEATURES)
        data = {"features": folder / "f.tsv"}
        triples += [(f"e{3 * (i % 9)}", "r9", f"e{i}") for i in range(700)]
    return prepare({"train": triples, "test": []}, folder / "s", data, log_notes=False).path


SHARED = {"negatives__count": 64}
CHUNKS = {"negatives__count": 8, "negatives__chunk_size": 32, "train__pipeline": "loop"}
HYBRID = {
    **SHARED,
    "dense__wrapper": "hybrid",
    "dense__options__replicas": 2,
    "dense__options__sharding": "grad_op",
    "train__accumulation": 2,
}
FULL = {"negatives__regime": "1vsall", "loss__name": "softmax", "train__batch_size": 64}
QUERIES = {**FULL, "negatives__regime": "kvsall"}
SPLIT = {"model__scorer": "rescal", "dense__wrapper": "fsdp", "train__accumulation": 2}


@pytest.mark.parametrize(
    ("world_size", "keys", "features"),
    [
        (1, SHARED, False),
        (2, {**SHARED, "entities__exchange__dtype": "int8"}, False),
        (2, {**SHARED, "negatives__sampling": "degree"}, False),
        (2, CHUNKS, False),
        (4, HYBRID, False),
        (2, {"negatives__count": 16}, True),
        (1, QUERIES, False),
        (2, {**FULL, "loss__relation_weight": 0.1}, False),
        (2, QUERIES, False),
        (2, QUERIES, True),
        (4, {**FULL, **SPLIT}, False),
    ],
)
def test_ranks_send_what_is_planned(world_size, keys, features):
    """Within 5 %, the mean of all ranks: for every kind, or in all against all entities."""
    config = config_of(graph(features), **{"train__batch_size": 256, **keys})
    plan, ranks = stored(config, f"{world_size}xCPU"), run_world(world_size, sent, config)
    measured = {kind: sum(rank[kind] for rank in ranks) / world_size for kind in ranks[0]}
    planned = {kind: sum(plan.sent.get(kind, (0, 0))) for kind in measured}
    if plan.is_full:  # sums of rows, of their gradients and of dense ones are alike
        planned, measured = ({"all": sum(x.values())} for x in (planned, measured))
    assert planned == pytest.approx(measured, rel=0.05)


def test_features_are_looked_up_as_planned():
    store = TripleStore.open(graph(features=True))
    config = config_of(store.path, train__batch_size=64, negatives__count=16)
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


def test_vectors_of_entities_with_features_take_memory():
    config = config_of(graph(features=True), negatives__regime="allvsall", loss__name="bce")
    plan = stored(config, "2xH100")
    one = replace(plan.sizes, features=None, entities=plan.sizes.rows, runs=())
    plain = replace(plan, sizes=one)
    assert plan.examples == 2 * 700 * 6
    rows, features = (4 * 8 * n for n in (-(-plan.sizes.rows // 2), plan.sizes.num_features))
    assert plan.memory["gradients"].device == rows and "gradients" not in plain.memory
    more = plan.memory["rows and ids"].device - plain.memory["rows and ids"].device
    assert more == rows + 2 * features > rows


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

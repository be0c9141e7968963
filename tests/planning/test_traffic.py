"""Planned lookups, traffic and its time, against real ranks and against arithmetic."""

from __future__ import annotations

import functools
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from planned_runs import plan_of, seconds, stored
from training_runs import config_of, random_triples, shared_folder
from worlds import run_world

from kge_torchrec.config import Config
from kge_torchrec.data.features import Features
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.store import TripleStore
from kge_torchrec.distributed.processes import Processes, processes
from kge_torchrec.distributed.traffic import Traffic
from kge_torchrec.planning.report import make_plan
from kge_torchrec.planning.step import ETHERNET_SHARE, LATENCY, Step
from kge_torchrec.training.assembly import build_backend, build_batches, build_pipeline

STEPS, CPU = 15, torch.device("cpu")
SIZES = {"author": 40, "place": 300, "user": 260}


@functools.cache
def graph(features: bool = False) -> Path:
    """The store of 700 entities, of which popular ones may have features."""
    folder, triples, data = shared_folder(), random_triples(700, 5, 6000), None
    if features:
        pairs = (f"e{i}\tshared {i % 13}\t1\ne{i}\town {i // 2}\t1\n" for i in range(0, 700, 3))
        (folder / "f.tsv").write_text("".join(pairs))
        data = {"features": folder / "f.tsv"}
        triples += [(f"e{3 * (i % 9)}", "r9", f"e{i}") for i in range(700)]
    return prepare({"train": triples, "test": []}, folder / "s", data, log_notes=False).path


@functools.cache
def typed_graph(features: bool = False) -> Path:
    """Most triples have an author: a small type at the start of the ids."""
    random, folder = np.random.default_rng(0), shared_folder()
    ends = [("author", "made", "place")] * 3 + [("user", "visits", "place")]
    triples = [
        (f"{head}:{random.integers(SIZES[head])}", name, f"{tail}:{random.integers(SIZES[tail])}")
        for head, name, tail in ends * 1000
    ]
    triples += [(f"user:{k}", "visits", f"place:{k}") for k in range(260)]
    pairs = (f"place:{k}\ttag {k % 7}\t1\nplace:{k}\tname {k}\t1\n" for k in range(0, 300, 2))
    (folder / "f.tsv").write_text("".join(pairs))
    data = {"types": "prefix", "features": folder / "f.tsv" if features else None}
    splits = {"train": list(dict.fromkeys(triples)), "test": []}
    return prepare(splits, folder / "store", data, log_notes=False).path


def sent(config: Config) -> dict[str, float]:
    """On a rank: bytes that it sends in a step."""
    with processes("cpu") as ranks:
        store = TripleStore.open(config.data.path)
        engine = build_backend(config, store, ranks)
        pipeline = build_pipeline(config, engine, ranks, Features.of(store))
        stream = build_batches(config, store, ranks).epoch(0)
        for _ in range(4):  # DDP sorts its buckets in the first steps
            pipeline.progress(stream)
        with Traffic() as traffic:
            for _ in range(STEPS):
                pipeline.progress(stream)
    return {kind: size / STEPS for kind, size in traffic.sent.items()}


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
        (2, {**SHARED, "entities__exchange__dtype": "int8"}, False),
        (2, CHUNKS, False),
        (4, HYBRID, False),
        (2, {"negatives__count": 16}, True),
        (2, {**FULL, "loss__relation_weight": 0.1}, False),
        (2, QUERIES, False),
        (2, QUERIES, True),
        (4, {**FULL, **SPLIT}, False),
    ],
)
def test_ranks_send_what_is_planned(world_size, keys, features):
    """The mean of all ranks, of every kind, or in all against all entities."""
    config = config_of(graph(features), **{"train__batch_size": 256, **keys})
    planned, ranks = stored(config, f"{world_size}xCPU"), run_world(world_size, sent, config)
    measured = {kind: sum(rank[kind] for rank in ranks) / world_size for kind in ranks[0]}
    sizes = {kind: sum(Step(planned).sent.get(kind, (0, 0))) for kind in measured}
    if planned.is_full:  # sums of rows, of their gradients and of dense ones are alike
        sizes, measured = ({"all": sum(x.values())} for x in (sizes, measured))
    assert sizes == pytest.approx(measured, rel=0.1 if features else 0.05)


@pytest.mark.parametrize(("among", "features"), [("all", False), ("types", True)])
def test_typed_ranks_look_up_no_more_than_planned(among, features):
    """Typed negatives are planned as if they were drawn from all entities."""
    keys = {"train__batch_size": 256, "negatives__count": 32, "negatives__among": among}
    config = config_of(typed_graph(features), **keys)
    store, found = TripleStore.open(config.data.path), []
    for rank in range(4):
        stream = build_batches(config, store, Processes(rank, 4, 4, CPU)).epoch(0)
        found += [len(next(stream).ids.values()) for _ in range(STEPS)]
    planned = stored(config, "4xCPU").batch.distinct
    assert np.mean(found) < 1.02 * planned < 1.25 * np.mean(found)


def test_the_time_of_a_type_follows_its_optimizer():
    """Without data, sizes of types are numbers."""
    sizes = {"entities": "author=1k,place=6k,user=3k", "relations": 3, "triples": 10**5}
    tables = {"place": {"optimizer": "adam"}}
    keys = {"train__optimizer": "sgd", "train__batch_size": 256, "negatives__count": 32}
    plain, typed = (
        make_plan(config_of("countries", entities__tables=x, **keys), "2xCPU-64GB", **sizes)
        for x in (None, tables)
    )
    assert seconds(typed)["table optimizer"] > 1.2 * seconds(plain)["table optimizer"]
    assert seconds(typed)["lookup"] == pytest.approx(seconds(plain)["lookup"])


def test_features_are_looked_up_as_planned():
    store = TripleStore.open(graph(features=True))
    config = config_of(store.path, train__batch_size=64, negatives__count=16)
    planned, table = stored(config), store.features()
    assert stored(config, "1xH100").memory["triples"].device == (
        12 * len(store.train) + 9 * store.num_entities + 12 * len(table[2])
    )
    with processes("cpu") as ranks:
        batches = [*islice(build_batches(config, store, ranks).epoch(0), STEPS)]
    looked_up = np.mean([len(batch.ids.values()) for batch in batches])
    assert looked_up == pytest.approx(planned.batch.distinct, rel=0.1)
    pairs = np.mean([len(batch.bags.row) for batch in batches])
    assert pairs == pytest.approx(planned.batch.pairs, rel=0.1)


def test_vectors_of_entities_with_features_take_memory():
    keys = {"negatives__regime": "allvsall", "loss__name": "bce"}
    planned = stored(config_of(graph(features=True), **keys), "2xH100")
    plain = plan_of("2xH100", planned.sizes.rows, 6, planned.sizes.triples, model__dim=8, **keys)
    assert planned.examples == 2 * 700 * 6
    rows, features = (4 * 8 * n for n in (planned.rows, planned.sizes.num_features))
    assert planned.memory["gradients"].device == rows and "gradients" not in plain.memory
    more = planned.memory["rows and ids"].device
    more -= planned.fetched * (12 * 8 + 24)
    assert more == rows + 2 * features > rows


def test_hosts_divide_what_is_sent():
    """8 ranks on 2 hosts: 3 of 7 others are on one's own host; a ring passes both hosts."""
    planned = plan_of("8xH100", 80_000, train__batch_size=512, hosts=2)
    sent = Step(planned).sent
    for kind in ("rows", "gradients"):
        within, between = sent[kind]
        assert within / between == pytest.approx(3 / 4, rel=1e-6)
    assert sent["dense"][0] == 0 < sent["dense"][1]
    split = planned.changed({"dense.wrapper": "hybrid"})
    assert Step(split).sent["dense"][0] > 0  # a copy is split within a host
    assert Step(plan_of("8xH100", 80_000)).sent["dense"][1] == 0
    assert sum(map(sum, Step(plan_of("1xH100")).sent.values())) == 0


def test_layouts_send_what_they_must():
    rows, columns, table, copies = (
        Step(plan_of("4xH100", 8000, model__dim=64, layout=layout))
        for layout in ("row_wise", "column_wise", "table_wise", "data_parallel")
    )
    assert sum(columns.sent["ids"]) > 3.9 * sum(rows.sent["ids"])
    assert columns.sent["rows"] == pytest.approx(rows.sent["rows"])
    assert copies.sent.keys() == {"gradients", "dense"}
    assert sum(copies.sent["gradients"]) == pytest.approx(2 * 3 / 4 * 8000 * 64 * 4)
    # A table on one rank: it sends the rows of all others, and receives their gradients.
    part = "exchange of rows"
    assert table.parts[part] == pytest.approx(4 * rows.parts[part])
    assert table.parts["exchange of gradients"] == pytest.approx(table.parts[part])
    assert table.parts["lookup"] == pytest.approx(4 * rows.parts["lookup"])


@pytest.mark.parametrize(("devices", "share"), [("8xH100", 0.7), ("2xCPU", ETHERNET_SHARE)])
def test_a_link_takes_time_for_what_passes_it(devices, share):
    keys = {"train__batch_size": 4096, "hosts": 2}
    usual = Step(plan_of(devices, 20_000, **keys))
    speed, part = usual.plan.cluster.device.between_hosts, "exchange of rows"
    other = Step(plan_of(devices, 20_000, links={"between_hosts": speed / 2e9}, **keys))
    more = usual.sent["rows"][1] / share / speed
    assert other.parts[part] - usual.parts[part] == pytest.approx(more, rel=1e-6)
    assert other.parts["scoring"] == usual.parts["scoring"]


def test_starting_collectives_takes_longer_on_more_ranks():
    def starts(ranks: int, **keys) -> float:
        planned = plan_of(f"{ranks}xCPU", 20_000, hosts=ranks, **keys)
        return seconds(planned)["starting collectives"]

    assert starts(66) - starts(2) == pytest.approx(6 * 64 * 1e-4)
    full = {"negatives__regime": "1vsall", "train__batch_size": 16}
    assert starts(2, **full) == pytest.approx(4 * LATENCY["between"])

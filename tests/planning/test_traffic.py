"""Planned lookups, traffic and its time, against real ranks and against arithmetic."""

from __future__ import annotations

import functools
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from planned_runs import plan_of, stored
from sent_bytes import WatchCollectives
from training_runs import config_of, random_triples, shared_folder
from worlds import run_world

from kge_torchrec import plan
from kge_torchrec.config import Config
from kge_torchrec.data.features import Features
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.types import runs_of_types
from kge_torchrec.distributed.processes import processes, rows_by_rank
from kge_torchrec.planning.report import make_plan, report
from kge_torchrec.planning.step import ETHERNET_SHARE, LATENCY
from kge_torchrec.training.assembly import build_backend, build_batches, build_pipeline

STEPS = 15
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
        with WatchCollectives() as watch:
            for _ in range(STEPS):
                pipeline.progress(stream)
    return {kind: size / STEPS for kind, size in watch.sent.items()}


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
    planned, ranks = stored(config, f"{world_size}xCPU"), run_world(world_size, sent, config)
    measured = {kind: sum(rank[kind] for rank in ranks) / world_size for kind in ranks[0]}
    sizes = {kind: sum(planned.sent.get(kind, (0, 0))) for kind in measured}
    if planned.is_full:  # sums of rows, of their gradients and of dense ones are alike
        sizes, measured = ({"all": sum(x.values())} for x in (sizes, measured))
    assert sizes == pytest.approx(measured, rel=0.05)


def ids_on_ranks(config: Config) -> np.ndarray:
    """On a rank: the rows of each run of ids (R) that it looks up on each rank in a step."""
    with processes("cpu") as ranks:
        store = TripleStore.open(config.data.path)
        stream = build_batches(config, store, ranks).epoch(0)
        ids = np.concatenate([next(stream).ids.values().numpy() for _ in range(STEPS)])
        blocks, runs = rows_by_rank(store.num_rows, ranks.world_size), runs_of_types(store)
    run = np.searchsorted([ids.stop for _, ids in runs], ids, side="right")
    owner = np.searchsorted([block.stop for block in blocks], ids, side="right")
    counts = np.bincount(run * len(blocks) + owner, minlength=len(runs) * len(blocks))
    return counts.reshape(-1, len(blocks)) / STEPS


@pytest.mark.parametrize(
    ("keys", "features"),
    [
        ({"negatives__among": "all"}, False),
        ({"negatives__among": "types"}, False),
        ({"negatives__among": "types", "negatives__sides": "head", "model__reciprocal": False},
         False),
        ({"negatives__among": "types", "negatives__among_options": {"share": 0.5}}, False),
        ({"negatives__among": "types"}, True),
    ],
)  # fmt: skip
def test_ranks_read_as_many_rows_of_each_type_as_planned(keys, features):
    config = config_of(typed_graph(features), train__batch_size=256, negatives__count=32, **keys)
    planned = stored(config, "4xCPU")
    measured = np.stack(run_world(4, ids_on_ranks, config), 1)  # (runs, from, to)
    kinds = [kind for kind, _ in runs_of_types(TripleStore.open(config.data.path))]
    of_type = np.array([[kind == name for kind in kinds] for name in planned.sizes.types])
    rank, busiest, times = planned.busiest
    assert busiest == pytest.approx(of_type @ measured.sum(1)[:, rank], rel=0.12, abs=5)
    assert 4 * planned.batch.distinct == pytest.approx(of_type @ measured.sum((1, 2)), rel=0.05)
    loads = measured.sum((0, 1))
    assert rank == loads.argmax() or times < 1.05  # equal ranks are in any order
    assert times == pytest.approx(loads.max() / loads.mean(), rel=0.05)
    said = f"rank {rank} reads most rows: {times:.2f} times the mean of all ranks"
    assert (said in report(planned)) == (times >= 1.05)
    if not features:  # whose rows lie behind all entities, on the last rank
        assert times < 1.05


def test_types_without_data_are_looked_up_in_proportion_to_their_number():
    config = config_of(typed_graph(), train__batch_size=256, negatives__count=32)
    sizes = {"entities": "author=1k,place=6k,user=3k", "relations": 3, "triples": 10**5}
    words = "in proportion to their number"
    assert any(words in note for note in plan(config, devices="8xH100", **sizes)["notes"])
    assert not any(words in note for note in plan(config, devices="8xH100")["notes"])
    made = make_plan(config, "8xH100", **sizes)
    assert made.batch.distinct / made.batch.distinct.sum() == pytest.approx([0.1, 0.6, 0.3])
    batch = stored(config, "8xH100").batch
    assert batch.lookups[0] > 0.2 * batch.lookups.sum()  # of 7 % of the rows


def test_the_time_of_a_type_follows_its_optimizer():
    times = []
    for optimizer in ("sgd", "adam"):
        tables = {"place": {"optimizer": optimizer}}
        config = config_of(typed_graph(), train__batch_size=256, entities__tables=tables)
        times.append(stored(config).seconds["table optimizer"])
    assert times[1] > 1.2 * times[0]


def test_features_are_looked_up_as_planned():
    store = TripleStore.open(graph(features=True))
    config = config_of(store.path, train__batch_size=64, negatives__count=16)
    planned, table = stored(config), store.features()
    assert stored(config, "1xH100").memory["triples"].device == (
        12 * len(store.train) + 9 * store.num_entities + 12 * len(table[2])
    )
    with processes("cpu") as ranks:
        batches = [*islice(build_batches(config, store, ranks).epoch(0), STEPS)]
    looked_up, pairs = (np.mean([f(b) for b in batches]) for f in (
        lambda b: len(b.ids.values()), lambda b: len(b.bags.row)))  # fmt: skip
    assert looked_up == pytest.approx(planned.batch.distinct.sum(), rel=0.03)
    times = np.bincount(store.train[:, [0, 2]].ravel(), minlength=store.num_entities)
    of_entity = Features.of(store).indptr.diff().numpy()
    drawn, triples = 32 / store.num_entities, 64 / len(store.train)
    lookups = (times * triples + drawn) @ (1 + of_entity)
    assert planned.batch.lookups.sum() == pytest.approx(lookups, rel=1e-6)
    assert pairs == pytest.approx(planned.batch.pairs, rel=0.05)


def test_vectors_of_entities_with_features_take_memory():
    keys = {"negatives__regime": "allvsall", "loss__name": "bce"}
    planned = stored(config_of(graph(features=True), **keys), "2xH100")
    plain = plan_of("2xH100", planned.sizes.rows, 6, planned.sizes.triples, model__dim=8, **keys)
    assert planned.examples == 2 * 700 * 6
    rows, features = (4 * 8 * n for n in (planned.rows.sum(), planned.sizes.num_features))
    assert planned.memory["gradients"].device == rows and "gradients" not in plain.memory
    more = planned.memory["rows and ids"].device
    more -= planned.fetched * (12 * 8 + 24)
    assert more == rows + 2 * features > rows


def test_single_device_sends_nothing():
    assert sum(map(sum, plan_of("1xH100").sent.values())) == 0


def test_hosts_divide_what_is_sent():
    """8 ranks on 2 hosts: 3 of 7 others are on one's own host; a ring passes both hosts."""
    planned = plan_of("8xH100", 80_000, train__batch_size=512, hosts=2)
    for kind in ("rows", "gradients"):
        within, between = planned.sent[kind]
        assert within / between == pytest.approx(3 / 4, rel=1e-6)
    assert planned.sent["dense"][0] == 0 < planned.sent["dense"][1]
    split = planned.changed({"dense.wrapper": "hybrid"})
    assert split.sent["dense"][0] > 0  # a copy is split within a host
    assert plan_of("8xH100", 80_000).sent["dense"][1] == 0


def test_layouts_send_what_they_must():
    rows, columns, table, copies = (
        plan_of("4xH100", 8000, model__dim=64, layout=layout)
        for layout in ("row_wise", "column_wise", "table_wise", "data_parallel")
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
        batch = plan_of("4xH100", 10**6, triples=10**6, skew=skew, train__batch_size=8192).batch
        saved.append(1 - batch.distinct.sum() / batch.lookups.sum())
    assert saved == sorted(saved)
    assert saved[0] < 0.03 < 0.2 < saved[2]


@pytest.mark.parametrize(
    ("devices", "link", "share"),
    [("8xH100", "within_host", 0.7), ("8xH100", "between_hosts", 0.7),
     ("2xCPU", "between_hosts", ETHERNET_SHARE)],
)  # fmt: skip
def test_a_link_takes_time_for_what_passes_it(devices, link, share):
    keys = {"train__batch_size": 4096, "hosts": 2}
    usual = plan_of(devices, 20_000, **keys)
    speed, part = getattr(usual.cluster.device, link), "exchange of rows"
    other = plan_of(devices, 20_000, links={link: speed / 2e9}, **keys)
    more = usual.sent["rows"][link == "between_hosts"] / share / speed
    assert other.seconds[part] - usual.seconds[part] == pytest.approx(more, rel=1e-6)
    assert other.seconds["scoring"] == usual.seconds["scoring"]


def test_starting_collectives_takes_longer_on_more_ranks():
    """Lookups send a message to each rank; sums go around a ring."""

    def starts(ranks: int, **keys) -> float:
        planned = plan_of(f"{ranks}xCPU", 20_000, hosts=ranks, **keys)
        return planned.seconds["starting collectives"]

    latency, sampled = LATENCY["between"], {"train__batch_size": 4096}
    assert starts(66, **sampled) - starts(2, **sampled) == pytest.approx(
        64 * (5 * 1e-4 + 2 * latency)
    )
    full = {"negatives__regime": "1vsall", "train__batch_size": 16}
    assert starts(2, **full) == pytest.approx(4 * latency)
    assert starts(6, **full) == pytest.approx(4 * (1 + 2 * 4) * latency)

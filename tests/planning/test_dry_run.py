"""Whole plans: the questions of the guide, shards, limits, notes and what cannot be."""

from __future__ import annotations

import time

import pytest
import torch
from planned_runs import cached, clustered, freebase, planned, workload
from training_runs import config_of, fit, tiny_store
from worlds import run_world

from kge_torchrec.config import OPTIMIZER_NAMES, ConfigError
from kge_torchrec.data.store import TripleStore
from kge_torchrec.distributed.processes import Processes
from kge_torchrec.embeddings.torchrec.planner import GIB, SHARDINGS, Bytes
from kge_torchrec.planning import step
from kge_torchrec.planning.cost import objective_cost
from kge_torchrec.planning.devices import parse_devices
from kge_torchrec.planning.layout import Layout
from kge_torchrec.planning.memory import PARTS, batch_bytes
from kge_torchrec.planning.plan import alternatives, plan_setup, plan_training
from kge_torchrec.planning.report import report
from kge_torchrec.planning.workload import Workload
from kge_torchrec.training.assembly import build_batches

ONE_RANK = Processes(0, 1, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def data_store(tmp_path_factory):
    return tiny_store(tmp_path_factory.mktemp("data") / "store", entities=1000, train=5000)


def test_freebase_at_100_fits_one_h200():
    plan = planned(freebase(model__dim=100), "1xH200")
    assert plan.fits
    table = plan.memory[0]["weights"].device + plan.memory[0]["optimizer state"].device
    assert table == 86_000_000 * 100 * 12  # 103 GB
    triples = 12 * plan.workload.num_triples  # batches are made on the GPU
    assert plan.memory[0]["triples"].device == triples > 4e9
    assert table + triples < plan.total(0).device < 1.02 * (table + triples)
    without = plan_setup(plan.changed({"train.batches": "cpu"}))
    assert plan.total(0).device - without.total(0).device == triples


def test_freebase_at_400_does_not_fit_one_h200():
    plan = planned(freebase(model__dim=400), "1xH200")
    worst = plan.overruns[0]
    assert worst.place == "device memory of rank 0"
    assert worst.over == plan.total(0).device - int(plan.cluster.device.memory * 0.95)


def test_freebase_at_400_fits_eight_h100s():
    plan = planned(freebase(model__dim=400), "8xH100", hosts=2)
    assert plan.fits
    assert [shard.rows for shard in plan.shards] == [10_750_000] * 8
    assert plan.memory[7]["weights"].device == 10_750_000 * 400 * 4


def test_a_billion_rows_over_64_devices_in_seconds():
    started = time.perf_counter()
    plan = planned(
        workload(10**9, 1000, 10**9, 0.7, model__dim=128, train__optimizer="adam"), "64xH100", 8
    )
    assert time.perf_counter() - started < 10
    assert plan.fits
    assert sum(shard.rows for shard in plan.shards) == 10**9


@pytest.mark.parametrize("devices", ["4xH100", "4xCPU"])
def test_averages_take_the_memory_of_the_weights(devices):
    keys = {"evaluation__every": 1, "dense__wrapper": "fsdp"}
    plain, ema = (
        planned(workload(1001, model__dim=64, train__averaging=kind, **keys), devices)
        for kind in ("none", "ema")
    )
    for rank, parts in enumerate(plain.memory):
        assert parts["average"] == Bytes()
        assert ema.memory[rank]["average"] == parts["weights"]
        dense = [getattr(p.memory[rank]["dense parameters"], p.place) for p in (plain, ema)]
        quarter = -(-plain.workload.dense_parameters // 4)
        assert dense[1] - dense[0] == 4 * quarter


@pytest.mark.parametrize("optimizer", OPTIMIZER_NAMES)
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_every_layout_holds_the_table_once_or_everywhere(sharding, optimizer):
    work = workload(1001, model__dim=64, train__optimizer=optimizer)
    plan = planned(work, "4xH100", sharding=sharding)
    numbers = sum(shard.rows * shard.columns for shard in plan.shards)
    assert numbers == (4 if sharding == "data_parallel" else 1) * 1001 * 64
    assert sum(parts["weights"].device for parts in plan.memory) == 4 * numbers
    assert all(set(parts) == set(PARTS) for parts in plan.memory)
    assert all(seconds > 0 for seconds in plan.times.values())


def test_columns_are_split_over_no_more_than_all_ranks():
    plan = planned(workload(100, model__dim=400), "8xH100", sharding="column_wise")
    assert [(s.rank, s.first_column, s.columns) for s in plan.shards] == [
        (rank, 80 * rank, 80) for rank in range(5)
    ]


def test_main_memory_of_a_host_is_shared_and_mapped_triples_need_none():
    plan = planned(workload(10**6, triples=10**7, model__dim=64), "4xCPU", 2)
    (host, other) = plan.limits
    assert host.capacity == 64 * GIB
    triples = plan.memory[0]["triples"].main
    assert triples == 10**7 * 12
    assert host.need == plan.total(0).main + plan.total(1).main - 2 * triples
    assert other.place == "main memory of host 1"


@pytest.mark.parametrize(
    ("masks", "sides"), [({"filtered": True}, "both"), ({"among": "seen"}, "tail")]
)
def test_the_mask_of_candidates_is_counted(data_store, masks, sides):
    """It is as large as the masks of a batch that training makes."""
    keys = {"sides": sides, "chunk_size": 16, "count": 12}
    keys["head_count"] = 5 if sides == "both" else None
    results = []
    for more in (masks, {}):
        negatives = {f"negatives__{name}": value for name, value in {**keys, **more}.items()}
        negatives["model__reciprocal"] = sides == "both"
        entities, triples = data_store.num_entities, len(data_store.train)
        work = workload(entities, 3, triples, train__batch_size=64, **negatives)
        ((part,),) = work.batches(1)
        batch = next(build_batches(work.config, data_store, ONE_RANK).epoch(0))
        in_batch = batch.known_head.numel() + batch.known_tail.numel()
        cost = objective_cost(work, part, is_cuda=False)
        results.append((batch_bytes(work, part), in_batch, cost.moved_bytes))
    (planned_size, size, moved), (without, nothing, others) = results
    assert planned_size - without == pytest.approx(size) and size > nothing == 0
    assert moved - others > size  # a loss reads it


@pytest.mark.parametrize(
    "keys, read, held",
    [
        ({}, ("train",), ()),
        ({"sampling": "degree"}, ("train",), ("degrees",)),
        ({"filtered": True, "sides": "tail", "sampling": "degree"},
         ("train", "tail"), ("degrees",)),
        ({"regime": "kvsall"}, ("tail", "head"), ()),
        ({"regime": "kvssample", "sampling": "degree", "sides": "head"},
         ("head",), ("degrees",)),
        ({"regime": "allvsall", "sides": "tail"}, ("tail",), ()),
    ],
)  # fmt: skip
def test_memory_of_the_data_is_counted(data_store, keys, read, held):
    """Mapped files once a host, and what draws entities on every rank."""
    keys = {f"negatives__{name}": value for name, value in keys.items()}
    keys["model__reciprocal"] = "negatives__sides" not in keys
    if keys.get("negatives__regime") == "allvsall":
        keys["loss__name"] = "bce"
    store = data_store
    work = workload(store.num_entities, 3, len(store.train), **keys)
    plan, without = planned(work, "1xCPU"), planned(workload(store.num_entities, 3), "1xCPU")
    pages, queries = {"train": store.train.nbytes}, 0
    for side in ("tail", "head"):
        index = store.side_index("train", side)
        pages[side] = sum(part.nbytes for part in index)
        queries += (len(store.train) - len(index.queries)) * (side in read)  # at most T are planned
    read_bytes = sum(pages[part] for part in read) + 16 * queries
    assert plan.memory[0]["triples"].main == pytest.approx(read_bytes, abs=16)
    more = plan.memory[0]["process"].main - without.memory[0]["process"].main
    assert more == (store.degrees().nbytes if held else 0)


def test_a_plan_says_how_many_answers_a_query_may_bring():
    keys = {"negatives__regime": "kvssample", "model__dim": 64}
    for most, said in ((5000, "up to 5,000 (negatives.max_answers), of 256 bytes per row"),
                       (0, "any number, of 256 bytes per row")):  # fmt: skip
        plan = planned(workload(negatives__max_answers=most, **keys), "1xCPU")
        assert any(said in note for note in plan.notes)


def test_a_plan_says_how_much_memory_a_checkpoint_takes():
    def said(devices: str = "2xCPU", **keys) -> list[str]:
        plan = planned(freebase(model__dim=64, **keys), devices)
        return [note for note in plan.notes if "a checkpoint takes up to" in note]

    (note,) = said()
    assert f"{3 * 4 * 64 * 86_000_000 / 2**30:.1f} GiB" in note
    assert len(said("4xH100")) == 1
    for keys in (
        {"checkpoint__options": {"background": False}},
        {"entities__placement": "disk"},
    ):
        assert not said(**keys)


def test_cached_rows_are_limited_by_main_memory():
    work = freebase(model__dim=400, **cached(0.1))
    plan = planned(work, "4xH100")
    assert plan.fits and not planned(freebase(model__dim=400), "4xH100").fits
    assert plan.memory[0]["cache"].device > 0.1 * 21_500_000 * 400 * 4
    assert plan.memory[0]["weights"].main == 4 * 400 * 21_500_000
    tight = plan_training(work, parse_devices("4xH100", host_gib=300), Layout())
    assert [limit.place for limit in tight.overruns] == ["main memory of host 0"]


def test_a_larger_cache_needs_more_memory_and_less_time():
    small, large = (planned(freebase(model__dim=400, **cached(r)), "4xH100") for r in (0.05, 0.3))
    assert small.memory[0]["cache"].device < large.memory[0]["cache"].device
    assert small.times["lookup"] > large.times["lookup"]


def test_fsdp_splits_the_dense_part():
    keys = {"model__dim": 64, "train__optimizer": "adam"}
    numbers = 2 * 10**6 * 64  # reciprocal

    def dense(**more):
        plan = planned(workload(1000, 10**6, **keys, **more), "8xH100", 2)
        return plan.memory[0]["dense parameters"]

    assert dense() == Bytes(device=4 * numbers * 4)
    assert dense(dense__wrapper="fsdp") == Bytes(device=4 * (numbers * 4 // 8 + numbers))
    assert dense(dense__wrapper="hybrid") == Bytes(device=4 * (numbers * 4 // 4 + numbers))
    offloaded = dense(dense__wrapper="fsdp", dense__options__cpu_offload=True)
    assert offloaded == Bytes(device=4 * numbers, main=4 * numbers * 4 // 8)


def test_micro_batches_need_less_memory_and_more_lookups():
    keys = {"train__batch_size": 4096, "negatives__count": 512}
    whole = planned(workload(10**6, triples=10**6, **keys), "2xCPU")
    cut = planned(workload(10**6, triples=10**6, train__accumulation=4, **keys), "2xCPU")
    assert len(cut.batches[0]) == 4
    assert cut.memory[0]["activations"].main < 0.4 * whole.memory[0]["activations"].main
    assert cut.lookups == whole.lookups + 3 * 2 * 2 * 512
    assert cut.traffic.total("dense") == whole.traffic.total("dense")


@pytest.mark.parametrize("key", ["norm", "value"])
def test_clipping_holds_the_sum_of_each_rows_gradients(key):
    def rows(**keys) -> float:
        return planned(workload(10**6, triples=10**6, **keys), "2xCPU").memory[0]["rows and ids"]

    plain = rows()
    clipped = rows(**{f"train__clip__{key}": 1.0})
    assert 1.1 * plain.main < clipped.main < 1.5 * plain.main


def test_16_bit_products_are_faster_on_gpus():
    keys = {"train__batch_size": 65536, "negatives__count": 8192, "model__dim": 512}
    plain, half, tf32 = (
        planned(workload(10**6, triples=10**6, **keys, **more), "1xH100")
        for more in ({}, {"train__precision": "bf16"}, {"train__precision": "tf32"})
    )
    assert half.times["scoring"] < tf32.times["scoring"] < plain.times["scoring"]
    assert any("float32" in note for note in half.notes)


def test_alternatives_are_sorted_and_include_what_does_not_fit():
    plans = alternatives(freebase(model__dim=400), clustered("8xH100"), Layout())
    fitting = [plan.fits for plan in plans]
    assert fitting == sorted(fitting, reverse=True)
    times = [plan.step_seconds for plan in plans if plan.fits]
    assert times == sorted(times)
    assert {plan.layout.sharding for plan in plans} == {*SHARDINGS} and len(plans) == 4
    assert len(alternatives(workload(), clustered("2xCPU"), Layout())) == 4
    with_cache = alternatives(workload(**cached(0.1)), clustered("2xH100"), Layout())
    assert {plan.layout_in_words for plan in with_cache} == {
        f"{sharding}, fused_uvm_caching, cache 0.1" for sharding in SHARDINGS[:3]
    }


@pytest.mark.parametrize(
    ("devices", "choice", "keys", "said"),
    [
        ("8xH100", {}, {"model__dim": 102}, "multiple of 4, not 102"),
        ("8xH100", {"sharding": "data_parallel"}, cached(0.1), "lie whole on every device"),
        ("8xH100", {"sharding": "grid"}, {}, "--sharding must be one of row_wise"),
        ("8xH100", {"reserve": 1.0}, {}, "--reserve must be in"),
        ("8xH100", {}, {"dense__wrapper": "none"}, "dense.wrapper none is for one rank, not for 8"),
        (
            "8xH100",
            {},
            {"dense__wrapper": "hybrid", "dense__options__replicas": 3},
            "8 ranks cannot be split into 3 equal groups",
        ),
    ],
)
def test_impossible_settings_are_rejected(devices, choice, keys, said):
    with pytest.raises(ConfigError, match=said):
        planned(workload(**keys), devices, **choice)


@pytest.mark.parametrize("name", ["entities", "relations", "triples"])
def test_sizes_below_one_are_rejected(name):
    with pytest.raises(ConfigError, match=f"{name} must be at least 1"):
        workload(**{name: 0})


def test_triples_are_on_the_gpu_only_where_they_leave_memory():
    sizes = {
        where: planned(freebase(model__dim=400, train__batches=where), "4xH200").memory[0]
        for where in ("auto", "cpu", "device")
    }
    triples = 12 * freebase().num_triples
    assert [sizes[x]["triples"].device for x in ("auto", "cpu", "device")] == [triples, 0, triples]
    tight = planned(freebase(model__dim=400), "3xH200")
    assert tight.fits and tight.memory[0]["triples"].device == 0


@pytest.mark.parametrize(
    "devices, hosts, keys, bound, word",
    [
        ("1xH200", 1, {"train__batch_size": 8192}, "host", "launch-bound"),
        ("1xH200", 1, {"train__batch_size": 65_536, "train__batches": "cpu"}, "loader",
         "loader-bound"),
        ("1xH200", 1, {"train__batch_size": 262_144}, "device", "memory-bound"),
        ("16xA100-40GB", 16, {"train__batch_size": 1 << 20, "negatives__chunk_size": 64,
                              "negatives__count": 64, "model__dim": 200}, "links", "link-bound"),
    ],
)  # fmt: skip
def test_a_plan_names_what_decides_its_speed(devices, hosts, keys, bound, word):
    keys = {"model__dim": 100, "train__optimizer": "rowwise_adagrad", **keys}
    plan = planned(freebase(**keys), devices, hosts)
    assert plan.bound == bound and f"  {word}: " in report(plan)
    busy = plan.busy
    assert sum(busy.values()) == pytest.approx(sum(plan.times.values()))
    # The host, the loader and the GPU work at the same time.
    assert plan.step_seconds == max(busy["host"], busy["loader"], busy["device"] + busy["links"])
    on_cpus = planned(freebase(model__dim=8), "4xCPU")
    assert on_cpus.step_seconds == sum(on_cpus.busy.values()) > max(on_cpus.busy.values())


def test_a_cuda_graph_starts_few_operations_and_keeps_its_memory():
    def parts(devices: str, **keys):
        return planned(freebase(model__dim=100, train__batch_size=1024, **keys), devices)

    plain, graph = (parts("1xH200", train__pipeline=name) for name in ("loop", "graph"))
    seconds = step.OUTSIDE_GRAPH * graph.cluster.device.launch + step.PYTHON_OUTSIDE
    assert graph.times["starting operations"] == pytest.approx(seconds)
    assert graph.examples_per_second > 1.8 * plain.examples_per_second
    memory = [plan.memory[0]["activations"].device for plan in (plain, graph)]
    assert memory[1] == 2 * memory[0]
    # Every place is looked up.
    assert graph.times["lookup"] > plain.times["lookup"]
    plain, graph = (parts("2xH200", train__pipeline=name) for name in ("loop", "graph"))
    assert graph.times == plain.times and graph.memory == plain.memory


def rows_held(config) -> tuple[int, int]:
    shard = fit(config).backend.shard()
    return shard.first_row, shard.rows.shape[0]


def test_ranks_hold_the_rows_that_are_planned(tmp_path):
    world_size = 4
    config = config_of(tiny_store(tmp_path / "store").path, tmp_path / "run", train__epochs=1)
    work = Workload.of_store(config, TripleStore.open(config.data.path))
    plan = plan_training(work, clustered(f"{world_size}xCPU"), Layout())
    rows = [(shard.first_row, shard.rows) for shard in plan.shards]
    assert rows == run_world(world_size, rows_held, config)

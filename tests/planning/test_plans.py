"""Whole plans: memory, limits, layouts and notes."""

from __future__ import annotations

import time

import pytest
from planned_runs import cached, clustered, freebase, plan_of, stored
from training_runs import config_of, fit, tiny_store
from worlds import run_world

from kge_torchrec import train
from kge_torchrec.config import OPTIMIZER_NAMES
from kge_torchrec.distributed.processes import ALONE
from kge_torchrec.embeddings.torchrec.planner import GIB, SHARDINGS, Bytes
from kge_torchrec.planning import step
from kge_torchrec.planning.memory import RANKED_MOST, RANKED_TRIPLE
from kge_torchrec.planning.plan import Plan
from kge_torchrec.planning.report import all_layouts, notes, percentages, report, side_by_side
from kge_torchrec.training.assembly import build_batches

ALL = {"negatives__regime": "1vsall", "loss__name": "bce", "train__batch_size": 64,
       "model__dim": 16}  # fmt: skip


@pytest.fixture(scope="module")
def data_store(tmp_path_factory):
    return tiny_store(tmp_path_factory.mktemp("data") / "store", entities=1000, train=5000)


def test_freebase_at_100_fits_one_h200():
    plan = freebase("1xH200", model__dim=100)
    assert plan.fits
    table = plan.memory["weights"].device + plan.memory["optimizer state"].device
    assert table == 86_000_000 * 100 * 12  # 103 GB
    triples = 12 * plan.sizes.triples  # batches are made on the GPU
    assert plan.memory["triples"].device == triples > 4e9
    assert table + triples < plan.total.device < 1.02 * (table + triples)
    without = plan.changed({"train.batches": "cpu"})
    assert plan.total.device - without.total.device == triples


def test_freebase_at_400_wants_eight_h100s():
    small, plan = freebase("1xH200", model__dim=400), freebase("8xH100", model__dim=400, hosts=2)
    (worst,) = small.overruns
    assert worst.place == "memory of a GPU"
    assert worst.over == small.total.device - int(small.cluster.device.memory * 0.95)
    assert plan.fits and len(plan.block) == 10_750_000
    assert plan.memory["weights"].device == 10_750_000 * 400 * 4


def test_a_billion_rows_over_64_devices_in_seconds():
    started = time.perf_counter()
    keys = {"model__dim": 128, "train__optimizer": "adam"}
    plan = plan_of("64xH100", 10**9, 1000, 10**9, 0.7, 8, **keys)
    assert plan.fits and len(plan.block) == 10**9 // 64
    assert time.perf_counter() - started < 10


@pytest.mark.parametrize("devices", ["4xH100", "4xCPU"])
def test_averages_take_the_memory_of_the_weights(devices):
    keys = {"model__dim": 64, "evaluation__every": 1, "dense__wrapper": "fsdp"}
    plain, ema = (plan_of(devices, 1001, train__averaging=x, **keys) for x in ("none", "ema"))
    assert "average" not in plain.memory and ema.memory["average"] == plain.memory["weights"]
    dense = [getattr(p.memory["dense parameters"], p.place) for p in (plain, ema)]
    assert dense[1] - dense[0] == 4 * -(-plain.costs.dense_numbers // 4)
    numbers = 1001 * 64 + plain.costs.dense_numbers
    assert ema.checkpoint_bytes - plain.checkpoint_bytes == 4 * numbers


@pytest.mark.parametrize("optimizer", OPTIMIZER_NAMES)
@pytest.mark.parametrize(
    ("layout", "rows", "columns"),
    [("row_wise", 251, 64), ("column_wise", 1001, 16), ("table_wise", 1001, 64),
     ("data_parallel", 1001, 64)],
)  # fmt: skip
def test_a_rank_holds_its_part_of_every_layout(layout, rows, columns, optimizer):
    plan = plan_of("4xH100", 1001, model__dim=64, train__optimizer=optimizer, layout=layout)
    assert (len(plan.block), plan.columns) == (rows, columns)
    assert plan.memory["weights"].device == 4 * rows * columns
    assert all(seconds > 0 for seconds in plan.seconds.values())


def test_columns_are_split_over_no_more_than_all_ranks():
    plan = plan_of("8xH100", 100, model__dim=400, layout="column_wise")
    assert plan.columns == 80 and plan.busiest[2] == 8 / 5


def test_main_memory_of_a_host_is_shared_and_mapped_triples_need_none():
    plan = plan_of("4xCPU", 10**6, triples=10**7, model__dim=64, hosts=2)
    (host,) = plan.limits
    triples = plan.memory["triples"].main
    assert (host.place, host.capacity) == ("main memory of a host", 64 * GIB)
    assert triples == 10**7 * 12 + RANKED_MOST and host.need == 2 * (plan.total.main - triples)


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
        counts = data_store.num_entities, 3, len(data_store.train)
        plan = plan_of("1xCPU", *counts, train__batch_size=64, **negatives)
        batch = next(build_batches(plan.config, data_store, ALONE).epoch(0))
        in_batch = batch.known_head.numel() + batch.known_tail.numel()
        results.append((plan.memory["batches"].main / 3, in_batch, plan.cost.moved_bytes))
    (planned_size, size, moved), (without, nothing, others) = results
    assert planned_size - without == pytest.approx(size, abs=1) and size > nothing == 0
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
    """Mapped files, and what draws entities."""
    keys = {f"negatives__{name}": value for name, value in keys.items()}
    keys["model__reciprocal"] = "negatives__sides" not in keys
    if keys.get("negatives__regime") == "allvsall":
        keys["loss__name"] = "bce"
    store = data_store
    counts = store.num_entities, 3, len(store.train)
    plan, without = plan_of("1xCPU", *counts, **keys), plan_of("1xCPU", *counts)
    pages, queries = {"train": store.train.nbytes}, 0
    for side in ("tail", "head"):
        index = store.side_index("train", side)
        pages[side] = sum(part.nbytes for part in index)
        queries += (len(store.train) - len(index.queries)) * (side in read)  # at most T are planned
    read_bytes = sum(pages[part] for part in read) + 16 * queries
    read_bytes += RANKED_TRIPLE * len(store.train)
    assert plan.memory["triples"].main == pytest.approx(read_bytes, abs=16)
    more = plan.memory["process"].main - without.memory["process"].main
    assert more == (store.degrees().nbytes if held else 0)


def said(plan: Plan, words: str) -> list[str]:
    return [note for note in notes(plan) if words in note]


def test_a_plan_says_how_many_answers_a_query_may_bring():
    keys = {"negatives__regime": "kvssample", "model__dim": 64}
    for most, words in ((5000, "up to 5,000 (negatives.max_answers), of 256 bytes per row"),
                        (0, "any number, of 256 bytes per row")):  # fmt: skip
        assert said(plan_of("1xCPU", negatives__max_answers=most, **keys), words)


def test_a_plan_says_how_much_memory_a_checkpoint_takes():
    (note,) = said(freebase("2xCPU", model__dim=64), "a checkpoint takes up to")
    assert f"{3 * 4 * 64 * 86_000_000 / 2**30:.1f} GiB" in note
    for keys in ({"checkpoint__options": {"background": False}}, {"entities__placement": "disk"}):
        assert not said(freebase("2xCPU", model__dim=64, **keys), "a checkpoint takes")


def test_a_checkpoint_has_the_planned_size_on_disk(tmp_path):
    keys = {"model__dim": 64, "train__optimizer": "adam", "train__epochs": 1}
    store = tiny_store(tmp_path / "store", entities=4000)
    run = train(config_of(store.path, tmp_path / "run", **keys))
    sizes = [file.stat().st_size for file in run.path.rglob("*.safetensors")]
    assert len(sizes) == 1
    assert 0 < sizes[0] - stored(run.config).checkpoint_bytes < 8192  # the file's header


def test_cached_rows_are_limited_by_main_memory():
    plan = freebase("4xH100", model__dim=400, **cached(0.1))
    assert plan.fits and not freebase("4xH100", model__dim=400).fits
    assert plan.memory["cache"].device > 0.1 * 21_500_000 * 400 * 4
    assert plan.memory["weights"].main == 4 * 400 * 21_500_000
    tight = plan.changed({}, cluster=clustered("4xH100", host_gib=300))
    assert [limit.place for limit in tight.overruns] == ["main memory of a host"]


def test_a_larger_cache_needs_more_memory_and_less_time():
    small, large = (freebase("4xH100", model__dim=400, **cached(r)) for r in (0.05, 0.3))
    assert small.memory["cache"].device < large.memory["cache"].device
    assert small.seconds["lookup"] > large.seconds["lookup"]


def test_fsdp_splits_the_dense_part():
    keys = {"model__dim": 64, "train__optimizer": "adam"}
    numbers = 2 * 10**6 * 64  # reciprocal

    def dense(**more):
        plan = plan_of("8xH100", 1000, 10**6, hosts=2, **keys, **more)
        return plan.memory["dense parameters"]

    assert dense() == Bytes(device=4 * numbers * 4)
    assert dense(dense__wrapper="fsdp") == Bytes(device=4 * (numbers * 4 // 8 + numbers))
    assert dense(dense__wrapper="hybrid") == Bytes(device=4 * (numbers * 4 // 4 + numbers))
    offloaded = dense(dense__wrapper="fsdp", dense__options__cpu_offload=True)
    assert offloaded == Bytes(device=4 * numbers, main=4 * numbers * 4 // 8)


def test_sharded_dense_parameters_are_whole_in_a_step_against_all():
    """Kept: values, gradients and Adagrad's sums.  Whole: values, gradients, those under way."""
    keys = {**ALL, "model__scorer": "rescal", "model__dim": 64, "dense__wrapper": "fsdp"}
    plan = plan_of("4xH100", **keys)
    size = 4 * plan.costs.dense_numbers * (3 / 4 + 3)
    assert plan.memory["dense parameters"].device == pytest.approx(size)


def test_micro_batches_need_less_memory_and_more_lookups():
    keys = {"train__batch_size": 4096, "negatives__count": 512}
    whole, cut = (
        plan_of("2xCPU", 10**6, triples=10**6, train__accumulation=n, **keys) for n in (1, 4)
    )
    assert cut.memory["activations"].main < 0.4 * whole.memory["activations"].main
    lookups = [p.micro_batches * p.batch.lookups.sum() for p in (whole, cut)]
    assert lookups[1] == lookups[0] + 3 * 2 * 512
    assert cut.sent["dense"] == whole.sent["dense"]


def test_micro_batches_against_all_hold_another_sum_of_gradients():
    whole, parts = (plan_of("4xH100", 10**5, train__accumulation=n, **ALL) for n in (1, 4))
    assert "gradients" not in whole.memory
    assert parts.memory["gradients"].device == 4 * 25_000 * 16
    assert parts.cost.flops == pytest.approx(whole.cost.flops / 4)
    for part in ("activations", "rows and ids"):
        assert parts.memory[part].device < 0.5 * whole.memory[part].device
    assert parts.seconds["scoring"] == pytest.approx(whole.seconds["scoring"], rel=0.3)
    assert parts.sent == whole.sent


@pytest.mark.parametrize("key", ["norm", "value"])
def test_clipping_holds_the_sum_of_each_rows_gradients(key):
    def rows(**keys) -> int:
        return plan_of("2xCPU", 10**6, triples=10**6, **keys).memory["rows and ids"].main

    assert 1.1 * rows() < rows(**{f"train__clip__{key}": 1.0}) < 1.5 * rows()


def test_16_bit_products_are_faster_on_gpus():
    keys = {"train__batch_size": 65536, "negatives__count": 8192, "model__dim": 512}
    plain, half, tf32 = (
        plan_of("1xH100", 10**6, triples=10**6, **keys, **more)
        for more in ({}, {"train__precision": "bf16"}, {"train__precision": "tf32"})
    )
    assert half.seconds["scoring"] < tf32.seconds["scoring"] < plain.seconds["scoring"]
    assert said(half, "float32")


def test_layouts_side_by_side_are_sorted_and_include_what_does_not_fit():
    plans = all_layouts(freebase("8xH100", model__dim=400))
    fitting = [plan.fits for plan in plans]
    assert fitting == sorted(fitting, reverse=True)
    times = [plan.step_seconds for plan in plans if plan.fits]
    assert times == sorted(times)
    assert {plan.layout for plan in plans} == {*SHARDINGS} and len(plans) == 4
    assert side_by_side(plans).splitlines()[-1].startswith("Training takes row_wise: ")
    with_cache = all_layouts(plan_of("2xH100", **cached(0.1)))
    assert {plan.in_words for plan in with_cache} == {
        f"{layout}, fused_uvm_caching, cache 0.1" for layout in SHARDINGS[:3]
    }
    assert [plan.layout for plan in all_layouts(plan_of("4xH100", **ALL))] == ["row_wise"]


def test_triples_are_on_the_gpu_only_where_they_leave_memory():
    sizes = [
        freebase("4xH200", model__dim=400, train__batches=where).memory["triples"].device
        for where in ("auto", "cpu", "device")
    ]
    triples = 12 * 338_586_276
    assert sizes == [triples, 0, triples]
    tight = freebase("3xH200", model__dim=400)
    assert tight.fits and tight.memory["triples"].device == 0


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
    plan = freebase(devices, hosts=hosts, **keys)
    text = report(plan)
    assert plan.bound == bound and f"  {word}: " in text
    busy = plan.busy
    assert sum(busy.values()) == pytest.approx(sum(plan.seconds.values()))
    # The host, the loader and the GPU work at the same time.
    longest = max(busy["host"], busy["loader"], busy["device"] + busy["links"])
    assert plan.step_seconds == pytest.approx(longest)
    assert "  at the same time: " in text and "  links are assumed to have " in text


def test_shares_of_a_step_add_up_to_a_hundred_percent():
    """On a GPU some parts hide behind others; their shares were once counted too."""
    for devices, keys in (("1xH200", {}), ("4xCPU", {"model__dim": 8}), ("8xH100", {})):
        plan = freebase(devices, **{"model__dim": 100, **keys})
        lines = [line for line in report(plan).splitlines() if line.endswith("%")]
        assert sum(int(line.split()[-1][:-1]) for line in lines) == 100
    assert percentages({"a": 1, "b": 1, "c": 1}) == {"a": 34, "b": 33, "c": 33}


def test_a_plan_gives_the_time_of_all_epochs():
    plan = freebase("1xH200", model__dim=100, train__epochs=30)
    assert ", all 30 " in report(plan)
    assert plan.epoch_seconds == pytest.approx(
        plan.step_seconds * plan.sizes.triples / plan.batch_size
    )


def test_a_cuda_graph_starts_few_operations_and_keeps_its_memory():
    def parts(devices: str, pipeline: str) -> Plan:
        keys = {"model__dim": 100, "train__batch_size": 1024, "train__pipeline": pipeline}
        return freebase(devices, **keys)

    plain, graph = (parts("1xH200", name) for name in ("loop", "graph"))
    seconds = step.OUTSIDE_GRAPH * graph.cluster.device.launch + step.PYTHON_OUTSIDE
    assert graph.seconds["starting operations"] == pytest.approx(seconds)
    assert graph.examples_per_second > 1.8 * plain.examples_per_second
    memory = [plan.memory["activations"].device for plan in (plain, graph)]
    assert memory[1] == 2 * memory[0]
    # Every place is looked up.
    assert graph.seconds["lookup"] > plain.seconds["lookup"]
    plain, graph = (parts("2xH200", name) for name in ("loop", "graph"))
    assert graph.seconds == plain.seconds and graph.memory == plain.memory


def rows_held(config) -> tuple[int, int]:
    shard = fit(config).backend.shard()
    return shard.first_row, shard.rows.shape[0]


def test_ranks_hold_the_rows_that_are_planned(tmp_path):
    config = config_of(tiny_store(tmp_path / "store").path, tmp_path / "run", train__epochs=1)
    rows = len(stored(config, "4xCPU").block)
    held = run_world(4, rows_held, config)
    assert [rows_of_rank for _, rows_of_rank in held[:3]] == [rows] * 3
    assert held[3][1] <= rows


def test_queries_and_epochs_against_all():
    def against_all(regime="1vsall", **keys) -> Plan:
        return plan_of("2xH100", **{**ALL, "negatives__regime": regime, **keys})

    assert against_all().queries == 128
    assert against_all(negatives__sides="tail", model__reciprocal=False).queries == 64
    assert against_all("kvsall").queries == 64
    assert against_all(train__batch_size=10**6).queries == 2 * 5000  # all triples
    assert against_all().steps_per_epoch == 5000 / 64
    assert against_all("kvsall").steps_per_epoch == 2 * 5000 / 64
    assert against_all("allvsall").steps_per_epoch == 2 * 1000 * 7 / 64
    assert said(against_all("kvsall"), "at most 10,000 queries")
    queries = against_all(loss__regularizers={"l2": 0.1}).fetched
    assert against_all(loss__regularizers={"dura": 0.1}).fetched == 2 * queries
    assert against_all(loss__relation_weight=0.1).fetched == 2 * queries


def test_biases_are_two_elements_of_a_row():
    plain = plan_of("4xCPU", **ALL)
    biased = plan_of("4xCPU", **{**ALL, "model__biases": True, "model__dim": 18})
    assert biased.costs.dense_numbers == plain.costs.dense_numbers
    rows = [plan.memory["weights"].main for plan in (plain, biased)]
    assert rows[1] == pytest.approx(rows[0] * 18 / 16)

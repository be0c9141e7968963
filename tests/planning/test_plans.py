"""Whole plans: memory, limits, layouts and notes."""

from __future__ import annotations

import time

import pytest
from planned_runs import cached, clustered, freebase, plan_of, seconds, stored
from training_runs import config_of, tiny_store

from kge_torchrec import train
from kge_torchrec.distributed.processes import ALONE
from kge_torchrec.embeddings.torchrec.planner import GIB, SHARDINGS
from kge_torchrec.planning import step
from kge_torchrec.planning.plan import CPU_FREED, CPU_PROCESS, Plan
from kge_torchrec.planning.report import all_layouts, percentages, report, side_by_side
from kge_torchrec.training.assembly import build_batches

ALL = {"negatives__regime": "1vsall", "loss__name": "bce", "train__batch_size": 64,
       "model__dim": 16}  # fmt: skip
ADAM = {"model__dim": 64, "train__optimizer": "adam"}
# 10M relations with their inverses: values, gradients and two states of Adam.
DENSE, RELATIONS = 4 * 2 * 10**6 * 64, {**ADAM, "relations": 10**6}
FSDP, HYBRID = {"dense__wrapper": "fsdp"}, {"dense__wrapper": "hybrid"}
OFFLOAD = {**FSDP, "dense__options__cpu_offload": True}
RESCAL = 4 * 7 * 2 * 64 * 64  # bytes of the matrices of 7 relations and their inverses
FREEBASE = {"entities": 86_000_000, "relations": 14_824, "triples": 338_586_276}
BIG = {**FREEBASE, "model__dim": 400, "train__optimizer": "adam"}
PROCESS = CPU_PROCESS + CPU_FREED  # of a table that is not tiny


@pytest.mark.parametrize(
    ("devices", "keys", "part", "device", "main"),
    [
        ("4xH100", ADAM, "weights", 4 * 250 * 64, 0),
        ("4xH100", ADAM, "optimizer state", 8 * 250 * 64, 0),
        ("4xH100", {**ADAM, "train__averaging": "ema"}, "average", 4 * 250 * 64, 0),
        ("4xCPU", {**ADAM, "train__averaging": "ema"}, "average", 0, 4 * 250 * 64),
        ("4xCPU", {**ALL, "model__biases": True, "model__dim": 18}, "weights", 0, 4 * 250 * 18),
        ("8xH100", {**BIG, "hosts": 2}, "weights", 4 * 10_750_000 * 400, 0),
        ("4xH100", {**BIG, **cached(0.1)}, "weights", 0, 4 * 21_500_000 * 400),
        ("8xH100", {**RELATIONS, "hosts": 2}, "dense parameters", 4 * DENSE, 0),
        ("8xH100", {**RELATIONS, **FSDP}, "dense parameters", 4 * DENSE // 8 + DENSE, 0),
        ("8xH100", {**RELATIONS, **HYBRID, "hosts": 2}, "dense parameters",
         4 * DENSE // 4 + DENSE, 0),
        ("8xH100", {**RELATIONS, **OFFLOAD}, "dense parameters", DENSE, 4 * DENSE // 8),
        # Against all entities: values, gradients and those on their way are whole; of what is
        # split, Adagrad has one state.
        ("4xH100", {**ALL, "model__scorer": "rescal", "model__dim": 64, **FSDP},
         "dense parameters", RESCAL * 3 // 4 + 3 * RESCAL, 0),
        ("4xH100", {**ALL, "train__accumulation": 4}, "gradients", 4 * 250 * 16, 0),
        # Triples from which a GPU makes batches, only where they leave memory.
        ("4xH200", BIG, "triples", 12 * 338_586_276, 12 * 338_586_276),
        ("4xH200", {**BIG, "train__batches": "cpu"}, "triples", 0, 12 * 338_586_276),
        ("3xH200", BIG, "triples", 0, 12 * 338_586_276),
        ("3xH200", {**BIG, "train__batches": "device"}, "triples", 12 * 338_586_276,
         12 * 338_586_276),
        ("1xCPU", {"entities": 10**6, "negatives__sampling": "degree"}, "process", 0,
         PROCESS + 8 * 10**6),
        ("1xCPU", {"entities": 10**6, "negatives__sampling": "degree",
                   "negatives__regime": "kvssample"}, "process", 0,
         PROCESS + 8 * 10**6),
    ],
)  # fmt: skip
def test_bytes_of_a_part(devices, keys, part, device, main):
    size = plan_of(devices, **keys).memory[part]
    assert (size.device, size.main) == (device, main)


def test_a_run_needs_little_more_than_its_table_and_triples():
    plan = freebase("1xH200", model__dim=100)
    known = 86_000_000 * 100 * 12 + 12 * plan.sizes.triples
    assert plan.fits and known < plan.total.device < 1.02 * known


def test_a_billion_rows_over_64_devices_in_seconds():
    started = time.perf_counter()
    keys = {"model__dim": 128, "train__optimizer": "adam"}
    plan = plan_of("64xH100", 10**9, 1000, 10**9, 0.7, 8, **keys)
    assert plan.fits and plan.rows == 10**9 // 64
    assert time.perf_counter() - started < 10


@pytest.mark.parametrize(
    ("layout", "rows", "columns"),
    [("row_wise", 251, 64), ("column_wise", 1001, 16), ("table_wise", 1001, 64),
     ("data_parallel", 1001, 64)],
)  # fmt: skip
def test_a_rank_holds_its_part_of_every_layout(layout, rows, columns):
    plan = plan_of("4xH100", 1001, model__dim=64, train__optimizer="adam", layout=layout)
    assert (plan.rows, plan.columns) == (rows, columns)
    assert plan.memory["weights"].device == 4 * rows * columns
    assert all(x > 0 for x in seconds(plan).values())


def test_columns_are_split_over_no_more_than_all_ranks():
    plan = plan_of("8xH100", 100, model__dim=400, layout="column_wise")
    assert plan.columns == 80 and step.Step(plan).load == 8 / 5


def test_layouts_side_by_side_are_sorted_and_include_what_does_not_fit():
    plans = all_layouts(freebase("8xH100", model__dim=400))
    order = [(not plan.fits, step.Step(plan).seconds) for plan in plans]
    assert order == sorted(order) and {plan.layout for plan in plans} == {*SHARDINGS}
    assert side_by_side(plans).splitlines()[-1].startswith("Training takes row_wise: ")
    with_cache = all_layouts(plan_of("2xH100", **cached(0.1)))
    assert all(next(iter(plan.forms)).cache_ratio for plan in with_cache)
    assert {plan.layout for plan in with_cache} == {*SHARDINGS[:3]}
    for keys in (ALL, {"entities__placement": "disk"}):
        assert [plan.layout for plan in all_layouts(plan_of("4xH100", **keys))] == ["row_wise"]


def test_main_memory_of_a_host_is_shared_and_mapped_triples_need_none():
    plan = plan_of("4xCPU", 10**6, triples=10**7, model__dim=64, hosts=2)
    (host,) = plan.limits
    assert (host.place, host.capacity) == ("main memory of a host", 64 * GIB)
    assert host.need == 2 * (plan.total.main - plan.memory["triples"].main)
    tight = freebase("4xH100", model__dim=400, **cached(0.1))
    assert tight.fits
    tight = tight.changed({"cluster": clustered("4xH100", host_gib=300)})
    assert tight.worst.place == "main memory of a host" and not tight.fits


def test_a_tiny_run_needs_its_process():
    """The C library keeps no more blocks free than a run has had."""
    tiny = plan_of("1xCPU", train__batch_size=32, negatives__count=6, model__dim=8)
    assert CPU_PROCESS < tiny.total.main < CPU_PROCESS + (2 << 20)


@pytest.fixture(scope="module")
def data_store(tmp_path_factory):
    return tiny_store(tmp_path_factory.mktemp("data") / "store", entities=1000, train=5000)


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
    ("devices", "keys", "triples", "sides"),
    [
        ("1xCPU", {}, True, ("tail", "head")),
        ("1xH100", {}, True, ()),
        ("1xH100", {"filtered": True, "sides": "tail", "sampling": "degree"}, True, ("tail",)),
        ("1xCPU", {"regime": "kvsall"}, False, ("tail", "head")),
        ("1xH100", {"regime": "kvssample", "sides": "head"}, False, ("head",)),
        ("1xH100", {"regime": "allvsall", "sides": "tail"}, False, ("tail",)),
    ],
)
def test_mapped_files_are_counted(data_store, devices, keys, triples, sides):
    """On a CPU those of the final ranking too; a side is planned with at most T queries."""
    keys = {f"negatives__{name}": value for name, value in keys.items()}
    keys["model__reciprocal"] = "negatives__sides" not in keys
    if keys.get("negatives__regime") == "allvsall":
        keys["loss__name"] = "bce"
    train = data_store.train
    size = train.nbytes * triples
    for side in sides:
        index = data_store.side_index("train", side)
        size += sum(part.nbytes for part in index) + 16 * (len(train) - len(index.queries))
    planned = plan_of(devices, data_store.num_entities, 3, len(train), **keys)
    assert planned.memory["triples"].main == pytest.approx(size, abs=16)


def test_a_plan_says_how_much_memory_a_checkpoint_takes():
    size = f"up to {3 * 4 * 64 * 86_000_000 / 2**30:.2f} GiB of a host's memory"
    assert size in report(freebase("2xCPU", model__dim=64))
    for keys in ({"checkpoint__options": {"background": False}}, {"entities__placement": "disk"}):
        assert "of a host's memory" not in report(freebase("2xCPU", model__dim=64, **keys))


def test_a_checkpoint_has_the_planned_size_on_disk(tmp_path):
    keys = {"model__dim": 64, "train__optimizer": "adam", "train__epochs": 1}
    store = tiny_store(tmp_path / "store", entities=4000)
    run = train(config_of(store.path, tmp_path / "run", **keys))
    (size,) = [file.stat().st_size for file in run.path.rglob("*.safetensors")]
    planned = stored(run.config)
    assert 0 < size - planned.checkpoint_bytes < 8192  # the file's header
    ema = stored(config_of(store.path, None, train__averaging="ema", **keys))
    numbers = planned.sizes.rows * 64 + planned.costs.dense_numbers
    assert ema.checkpoint_bytes - planned.checkpoint_bytes == 4 * numbers


def test_a_larger_cache_needs_more_memory_and_less_time():
    small, large = (freebase("4xH100", model__dim=400, **cached(r)) for r in (0.05, 0.3))
    assert 0.05 * 21_500_000 * 1600 < small.memory["cache"].device < large.memory["cache"].device
    assert seconds(small)["lookup"] > seconds(large)["lookup"]


def test_micro_batches_need_less_memory_and_more_lookups():
    keys = {"train__batch_size": 4096, "negatives__count": 512}
    whole, cut = (
        plan_of("2xCPU", 10**6, triples=10**6, train__accumulation=n, **keys) for n in (1, 4)
    )
    assert cut.memory["activations"].main < 0.4 * whole.memory["activations"].main
    lookups = [p.micro_batches * p.batch.lookups for p in (whole, cut)]
    assert lookups[1] == pytest.approx(lookups[0] + 3 * 2 * 512)
    assert step.Step(cut).sent["dense"] == step.Step(whole).sent["dense"]


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
    made = step.Step(plan)
    assert made.bound == bound and f"  {word}: " in text
    # The host, the loader and the GPU work at the same time.
    host, loader, device, links = (
        sum(made.parts.get(part, 0.0) for part in parts) for parts in step.RESOURCES.values()
    )
    assert host + loader + device + links == pytest.approx(sum(made.parts.values()))
    assert made.seconds == pytest.approx(max(host, loader, device + links))
    assert "  at the same time: " in text and "  links are assumed to have " in text


def test_shares_of_a_step_add_up_to_a_hundred_percent_and_epochs_to_all():
    """On a GPU some parts hide behind others; their shares were once counted too."""
    for devices, keys in (("1xH200", {}), ("4xCPU", {"model__dim": 8})):
        plan = freebase(devices, train__epochs=30, **{"model__dim": 100, **keys})
        text, made = report(plan), step.Step(plan)
        lines = [line for line in text.splitlines() if line.endswith("%")]
        assert sum(int(line.split()[-1][:-1]) for line in lines) == 100
        assert ", all 30 " in text
        steps = plan.sizes.triples / plan.batch_size
        assert made.epoch_seconds == pytest.approx(made.seconds * steps)
    assert percentages({"a": 1, "b": 1, "c": 1}) == {"a": 34, "b": 33, "c": 33}


def test_a_cuda_graph_starts_few_operations_and_keeps_its_memory():
    def parts(devices: str, pipeline: str) -> Plan:
        keys = {"model__dim": 100, "train__batch_size": 1024, "train__pipeline": pipeline}
        return freebase(devices, **keys)

    plain, graph = (parts("1xH200", name) for name in ("loop", "graph"))
    started = step.OUTSIDE_GRAPH * graph.cluster.device.launch + step.PYTHON_OUTSIDE
    assert seconds(graph)["starting operations"] == pytest.approx(started)
    assert step.Step(plain).seconds > 1.8 * step.Step(graph).seconds
    memory = [plan.memory["activations"].device for plan in (plain, graph)]
    assert memory[1] == 2 * memory[0]
    # Every place is looked up.
    assert seconds(graph)["lookup"] > seconds(plain)["lookup"]
    plain, graph = (parts("2xH200", name) for name in ("loop", "graph"))
    assert seconds(graph) == seconds(plain) and graph.memory == plain.memory


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
    queries = against_all(loss__regularizers={"l2": 0.1}).fetched
    assert against_all(loss__regularizers={"dura": 0.1}).fetched == 2 * queries
    assert against_all(loss__relation_weight=0.1).fetched == 2 * queries

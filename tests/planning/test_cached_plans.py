"""Plans of rows in main memory that GPUs cache: by the config as by the kernel's name."""

from __future__ import annotations

import pytest
from planned_runs import freebase, planned, workload
from worlds_table import TableModel

from kge_torchrec.cli import main
from kge_torchrec.embeddings.optimizers import TableOptimizer
from kge_torchrec.embeddings.torchrec import _plan_options
from kge_torchrec.embeddings.torchrec.planner import GIB, Ranks, describe_plan, plan_row_wise
from kge_torchrec.embeddings.torchrec.settings import fused_params
from kge_torchrec.embeddings.torchrec.sharder import EntitySharder
from kge_torchrec.planning.advice import advise
from kge_torchrec.planning.devices import parse_devices
from kge_torchrec.planning.layout import Layout
from kge_torchrec.planning.plan import alternatives, plan_training

KEY = "entities.placement managed_caching"
KERNEL = {"kernel": "fused_uvm_caching", "cache_ratio": 0.1}


def placed(ratio: float = 0.1) -> dict:
    options = {"cache_ratio": ratio}
    return {"entities__placement": "managed_caching", "entities__placement_options": options}


def test_the_config_means_the_kernel():
    one = planned(freebase(model__dim=400, **placed()), "4xH100")
    other = planned(freebase(model__dim=400), "4xH100", **KERNEL)
    assert one.fits and not planned(freebase(model__dim=400), "4xH100").fits
    assert one.memory == other.memory and one.times == other.times
    assert str(one.layout) == str(other.layout) == "row_wise, fused_uvm_caching, cache 0.1, fp32"


def test_a_larger_cache_needs_more_memory_and_less_time():
    small, large = (planned(freebase(model__dim=400, **placed(r)), "4xH100") for r in (0.05, 0.3))
    assert small.memory[0]["cache"].device < large.memory[0]["cache"].device
    of_rows = {plan.memory[0]["weights"].main for plan in (small, large)}
    assert of_rows == {4 * 400 * 21_500_000}
    assert small.times["lookup"] > large.times["lookup"]


@pytest.mark.parametrize(
    ("keys", "choice", "said"),
    [
        (placed(), {}, ["no GPU has run"]),
        ({}, KERNEL, ["training has this kernel as entities.placement managed_caching, with "
                      "entities.placement_options.cache_ratio 0.1", "no GPU has run"]),
        ({}, {"kernel": "fused_uvm"}, ["fused_uvm is planned only: training has rows in main "]),
        ({}, {"dtype": "fp16"}, ["training has only fp32 tables so far"]),
        ({}, {}, []),
    ],
)  # fmt: skip
def test_notes_name_what_training_has(keys, choice, said):
    notes = planned(workload(model__dim=64, **keys), "1xH100", **choice).notes
    assert [note[: len(start)] for note, start in zip(notes, said, strict=True)] == said


def test_advice_is_a_key_that_goes_with_the_run():
    def advised(**keys) -> list[str]:
        work = workload(10**8, model__dim=128, train__optimizer="sgd", **keys)
        plan = planned(work, "1xA100-40GB")
        return [item.change for item in advise(plan) if item.change.startswith(KEY)]

    (change,) = advised()
    assert "with a cache_ratio up to 0." in change
    assert advised(entities__engine="handrolled") == []


@pytest.mark.slow
def test_the_memory_of_gpus_is_advised_where_main_memory_is_too_small():
    """And other advice begins with the place that the config has."""
    work = freebase(model__dim=400, train__optimizer="sgd", **placed())
    plan = plan_training(work, parse_devices("4xH200", host_gib=100), Layout())
    assert [limit.place for limit in plan.overruns] == ["main memory of host 0"]
    (memory,) = [item for item in advise(plan) if item.change == "entities.placement memory"]
    assert memory.fits


def test_all_layouts_have_each_place_once():
    work = workload(10**6, model__dim=64, **placed(0.3))
    plan = planned(work, "2xH100")
    layouts = [str(p.layout) for p in alternatives(work, plan.cluster, plan.layout)]
    assert len(set(layouts)) == len(layouts)
    assert {"row_wise, fused, fp32", "row_wise, fused_uvm_caching, cache 0.3, fp32"} < {*layouts}


def test_the_kernel_is_said_once(capsys):
    arguments = ["plan", "--devices", "1xH100", "--entities", "1M", "--relations", "5",
                 "--triples", "1M", "--entities.placement", "managed_caching"]  # fmt: skip
    assert main([*arguments, "--kernel", "fused_uvm"]) == 1
    assert "--kernel: entities.placement managed_caching says where" in capsys.readouterr().err
    assert main(arguments) == 0
    assert "fused_uvm_caching, cache 0.2" in capsys.readouterr().out
    assert main([*arguments[:2], "2xCPU", *arguments[3:]]) == 1
    assert "a GPU caches the rows, and here is a CPU" in capsys.readouterr().err


def test_training_plans_the_cache_of_its_config():
    sharder = EntitySharder(fused_params=fused_params(TableOptimizer("adam")))
    ranks = Ranks(4, 4, "cuda", 80 * GIB, 1000 * GIB)
    options = _plan_options(freebase(**placed()).config)
    plan = plan_row_wise(TableModel(86_000_001, 400), sharder, ranks, **options)
    assert describe_plan(plan, sharder).splitlines()[:2] == [
        "table.entity: row_wise, kernel fused_uvm_caching, 4 shards",
        "  ranks 0-2: 21,500,001 rows x 400, 96.11 GiB each in main memory, 0.1 of the rows "
        "cached on the GPU",
    ]
    assert _plan_options(freebase().config) == {"averages": 0}

"""Advice on faster steps: given where launches dominate, and true when planned again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planned_runs import freebase, planned, workload

from kge_torchrec.planning.advice import MOST_FIXED, TOO_FEW_STEPS, TOO_LARGE, faster
from kge_torchrec.planning.layout import Layout
from kge_torchrec.planning.plan import plan_training
from kge_torchrec.planning.report import plan_content, report


def billion(**keys):
    """1B entities, of which 64 devices train 5B triples."""
    return workload(10**9, 1000, 5 * 10**9, 0.7, model__dim=128, **keys)


CASES = {  # work, devices, hosts, times faster at least
    "1B x 128 on 64": (billion, "64xH100-80GB", 8, 100),
    "86M x 100 on one": (lambda **keys: freebase(model__dim=100, **keys), "1xH200", 1, 20),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.first_tier("86M x 100 on one")
def test_batch_size_above_which_kernel_launches_do_not_dominate(case):
    work, devices, hosts, times = CASES[case]
    now = planned(work(train__batch_size=1024), devices, hosts)
    results = faster(now)
    assert results.limit == ""
    size = results.settings["train.batch_size"]
    of_rank, rest = divmod(size, now.cluster.world_size)
    assert rest == 0 and of_rank & (of_rank - 1) == 0

    again = planned(work(train__batch_size=size), devices, hosts)
    assert again.fits
    assert again.fixed_share < MOST_FIXED
    assert again.examples_per_second > times * now.examples_per_second
    assert faster(again) is None
    assert planned(work(train__batch_size=size // 2), devices, hosts).fixed_share >= MOST_FIXED

    said = report(now, (), results)
    assert f"+ --train.batch_size {size}\n" in said
    assert f"{again.examples_per_second:,.0f} triples/s instead of" in said
    assert f"{now.examples_per_second:,.0f}: steps of" in said
    assert "nothing of it is measured" in said
    figures = plan_content(now, (), results)["faster"]
    assert figures["then"]["step_seconds"] == pytest.approx(again.step_seconds)
    assert figures["then"]["fixed_share"] == pytest.approx(again.fixed_share)
    assert figures["now"]["batch_size_of_rank"] == 1024 / now.cluster.world_size


def test_no_advice_where_compute_dominates():
    plan = planned(freebase(train__batch_size=1 << 18), "1xCPU")
    assert plan.fixed_share < MOST_FIXED
    assert faster(plan) is None
    assert "faster" not in report(plan, (), faster(plan))
    assert plan_content(plan)["faster"] is None


def test_memory_limits_the_batch():
    keys = {"negatives__chunk_size": 64, "negatives__count": 4096, "model__dim": 4}
    keys["train__batches"] = "device"  # making them elsewhere would soon take longest
    plan = planned(workload(10**6, triples=10**9, train__batch_size=64, **keys), "1xH100")
    gib = 1 << 30
    small = replace(plan.cluster.device, memory=plan.total(0).device * 100 // 95 + gib // 8)
    plan = plan_training(plan.workload, replace(plan.cluster, device=small), Layout())
    results = faster(plan)
    assert results.limit == TOO_LARGE
    assert results.then.fits
    assert results.then.fixed_share >= MOST_FIXED
    size = results.settings["train.batch_size"]
    assert size > 64
    larger = plan.workload.with_settings({"train.batch_size": 2 * size})
    assert not plan_training(larger, plan.cluster, Layout()).fits


def test_small_graph_keeps_enough_steps():
    plan = planned(workload(14_541, 237, 272_115, train__batch_size=1024), "1xH200")
    results = faster(plan)
    assert results.limit == TOO_FEW_STEPS
    assert results.settings == {"train.batch_size": 8192}
    assert results.then.workload.steps_per_epoch >= 32
    assert f"- {TOO_FEW_STEPS}" in report(plan, (), results)


@pytest.mark.slow
def test_the_wrapper_where_dense_gradients_matter():
    many = workload(10**9, 10**6, 5 * 10**9, model__dim=128, train__batch_size=1024)
    plan = planned(many, "64xH100-80GB", 8)
    results = faster(plan)
    assert results.settings["dense.wrapper"] == "hybrid"  # sends less to other hosts than ddp, fsdp
    again = planned(many.with_settings(results.settings), "64xH100-80GB", 8)
    assert again.step_seconds == results.then.step_seconds
    same_batch = {"train.batch_size": again.workload.batch_size}
    before = planned(many.with_settings(same_batch), "64xH100-80GB", 8)
    assert again.step_seconds < 0.95 * before.step_seconds
    few = faster(planned(billion(train__batch_size=1024), "64xH100-80GB", 8))
    assert "dense.wrapper" not in few.settings


def test_sharded_parameters_start_more_collectives():
    times = {}
    for name in ("ddp", "fsdp", "hybrid"):  # an all-reduce; 2 gathers, a scatter; and a sum
        plan = planned(
            workload(model__dim=16).with_settings({"dense.wrapper": name}), "4xA100-40GB", 2
        )
        times[name] = plan.times["starting collectives"]
    one = times["hybrid"] - times["fsdp"]
    assert one == pytest.approx(6e-5 + 2 * (1.2e-6 + 8.5e-6))  # one hop in a host, one between
    assert times["fsdp"] - times["ddp"] == pytest.approx(2 * one)
    assert times["ddp"] - one == pytest.approx(5 * (6e-5 + 2 * 1e-6))  # three messages each


def test_fewer_micro_batches_are_advised():
    keys = {"train__accumulation": 4, "train__batch_size": 1024}
    plan = planned(freebase(model__dim=100, **keys), "1xH200")
    assert faster(plan).settings["train.accumulation"] == 1


def test_all_entities_as_candidates():
    keys = {"negatives__regime": "1vsall", "model__dim": 64, "train__batch_size": 16}
    plan = planned(workload(14_541, 237, 272_115, **keys), "1xH200")
    results = faster(plan)
    assert results.settings.keys() == {"train.batch_size"}
    assert results.then.examples_per_second > plan.examples_per_second


@pytest.mark.parametrize(
    "key", ["dense__options__cpu_offload", "dense__options__replicas", "dense__options__sharding"]
)
@pytest.mark.first_tier("dense__options__replicas")
def test_a_wrapper_that_the_config_does_not_allow_is_not_advised(key):
    """Settings of hybrid that ddp refuses."""
    value = {
        "dense__options__cpu_offload": True,
        "dense__options__replicas": 2,
        "dense__options__sharding": "grad_op",
    }[key]
    work = workload(1000, 10**5, 10**6, dense__wrapper="hybrid", **{key: value})
    plan = planned(work, "8xA100-40GB", 2)
    assert plan.times["dense gradients"] > 0
    results = faster(plan)
    assert results is None or results.settings.get("dense.wrapper") != "ddp"

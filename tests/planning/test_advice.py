"""Advice is computed: what is advised fits, and one step less does not."""

from __future__ import annotations

import re

import pytest
from planned_runs import cached, freebase, planned, workload

from kge_torchrec.planning.advice import Advice, advise
from kge_torchrec.planning.devices import Cluster, parse_devices
from kge_torchrec.planning.layout import Layout
from kge_torchrec.planning.plan import TrainingPlan, plan_setup, plan_training

CACHED = "entities.placement managed_caching"


@pytest.fixture
def no_other_devices(monkeypatch):
    """For tests of other advice: hundreds of clusters take seconds to plan."""
    one = Advice("more devices", False, "")
    monkeypatch.setattr("kge_torchrec.planning.advice._devices", lambda *_: one)


def find_advice(items: list[Advice], start: str):
    (one,) = [item for item in items if item.change.startswith(start)]
    return one


def with_cache(plan: TrainingPlan, ratio: float) -> TrainingPlan:
    where = {"entities.placement_options": {"cache_ratio": ratio}}
    return plan_setup(plan.changed({"entities.placement": "managed_caching", **where}))


def number(text: str, pattern: str) -> int:
    return int(re.search(pattern, text)[1])


def test_freebase_at_400():
    work = freebase(model__dim=400)
    plan = planned(work, "1xH200")
    cluster, advice = plan.cluster, advise(plan)

    more = next(item for item in advice if item.change.endswith(("host", "hosts")))
    count = number(more.change, r"(\d+) x")
    hosts = 1 if "one host" in more.change else number(more.change, r"on (\d+) hosts")
    assert plan_training(work, Cluster(cluster.device, count, hosts), Layout()).fits
    smaller = next(n for n in range(count - 1, 0, -1) if n % -(-n // 8) == 0)
    hosts = -(-smaller // 8)
    assert not plan_training(work, Cluster(cluster.device, smaller, hosts), Layout()).fits

    ratio = float(re.search(r"up to ([\d.]+)", find_advice(advice, CACHED).change)[1])
    assert with_cache(plan, ratio).fits


def test_cache_is_as_large_as_memory_allows():
    plan = planned(workload(10**8, model__dim=128, train__optimizer="sgd"), "1xA100-40GB")
    ratio = float(re.search(r"up to ([\d.]+)", find_advice(advise(plan), CACHED).change)[1])
    assert 0.3 < ratio < 0.9
    assert with_cache(plan, ratio).fits
    assert not with_cache(plan, ratio + 0.01).fits


def test_one_sufficient_change_is_advised():
    plan = planned(workload(10**8, model__dim=40, train__optimizer="adam"), "1xA100-40GB")
    advice = advise(plan)
    by_row = find_advice(advice, "train.optimizer rowwise_adam")
    assert by_row.fits
    again = plan.workload.with_settings({"train.optimizer": "rowwise_adam"})
    assert planned(again, "1xA100-40GB").fits


def test_hosts_help_cpus():
    plan = planned(workload(10**9, model__dim=32, train__optimizer="adam"), "2xCPU")
    advice = next(item for item in advise(plan) if "xCPU" in item.change.replace(" ", ""))
    hosts = number(advice.change, r"on (\d+) hosts")
    device = plan.cluster.device
    assert plan_training(plan.workload, Cluster(device, 2 * hosts, hosts), Layout()).fits
    fewer = Cluster(device, 2 * (hosts - 1), hosts - 1)
    assert not plan_training(plan.workload, fewer, Layout()).fits


def test_dense_parameters_without_room_for_the_table(no_other_devices):
    work = workload(1000, relations=12 * 10**6, model__dim=64, train__optimizer="adam")
    plan = planned(work, "4xL4")
    assert not plan.fits
    sharded = find_advice(advise(plan), "dense.wrapper fsdp")
    assert sharded.fits == planned(work.with_settings({"dense.wrapper": "fsdp"}), "4xL4").fits


def test_uvm_is_not_advised_where_main_memory_is_too_small():
    plan = planned(freebase(model__dim=400), "1xL4")  # hosts of 192 GiB
    assert not find_advice(advise(plan), f"{CACHED} with a cache_ratio of 0.01").fits


def test_a_cache_is_not_advised_to_the_engine_that_has_none():
    work = workload(10**8, model__dim=128, train__optimizer="sgd", entities__engine="handrolled")
    advice = advise(planned(work, "1xA100-40GB"))
    assert not any(item.change.startswith(CACHED) for item in advice)


def test_the_memory_of_gpus_is_advised_where_main_memory_is_too_small():
    """And other advice begins with the place that the config has."""
    work = freebase(model__dim=400, train__optimizer="sgd", **cached(0.1))
    plan = plan_training(work, parse_devices("4xH200", host_gib=100), Layout())
    assert [limit.place for limit in plan.overruns] == ["main memory of host 0"]
    assert find_advice(advise(plan), "entities.placement memory").fits

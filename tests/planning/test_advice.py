"""Advice is computed: what is advised fits, and less does not."""

from __future__ import annotations

import re

import pytest
from planned_runs import cached, clustered, freebase, plan_of, stored
from training_runs import config_of

from kge_torchrec.config.entities import PlacementOptions
from kge_torchrec.data.prepare import prepare
from kge_torchrec.planning.advice import Advice, advise
from kge_torchrec.planning.devices import Cluster
from kge_torchrec.planning.plan import Plan

CACHED, DISK = "entities.placement managed_caching", "entities.placement disk"
OPTIONS = "entities.placement_options"


def advised(plan: Plan, words: str) -> Advice:
    assert not plan.fits
    (one,) = [item for item in advise(plan) if words in item.change]  # nothing contradicts it
    return one


def on(plan: Plan, count: int, hosts: int) -> Plan:
    return plan.changed({"cluster": Cluster(plan.cluster.device, count, hosts)})


def placed(plan: Plan, where: str, **options) -> Plan:
    options = PlacementOptions(**options)
    keys = {"entities.placement_options": options, "entities.placement": where}
    return plan.changed(keys)


def test_the_smallest_number_of_devices():
    plan = freebase("1xH200", model__dim=400)
    assert advised(plan, " x H200").change == "3 x H200-141GB on one host,"
    assert on(plan, 3, 1).fits and not on(plan, 2, 1).fits
    fitting = [item.fits for item in advise(plan)]
    assert fitting == sorted(fitting, reverse=True)


def test_hosts_help_cpus():
    plan = plan_of("2xCPU", 10**9, model__dim=32, train__optimizer="adam")
    words = advised(plan, " x CPU").change
    hosts = int(re.search(r"on (\d+) hosts", words)[1])
    assert on(plan, 2 * hosts, hosts).fits and not on(plan, 2 * hosts - 2, hosts - 1).fits


@pytest.mark.parametrize(("dim", "ratio", "too_large"), [(128, 0.5, None), (1024, 0.05, 0.1)])
def test_the_first_cache_that_fits_is_advised(dim, ratio, too_large):
    plan = plan_of("1xA100-40GB", 10**8, model__dim=dim, train__optimizer="sgd")
    assert advised(plan, f"{CACHED}, {OPTIONS}.cache_ratio {ratio}").fits
    assert placed(plan, "managed_caching", cache_ratio=ratio).fits
    assert not too_large or not placed(plan, "managed_caching", cache_ratio=too_large).fits


def test_more_devices_are_not_advised_to_a_run_on_one():
    plan = freebase("1xH200", model__dim=400, dense__wrapper="none")
    assert not any("H200" in item.change for item in advise(plan))


def test_a_cache_is_not_advised_where_it_does_not_go():
    small = freebase("1xL4", model__dim=400)  # hosts of 192 GiB
    assert not advised(small, f"{CACHED}, {OPTIONS}.cache_ratio 0.01").fits
    keys = {"model__dim": 128, "train__optimizer": "sgd", "entities__engine": "handrolled"}
    plan = plan_of("1xA100-40GB", 10**8, **keys)
    assert not any(CACHED in item.change for item in advise(plan))


def test_the_memory_of_gpus_is_advised_where_main_memory_is_too_small():
    plan = freebase("4xH200", model__dim=400, train__optimizer="sgd", **cached(0.1))
    plan = plan.changed({"cluster": clustered("4xH200", host_gib=100)})
    assert plan.worst.place == "main memory of a host"
    assert advised(plan, "entities.placement memory").fits


@pytest.mark.parametrize(
    ("devices", "keys", "change", "value"),
    [
        ("1xA100-40GB", {"entities": 10**8, "model__dim": 40}, "train.optimizer", "rowwise_adam"),
        ("4xL4", {"relations": 12 * 10**6, "model__dim": 64}, "dense.wrapper", "fsdp"),
    ],
)
def test_one_change_is_said_to_be_enough_if_it_is(devices, keys, change, value):
    plan = plan_of(devices, train__optimizer="adam", **keys)
    assert advised(plan, f"{change} {value}").fits == plan.changed({change: value}).fits


@pytest.mark.parametrize(("regime", "fits"), [("sampled", [True]), ("1vsall", [])])
def test_the_disk_is_advised_where_it_goes_with_the_run(regime, fits):
    keys = {"loss__name": "softmax", "negatives__regime": regime}
    plan = plan_of("1xCPU-16GB", 60_000_000, model__dim=64, **keys)
    assert [item.fits for item in advise(plan) if item.change.startswith(DISK)] == fits


def test_the_disk_is_not_advised_to_entities_with_features(tmp_path):
    (tmp_path / "f.tsv").write_text("e1\tred\n")
    triples = {"train": [("e1", "r", "e2"), ("e2", "r", "e3")]}
    store = prepare(triples, tmp_path / "s", {"features": tmp_path / "f.tsv"}, log_notes=False)
    plan = stored(config_of(store.path, None, model__dim=64), "1xCPU-0.1GB")
    assert not plan.fits and not any(x.change.startswith(DISK) for x in advise(plan))


PASSES = {"entities__placement": "disk", "entities__placement_options": {"passes": 2}}


@pytest.mark.parametrize(
    ("devices", "counts", "keys", "cut", "too_large"),
    [
        ("1xCPU-16GB", (60_000_000,), {"model__dim": 64}, (16, 4), None),
        ("2xCPU-8GB", (30_000_000, 1000, 100_000_000), {"model__dim": 402}, (128, 4), (64, 4)),
        ("1xCPU-8GB", (60_000_000,), {"model__dim": 128, **PASSES}, (64, 4), (32, 4)),
    ],
)
def test_the_fewest_parts_that_fit_are_advised(devices, counts, keys, cut, too_large):
    plan = plan_of(devices, *counts, **keys)
    advice = advised(plan, DISK)
    words = f"{DISK}, {OPTIONS}.parts {cut[0]}, {OPTIONS}.buffer {cut[1]}"
    assert advice.fits and advice.change.startswith(words)
    for parts, fits in ((cut, True), (too_large, False)):
        if parts:
            passes = plan.config.entities.placement_options.passes
            chosen = placed(plan, "disk", parts=parts[0], buffer=parts[1], passes=passes)
            assert chosen.fits == fits

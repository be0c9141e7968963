"""Advice is computed: what is advised fits, and one step less does not."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from planned_runs import cached, clustered, freebase, plan_of, stored
from training_runs import config_of

from kge_torchrec.config.entities import PlacementOptions
from kge_torchrec.data.prepare import prepare
from kge_torchrec.planning.advice import Advice, advise
from kge_torchrec.planning.devices import Cluster
from kge_torchrec.planning.plan import Plan

CACHED, DISK = "entities.placement managed_caching", "entities.placement disk"


def find(items: list[Advice], start: str) -> Advice:
    (one,) = [item for item in items if item.change.startswith(start)]
    return one


def number(text: str, pattern: str) -> int:
    return int(re.search(pattern, text)[1])


def with_cache(plan: Plan, ratio: float) -> Plan:
    where = {"entities.placement_options": PlacementOptions(cache_ratio=ratio)}
    return plan.changed({"entities.placement": "managed_caching", **where})


def on(plan: Plan, count: int, hosts: int) -> Plan:
    return plan.changed({}, cluster=Cluster(plan.cluster.device, count, hosts))


def test_freebase_at_400():
    plan = freebase("1xH200", model__dim=400)
    advice = advise(plan)
    more = next(item for item in advice if "the smallest number" in item.change)
    assert more.fits and more.change.startswith("3 x H200-141GB on one host")
    assert on(plan, 3, 1).fits and not on(plan, 2, 1).fits
    assert with_cache(
        plan, float(re.search(r"up to ([\d.]+)", find(advice, CACHED).change)[1])
    ).fits
    assert [item.fits for item in advice] == sorted((x.fits for x in advice), reverse=True)


def test_cache_is_as_large_as_memory_allows():
    plan = plan_of("1xA100-40GB", 10**8, model__dim=128, train__optimizer="sgd")
    ratio = float(re.search(r"up to ([\d.]+)", find(advise(plan), CACHED).change)[1])
    assert 0.3 < ratio < 0.9
    assert with_cache(plan, ratio).fits and not with_cache(plan, ratio + 0.01).fits


def test_one_sufficient_change_is_advised():
    plan = plan_of("1xA100-40GB", 10**8, model__dim=40, train__optimizer="adam")
    assert find(advise(plan), "train.optimizer rowwise_adam").fits
    assert plan.changed({"train.optimizer": "rowwise_adam"}).fits


def test_hosts_help_cpus():
    plan = plan_of("2xCPU", 10**9, model__dim=32, train__optimizer="adam")
    more = next(item for item in advise(plan) if "the smallest number" in item.change)
    assert len(plan.costs._counted) == 2  # of the run's micro-batch, and of the advised number's
    hosts = number(more.change, r"on (\d+) hosts")
    assert on(plan, 2 * hosts, hosts).fits and not on(plan, 2 * hosts - 2, hosts - 1).fits


def test_dense_parameters_without_room_for_the_table():
    plan = plan_of("4xL4", 1000, relations=12 * 10**6, model__dim=64, train__optimizer="adam")
    fits = plan.changed({"dense.wrapper": "fsdp"}).fits
    assert not plan.fits and find(advise(plan), "dense.wrapper fsdp").fits == fits


def test_rows_in_main_memory_are_not_advised_where_they_do_not_go():
    small = freebase("1xL4", model__dim=400)  # hosts of 192 GiB
    assert not find(advise(small), f"{CACHED} with a cache_ratio of 0.01").fits
    keys = {"model__dim": 128, "train__optimizer": "sgd", "entities__engine": "handrolled"}
    advice = advise(plan_of("1xA100-40GB", 10**8, **keys))
    assert not any(item.change.startswith(CACHED) for item in advice)


def test_the_memory_of_gpus_is_advised_where_main_memory_is_too_small():
    plan = freebase("4xH200", model__dim=400, train__optimizer="sgd", **cached(0.1))
    plan = plan.changed({}, cluster=clustered("4xH200", host_gib=100))
    assert [limit.place for limit in plan.overruns] == ["main memory of a host"]
    assert find(advise(plan), "entities.placement memory").fits


def test_devices_that_the_replicas_do_not_divide_are_passed_over():
    keys = {"dense__wrapper": "hybrid", "dense__options__replicas": 2}
    advice = advise(freebase("2xH100", model__dim=400, **keys))
    assert number(next(x.change for x in advice if "number" in x.change), r"(\d+) x") % 2 == 0


@pytest.mark.parametrize(("regime", "advised"), [("sampled", True), ("1vsall", False)])
def test_the_disk_is_advised_where_it_goes_with_the_run(regime, advised):
    keys = {"loss__name": "softmax", "negatives__regime": regime}
    plan = plan_of("1xCPU-16GB", 60_000_000, model__dim=64, **keys)
    disk = [item.fits for item in advise(plan) if item.change.startswith(DISK)]
    assert disk == [True] * advised


def test_the_disk_is_not_advised_to_entities_with_features(tmp_path):
    (tmp_path / "f.tsv").write_text("e1\tred\n")
    triples = {"train": [("e1", "r", "e2"), ("e2", "r", "e3")]}
    store = prepare(triples, tmp_path / "s", {"features": tmp_path / "f.tsv"}, log_notes=False)
    plan = stored(config_of(store.path, None, model__dim=64), "1xCPU-0.1GB")
    assert not plan.fits and not any(x.change.startswith(DISK) for x in advise(plan))


def on_disk(plan: Plan, parts: int, buffer: int) -> Plan:
    options = replace(plan.config.entities.placement_options, parts=parts, buffer=buffer)
    return plan.changed({"entities.placement_options": options, "entities.placement": "disk"})


def advised_disk(plan: Plan) -> Plan:
    """The plan with the disk as it is advised; the advice says that it fits."""
    assert not plan.fits
    disk = find(advise(plan), DISK)
    assert disk.fits
    return on_disk(plan, *(number(disk.change, rf"{key} (\d+)") for key in ("parts", "buffer")))


def test_the_largest_buffer_that_fits_is_advised_with_the_parts_that_read_least():
    plan = advised_disk(plan_of("1xCPU-16GB", 60_000_000, model__dim=64))
    cut = plan.config.entities.placement_options
    assert plan.fits and not on_disk(plan, cut.parts, cut.buffer + 1).fits
    for parts in (8, 32):
        cuts = [on_disk(plan, parts, buffer) for buffer in range(2, parts + 1)]
        largest = [other for other in cuts if other.fits][-1]
        assert largest.disk["epoch_bytes"] > plan.disk["epoch_bytes"]


def test_the_disk_is_not_called_too_small_where_more_parts_fit():
    """With 4 of 16 parts, as by default, it does not fit."""
    plan = plan_of("2xCPU-8GB", 30_000_000, 1000, 100_000_000, model__dim=402)
    assert not on_disk(plan, 16, 4).fits and advised_disk(plan).fits
    disk = [item for item in advise(plan) if item.change.startswith(DISK)]
    assert [item.fits for item in disk] == [True]  # nothing contradicts it


def test_a_run_on_disk_that_does_not_fit_is_advised_other_parts():
    keys = {"entities__placement": "disk", "entities__placement_options": {"passes": 2}}
    plan = advised_disk(plan_of("1xCPU-8GB", 60_000_000, model__dim=128, **keys))
    assert plan.fits and plan.config.entities.placement_options.passes == 2

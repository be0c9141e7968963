"""Plan files: back and forth, the same plan as training's, and refusals that say why."""

from __future__ import annotations

import json
from importlib import metadata

import pytest
from planned_runs import planned, workload
from worlds_table import TableModel

from kge_torchrec import __version__
from kge_torchrec.config import ConfigError
from kge_torchrec.embeddings.optimizers import TableOptimizer
from kge_torchrec.embeddings.torchrec.planned import VERSION, package_versions, read_plan
from kge_torchrec.embeddings.torchrec.planner import Ranks, plan_row_wise
from kge_torchrec.embeddings.torchrec.settings import fused_params
from kge_torchrec.embeddings.torchrec.sharder import EntitySharder
from kge_torchrec.files import write_json
from kge_torchrec.planning.advice import advise
from kge_torchrec.planning.plan_file import plan_content


def of(optimizer: str = "adam", dim: int = 16, **keys):
    """The config of a run."""
    return workload(1001, model__dim=dim, train__optimizer=optimizer, **keys).config


RUN = {
    "config": of(),
    "num_entities": 1001,
    "world_size": 4,
    "local_world_size": 4,
    "device_type": "cpu",
}


def a_plan(**choice):
    work = workload(1001, model__dim=16, train__optimizer="adam")
    return planned(work, "4xCPU", **choice)


@pytest.fixture
def file(tmp_path):
    write_json(tmp_path / "plan.json", plan_content(a_plan()))
    return tmp_path / "plan.json"


def test_training_reads_the_plan_that_it_would_make(file):
    plan = read_plan(file)
    plan.check(**RUN)
    sharder = EntitySharder(fused_params=fused_params(TableOptimizer("adam")))
    own = plan_row_wise(TableModel(1001, 16), sharder, Ranks(4, 4, "cpu"))
    assert plan.sharding_plan().plan["entities"] == own.plan["table"]


@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_plan_file_supports_ranks_without_rows(tmp_path, world_size):
    plan = planned(workload(5, model__dim=16, train__optimizer="adam"), f"{world_size}xCPU")
    write_json(tmp_path / "plan.json", plan_content(plan))
    changed = {"num_entities": 5, "world_size": world_size, "local_world_size": world_size}
    read_plan(tmp_path / "plan.json").check(**{**RUN, **changed})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"world_size": 2, "local_world_size": 2}, "the number of ranks is 4 there and 2 here"),
        ({"local_world_size": 2}, "the number of ranks on a host is 4 there and 2"),
        ({"num_entities": 1002}, "the number of entities is 1001 there and 1002"),
        ({"config": of(dim=8)}, "model.dim is 16 there and 8"),
        ({"config": of("sgd")}, "train.optimizer is 'adam' there and 'sgd'"),
        ({"device_type": "cuda"}, "the kind of device is 'cpu' there and 'cuda'"),
    ],
)
@pytest.mark.first_tier(
    "changes2-the number of entities is 1001 there and 1002",
    "changes4-train.optimizer is 'adam' there and 'sgd'",
    "changes0-the number of ranks is 4 there and 2 here",
)
def test_plan_of_another_run_is_rejected(file, changes, said):
    with pytest.raises(ConfigError, match=said):
        read_plan(file).check(**{**RUN, **changes})


def change(file, *keys, value) -> None:
    content = json.loads(file.read_text())
    at = content
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    file.write_text(json.dumps(content))


def test_plans_know_the_version_of_a_checkout_that_is_not_installed(monkeypatch):
    def version(name, of=metadata.version):
        if name == "kge-torchrec":
            raise metadata.PackageNotFoundError(name)
        return of(name)

    monkeypatch.setattr(metadata, "version", version)
    assert package_versions()["kge-torchrec"] == __version__
    assert {"torch", "torchrec"} < {*package_versions()}


def test_other_versions_are_rejected(file):
    change(file, "packages", "torchrec", value="1.2.3")
    with pytest.raises(ConfigError, match=r"torchrec is '1.2.3' there and"):
        read_plan(file).check(**RUN)
    change(file, "version", value=VERSION + 1)
    with pytest.raises(ConfigError, match=f"a plan of version {VERSION + 1}"):
        read_plan(file)


def test_manually_moved_rows_are_rejected(file):
    change(file, "sharding", "shards", 1, "rows", value=200)
    with pytest.raises(ConfigError, match="rank 1 must hold 251 rows from 251 on"):
        read_plan(file).check(**RUN)


def test_missing_shard_is_rejected(file):
    shards = json.loads(file.read_text())["sharding"]["shards"]
    change(file, "sharding", "shards", value=shards[:3])
    with pytest.raises(ConfigError, match="needs 4 shards and has 3"):
        read_plan(file).check(**RUN)


@pytest.mark.parametrize("key", ["packages", "table", "world", "sharding", "fits"])
def test_damaged_file_is_rejected(file, key):
    content = json.loads(file.read_text())
    del content[key]
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="is damaged"):
        read_plan(file)


@pytest.mark.parametrize(("text", "said"), [("{", "not valid JSON"), ("[]", "is no plan")])
def test_other_files_are_rejected(tmp_path, text, said):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_plan(tmp_path / "x.json")


@pytest.mark.slow
def test_plan_that_does_not_fit_is_rejected(tmp_path):
    plan = planned(workload(10**9, model__dim=400, train__optimizer="adam"), "1xH100")
    content = plan_content(plan, advise(plan))
    write_json(tmp_path / "plan.json", content)
    assert content["advice"]
    assert max(limit["over"] for limit in content["limits"]) > 10**9
    with pytest.raises(ConfigError, match="does not fit its devices"):
        read_plan(tmp_path / "plan.json")


def test_unsupported_layouts_are_rejected(tmp_path):
    plan = planned(workload(1001, model__dim=16), "4xH100", sharding="column_wise")
    write_json(tmp_path / "plan.json", plan_content(plan))
    run = {**RUN, "config": plan.workload.config, "device_type": "cuda"}
    with pytest.raises(ConfigError, match="the sharding is 'column_wise' there"):
        read_plan(tmp_path / "plan.json").check(**run)


def test_a_plan_of_cached_rows_is_of_runs_with_this_cache(tmp_path):
    def place(ratio: float) -> dict:
        options = {"cache_ratio": ratio}
        return {"entities__placement": "managed_caching", "entities__placement_options": options}

    plan = planned(workload(1001, model__dim=16, **place(0.1)), "4xH100")
    write_json(tmp_path / "plan.json", plan_content(plan))
    read = read_plan(tmp_path / "plan.json")
    run = {**RUN, "config": plan.workload.config, "device_type": "cuda"}
    read.check(**run)
    (table,) = read.sharding_plan().plan["entities"].values()
    assert (table.compute_kernel, table.cache_params.load_factor) == ("fused_uvm_caching", 0.1)
    optimizer = plan.workload.optimizer
    with pytest.raises(ConfigError, match="the kernel is 'fused_uvm_caching' there and 'fused' he"):
        read.check(**{**run, "config": of(optimizer)})
    with pytest.raises(ConfigError, match=r"the cached share of the rows is 0.1 there and 0.2 her"):
        read.check(**{**run, "config": of(optimizer, **place(0.2))})


def test_json_contains_the_whole_plan():
    content = json.loads(json.dumps(plan_content(a_plan())))
    assert content["fits"] is True
    assert len(content["memory"]) == 4
    assert content["memory"][0]["total"]["main"] == sum(content["memory"][0]["main"].values())
    assert content["traffic"]["sent"]["rows"]["within_hosts"] > 0
    assert content["step"]["parts"][content["step"]["largest"]] == max(
        content["step"]["parts"].values()
    )
    assert "not a measurement" in content["step"]["what"]

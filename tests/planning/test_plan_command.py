"""The verb: sizes from options and data, output, files and exit codes."""

from __future__ import annotations

import json
from functools import partial

import pytest
from training_runs import tiny_store

import kge_torchrec
from kge_torchrec.cli import run_verb
from kge_torchrec.commands.plan import DOES_NOT_FIT
from kge_torchrec.config import ConfigError
from kge_torchrec.errors import DataError
from kge_torchrec.planning.sizes import count

FREEBASE = ["--entities", "86_000_000", "--relations", "14,824", "--triples", "338_586_276"]
run = partial(run_verb, "plan")


def test_plan_needs_no_data_and_no_gpu(capsys):
    arguments = ["default", "--devices", "8xH100-80GB", "--hosts", "2", *FREEBASE]
    arguments += ["--model.dim", "400", "--train.optimizer", "adam"]
    arguments += ["--data.path", "nowhere"]
    assert run(arguments) == 0
    said = capsys.readouterr().out
    assert "It fits." in said
    assert "86,000,000 entities x 400 (adam)" in said
    assert "8 x H100-80GB on 2 hosts: row_wise, fused" in said
    assert "a model, not a measurement" in said


def test_plan_of_an_open_config_says_that_it_plans_the_rules(capsys):
    arguments = ["default", "--devices", "1xH200", *FREEBASE, "--data.path", "nowhere"]
    run([*arguments, "--model.dim", "100"])
    assert "default: rules; train would first race" in capsys.readouterr().err
    run([*arguments, "--model.dim", "100", "--train.optimizer", "adam"])
    assert "default: rules" not in capsys.readouterr().err


def test_plan_that_does_not_fit_is_reported(capsys):
    arguments = [*FREEBASE, "--model.dim=400", "--train.optimizer=adam", "--devices", "1xH200",
                 "--negatives.count=512"]  # fmt: skip
    assert run(arguments) == DOES_NOT_FIT
    said = capsys.readouterr().out
    assert "memory of a GPU: 386." in said and "% left free): " in said
    assert "GiB too much" in said
    assert "What would make it fit:" in said
    assert "+ 3 x H200-141GB on one host, the smallest number, fits: " in said
    assert "- train.optimizer rowwise_adam is not enough" in said


def test_widths_that_need_the_handrolled_engine_on_cuda(capsys):
    arguments = ["--entities=1M", "--relations=10", "--triples=1M", "--devices", "1xH200"]
    for dim in (102, 2052):
        assert run([*arguments, f"--model.dim={dim}", "--entities.engine=handrolled"]) == 0
        assert f"1,000,000 entities x {dim}" in capsys.readouterr().out


def test_dense_part_above_the_capacity(capsys):
    arguments = ["--entities=1000", "--relations=12M", "--triples=13M", "--devices", "2xL4"]
    assert run([*arguments, "--model.dim=100"]) == DOES_NOT_FIT
    assert "before it holds a row of the table (" in capsys.readouterr().out


def test_plan_prints_json(capsys):
    arguments = ["--devices", "4xCPU-200GB", *FREEBASE, "--model.dim=8", "--format", "json"]
    assert run(arguments) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["fits"] is True
    memory = content["memory"]
    assert memory["total"] == {"device": 0, "main": sum(memory["main"].values())}
    assert content["world"]["size"] == 4
    assert content["traffic"]["sent"]["rows"]["within_hosts"] > 0
    step = content["step"]
    assert sum(step["parts"][part] for part in step["decisive"]) == pytest.approx(step["seconds"])
    assert "not a measurement" in step["what"]


def test_sizes_from_a_store(tmp_path, capsys):
    store = tiny_store(tmp_path / "store")
    arguments = ["--devices", "2xCPU", "--data.path", str(store.path), "--format", "json"]
    assert run(arguments) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["table"]["entities"] == store.num_entities
    assert content["run"]["relations"] == store.num_relations
    assert content["run"]["triples"] == len(store.train)


def test_embedded_graph_and_explicit_sizes_are_accepted(tmp_path, capsys):
    assert run(["demo", "--devices", "1xCPU"]) == 0
    store = tiny_store(tmp_path / "store")
    capsys.readouterr()
    arguments = ["--devices", "2xCPU", "--data.path", str(store.path), "--entities", "1M"]
    assert run([*arguments, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["table"]["entities"] == 10**6


def test_all_layouts(capsys):
    arguments = ["--devices", "8xH100", *FREEBASE, "--model.dim=400", "--train.optimizer=adam"]
    assert run([*arguments, "--all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("layout")
    assert len(lines) == 1 + 4 + 2 and lines[-1].startswith("Training takes row_wise")
    assert any("data_parallel" in line and "over" in line for line in lines)
    arguments[1] = "1xL4"
    assert run([*arguments, "--all", "--host-memory", "64"]) == DOES_NOT_FIT


SIZES = {"entities": "86M", "relations": "14,824", "triples": 338_586_276}
CACHED = {"entities.placement": "managed_caching"}
FULL = {"negatives.regime": "1vsall"}
NO_DATA = {"entities": None, "relations": None, "triples": None}
REJECTED = [
    ("8xH100Z", {}, "did you mean H100-80GB"),
    ("8xquantum", {}, "no device 'quantum'; there are A100-40GB"),
    ("8xA100", {}, "A100-40GB or A100-80GB; say which"),
    ("0xH100", {}, "--devices: there must be at least one, got 0"),
    ("-2xH100", {}, "at least one, got -2"),
    ("4xT4-16GB", {}, "compute capability 8.0 or more; T4-16GB has 7.5"),
    ("eight", {}, "no device 'eight'"),
    ("8x", {}, "must look like 8xH100-80GB"),
    ("8xH100", {"hosts": 0}, "--hosts: there must be at least one"),
    ("8xH100", {"hosts": 3}, "8 devices cannot be spread evenly over 3 hosts"),
    ("8xH100", {"hosts": 1.5}, "--hosts must be a whole number, got 1.5"),
    ("8xH100", {"host_memory": -5}, "--host-memory must be a number above 0, got -5"),
    ("8xH100", {"within_host": 0}, "--within-host must be a number above 0, got 0"),
    ("8xH100", {"between_hosts": "fast"}, "--between-hosts must be a number above 0, got fast"),
    ("8xH100", {"reserve": 1.0}, "--reserve must be in"),
    ("8xH100", {"reserve": "half"}, "--reserve must be in"),
    ("8xH100", {"skew": -1}, "--skew must be a number from 0 to 3, got -1"),
    ("8xH100", {"skew": "steep"}, "--skew must be a number from 0 to 3, got steep"),
    ("8xH100", {"entities": 0}, "entities must be at least 1"),
    ("8xH100", {"relations": 0}, "relations must be at least 1"),
    ("8xH100", {"triples": 0}, "triples must be at least 1"),
    ("8xH100", {"relations": "many"}, "--relations: 'many' is no number"),
    ("8xH100", {"entities": "a=2k,a=3k"}, "--entities: a has two numbers; give one"),
    ("8xH100", {**NO_DATA, "entities": 5}, "give all of --entities, --relations"),
    ("8xH100", {**NO_DATA, "data.path": "nowhere"}, "there is nothing at nowhere"),
    ("8xH100", {**NO_DATA, "data.path": "pykeen:no-such"}, r"kge-torchrec\[pykeen\]"),
    ("8xH100", {"model.dimm": 3}, "did you mean model.dim"),
    ("8xH100", {"model.dim": 102}, "on CUDA it must be a multiple of 4, not 102"),
    ("8xH100", {"model.dim": 2052}, "on CUDA it must be 2,048 or less, not 2,052"),
    ("8xH100", {"sharding": "grid"}, "--sharding must be one of row_wise"),
    ("8xH100", {"sharding": "data_parallel", **CACHED}, "lie whole on every device"),
    ("8xH100", {"sharding": "table_wise", "entities.placement": "disk"},
     "on disk are split by rows"),
    ("8xH100", {"sharding": "column_wise", **FULL}, "only row_wise"),
    ("8xH100", {"dense.wrapper": "none"}, "dense.wrapper none is for one rank, not for 8"),
    ("8xH100", {"dense.wrapper": "hybrid", "dense.options": {"replicas": 3}},
     "8 ranks cannot be split into 3 equal groups"),
]  # fmt: skip


@pytest.mark.parametrize(("devices", "options", "words"), REJECTED)
def test_impossible_plans_are_rejected(devices, options, words):
    keys = {key: value for key, value in options.items() if "." in key}
    others = {key: value for key, value in options.items() if "." not in key}
    with pytest.raises((ConfigError, DataError), match=words):
        kge_torchrec.plan({"model.dim": 100, **keys}, devices=devices, **{**SIZES, **others})


def test_the_verb_checks_its_options_in_the_same_way():
    for option, value, words in (
        ("host-memory", "-5", "--host-memory must be a number above 0"),
        ("within-host", "0", "--within-host must be"),
        ("entities", "0", "entities must be at least 1"),
        ("model.dimm", "3", "did you mean model.dim"),
    ):
        with pytest.raises(ConfigError, match=words):
            run(["--devices", "8xH100", *FREEBASE, f"--{option}", value])


def test_help_and_usage(capsys):
    with pytest.raises(SystemExit):
        run(["--help"])
    assert "--devices" in capsys.readouterr().out
    assert run([]) == 2
    with pytest.raises(SystemExit):
        run(["default"])


@pytest.mark.parametrize(
    ("text", "number"),
    [("86_000_000", 86 * 10**6), ("86M", 86 * 10**6), ("1.5k", 1500), ("2B", 2 * 10**9)],
)
def test_counts(text, number):
    assert count("entities", text) == number


def test_plan_as_a_function():
    sizes = {"entities": "2k", "relations": 14, "triples": "1M"}
    content = kge_torchrec.plan(devices="2xCPU-64GB", hosts=2, **sizes)
    assert content["table"]["entities"] == 2000 and content["run"]["triples"] == 10**6
    assert content["world"]["hosts"] == 2

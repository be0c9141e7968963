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
from kge_torchrec.embeddings.torchrec.planner import SHARDINGS
from kge_torchrec.errors import DataError
from kge_torchrec.planning.sizes import count

FREEBASE = ["--entities", "86_000_000", "--relations", "14,824", "--triples", "338_586_276"]
ADAM = [*FREEBASE, "--model.dim=400", "--train.optimizer=adam"]
HAND = ["--entities=1M", "--relations=10", "--triples=1M", "--entities.engine=handrolled"]
run = partial(run_verb, "plan")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["default", "--devices", "8xH100-80GB", "--hosts=2", *ADAM, "--data.path=nowhere"], 0,
         ["It fits.", "86,000,000 entities x 400 (adam)", "a model, not a measurement",
          "8 x H100-80GB on 2 hosts: row_wise, fused"]),
        (["--devices", "1xH200", *ADAM, "--negatives.count=512"], DOES_NOT_FIT,
         ["memory of a GPU: 386.", "% left free): ", "GiB too much", "What would make it fit:",
          "+ 3 x H200-141GB on one host, fits: ",
          "- train.optimizer rowwise_adam is not enough"]),
        (["--devices", "1xH200", *HAND, "--model.dim=102"], 0, ["1,000,000 entities x 102"]),
        (["--devices", "1xH200", *HAND, "--model.dim=2052"], 0, ["1,000,000 entities x 2052"]),
        (["demo", "--devices", "1xCPU"], 0, ["It fits.", "a checkpoint: "]),
        (["--devices", "8xH100", *ADAM, "--all"], 0,
         ["layout   ", "row_wise, fused", "column_wise, fused", "table_wise, fused",
          "data_parallel, dense  no, 439", "\nTraining takes row_wise: "]),
        (["--devices", "1xL4", *ADAM, "--all", "--host-memory", "64"], DOES_NOT_FIT, ["no, "]),
    ],
)  # fmt: skip
def test_what_is_printed(arguments, code, words, capsys):
    assert run(arguments) == code
    said = capsys.readouterr().out
    assert [text for text in words if text not in said] == []


def test_plan_of_an_open_config_says_that_it_plans_the_rules(capsys):
    arguments = ["default", "--devices", "1xH200", *FREEBASE, "--data.path", "nowhere"]
    run([*arguments, "--model.dim", "100"])
    assert "default: rules; train would first race" in capsys.readouterr().err
    run([*arguments, "--model.dim", "100", "--train.optimizer", "adam"])
    assert "default: rules" not in capsys.readouterr().err


def test_plan_prints_json(capsys):
    arguments = ["--devices", "4xCPU-200GB", *FREEBASE, "--model.dim=8", "--format", "json"]
    assert run(arguments) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["fits"] is True and content["cluster"]["world_size"] == 4
    memory = content["memory"]
    assert memory["total"] == {"device": 0, "main": sum(memory["main"].values())}
    assert content["sent"]["rows"]["within_host"] > 0
    step = content["step"]
    assert sum(step["parts"][part] for part in step["decisive"]) == pytest.approx(step["seconds"])
    assert "not a measurement" in step["what"]
    assert content["training_seconds"] > content["epoch_seconds"] > 0
    assert content["checkpoint_bytes"] > 86_000_000 * 8 * 4
    assert run([*arguments, "--all"]) == 0
    layouts = json.loads(capsys.readouterr().out)
    assert {layout["layout"] for layout in layouts} == {*SHARDINGS}


def test_sizes_that_are_left_out_come_from_the_data(tmp_path, capsys):
    store = tiny_store(tmp_path / "store")
    arguments = ["--devices", "2xCPU", "--data.path", str(store.path), "--format", "json"]
    assert run(arguments) == 0
    content = json.loads(capsys.readouterr().out)
    counts = (store.num_entities, store.num_relations, len(store.train))
    assert tuple(content[x] for x in ("entities", "relations", "triples")) == counts


SIZES = {"entities": "86M", "relations": "14,824", "triples": 338_586_276}
NO_DATA = {"entities": None, "relations": None, "triples": None}
REJECTED = [
    ("8xH100Z", {}, "did you mean H100-80GB"),
    ("8xquantum", {}, "no device 'quantum'; there are A100-40GB"),
    ("8xA100", {}, "A100-40GB or A100-80GB; say which"),
    ("0xH100", {}, "--devices: there must be at least one, got 0"),
    ("-2xH100", {}, "at least one, got -2"),
    ("eight", {}, "no device 'eight'"),
    ("8x", {}, "must look like 8xH100-80GB"),
    ("8xH100", {"hosts": 0}, "--hosts: there must be at least one"),
    ("8xH100", {"hosts": 3}, "8 devices cannot be spread evenly over 3 hosts"),
    ("8xH100", {"hosts": 1.5}, "--hosts must be a whole number, got 1.5"),
    ("8xH100", {"host_memory": -5}, "--host-memory must be a number above 0, got -5"),
    ("8xH100", {"between_hosts": "fast"}, "--between-hosts must be a number above 0, got fast"),
    ("8xH100", {"skew": -1}, "--skew must be a number from 0 to 3, got -1"),
    ("8xH100", {"skew": "steep"}, "--skew must be a number from 0 to 3, got steep"),
    ("8xH100", {"entities": 0}, "entities must be at least 1"),
    ("8xH100", {"relations": 0}, "relations must be at least 1"),
    ("8xH100", {"triples": 0}, "triples must be at least 1"),
    ("8xH100", {"relations": "many"}, "--relations: 'many' is no number"),
    ("8xH100", {"entities": "a=2k,a=3k"}, "--entities: a has two numbers; give one"),
    ("8xH100", {**NO_DATA, "entities": 5}, "give all of --entities, --relations"),
    ("8xH100", {**NO_DATA, "data.path": "nowhere"}, "there is nothing at nowhere"),
    ("8xH100", {**NO_DATA, "data.path": "pykeen:no-such"}, r"\[pykeen\]"),
    ("8xH100", {"model.dimm": 3}, "did you mean model.dim"),
    ("8xH100", {"model.dim": 102}, "on CUDA it must be a multiple of 4, not 102"),
    ("8xH100", {"model.dim": 2052}, "on CUDA it must be 2,048 or less, not 2,052"),
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


@pytest.mark.parametrize(
    ("text", "number"),
    [("86_000_000", 86 * 10**6), ("86M", 86 * 10**6), ("1.5k", 1500), ("2B", 2 * 10**9)],
)
def test_counts(text, number):
    assert count("entities", text) == number

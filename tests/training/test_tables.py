"""Tables per node type: resumed, extended, planned and refused; test_exact trains with them."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from grown_runs import tensors
from planned_runs import stored
from training_runs import (
    config_of,
    dies_after,
    fit,
    largest_difference,
    parameters,
    rank_resumes,
    shared_folder,
    tiny_store,
)
from worlds import WorldError, run_world

from kge_torchrec import extend, open_run, plan, resume, train
from kge_torchrec.config import Config, ConfigError
from kge_torchrec.config.parser import config_from_dict
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.store import TripleStore
from kge_torchrec.distributed.processes import processes
from kge_torchrec.embeddings.torchrec.collection import entity_collection
from kge_torchrec.embeddings.torchrec.planner import PlanDoesNotFit, Ranks, plan_rows
from kge_torchrec.embeddings.torchrec.sharder import EntitySharder, fused_params
from kge_torchrec.planning.report import all_layouts, report
from kge_torchrec.training.assembly import entity_tables
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session

SIZES = {"author": 5, "place": 21, "user": 17}
ENDS = (("author", "made", "place"), ("user", "visits", "place"), ("user", "follows", "user"))
TABLES = {
    "author": {"optimizer": "sgd", "lr": 0.5, "init": "uniform", "init_scale": 0.2},
    "place": {"optimizer": "adam", "lr": 0.02, "optimizer_options": {"weight_decay": 0.02}},
    "user": {"optimizer": "rowwise_adagrad", "lr": 0.05},
}


def typed_triples(count: int, seed: int = 0) -> list[tuple[str, str, str]]:
    """Distinct triples in which every entity occurs."""
    random = np.random.default_rng(seed)
    triples = {}
    for turn in range(10 * count):
        head, name, tail = ENDS[turn % 3]
        places = turn // 3 % SIZES[head], random.integers(SIZES[tail])
        triples[f"{head}:{places[0]}", name, f"{tail}:{places[1]}"] = None
        if len(triples) == count:
            break
    unseen = [f"place:{k}" for k in range(SIZES["place"])]
    return [*triples, *(("user:0", "visits", place) for place in unseen)]


@functools.cache
def typed_store() -> Path:
    triples = [*dict.fromkeys(typed_triples(120))]
    splits = {"train": triples[:-10], "valid": triples[-10:-5], "test": triples[-5:]}
    store = prepare(splits, shared_folder() / "typed", {"types": "prefix"}, log_notes=False)
    assert store.report["types"]["sizes"] == SIZES
    return store.path


def tables_config(folder: Path | str, **changes) -> Config:
    changes = {"entities__tables": TABLES, "negatives__among": "all", **changes}
    return config_of(typed_store(), folder, **changes)


def rank_trains(folder: Path, changes: dict, after: int | None) -> dict:
    changes = {"train__epochs": 3, "checkpoint__every__steps": 3, **changes}
    return fit(tables_config(folder, **changes), dies_after(after)).parameters


def test_killed_runs_resume_on_other_ranks_and_engines(tmp_path):
    first, second = ({"entities__engine": engine} for engine in ("torchrec", "handrolled"))
    (whole,) = run_world(1, rank_trains, tmp_path / "whole", second, None)
    with pytest.raises(WorldError, match="died with exit code -9"):
        run_world(2, rank_trains, tmp_path / "run", first, 7)
    assert [*(tmp_path / "run" / "checkpoints").glob("step*")]
    (again,) = run_world(1, rank_trains, tmp_path / "run", second, None)
    assert largest_difference(again, whole) < 1e-5


def states(tensors_of_run: dict) -> dict:
    """The optimizer states of entities by "type.state"."""
    prefix = "optimizer.entities.embeddings.entity.weight."
    return {n.removeprefix(prefix): t for n, t in tensors_of_run.items() if n.startswith(prefix)}


@functools.cache
def base_run() -> Path:
    return train(tables_config(shared_folder() / "base")).path


NEW = {"train": [("user:new", "visits", "place:0"), ("user:new", "visits", "place:new"),
                 ("author:new", "made", "place:new"), ("user:0", "follows", "user:new")],
       "test": [("user:new", "visits", "place:1")]}  # fmt: skip
FURTHER = {"train": [("user:last", "visits", "place:new"), ("shop:x", "sells", "place:0"),
                     ("user:last", "follows", "user:new")]}  # fmt: skip


def test_extended_runs_keep_the_states_of_each_type(tmp_path):
    before = states(tensors(base_run()))
    assert {name: len(value) for name, value in before.items()} == {
        "place.momentum1": 21, "place.exp_avg_sq": 21, "user.momentum1": 17}  # fmt: skip
    once = extend(base_run(), NEW, tmp_path / "once", epochs=0).path
    after = states(tensors(once))
    for name, value in before.items():
        assert torch.equal(after[name][:-1], value)
        assert not after[name][-1:].any() and len(after[name]) == len(value) + 1
    twice = extend(once, FURTHER, tmp_path / "twice", epochs=1).path
    sizes = {name: len(value) for name, value in states(tensors(twice)).items()}
    assert sizes == {"place.momentum1": 22, "place.exp_avg_sq": 22, "user.momentum1": 19,
                     "shop.momentum1": 1}  # fmt: skip
    with open_run(twice) as run:
        answers = run.predict("user:last", "visits", k=3)
        assert {answer.label.partition(":")[0] for answer in answers} == {"place"}


def test_extended_runs_start_like_a_run_of_the_whole_graph(tmp_path):
    made = extend(base_run(), NEW, tmp_path / "run", epochs=0).path
    config = config_of(made / "store", tmp_path / "other", entities__tables=TABLES)
    with processes("cpu") as ranks:
        fresh = parameters(Session(config, RunFolder(tmp_path / "other"), ranks))
    with open_run(made) as run:
        grown = parameters(run.model)
    old = sum(SIZES.values())
    assert torch.equal(grown["entities"][old:], fresh["entities"][old:])


def test_deleting_entities_drops_the_rows_of_their_type(tmp_path):
    once = extend(base_run(), NEW, tmp_path / "once", epochs=1).path
    gone = ["user:3", "place:20", "user:new"]
    made = extend(once, None, tmp_path / "less", delete=gone).path
    before, after = states(tensors(once)), states(tensors(made))
    kept = torch.ones(18, dtype=torch.bool)
    labels = TripleStore.open(once / "store").entities.array.to_pylist()
    users = [label for label in labels if label.startswith("user:")]
    for label in gone[::2]:
        kept[users.index(label)] = False
    assert torch.equal(after["user.momentum1"], before["user.momentum1"][kept])
    assert len(after["place.momentum1"]) == len(before["place.momentum1"]) - 1
    whole = extend(made, None, tmp_path / "no authors", delete=[
        label for label in labels if label.startswith("author:")], epochs=1).path  # fmt: skip
    with open_run(whole) as run:
        assert len(run.model.entity_labels) == len(labels) - 3 - 6


def test_settings_are_completed_from_train_and_model():
    config = tables_config("unused", train__optimizer="adam", train__lr=0.003,
                           train__optimizer_options={"beta1": 0.8}, model__init="normal",
                           model__init_scale=0.3)  # fmt: skip
    of = {kind: config.entities.table_of(kind, config.train, config.model)
          for kind in ("author", "place", "user", "shop")}  # fmt: skip
    assert (of["shop"].optimizer, of["shop"].lr) == ("adam", 0.003)
    assert of["shop"].optimizer_options.beta1 == 0.8
    assert of["place"].optimizer_options.weight_decay == 0.02
    assert of["place"].optimizer_options.beta1 == 0.9
    assert (of["author"].init, of["author"].init_scale) == ("uniform", 0.2)
    assert (of["user"].init, of["user"].init_scale) == ("normal", 0.3)
    tables = {"user": {"optimizer": "adam"}, "place": {"init": "xavier_normal"}}
    bare = tables_config("unused", entities__tables=tables)
    assert bare.entities.table_of("user", bare.train, bare.model).lr == 0.003
    assert bare.entities.table_of("place", bare.train, bare.model).init_scale == 1.0


BAD = {
    "an unknown type": ({"usr": {}}, r"entities\.tables: a type of .* must be one of author, "
                                     r"place, user, got 'usr'; did you mean 'user'\?"),
    "an unknown setting": ({"user": {"rate": 1}}, r"entities\.tables\.user\.rate is no option"),
    "an unknown optimizer": ({"user": {"optimizer": "adm"}}, "adm"),
    "a rate of 0": ({"user": {"lr": 0}}, r"entities\.tables\.user\.lr must be a number > 0"),
    "an option of another optimizer": ({"user": {"optimizer": "sgd", "optimizer_options": {
        "beta1": 0.5}}}, r"entities\.tables\.user\.optimizer_options\.beta1 is no option"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_wrong_settings_get_a_sentence(tmp_path, case):
    tables, message = BAD[case]
    with pytest.raises(ConfigError, match=message):
        train(tables_config(tmp_path / "run", entities__tables=tables))


def test_tables_need_types_and_fbgemms_arithmetic(tmp_path):
    store = tiny_store(tmp_path / "store").path
    with pytest.raises(ConfigError, match=r"entities\.tables: .* one type per entity; give types"):
        train(config_of(store, tmp_path / "run", entities__tables=TABLES))
    with pytest.raises(ConfigError, match=r"entities\.tables: optimizers per type follow FBGEMM"):
        tables_config("unused", entities__engine="handrolled", entities__preset="dgl",
                      entities__tables={}, train__optimizer="adam")  # fmt: skip


def test_rates_of_types_may_change_on_resume_but_optimizers_may_not(tmp_path):
    run = train(tables_config(tmp_path / "run")).path
    other = {**TABLES, "user": {**TABLES["user"], "lr": 0.01}}
    resume(run, {"entities.tables": other, "train.epochs": 3})
    other["user"] = {"optimizer": "adam"}
    with pytest.raises(ConfigError, match=r"entities\.tables .* cannot change on resume"):
        resume(run, {"entities.tables": other, "train.epochs": 4})


def rank_weighs_tables(folder: Path) -> dict[str, int]:
    """Bytes of the rows and states of each type on this rank."""
    with processes("cpu") as ranks:
        backend = Session(tables_config(folder), RunFolder(folder), ranks).backend
        start, stop = backend.shard().row_range
        own = [optimizer.states for optimizer in backend.table.optimizers]
        counts = dict.fromkeys(SIZES, 0)
        for table, states in zip(backend.table.tables, own, strict=True):
            counts[table.type] += 4 * len(table.within(start, stop)) * backend.shard().dim
            counts[table.type] += sum(state.nbytes for state in states.values())
        return counts


def test_plan_has_the_bytes_of_all_tables(tmp_path):
    measured = run_world(2, rank_weighs_tables, tmp_path / "run")
    config = tables_config(tmp_path / "run")
    planned = stored(config, "2xCPU")
    fullest = max(measured, key=lambda rank: sum(rank.values()))
    rows = planned.memory["weights"].main + planned.memory["optimizer state"].main
    assert rows == pytest.approx(sum(fullest.values()), rel=0.1)  # of 22 rows
    assert "rowwise_adagrad" in report(planned)
    assert [plan.layout for plan in all_layouts(planned)] == ["row_wise"]


def test_plan_takes_sizes_of_types(tmp_path, capsys):
    config = tables_config(tmp_path / "run")
    sizes = {"entities": "user=600k,place=300k,author=1k", "relations": 3, "triples": 10**6}
    planned = plan(config, devices="8xH100", **sizes)
    assert planned["entities"] == 901_000
    states = 4 * (37_500 * 2 * config.model.dim + 75_000)  # Adam of places, a value per user
    assert planned["memory"]["device"]["optimizer state"] == states
    with pytest.raises(ConfigError, match=r"entities\.tables: the sizes of author, place, user"):
        plan(config, devices="8xH100", **{**sizes, "entities": "901k"})


def test_whole_states_of_types_with_two_runs_of_ids_are_saved(tmp_path):
    """An extended run has ids of a type before and after those of other types."""
    whole = tensors(extend(base_run(), NEW, tmp_path / "whole", epochs=3).path)
    made = extend(base_run(), NEW, tmp_path / "run", epochs=1).path
    run_world(2, rank_resumes, made, {"train.epochs": 3})
    again = tensors(made)
    assert whole.keys() == again.keys() and len(states(again)["user.momentum1"]) == 18
    for name, value in whole.items():
        torch.testing.assert_close(again[name], value, rtol=1e-5, atol=1e-5)
    assert states(again)["user.momentum1"][-1] > 0


def test_tables_that_do_not_fit_name_each_type():
    config = tables_config("unused")
    tables = entity_tables(config, TripleStore.open(typed_store()), 0)
    collection, sharder = entity_collection(43, 8), EntitySharder(fused_params(tables))
    room = 4 * 8 * 60  # bytes of 60 rows; 43 rows and their states need more on one rank
    for ranks, fits in ((1, False), (4, True)):
        have = Ranks(ranks, ranks, "cpu", host_bytes=ranks * room)
        if fits:
            (shards,) = plan_rows(collection, sharder, tables, have).plan["entities"].values()
            sizes = [shard.shard_sizes[0] for shard in shards.sharding_spec.shards]
            assert sizes == [11, 11, 11, 10]
        else:
            with pytest.raises(PlanDoesNotFit, match=r"rank 0 gets .* \(author .*, place .*user"):
                plan_rows(collection, sharder, tables, have)


def test_tables_rule_out_a_race_and_foreign_optimizers_on_gpus():
    only_tables = config_from_dict({"entities.tables": {"user": {}}})
    assert only_tables.decided_by == "entities.tables is given"
    own = tables_config(
        "unused", entities__tables={"user": {"optimizer": "foreign_parts:Momentum"}}
    )
    with pytest.raises(ConfigError, match="on GPUs"):
        own.check_device(True)

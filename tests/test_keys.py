"""Rules that are declared with the keys of the config: when they act, and whether they may change.

A new key fails here until the tables have it: ``WITHOUT_EFFECT`` if it is declared with ``acts``,
``CHANGES`` in any case.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from training_runs import config_of, tiny_store

import kge_torchrec
from kge_torchrec import api
from kge_torchrec.cli import main
from kge_torchrec.config import Config, ConfigError, all_keys
from kge_torchrec.config.keys import (
    Facts,
    Part,
    changed_keys,
    check_effects,
    check_resume,
    declared,
    default_of,
    key_of,
    without_effect,
)
from kge_torchrec.config.options import parse_options, settings_of
from kge_torchrec.config.parser import config_from_dict, load_config
from kge_torchrec.config.registry import KINDS, resolve
from kge_torchrec.config.sizing import KEYS as PICKED
from kge_torchrec.data.prepare import prepare

FULL = {"negatives.regime": "1vsall"}
UNREAD = Facts(unread={"split_by", "has_header", "allow_unseen_relations", "literals", "columns",
                       "types_from", "types", "features", "reader"})  # fmt: skip
PLATEAU = {"train.schedule": "plateau"}

# key: (a value that has no effect, what it has none with, what gives it one)
WITHOUT_EFFECT: dict[str, tuple[Any, dict[str, Any] | Facts, dict[str, Any] | Facts]] = {
    "data.split.by": ("last", UNREAD, Facts()),
    "data.split.ratio": ([0.8, 0.1, 0.1], {"data.split.by": "last"}, {"data.split.by": "time"}),
    "data.split.count": (2, {"data.split.by": "head"}, {"data.split.by": "last"}),
    "data.split.time_column": ("x", {"data.split.by": "head"}, {"data.split.by": "time"}),
    "data.reader_options.has_header": (True, UNREAD, Facts()),
    "data.allow_unseen_relations": (True, UNREAD, Facts()),
    "data.reader_options.literals": ("keep", UNREAD, Facts()),
    "data.reader_options.columns": (["a", "b", "c"], UNREAD, Facts()),
    "data.types_from": ("is", UNREAD, Facts()),
    "data.types": ("prefix", UNREAD, Facts()),
    "data.features": ("x.tsv", UNREAD, Facts()),
    "data.type_triples": ("keep", {}, {"data.types_from": "is"}),
    "data.reader": ("foreign_parts:Words", UNREAD, Facts()),
    "model.init_options.width": ("pca", {}, {"model.init_from": "x.npy"}),
    "model.init_options.frozen": (True, {}, {"model.init_from": "x.npy"}),
    "negatives.count": (9, FULL, {"negatives.regime": "kvssample"}),
    "negatives.head_count": (9, {"negatives.regime": "kvssample"}, {}),
    "negatives.in_batch": (True, FULL, {}),
    "negatives.hardest": (9, {"negatives.count": 9}, {"negatives.count": 10}),
    "negatives.log_q": (True, {"negatives.regime": "kvssample"}, {}),
    "negatives.chunk_size": (9, FULL, {}),
    "negatives.sampling": ("degree", FULL, {"negatives.regime": "kvssample"}),
    "negatives.among_options.types": (
        "x.tsv",
        {"negatives.among": "seen"},
        {"negatives.among": "types"},
    ),
    "negatives.among_options.share": (0.5, {}, {"negatives.among": "seen"}),
    "negatives.max_answers": (9, {}, {"negatives.regime": "kvssample"}),
    "entities.exchange.dtype": ("int8", FULL, {}),
    "entities.placement_options.parts": (8, {}, {"entities.placement": "disk"}),
    "entities.placement_options.buffer": (2, {}, {"entities.placement": "disk"}),
    "entities.placement_options.passes": (2, {}, {"entities.placement": "disk"}),
    "entities.placement_options.cache_ratio": (
        0.5,
        {"entities.placement": "disk"},
        {"entities.placement": "managed_caching"},
    ),
    "dense.options.sharding": ("grad_op", {}, {"dense.wrapper": "fsdp"}),
    "dense.options.replicas": (2, {"dense.wrapper": "fsdp"}, {"dense.wrapper": "hybrid"}),
    "dense.options.cpu_offload": (True, {"dense.wrapper": "ddp"}, {"dense.wrapper": "hybrid"}),
    "train.schedule_options.patience": (1, {**PLATEAU, "evaluation.every": 0}, PLATEAU),
    "train.schedule_options.threshold": (0.1, {**PLATEAU, "evaluation.every": 0}, PLATEAU),
    "train.averaging_options.decay": (0.5, {}, {"train.averaging": "ema"}),
    "train.averaging_options.every_steps": (9, {}, {"train.averaging": "ema"}),
    "train.precision": ("tf32", Facts(on_cuda=False), Facts(on_cuda=True)),
    "train.batches": ("device", FULL, {}),
    "train.extension.freeze": ("old", Facts(extended=False), Facts(extended=True)),
    "evaluation.metric": ("mr", {"evaluation.every": 0}, {"evaluation.every": 1}),
    "evaluation.patience": (2, {"evaluation.every": 0}, {}),
    "evaluation.max_triples": (2, {"evaluation.every": 0}, {}),
    "evaluation.candidates_options.types": ("x.tsv", {}, {"evaluation.candidates": "types"}),
    "evaluation.candidates_options.file": ("x.npz", {}, {"evaluation.candidates": "fixed"}),
    "evaluation.candidates_options.count": (9, {}, {"evaluation.candidates": "sampled"}),
    "evaluation.candidates_options.seed": (9, {}, {"evaluation.candidates": "sampled"}),
    "size": ("small", {"model.dim": 8, "train.epochs": 1, "negatives.count": 4}, {}),
}


def every_rule() -> dict[str, Any]:
    """The fields of all keys, and of all options that are declared by ``key``."""
    rules = dict(declared(Config))
    for name, item in declared(Config).items():
        of = key_of(item).options
        parts = [of] if isinstance(of, type) else []
        if isinstance(of, Part):
            parts = [resolve(of.kind, each) for each in KINDS[of.kind].ours]
            parts += [] if of.otherwise is None else [of.otherwise]
        for part in parts:
            for field in fields(settings_of(part)):
                if "key" in field.metadata:
                    rules[f"{name}.{field.name}"] = field
    return rules


def test_every_conditional_key_is_in_the_table():
    rules = every_rule()
    assert {name for name, item in rules.items() if key_of(item).acts} == set(WITHOUT_EFFECT)
    assert all(key_of(item).help.endswith(".") for item in rules.values())


@pytest.mark.parametrize("key, others, expected", [
    ("train.optimizer_options.beta1", {"train.optimizer": "sgd"},
     "is no option of SGD, which has none"),
    ("train.optimizer_options.beta2", {}, "is no option of Adagrad, which has eps"),
    ("train.optimizer_options.weight_decay", {}, "is no option of Adagrad, which has eps"),
    ("train.schedule_options.decay", {}, "is no option of Constant, which has none"),
    ("train.schedule_options.patience", {"train.schedule": "exponential"},
     "is no option of Exponential, which has decay"),
    ("model.dropout.head", {}, "is no option of Dropout, which has entity, relation, input"),
])  # fmt: skip
def test_unknown_option_of_a_part_is_rejected(key, others, expected):
    with pytest.raises(ConfigError, match=expected):
        load_config(None, {**others, key: 0.5})


@pytest.mark.parametrize("key", WITHOUT_EFFECT)
def test_key_without_effect_is_rejected_with_its_condition(key):
    value, off, on = WITHOUT_EFFECT[key]
    config, facts = _with(key, value, off)
    with pytest.raises(ConfigError) as caught:
        check_effects(config, facts)
    said = str(caught.value)
    assert said.startswith(f"{key} ") and "has no effect here: it acts only with " in said
    assert f"leave {key} at its default" in said
    if not isinstance(off, Facts):  # the command line knows it before anything starts
        with pytest.raises(ConfigError, match=f"{key} .* has no effect"):
            load_config(None, {**off, key: value})
    config, facts = _with(key, value, on)
    check_effects(config, facts)
    config, facts = _with(key, default_of(every_rule()[key]), off)
    assert key not in without_effect(config, facts)


@pytest.mark.parametrize("placement", ["memory", "disk", "managed_caching"])
def test_options_of_another_placement_are_rejected(placement):
    of_disk = {"parts": 8, "buffer": 3, "passes": 2}
    for option, value in {**of_disk, "cache_ratio": 0.5}.items():
        values = {"entities.placement": placement, "entities.placement_options": {option: value}}
        if placement == ("disk" if option in of_disk else "managed_caching"):
            assert load_config(None, values).entities.placement_options == {option: value}
            continue
        for read in (load_config, _planned):
            with pytest.raises(ConfigError, match=rf"options.{option} {value} has no effect here"):
                read(None, values)


def _planned(_: None, values: dict[str, Any]) -> dict[str, Any]:
    return kge_torchrec.plan(values, devices="1xCPU", entities=9, relations=1, triples=9)


@dataclass
class Listed:
    """Options of no part, one of them a list."""

    numbers: list[float]
    one: int | bool = 0


def test_options_are_not_shared():
    """Options with equal values are parsed once; each config has its own, of the types it gave."""
    first = parse_options(Listed, {"numbers": [1, 2], "one": 1}, "options")
    first.numbers.append(3.0)
    again = parse_options(Listed, {"numbers": [1, 2], "one": 1}, "options")
    assert again.numbers == [1.0, 2.0] and type(again.numbers[0]) is float
    assert parse_options(Listed, {"numbers": [1, 2], "one": True}, "options").one is True
    for value in (lambda: 0, "1"):
        with pytest.raises(ConfigError, match=r"options\.numbers must be a list"):
            parse_options(Listed, {"numbers": value}, "options")


def _python(keys: dict[str, Any]) -> dict[str, Any]:
    return {key.replace(".", "__"): value for key, value in keys.items()}


def _with(key: str, value: Any, others: dict[str, Any] | Facts) -> tuple[Config, Facts]:
    if isinstance(others, Facts):
        return config_from_dict({key: value}), others
    return config_from_dict({**others, key: value}), Facts()


def test_defaults_never_lack_an_effect():
    assert without_effect(Config(), Facts(False, False, UNREAD.unread)) == {}


def test_missing_facts_reject_no_keys():
    config = config_from_dict({"train.precision": "tf32", "train.extension": {"freeze": "old"}})
    assert without_effect(config, Facts()) == {}
    assert len(without_effect(config, Facts(on_cuda=False, extended=False))) == 2


def test_key_without_effect_is_rejected_on_resume_and_picked_ones_are_warned_of(tmp_path, caplog):
    store = tiny_store(tmp_path / "store").path
    api.train(config_of(store, tmp_path / "run", train__epochs=1)).close()
    with pytest.raises(ConfigError, match=r"negatives.max_answers 9 has no effect here"):
        api.resume(tmp_path / "run", {"negatives.max_answers": 9})
    caplog.clear()
    again = {**FULL, "negatives.count": 6}
    with caplog.at_level(logging.WARNING, "kge_torchrec.training.run_data"):
        api.train(config_of(store, tmp_path / "full", **_python(again))).close()
    said = [record.getMessage() for record in caplog.records if "run_data" in record.name]
    assert any(line.startswith("negatives.count 6 has no effect here") for line in said)


def test_keys_of_reading_are_rejected_for_other_sources(tmp_path):
    (tmp_path / "graph").mkdir()
    lines = "".join(f"e{i}\tr\te{i + 1}\n" for i in range(20))
    for name in ("train.tsv", "valid.tsv"):
        (tmp_path / "graph" / name).write_text(lines)
    (tmp_path / "one.tsv").write_text(lines)
    store = prepare(tmp_path / "graph", tmp_path / "store", progress=False, log_notes=False).path
    for data, key, value in (
        (tmp_path / "graph", "data.split.ratio", [0.8, 0.1, 0.1]),
        (tmp_path / "graph", "data.reader_options.literals", "keep"),
        (store, "data.split.by", "last"),
        (store, "data.reader_options.columns", ["a", "b", "c"]),
        ("countries", "data.reader_options.literals", "keep"),
        (store, "train.precision", "tf32"),
        (store, "train.extension.freeze", "old"),
    ):
        with pytest.raises(ConfigError, match=f"{key} .* has no effect here"):
            api.train(config_of(data, tmp_path / "run", **{key.replace(".", "__"): value}))
        assert not (tmp_path / "run").exists()
    for data in (tmp_path / "one.tsv", tmp_path / "graph"):
        keys = {"data__reader_options__has_header": False, "train__epochs": 0}
        api.train(config_of(data, tmp_path / data.stem, **keys)).close()


# What may change when a run resumes

RATIO = [0.8, 0.1, 0.1]
# key: (another value, whether it is accepted). Keys of one value only have a second one here.
CHANGES: dict[str, tuple[Any, bool]] = {
    "data.path": ("countries", False), "data.split": ({"ratio": RATIO}, False),
    "data.allow_unseen_relations": (True, False),
    "data.weights": ("loss", False), "data.types_from": ("is", False),
    "data.types": ("prefix", False), "data.features": ("x.tsv", False),
    "data.type_triples": ("keep", False), "data.reader": ("foreign_parts:Words", False),
    "data.reader_options": ({"has_header": True}, False),
    "model.scorer": ("distmult", False), "model.dim": (16, False),
    "model.reciprocal": (False, False), "model.init": ("uniform", False),
    "model.init_scale": (0.25, False), "model.normalization": ("unit", False),
    "model.biases": (True, False), "model.dropout": ({"hidden": 0.1}, True),
    "model.options": ({"p": 1}, False),
    "model.init_from": ("x.npy", False), "model.init_options": ({"width": "pca"}, False),
    "loss.name": ("bce", True), "loss.n3": (0.1, True),
    "loss.relation_weight": (0.1, True),
    "loss.regularizers": ({"dura": 0.1}, True), "loss.options": ({"label_smoothing": 0.1}, True),
    "negatives.regime": ("1vsall", False), "negatives.count": (9, True),
    "negatives.head_count": (9, True), "negatives.in_batch": (True, True),
    "negatives.hardest": (2, True), "negatives.log_q": (True, True),
    "negatives.chunk_size": (4, True), "negatives.sides": ("tail", True),
    "negatives.sampling": ("degree", True),
    "negatives.filtered": (True, True), "negatives.among": ("seen", True),
    "negatives.among_options": ({"share": 0.5}, True), "negatives.max_answers": (9, True),
    "negatives.options": ({"degree_power": 0.5}, True),
    "entities.engine": ("handrolled", True), "entities.options": ({"duplicates": "mean"}, True),
    "entities.exchange": ({"dtype": "int8"}, True), "entities.placement": ("disk", True),
    "entities.placement_options": ({"parts": 8}, True),
    "entities.tables": ({"user": {"optimizer": "adam"}}, False),
    "dense.wrapper": ("fsdp", True), "dense.compile": (True, True),
    "dense.options": ({"sharding": "grad_op"}, True),
    "train.epochs": (9, True), "train.batch_size": (64, False), "train.optimizer": ("sgd", False),
    "train.lr": (0.01, True), "train.relation_lr": (0.01, True),
    "train.optimizer_options": ({"eps": 0.1}, True),
    "train.schedule": ("linear", True), "train.warmup_steps": (3, True),
    "train.schedule_options": ({"decay": 0.5}, True),
    "train.averaging": ("ema", True), "train.averaging_options": ({"decay": 0.5}, True),
    "train.precision": ("bf16", True), "train.accumulation": (2, True),
    "train.clip": ({"norm": 1.0}, True),
    "train.pipeline": ("loop", True), "train.batches": ("device", True),
    "train.log_every": (7, True),
    "train.extension": ({"freeze": "old"}, True),
    "evaluation.every": (1, True), "evaluation.metric": ("mr", True),
    "evaluation.patience": (1, True), "evaluation.max_triples": (5, True),
    "evaluation.batch_size": (5, True), "evaluation.candidates": ("seen", True),
    "evaluation.candidates_options": ({"count": 9}, True),
    "checkpoint.every": ({"epochs": 2}, True), "checkpoint.keep": (3, True),
    "checkpoint.options": ({"background": "none"}, True),
    "run.dir": ("elsewhere", False), "run.resume": ("auto", False), "run.progress": (True, True),
    "run.trackers": ({"wandb": "x"}, True),
    "size": ("large", False), "default": ("rules", False),
    "seed": (1, False), "device": ("auto", True), "threads": (2, True),
    "timeout": (60, True),
}  # fmt: skip


def test_option_at_its_default_is_no_change():
    before, after = Config(), config_from_dict({"checkpoint.every": {"epochs": 1}})
    assert before.checkpoint != after.checkpoint and changed_keys(before, after) == []
    after = config_from_dict({"checkpoint.every": {"epochs": 2}})
    assert changed_keys(before, after) == ["checkpoint.every"]


def test_every_key_declares_whether_it_may_change():
    assert set(CHANGES) == set(all_keys())


@pytest.mark.parametrize("key", CHANGES)
def test_change_on_resume_is_accepted_or_rejected_with_a_message(key):
    """Checks only configs; training may reject a combination for other reasons."""
    value, accepted = CHANGES[key]
    others = {
        "model.options": {"model.scorer": "keci", "model.dim": 12},
        "train.schedule_options": {"train.schedule": "exponential"},
        "train.optimizer": {"train.optimizer_options.eps": None},  # which sgd does not have
        "negatives.options": {"negatives.sampling": "degree"},
        "negatives.sides": {"model.reciprocal": False},
        "negatives.among_options": {"negatives.among": "seen"},
        "run.resume": {"run.dir": "runs/one"},
    }.get(key, {})
    if key.startswith("entities.") and key != "entities.engine":
        others = {"entities.engine": "handrolled", "train.optimizer": "adam"}
    if key.startswith("model.init_"):
        others = {"model.init_from": "y.npy"}
    elif key.startswith("dense."):
        others = {"dense.wrapper": "hybrid", "dense.compile": False}
    base = config_of("store", **_python(others))
    changed = config_from_dict(base.to_dict(), {key: value})
    assert changed != base
    if accepted:
        check_resume(base, changed, Path("runs/one"))
        return
    with pytest.raises(ConfigError, match=f"^{key} is .* and cannot change on resume; ") as caught:
        check_resume(base, changed, Path("runs/one"))
    assert len(str(caught.value).partition("resume; ")[2]) > 10  # what to do


def test_resumed_run_rejects_other_data_folders_and_sizes(tmp_path, capsys):
    """The command line rejects the change, and the run stays as it was."""
    store = tiny_store(tmp_path / "store").path
    folder = tmp_path / "run"
    api.train(config_of(store, folder, train__epochs=1)).close()
    before = (folder / "config.yaml").read_bytes(), (folder / "results.json").read_bytes()
    for key, value in (("data.path", "countries"), ("run.dir", "x"), ("size", "large")):
        assert main(["train", "--resume", str(folder), f"--{key}", value]) == 1
        assert f"{key} is " in capsys.readouterr().err
    after = (folder / "config.yaml").read_bytes(), (folder / "results.json").read_bytes()
    assert before == after


def test_run_follows_its_moved_store_and_folder(tmp_path):
    store, folder = tiny_store(tmp_path / "store").path, tmp_path / "run"
    api.train(config_of(store, folder, train__epochs=1)).close()
    moved = {"data.path": str(tmp_path / "moved"), "run.dir": str(tmp_path / "renamed")}
    store.rename(moved["data.path"])
    folder.rename(moved["run.dir"])
    with api.resume(moved["run.dir"], {**moved, "train.epochs": 2}) as run:
        assert run.results["train"]["epochs"] == 2
    other = tiny_store(tmp_path / "other", train=100).path
    with pytest.raises(Exception, match=r"triples at hand are not the ones"):
        api.resume(moved["run.dir"], {"data.path": str(other), "train.epochs": 3})


@pytest.mark.parametrize("key", PICKED)
def test_keys_with_resolved_defaults_are_null(key):
    assert default_of(declared(Config)[key]) is None

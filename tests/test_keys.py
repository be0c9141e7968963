"""Rules that are declared with the keys of the config: when they act, and whether they may change.

``tests/test_every_key.py`` shows the effect of each key; the mechanisms are tested here on a few.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from training_runs import config_of, tiny_store

from kge_torchrec import api
from kge_torchrec.config import RESOLVED_KEYS, Config, ConfigError
from kge_torchrec.config.describe import help_of
from kge_torchrec.config.keys import (
    changed_keys,
    check_effects,
    check_resume,
    declared,
    without_effect,
)
from kge_torchrec.config.parser import config_from_dict, load_config
from kge_torchrec.data.prepare import prepare

FULL = {"negatives.regime": "1vsall"}

# key: (a value that has no effect, what it has none with, what gives it one)
WITHOUT_EFFECT: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "negatives.count": (9, FULL, {"negatives.regime": "kvssample"}),
    "dense.options.replicas": (2, {"dense.wrapper": "fsdp"}, {"dense.wrapper": "hybrid"}),
}


@pytest.mark.parametrize("key", WITHOUT_EFFECT)
def test_key_without_effect_is_rejected_with_its_condition(key):
    value, off, on = WITHOUT_EFFECT[key]
    with pytest.raises(ConfigError) as caught:
        check_effects(config_from_dict({**off, key: value}))
    said = str(caught.value)
    assert said.startswith(f"{key} ") and "has no effect here: it acts only with " in said
    assert f"leave {key} at its default" in said
    with pytest.raises(ConfigError, match=f"{key} .* has no effect"):
        load_config(None, {**off, key: value})
    check_effects(config_from_dict({**on, key: value}))


def test_keys_have_a_help_and_an_effect_at_their_defaults():
    assert all(help_of(key).endswith(".") for key in declared(Config).values())
    assert without_effect(Config()) == {}
    assert {declared(Config)[key].default for key in RESOLVED_KEYS} == {None}


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


def test_keys_of_reading_are_rejected_for_a_store(tmp_path):
    (tmp_path / "graph").mkdir()
    lines = "".join(f"e{i}\tr\te{i + 1}\n" for i in range(20))
    for name in ("train.tsv", "valid.tsv"):
        (tmp_path / "graph" / name).write_text(lines)
    (tmp_path / "one.tsv").write_text(lines)
    store = prepare(tmp_path / "graph", tmp_path / "store", progress=False, log_notes=False).path
    for data, key, value in (
        (store, "data.split.by", "last"),
        (store, "data.columns", "head=a"),
        (store, "train.extension.freeze", "old"),
        (store, "train.precision", "tf32"),
    ):
        with pytest.raises(ConfigError, match=f"{key} .*(has no effect here|acts on GPUs)"):
            api.train(config_of(data, tmp_path / "run", **{key.replace(".", "__"): value}))
        assert not (tmp_path / "run").exists()
    for data in (tmp_path / "one.tsv", tmp_path / "graph"):
        keys = {"data__has_header": False, "train__epochs": 0}
        api.train(config_of(data, tmp_path / data.stem, **keys)).close()


# What may change when a run resumes

# key: (another value, whether it is accepted, other keys)
CHANGES: dict[str, tuple[Any, bool, dict[str, Any]]] = {
    "model.init_options.frozen": (True, False, {"model.init_from": "y.npy"}),
    "negatives.sides": ("tail", True, {"model.reciprocal": False}),
    "train.lr": (0.01, True, {}),
}


@pytest.mark.parametrize("key", CHANGES)
def test_change_on_resume_is_accepted_or_rejected_with_a_message(key):
    """Checks only configs; training may reject a combination for other reasons."""
    value, accepted, others = CHANGES[key]
    base = config_of("store", **_python(others))
    changed = config_from_dict(base.to_dict(), {key: value})
    assert changed != base
    if accepted:
        check_resume(base, changed, Path("runs/one"))
        return
    with pytest.raises(ConfigError, match=f"^{key} is .* and cannot change on resume; ") as caught:
        check_resume(base, changed, Path("runs/one"))
    assert len(str(caught.value).partition("resume; ")[2]) > 10  # what to do


def _python(keys: dict[str, Any]) -> dict[str, Any]:
    return {key.replace(".", "__"): value for key, value in keys.items()}


def test_option_at_its_default_is_no_change():
    before = Config()
    for same in ({"checkpoint.every": {"epochs": 1}}, {"loss.options": {"label_smoothing": 0}}):
        assert config_from_dict(same) == before
    after = config_from_dict({"loss.options": {"label_smoothing": 0.1}})
    assert changed_keys(before, after) == ["loss.options"]
    after = config_from_dict({"checkpoint.every": {"epochs": 2}})
    assert changed_keys(before, after) == ["checkpoint.every.epochs"]


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


def test_device_names_the_key_of_the_optimizer_that_it_lacks():
    """A type's table may have an optimizer of its own."""
    foreign = {"u": {"optimizer": "foreign_parts:Momentum"}}
    config = config_from_dict({"entities.tables": foreign})
    with pytest.raises(ConfigError, match=r"^entities\.tables\.u\.optimizer foreign_parts:Mom"):
        config.check_device(on_cuda=True)
    config = config_from_dict({"train.optimizer": "foreign_parts:Momentum"})
    with pytest.raises(ConfigError, match=r"^train\.optimizer foreign_parts:Momentum: on GPUs"):
        config.check_device(on_cuda=True)

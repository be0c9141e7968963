"""Options of the hand-rolled optimizer: what the presets are, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kge_torchrec.config import Config, ConfigError, EntitiesConfig
from kge_torchrec.config.parser import load_config
from kge_torchrec.config.sparse_options import (
    FBGEMM,
    PRESETS,
    SparseOptions,
    choose,
    preset,
)
from kge_torchrec.embeddings.optimizers import TABLE_OPTIMIZERS

CONTRADICTIONS = [
    ("fbgemm", "adagrad", {"bias_correction": "row"}, "bias_correction"),
    ("fbgemm", "rowwise_adagrad", {"bias_correction": "table"}, "bias_correction"),
    ("fbgemm", "sgd", {"bias_correction": "shard"}, "bias_correction"),
    ("dgl", "adagrad", {"bias_correction": "row"}, "bias_correction"),
    ("fbgemm", "adagrad", {"epsilon": "uncorrected"}, "epsilon"),
    ("fbgemm", "rowwise_adagrad", {"epsilon": "uncorrected"}, "epsilon"),
    ("fbgemm", "sgd", {"epsilon": "uncorrected"}, "epsilon"),
    ("fbgemm", "sgd", {"epsilon": "inside"}, "epsilon"),
    ("fbgemm", "sgd", {"state_dtype": "bf16"}, "state_dtype"),
    ("fbgemm", "sgd", {"state_rounding": "nearest"}, "state_rounding"),
    ("fbgemm", "sgd", {"state_device": "cpu"}, "state_device"),
    ("fbgemm", "adam", {"state_rounding": "nearest"}, "state_rounding"),
    ("dicee", "adam", {"state_dtype": "fp32", "state_rounding": "nearest"}, "state_rounding"),
]
UNKNOWN = [
    ("duplicates", "max"),
    ("bias_correction", "column"),
    ("epsilon", "nowhere"),
    ("state_dtype", "fp16"),
    ("state_rounding", "up"),
    ("state_device", "cuda"),
    ("async_step", "yes"),
]


# Options and presets


@pytest.mark.parametrize(("option", "value"), UNKNOWN)
def test_unknown_values_list_the_known_ones(option, value):
    known = str(getattr(FBGEMM, option))
    for make in (SparseOptions, lambda **keys: choose("fbgemm", "adam", **keys)):
        with pytest.raises(ValueError, match=rf"^{option}: '{value}' is none of .*{known}"):
            make(**{option: value})


def test_options_are_frozen():
    with pytest.raises(AttributeError):
        FBGEMM.duplicates = "mean"


@pytest.mark.parametrize("optimizer", TABLE_OPTIMIZERS)
def test_fbgemm_supports_every_optimizer(optimizer):
    expected = SparseOptions(
        duplicates="sum",
        bias_correction="table",
        epsilon="outside",
        state_dtype="fp32",
        state_device="same",
        async_step=False,
    )
    assert preset("fbgemm", optimizer) == expected == FBGEMM


def test_dicee_preset_is_sparse_adam():
    assert preset("dicee", "adam") == SparseOptions(
        duplicates="sum",
        bias_correction="shard",
        epsilon="uncorrected",
        state_dtype="bf16",
        state_rounding="nearest",
        state_device="cpu",
        async_step=True,
    )


def test_dgl_presets_are_adam_and_adagrad():
    adam = SparseOptions(duplicates="mean", bias_correction="row", epsilon="outside")
    assert preset("dgl", "adam") == adam
    assert preset("dgl", "adagrad") == replace(adam, epsilon="inside")


@pytest.mark.parametrize("optimizer", TABLE_OPTIMIZERS)
@pytest.mark.parametrize(("name", "has"), [("dicee", {"adam"}), ("dgl", {"adam", "adagrad"})])
def test_presets_without_the_optimizer_are_rejected(name, has, optimizer):
    if optimizer in has:
        assert preset(name, optimizer) != FBGEMM
        return
    with pytest.raises(ValueError, match=rf"^preset: {name} has .*adam.* not {optimizer}$"):
        preset(name, optimizer)


def test_unknown_preset_lists_the_known_ones():
    with pytest.raises(ValueError, match="^preset: 'keras' is none of " + ", ".join(PRESETS)):
        choose("keras", "adam")


# Choices


@pytest.mark.parametrize("name", PRESETS)
def test_default_options_are_the_preset(name):
    nothing = dict.fromkeys(("duplicates", "epsilon", "state_rounding", "async_step"))
    assert choose(name, "adam") == choose(name, "adam", **nothing) == preset(name, "adam")


def test_override_changes_one_option():
    dicee = preset("dicee", "adam")
    assert choose("dicee", "adam", async_step=False) == replace(dicee, async_step=False)
    assert choose("dicee", "adam", state_rounding="stochastic") == replace(
        dicee, state_rounding="stochastic"
    )
    assert choose("dgl", "adagrad", epsilon="outside").epsilon == "outside"
    assert choose("fbgemm", "sgd", duplicates="mean") == SparseOptions(duplicates="mean")


@pytest.mark.parametrize(("name", "optimizer", "chosen", "option"), CONTRADICTIONS)
def test_contradictions_are_rejected(name, optimizer, chosen, option):
    with pytest.raises(ValueError, match=f"^{option}: "):
        choose(name, optimizer, **chosen)


# Keys of a config


def handrolled(preset="fbgemm", **options):
    return EntitiesConfig(engine="handrolled", options={"preset": preset, **options})


@pytest.mark.parametrize("name", PRESETS)
def test_config_keys_set_the_options(name):
    assert handrolled(preset=name).sparse_options("adam") == preset(name, "adam")
    chosen = handrolled(preset=name, duplicates="mean", async_step=True).sparse_options("adam")
    assert chosen == replace(preset(name, "adam"), duplicates="mean", async_step=True)


@pytest.mark.parametrize(("name", "optimizer", "chosen", "option"), CONTRADICTIONS)
def test_contradictions_name_the_key(name, optimizer, chosen, option):
    with pytest.raises(ConfigError, match=rf"^entities\.options\.{option}: "):
        handrolled(preset=name, **chosen).sparse_options(optimizer)


@pytest.mark.parametrize(("option", "value"), UNKNOWN)
def test_unknown_values_name_the_key(option, value):
    with pytest.raises(ConfigError, match=rf"^entities\.options\.{option}: '{value}' is none of"):
        handrolled(**{option: value}).sparse_options("adam")


def test_preset_without_the_optimizer_names_the_key():
    with pytest.raises(ConfigError, match=r"^entities\.options\.preset: dicee has adam only"):
        handrolled(preset="dicee").sparse_options("adagrad")
    with pytest.raises(ConfigError, match=r"^entities\.options\.preset: 'keras' is none of"):
        handrolled(preset="keras").sparse_options("adam")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("duplicates", "mean"),
        ("bias_correction", "row"),
        ("epsilon", "inside"),
        ("state_dtype", "bf16"),
        ("state_device", "cpu"),
        ("async_step", True),
    ],
)
def test_torchrec_supports_only_fbgemm_options(option, value):
    with pytest.raises(
        ConfigError, match=rf"^entities\.options\.{option} .*entities\.engine handrolled$"
    ):
        EntitiesConfig(options={option: value}).sparse_options("adam")
    same = EntitiesConfig(options={option: getattr(FBGEMM, option)})
    assert same.sparse_options("adam") == FBGEMM


@pytest.mark.parametrize("name", ["dicee", "dgl"])
def test_torchrec_supports_only_the_fbgemm_preset(name):
    with pytest.raises(
        ConfigError, match=rf"^entities\.options\.preset '{name}' .*engine handrolled$"
    ):
        EntitiesConfig(options={"preset": name}).sparse_options("adam")


def test_contradictory_config_is_rejected():
    keys = {
        "entities.engine": "handrolled",
        "entities.options.preset": "dicee",
        "train.optimizer": "adam",
    }
    assert load_config(None, keys).entities.preset == "dicee"
    with pytest.raises(ConfigError, match=r"^entities\.options\.preset: dicee has adam only"):
        load_config(None, {**keys, "train.optimizer": "adagrad"})
    with pytest.raises(ConfigError, match=r"^train\.optimizer_options\.weight_decay: dicee"):
        load_config(None, {**keys, "train.optimizer_options.weight_decay": 0.1})
    assert Config().entities.sparse_options(Config().train.optimizer) == FBGEMM


@pytest.mark.parametrize(
    "keys", [{"duplicates": "mean"}, {"state_dtype": "bf16"}, {"state_device": "cpu"}]
)
def test_foreign_optimizer_takes_its_own_step(keys):
    assert choose("fbgemm", "foreign_parts:Momentum", async_step=True).async_step
    with pytest.raises(ValueError, match=f"{next(iter(keys))}: foreign_parts:Momentum is not ours"):
        choose("fbgemm", "foreign_parts:Momentum", **keys)

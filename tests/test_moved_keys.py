"""Earlier names of config keys: they work as aliases, with a warning."""

from __future__ import annotations

import pytest
import yaml
from training_runs import config_of

from kge_torchrec.config import Config, all_keys
from kge_torchrec.config.keys import moved_keys
from kge_torchrec.config.parser import as_config, config_from_dict, load_config

MOVED = {  # old: (value, other keys that it needs)
    "loss.margin": (3.0, {"loss.name": "margin"}),
    "loss.temperature": (2.0, {"loss.name": "self_adversarial"}),
    "loss.reduction": ("mean", {"loss.name": "bce"}),
    "loss.label_smoothing": (0.1, {}),
    "negatives.degree_power": (0.5, {"negatives.sampling": "degree"}),
    "entities.duplicates": ("mean", {}),
    "entities.bias_correction": ("row", {}),
    "entities.epsilon": ("inside", {}),
    "entities.state_dtype": ("bf16", {}),
    "entities.state_rounding": ("nearest", {"entities.state_dtype": "bf16"}),
    "entities.state_device": ("cpu", {}),
    "entities.async_step": (True, {}),
    "data.ratio": ([0.8, 0.1, 0.1], {}),
    "data.has_header": (True, {}),
    "data.columns": (["a", "b", "c"], {}),
    "data.literals": ("keep", {}),
    "model.entity_dropout": (0.1, {}),
    "model.relation_dropout": (0.1, {}),
    "model.input_dropout": (0.1, {}),
    "model.hidden_dropout": (0.1, {}),
    "model.init_width": ("pca", {"model.init_from": "x.npy"}),
    "model.init_frozen": (True, {"model.init_from": "x.npy"}),
    "negatives.types": ("x.tsv", {"negatives.among": "types"}),
    "evaluation.types": ("x.tsv", {"evaluation.candidates": "types"}),
    "negatives.file": ("x.tsv", {"negatives.among": "own"}),
    "negatives.among_share": (0.5, {"negatives.among": "seen"}),
    "dense.sharding": ("grad_op", {"dense.wrapper": "fsdp"}),
    "dense.replicas": (2, {"dense.wrapper": "hybrid"}),
    "dense.cpu_offload": (True, {"dense.wrapper": "fsdp"}),
    "dense.compile_mode": ("max-autotune", {"dense.compile": True}),
    "train.beta1": (0.5, {"train.optimizer": "adam"}),
    "train.beta2": (0.5, {"train.optimizer": "adam"}),
    "train.eps": (1e-4, {}),
    "train.weight_decay": (0.1, {"train.optimizer": "rowwise_adagrad"}),
    "train.decay": (0.5, {"train.schedule": "exponential"}),
    "train.plateau_patience": (1, {"train.schedule": "plateau"}),
    "train.plateau_threshold": (0.1, {"train.schedule": "plateau"}),
    "run.tensorboard": (False, {}),
    "run.wandb": ("x", {}),
    "loss.l2": (0.1, {}),
    "entities.preset": ("dgl", {}),
    "train.clip_norm": (1.0, {}),
    "train.clip_value": (0.1, {}),
    "train.freeze": ("old", {}),
    "checkpoint.every_epochs": (3, {}),
    "checkpoint.every_steps": (2, {}),
}


@pytest.mark.parametrize("old", MOVED)
def test_old_names_of_keys_work_with_a_warning(old, tmp_path, caplog):
    value, others = MOVED[old]
    if old.startswith("entities."):
        others = {**others, "entities.engine": "handrolled", "train.optimizer": "adam"}
    new, _ = moved_keys(Config)[old]
    expected = load_config(None, {**others, new: value})
    caplog.clear()
    assert load_config(None, {**others, old: value}) == expected
    assert f"{old} is now {new}; the old name still works" in caplog.messages
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**others, old: value}))
    caplog.clear()
    assert load_config(file) == expected
    assert f"{old} is now {new}; the old name still works" in caplog.messages
    words = [f"--{key}={other}" for key, other in others.items()]
    assert load_config(None, [*words, f"--{old}", str(value)]) == expected
    assert as_config({**others, old: value}) == expected


def test_tf32_of_an_earlier_config_is_a_precision(tmp_path, caplog):
    every_key = config_of("store").to_dict()
    file = tmp_path / "run.yaml"
    for precision, tf32, expected in (
        ("fp32", True, "tf32"), ("bf16", True, "bf16"), ("bf16", False, "bf16"),
    ):  # fmt: skip
        every_key["train"] |= {"precision": precision, "tf32": tf32}
        file.write_text(yaml.safe_dump(every_key))
        assert load_config(file).train.precision == expected
        assert config_from_dict(every_key).train.precision == expected
        words = [f"--train.precision={precision}", "--train.tf32", str(tf32).lower()]
        assert load_config(None, words[1:]).train.precision == ("tf32" if tf32 else "fp32")
        if precision == "bf16":
            assert load_config(None, words).train.precision == "bf16"
    assert load_config(None, {"train.tf32": True}).train.precision == "tf32"
    assert load_config(file, {"train.tf32": True}).train.precision == "tf32"
    assert "train.tf32 is now train.precision tf32; the old name still works" in caplog.messages


@pytest.mark.parametrize("words", [
    ["--loss.l2", "0.1", "--loss.regularizers", "{dura: 0.2}"],
    ["--loss.l2=0.1", "--loss.regularizers={dura: 0.2}"],
    ["--loss.regularizers.dura", "0.2", "--loss.l2", "0.1"],
])  # fmt: skip
def test_old_name_adds_to_the_options_that_are_there(words, tmp_path):
    expected = {"l2": 0.1, "dura": 0.2}
    assert load_config(None, words).loss.regularizers == expected
    for options in ({"loss.regularizers": {"dura": 0.2}}, {"loss.regularizers.dura": 0.2}):
        assert config_from_dict({"loss.l2": 0.1, **options}).loss.regularizers == expected
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"loss": {"regularizers": {"dura": 0.2}, "l2": 0.1}}))
    assert load_config(file).loss.regularizers == expected
    assert load_config(file, {"loss.regularizers.l2": 0.3}).loss.regularizers["l2"] == 0.3


def test_removed_option_is_dropped_with_a_sentence(tmp_path, caplog):
    said = "dense.options.compile_mode no longer exists: torch.compile runs in its default mode"
    file = tmp_path / "run.yaml"
    for mode, warnings in (("default", 0), ("reduce-overhead", 1)):
        for dense in ({"options": {"compile_mode": mode}}, {"compile_mode": mode}):
            file.write_text(yaml.safe_dump({"dense": dense}))
            caplog.clear()
            assert load_config(file) == config_from_dict({})
            assert sum(said in message for message in caplog.messages) == warnings
    assert load_config(None, ["--dense.compile_mode", "max-autotune"]).dense.options == {}


def test_every_moved_key_is_in_the_table():
    assert set(MOVED) == set(moved_keys(Config))
    assert not set(MOVED) & set(all_keys()) and len(all_keys()) <= 90

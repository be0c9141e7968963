"""The search space: what a file may say, conditions, and what is refused."""

from __future__ import annotations

import optuna
import pytest
import yaml

from kge_torchrec.config import ConfigError
from kge_torchrec.config.parser import config_from_dict
from kge_torchrec.config.registry import resolve
from kge_torchrec.config.sizing import GraphSize
from kge_torchrec.config.yaml_file import read_yaml
from kge_torchrec.tuning.space import default_space, parameters_of, suggested
from kge_torchrec.tuning.trials import with_values

TEXT = """
loss.name: [softmax, margin]
loss.options.margin: {low: 1.0, high: 20.0, when: {loss.name: [margin, self_adversarial]}}
train.optimizer: [adagrad, adam]
train.lr:
  - {low: 0.02, high: 1.0, log: true, when: {train.optimizer: adagrad}}
  - {low: 1.0e-4, high: 0.01, log: true, when: {train.optimizer: adam}}
negatives.count: {low: 8, high: 64, step: 8, when: {negatives.regime: sampled}}
model.options.p: {low: 0, high: 2}
"""
BASE = {"model.scorer": "keci", "model.dim": 12}


def drawn(space: dict, config, count: int) -> list[dict]:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    parameters = parameters_of(space)
    return [suggested(parameters, config, study.ask()) for _ in range(count)]


def test_space_reads_conditions_ranges_and_types():
    space, config = yaml.safe_load(TEXT), config_from_dict(BASE)
    rates: dict[str, list] = {"adagrad": [], "adam": []}
    for values in drawn(space, config, 24):
        assert ("loss.options.margin" in values) == (values["loss.name"] == "margin")
        rates[values["train.optimizer"]].append(values["train.lr"])
        assert values["negatives.count"] % 8 == 0 and isinstance(values["negatives.count"], int)
        made = with_values(config, values)
        assert made.model.options_in("options").p == values["model.options.p"]
        assert made.train.lr == values["train.lr"]
    assert min(rates["adagrad"]) >= 0.02 and max(rates["adagrad"]) <= 1
    assert min(rates["adam"]) >= 1e-4 and max(rates["adam"]) <= 0.01
    other = config_from_dict({**BASE, "negatives.regime": "1vsall", "train.optimizer": "sgd"})
    fewer = {k: v for k, v in space.items() if k != "train.optimizer"}
    assert all({"negatives.count", "train.lr"}.isdisjoint(v) for v in drawn(fewer, other, 9))


def test_options_of_another_part_are_left_out():
    options = {"train.optimizer_options": {"beta1": 0.5, "eps": 1e-4}}
    config = config_from_dict({**BASE, "train.optimizer": "adam", **options})
    trial = with_values(config, {"train.optimizer": "adagrad"})
    assert trial.train.optimizer_options == {"eps": 1e-4}
    trial = with_values(config, {"train.optimizer": "rowwise_adam"})
    assert trial.train.optimizer_options == {"beta1": 0.5, "eps": 1e-4}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train.rate: [1, 2]", "space.yaml:1: unknown key train.rate; did you mean train."),
        ("train: [1, 2]", "space.yaml:1: train is a group of keys"),
        ("data.path: [a, b]", "space.yaml:1: data.path: all trials of a study share this key"),
        ("seed: [1]\ntrain.epochs: [1, 2]", "space.yaml:2: train.epochs: all trials of a study"),
        ("train.lr: {low: 1.0, hihg: 2.0}", "space.yaml:1: train.lr: hihg is not one of"),
        ("train.lr: {low: 2.0, high: 1.0}", "train.lr: .*low=2.0, high=1.0"),
        ("train.lr: {low: 0.0, high: 1.0, log: true}", "train.lr: .*low"),
        ("train.lr: {low: 1e-4, high: 1.0}", "must be numbers, got '1e-4' .YAML: 1.0e-4"),
        ("train.lr: {low: 1.0}", "low and high must be numbers, got None"),
        ("train.lr: []", "give a list of choices"),
        ("train.lr: {choices: [1.0], low: 1.0}", "give a list of choices"),
        ("train.lr: {low: 0.1, high: 1.0, when: {train.optimiser: adam}}", "unknown key train.opt"),
        ("train.lr: [{low: 0.1, high: 1.0}, {low: 2.0, high: 3.0}]", "needs a `when`"),
        ("train.lr: {choices: [1], when: {train.optimizer: adam}}\ntrain.optimizer: [adam]",
         "space.yaml:1: train.lr: its condition names train.optimizer, which must come before it"),
        ("train.lr: {choices: [1], when: {train.lr: 1}}", "must come before"),
        ("[train.lr]", "must map each key"),
    ],
)  # fmt: skip
def test_invalid_spaces_are_rejected(tmp_path, text, words):
    file = tmp_path / "space.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        ranges, lines = read_yaml(file)
        parameters_of(ranges, str(file), lines)


@pytest.mark.parametrize("scorer", ["complex", "rotate", "conve"])
def test_default_spaces_are_trainable(scorer):
    needs = resolve("scorer", scorer).needs_reciprocal
    base = {"model.scorer": scorer, "model.dim": 48, "model.reciprocal": needs}
    config = config_from_dict(base)
    for entities in (100, 10_000_000):
        values = default_space(config, entities)
        whole = "1vsall" in values.get("negatives.regime", ())
        assert whole == (entities == 100 and not resolve("scorer", scorer).is_distance)
        # A study settles what depends on the graph before its trials change what they may.
        resolved = config.settled(GraphSize(entities, 50, 10 * entities), False, 1)
        for chosen in drawn(values, resolved, 8):
            with_values(resolved, chosen)

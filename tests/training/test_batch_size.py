"""What train.batch_size null stands for, and that a run keeps the number it started with."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from training_runs import config_of, tiny_store

from kge_torchrec import api
from kge_torchrec.config import Config, ConfigError
from kge_torchrec.config.parser import load_config
from kge_torchrec.planning.command import run as plan

MILLION = 10**6


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tiny_store(tmp_path_factory.mktemp("graph") / "store").path


@pytest.mark.parametrize(
    "on_cuda, ranks, triples, keys, size",
    [
        (False, 4, 1000 * MILLION, {}, 1024),
        (True, 1, 1000 * MILLION, {}, 8192),
        (True, 64, 1000 * MILLION, {}, 64 * 8192),
        (True, 64, 10 * MILLION, {}, 100_000),
        (True, 1, 272_115, {}, 2721),  # FB15k-237
        (True, 8, 5216, {}, 1024),  # UMLS
        (True, 8, 1000 * MILLION, {"negatives.regime": "kvssample"}, 8 * 8192),
        (True, 8, 1000 * MILLION, {"negatives.regime": "1vsall"}, 1024),
        (True, 8, 1000 * MILLION, {"train.batch_size": 77}, 77),
    ],
)
def test_by_device_and_data(on_cuda, ranks, triples, keys, size):
    config = load_config(None, keys).with_batch_size(on_cuda, ranks, triples)
    assert config.train.batch_size == size
    assert config.with_batch_size(True, 1000, 10**12) is config


def test_a_run_keeps_its_number(store, tmp_path, monkeypatch):
    """On whatever it goes on, by hand or as a scheduler does it."""
    config = config_of(store, tmp_path, train__batch_size=None, train__epochs=1, run__resume="auto")
    run = api.train(config)
    assert load_config(tmp_path / "config.yaml").train.batch_size == 1024
    assert run.config.train.batch_size == 1024

    def other(self, *_):
        return self if self.train.batch_size else replace(
            self, train=replace(self.train, batch_size=3))  # fmt: skip

    monkeypatch.setattr(Config, "with_batch_size", other)
    assert api.train(config).config.train.batch_size == 1024
    assert api.resume(tmp_path, {"train.epochs": 2}).config.train.batch_size == 1024
    with pytest.raises(ConfigError, match=r"train.batch_size is 1024 in this run"):
        api.resume(tmp_path, {"train.batch_size": None})


def test_a_plan_is_of_the_number_that_training_takes(capsys):
    sizes = ["--entities", "1000", "--relations", "5", "--triples", "10M", "--format", "json"]
    found = {}
    for devices in ("2xCPU", "2xH200"):
        plan(["--devices", devices, *sizes, "--model.dim", "8"])
        found[devices] = json.loads(capsys.readouterr().out)["run"]["batch_size"]
    assert found == {"2xCPU": 1024, "2xH200": 2 * 8192}

"""Defaults that depend on the graph; a run keeps the values that it started with."""

from __future__ import annotations

import json
from dataclasses import replace
from operator import attrgetter

import pytest
from training_runs import config_of

from kge_torchrec import api
from kge_torchrec.cli import run_verb
from kge_torchrec.config import RESOLVED_KEYS, SCORER_NAMES, Config, ConfigError, GraphSize
from kge_torchrec.config.parser import load_config
from kge_torchrec.config.registry import resolve

MILLION = 10**6


@pytest.mark.parametrize(
    "on_cuda, ranks, triples, keys, size",
    [
        (False, 4, 1000 * MILLION, {}, 1024),
        (False, 1, 272_115, {}, 512),  # FB15k-237
        (False, 1, 5216, {}, 128),  # UMLS
        (True, 1, 1000 * MILLION, {}, 8192),
        (True, 64, 1000 * MILLION, {}, 64 * 8192),
        (True, 64, 10 * MILLION, {}, 100_000),
        (True, 1, 272_115, {}, 2721),
        (True, 8, 5216, {}, 128),
        (True, 8, 1000 * MILLION, {"negatives.regime": "kvssample"}, 8 * 8192),
        (True, 8, 1000 * MILLION, {"negatives.regime": "1vsall"}, 1024),
        (True, 8, 1000 * MILLION, {"train.batch_size": 77}, 77),
    ],
)
def test_batch_size_depends_on_device_and_data(on_cuda, ranks, triples, keys, size):
    config = load_config(None, keys).settled(GraphSize(1000, 50, triples), on_cuda, ranks)
    assert config.train.batch_size == size
    assert config.settled(GraphSize(3, 1, 7), True, 1000) is config


FB15K_237 = GraphSize(14_541, 237, 272_115, 17_535)
KINSHIP = GraphSize(104, 25, 8_544, 1_068)
WIKIDATA = GraphSize(4_594_485, 822, 20_614_279, 5_163)


@pytest.mark.parametrize(
    "graph, keys, expected",
    [
        (FB15K_237, {}, {"model.dim": 256, "loss.n3": 0.042, "loss.relation_weight": 0.5,
                         "negatives.count": 1024, "train.epochs": 21, "train.lr": 0.1,
                         "evaluation.every": 2, "evaluation.max_triples": 0}),
        (KINSHIP, {}, {"loss.n3": 0.02, "loss.relation_weight": 0.25, "negatives.count": 256,
                       "train.epochs": 100, "evaluation.every": 10}),
        (WIKIDATA, {}, {"model.dim": 128, "loss.n3": 0.085, "train.epochs": 10,
                        "evaluation.every": 1, "evaluation.max_triples": 2176}),
        (GraphSize(86_054_151, 14_824, 304_727_650), {}, {"loss.relation_weight": 0.0}),
        (KINSHIP, {"size": "large"}, {"model.dim": 1024}),
        (FB15K_237, {"size": "small"}, {"model.dim": 64, "negatives.count": 256,
                                        "train.epochs": 10}),
        (KINSHIP, {"model.scorer": "rotate", "train.optimizer": "adam"},
         {"model.init": "uniform", "model.init_scale": 0.25, "loss.n3": 0.0, "train.lr": 0.003,
          "loss.relation_weight": 0.0}),
        (KINSHIP, {"loss.name": "bce", "negatives.regime": "kvsall"},
         {"loss.n3": 0.0, "loss.relation_weight": 0.0}),
        (KINSHIP, {"model.scorer": "conve", "model.options.height": 10}, {"model.dim": 260}),
        (KINSHIP, {"model.scorer": "rescal"}, {"model.dim": 64}),
        (KINSHIP, {"train.epochs": 7, "loss.n3": 0.3, "train.lr": 1.0},
         {"train.epochs": 7, "evaluation.every": 1, "loss.n3": 0.3, "train.lr": 1.0}),
    ],
)  # fmt: skip
def test_defaults_depend_on_the_graph(graph, keys, expected):
    config = load_config(None, keys).settled(graph)
    assert {key: attrgetter(key)(config) for key in expected} == expected
    assert all(attrgetter(key)(config) is not None for key in RESOLVED_KEYS)


@pytest.mark.parametrize(
    "settings, followed",
    [
        ({"model.init": "xavier_normal"}, {"model.init_scale": 1.0}),
        ({"model.init": "xavier_uniform"}, {"model.init_scale": 1.0}),
        ({"model.init": "uniform"}, {"model.init_scale": 0.25}),
        ({"model.init": "normal"}, {"model.init_scale": 0.001}),
        ({"model.init": "normal", "model.scorer": "conve"}, {"model.init_scale": 0.001}),
        ({"model.init": "xavier_normal", "model.scorer": "rotate"}, {"model.init_scale": 1.0}),
        ({"model.init_scale": 0.5}, {"model.init": "normal"}),
        ({"model.scorer": "rotate"}, {"model.init": "uniform", "model.init_scale": 0.25}),
        ({"train.optimizer": "adam"}, {"train.lr": 0.003}),
        ({"train.optimizer": "sgd"}, {"train.lr": 0.5}),
        ({"train.epochs": 30}, {"evaluation.every": 3}),
        ({"loss.name": "margin"}, {"loss.n3": 0.0, "loss.relation_weight": 0.0}),
        ({"loss.regularizers": {"n3": 0.2}}, {"loss.n3": 0.0, "loss.relation_weight": 0.25}),
        ({"loss.regularizers": {"ivr": {"lambda1": 0.2}}}, {"loss.n3": 0.0}),
        ({"negatives.regime": "kvsall"}, {"loss.relation_weight": 0.0}),
        ({"model.biases": True}, {"model.dim": 260}),
        ({"size": "small"}, {"model.dim": 64, "train.epochs": 50}),
    ],
)  # fmt: skip
def test_defaults_follow_the_keys_they_depend_on(settings, followed):
    config = load_config(None, settings).settled(KINSHIP)
    assert {key: attrgetter(key)(config) for key in (*settings, *followed)} == {
        **settings,
        **followed,
    }


@pytest.mark.parametrize("scorer", SCORER_NAMES)
def test_every_scorer_and_graph_has_valid_defaults(scorer):
    for graph in (GraphSize(1, 1, 1), GraphSize(2, 1, 0), GraphSize(10**9, 9, 10**11)):
        keys = {"model.scorer": scorer, "model.reciprocal": True}
        config, kind = load_config(None, keys).settled(graph), resolve("scorer", scorer)
        kind.check(config.model.dim, True, kind.Options())


def test_run_keeps_its_batch_size(store, tmp_path, monkeypatch):
    """A run keeps its batch size when it resumes on another device, by hand or by a scheduler."""
    config = config_of(store, tmp_path, train__batch_size=None, train__epochs=1, run__resume="auto")
    run = api.train(config)
    assert load_config(tmp_path / "config.yaml").train.batch_size == 128
    assert run.config.train.batch_size == 128

    def other(self, *_, **__):
        return self if self.train.batch_size else replace(
            self, train=replace(self.train, batch_size=3))  # fmt: skip

    monkeypatch.setattr(Config, "settled", other)
    assert api.train(config).config.train.batch_size == 128
    assert api.resume(tmp_path, {"train.epochs": 2}).config.train.batch_size == 128
    with pytest.raises(ConfigError, match=r"train.batch_size is 128 in this run"):
        api.resume(tmp_path, {"train.batch_size": None})


def test_plan_uses_the_batch_size_of_training(capsys):
    sizes = ["--entities", "1000", "--relations", "5", "--triples", "10M", "--format", "json"]
    results = {}
    for devices in ("2xCPU", "2xH200"):
        run_verb("plan", ["--devices", devices, *sizes, "--model.dim", "8"])
        results[devices] = json.loads(capsys.readouterr().out)["batch_size"]
    assert results == {"2xCPU": 1024, "2xH200": 2 * 8192}


def test_run_reports_its_resolved_defaults(store, tmp_path, capsys):
    config = config_of(store, tmp_path, train__batch_size=None, train__epochs=1, run__progress=True)
    api.train(config).close()
    assert "defaults for this graph: train.batch_size 128\n" in capsys.readouterr().err

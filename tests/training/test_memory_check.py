"""Numbers that no memory can hold are refused before any work is done for them."""

from __future__ import annotations

import pytest
import torch
from training_runs import config_of, tiny_store

from kge_torchrec import api, cli
from kge_torchrec.config import ConfigError, GraphSize
from kge_torchrec.distributed.processes import Processes
from kge_torchrec.training import memory_check
from kge_torchrec.training.memory_check import check_memory

ONE = Processes(0, 1, 1, torch.device("cpu"))
GRAPH = GraphSize(1000, 10, 5000)


@pytest.mark.parametrize(
    "keys, key",
    [
        ({"model__dim": 10**9}, "model.dim: the entity table"),
        ({"model__dim": 10**6, "model__scorer": "rescal"}, "model.dim: the table of relations"),
        ({"negatives__count": 10**10}, "negatives.count: the scores of a batch"),
        ({"negatives__count": 10**30}, "negatives.count: the scores of a batch"),
    ],
)
def test_tensor_larger_than_memory_is_rejected(keys, key):
    with pytest.raises(ConfigError, match=rf"^{key} would take .* GiB per rank, which has"):
        check_memory(config_of("store", **keys), GRAPH, ONE)


def test_configs_that_fit_in_memory_are_accepted(monkeypatch):
    check_memory(config_of("store"), GRAPH, ONE)
    full = {"negatives__regime": "1vsall", "negatives__count": 10**12}
    check_memory(config_of("store", **full), GRAPH, ONE)
    monkeypatch.setattr(memory_check, "host_memory", lambda: 4 * 1000 * 8)
    check_memory(config_of("store"), GRAPH, ONE)  # 1,000 rows x 8 just fit
    two = Processes(0, 2, 2, torch.device("cpu"))  # each has half of the table and of the memory
    check_memory(config_of("store"), GRAPH, two)
    monkeypatch.setattr(memory_check, "host_memory", lambda: 4 * 1000 * 8 - 2)
    for processes in (ONE, two):
        with pytest.raises(ConfigError, match=r"^model.dim: the entity table"):
            check_memory(config_of("store"), GRAPH, processes)


def test_rejected_training_leaves_no_run_folder(tmp_path):
    store = tiny_store(tmp_path / "store").path
    with pytest.raises(ConfigError, match=r"^model.dim: the entity table would"):
        api.train(config_of(store, tmp_path / "run", model__dim=10**10))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 4 bytes")]
)
def test_out_of_memory_in_training_has_a_message(monkeypatch, capsys, error):
    def fail(_):
        raise error

    monkeypatch.setattr("kge_torchrec.cli._run", fail)
    assert cli.main(["parts", "loss"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("kge-torchrec: not enough memory") and "model.dim" in said
    monkeypatch.setattr("kge_torchrec.cli._is_out_of_memory", lambda error: False)
    with pytest.raises(type(error)):
        cli.main(["parts", "loss"])

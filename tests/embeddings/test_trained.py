"""A trained model reads what every engine wrote, on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from training_runs import config_of, fit, largest_difference, tiny_store
from worlds import run_world

from kge_torchrec import api
from kge_torchrec.config.parser import load_config
from kge_torchrec.training.checkpoints import CheckpointError

WRITERS = {
    "torchrec": {"model__scorer": "conve", "model__dim": 12},
    "handrolled": {"entities__engine": "handrolled", "dense__wrapper": "fsdp",
                   "model__normalization": "layer"},
}  # fmt: skip


def write(store: Path, folder: Path, changes: dict) -> dict:
    config = config_of(store, folder, train__epochs=1, train__optimizer="adam", **changes)
    parameters = fit(config).parameters
    config.save(folder / "config.yaml")
    return parameters


def read(folder: Path) -> dict:
    with api.open_run(folder) as run:
        shard, scorer = run.model.shard, run.model.scorer
        table = shard.fetch(torch.arange(shard.num_entities))
        dense = {name: p.detach().clone() for name, p in scorer.named_parameters()}
        return {"entities": table, **dense}


@pytest.mark.parametrize(
    "change, said",
    [
        ({"model.dim": 16}, r"weight has the size \[37, 8\] instead of \[37, 16\]"),
        ({"model.normalization": "layer"}, "the checkpoint has no .*entity_norm"),
    ],
)
@pytest.mark.first_tier("change1-the checkpoint has no .*entity_norm")
def test_checkpoint_of_another_model_is_rejected(tmp_path, change, said):
    store, folder = tiny_store(tmp_path / "store").path, tmp_path / "run"
    write(store, folder, {})
    load_config(folder / "config.yaml", change).save(folder / "config.yaml")
    with api.open_run(folder) as run, pytest.raises(CheckpointError, match=said):
        run.evaluate()


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.first_tier("torchrec")
@pytest.mark.slow
def test_any_number_of_ranks_reads_the_parameters(tmp_path, writer):
    store = tiny_store(tmp_path / "store").path
    written = run_world(2, write, store, tmp_path / "run", WRITERS[writer])[0]
    for ranks in (1, 4):
        for results in run_world(ranks, read, tmp_path / "run"):
            assert largest_difference(results, written) == 0

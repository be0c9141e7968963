"""A trained model reads what every engine wrote, on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from training_runs import config_of, fit, largest_difference
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


def test_checkpoint_of_another_model_is_rejected(store, tmp_path):
    write(store, tmp_path, {})
    file, said = tmp_path / "config.yaml", "the checkpoint has no .*entity_norm"
    load_config(file, {"model.normalization": "layer"}).save(file)
    with api.open_run(tmp_path) as run, pytest.raises(CheckpointError, match=said):
        run.evaluate()


@pytest.mark.parametrize("writer", WRITERS)
def test_any_number_of_ranks_reads_the_parameters(store, tmp_path, writer):
    written = run_world(2, write, store, tmp_path / "run", WRITERS[writer])[0]
    for ranks in (1, 4):
        for results in run_world(ranks, read, tmp_path / "run"):
            assert largest_difference(results, written) == 0

"""Assembly of the parts of a run from its config."""

from __future__ import annotations

import pytest
import torch
from training_runs import config_of, tiny_store

from kge_torchrec.distributed.processes import Processes
from kge_torchrec.training.assembly import build_batches, examples_per_epoch

ALONE = Processes(0, 1, 1, torch.device("cpu"))


@pytest.mark.parametrize("regime", ["sampled", "1vsall", "kvsall", "allvsall", "kvssample"])
def test_examples_match_the_batches(regime, tmp_path):
    store = tiny_store(tmp_path / "store")
    for sides in ({}, {"negatives__sides": "tail", "model__reciprocal": False}):
        keys = {"negatives__regime": regime, "loss__name": "bce", "train__batch_size": 8, **sides}
        config = config_of("none", **keys)
        assert examples_per_epoch(config, store) == build_batches(config, store, ALONE).examples

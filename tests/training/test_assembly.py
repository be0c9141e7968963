"""What a config is put together to, and what it is refused for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from training_runs import config_of, tiny_store

from kge_torchrec.config import Config, ConfigError
from kge_torchrec.distributed.processes import Processes
from kge_torchrec.models.model import Objective
from kge_torchrec.training.assembly import build_batches, build_objective, examples_per_epoch

REGIMES = ("sampled", "1vsall", "kvsall", "allvsall", "kvssample")
ALONE = Processes(0, 1, 1, torch.device("cpu"))


def config_with(regime: str, **changes) -> Config:
    return config_of("none", negatives__regime=regime, loss__name="bce", model__dim=8, **changes)


@pytest.mark.parametrize("regime", REGIMES)
def test_a_scorer_that_encodes_no_queries_is_for_sampled_negatives(regime):
    """It would fail at the first step, by a name that is no word of the config."""
    config = config_with(regime, model__scorer="foreign_parts:Distance")
    if regime == "sampled":
        assert isinstance(build_objective(config, 2), Objective)
    else:
        with pytest.raises(ConfigError, match=rf"model\.scorer: .*:Distance .*regime {regime} "):
            build_objective(config, 2)


@pytest.mark.parametrize("regime", REGIMES)
def test_examples_are_those_of_the_batches(regime, tmp_path):
    config = config_with(regime, train__batch_size=8)
    store = tiny_store(tmp_path / "store")
    tails = replace(config, negatives=replace(config.negatives, sides="tail"))
    for one in (config, tails):
        assert examples_per_epoch(one, store) == build_batches(one, store, ALONE).examples

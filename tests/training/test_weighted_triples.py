"""Weights of triples: what refuses them, and what lacks them; test_exact trains with them."""

from __future__ import annotations

import pytest
from training_runs import config_of, fit, random_triples

from kge_torchrec.config import ConfigError
from kge_torchrec.config.parser import config_from_dict
from kge_torchrec.data.prepare import prepare
from kge_torchrec.errors import DataError


@pytest.mark.parametrize("regime", ["kvsall", "kvssample"])
def test_queries_with_several_answers_reject_weights(regime):
    keys = {"data.weights": "loss", "negatives.regime": regime}
    with pytest.raises(ConfigError, match=r"data.weights loss: queries of .* use sampled or 1vs"):
        config_from_dict(keys)


def test_missing_weights_are_reported(tmp_path):
    """Missing weights are reported for a store and for files, with the key that adds them."""
    store = prepare({"train": random_triples(9, 2, 20)}, tmp_path / "store")
    with pytest.raises(DataError, match=r"data.weights loss: the store has no weights"):
        fit(config_of(store.path, tmp_path / "run", data__weights="loss"))
    (tmp_path / "x.tsv").write_text("a\tr\tb\t0.5\n")
    with pytest.raises(DataError, match=r"read it with --data.weights loss$"):
        fit(config_of(tmp_path / "x.tsv", tmp_path / "other"))

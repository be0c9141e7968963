"""Dropout in a run: other elements at every step, and on every rank that has its own queries."""

from __future__ import annotations

import pytest
from training_runs import config_of, fit, tiny_store
from worlds import run_world

from kge_torchrec.training.trainer import Trainer

REGIMES = ("sampled", "kvssample", "1vsall")
STEPS = 4


def rank_drops(configs) -> dict[str, list[bytes]]:
    """Return by regime the masks of encoded queries that this rank draws, in order."""
    results: dict[str, list[bytes]] = {}

    def watch(loop: Trainer) -> None:
        loop._save = lambda ends=False: None
        masks = results.setdefault(loop.config.negatives.regime, [])
        layer = loop.session.scorer.hidden_dropout
        layer.register_forward_hook(
            lambda _, inputs, out: masks.append((out[0, :5] == 0).numpy().tobytes())
        )

    for config in configs:
        fit(config, watch)
    return results


@pytest.fixture(scope="module")
def masks(tmp_path_factory) -> list[dict[str, list[bytes]]]:
    """Checks two ranks."""
    folder = tmp_path_factory.mktemp("dropout")
    store = tiny_store(folder / "store", train=32 * STEPS).path
    changes = {"model__dropout__hidden": 0.5, "train__epochs": 2}
    configs = [config_of(store, folder / r, negatives__regime=r, **changes) for r in REGIMES]
    return run_world(2, rank_drops, configs)


@pytest.mark.parametrize("regime", ["sampled", "kvssample"])
def test_steps_ranks_and_sides_drop_different_elements(masks, regime):
    drawn = [mask for rank in masks for mask in rank[regime]]
    assert len(drawn) >= 2 * 2 * 2 * STEPS  # epochs, ranks, sides
    assert len(set(drawn)) == len(drawn)


def test_full_candidates_drop_alike_on_ranks_but_not_on_steps(masks):
    one, other = (rank["1vsall"] for rank in masks)
    assert one == other
    assert len(set(one)) == len(one) == 2 * STEPS

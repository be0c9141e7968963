"""Into how many bags ids are dealt changes nothing but the speed of a GPU's kernels."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training_runs import config_of, fit, largest_difference, tiny_store
from worlds import run_world

from kge_torchrec.data.batches import LOOKUP_BAGS, as_feature

VARIANTS = {
    "sparse_dist": {"train__optimizer": "adam"},
    "micro-batches": {"train__accumulation": 3, "train__clip__norm": 0.1},
    "kvssample": {"negatives__regime": "kvssample"},
}
BAGS = (1, 4096)


@given(ids=st.lists(st.integers(0, 9), max_size=20), bags=st.integers(1, 30))
def test_bags_are_even_and_keep_the_order(ids, bags):
    feature = as_feature(torch.tensor(ids, dtype=torch.int64), bags)
    lengths = feature.lengths().tolist()
    assert feature.values().tolist() == ids and sum(lengths) == len(ids)
    assert len(lengths) == feature.stride() == bags
    assert max(lengths) - min(lengths) <= 1
    assert feature.length_per_key() == [len(ids)] and feature.offset_per_key() == [0, len(ids)]


def test_lookups_use_many_bags_on_cuda_and_one_on_the_cpu():
    assert LOOKUP_BAGS == {"cpu": 1, "cuda": 4096}


def rank_trains_all(store: Path, folder: Path) -> dict:
    results = {}
    for name, changes in VARIANTS.items():
        for bags in BAGS:
            run = folder / f"{name}-{bags}"
            config = config_of(store, run, train__epochs=1, **changes)
            with patch.dict(LOOKUP_BAGS, cpu=bags):
                results[name, bags] = fit(config, remember_bags).parameters
                assert bag_counts == {bags}
    return results


bag_counts: set[int] = set()


def remember_bags(loop) -> None:
    bag_counts.clear()
    batch = loop.batches.batch

    def remembered(*arguments):
        made = batch(*arguments)
        bag_counts.add(made.ids.stride())
        return made

    loop.batches.batch, loop._save = remembered, lambda: None


@functools.cache
def trained(world_size: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        store = tiny_store(Path(folder) / "store").path
        return run_world(world_size, rank_trains_all, store, Path(folder))[0]


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", VARIANTS)
def test_parameters_do_not_depend_on_the_number_of_bags(name, world_size):
    one, *others = (trained(world_size)[name, bags] for bags in BAGS)
    assert all(largest_difference(one, other) == 0 for other in others)
    assert largest_difference(one, trained(1)[name, 1]) < 1e-5

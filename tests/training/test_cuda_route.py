"""The route of ids and rows between several GPUs, forced on a CPU.

On CUDA the ids of a batch are 4,096 bags, and the rows that arrive are not permuted.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
from training_runs import (
    config_of,
    fit,
    kernels_of_cuda,
    largest_difference,
    without_checkpoints,
)
from worlds import run_world

from kge_torchrec.embeddings.torchrec import sharder
from kge_torchrec.embeddings.torchrec.collection import LOOKUP_BAGS, as_feature

VARIANTS = {
    "micro-batches": {"train__accumulation": 3, "train__clip__norm": 0.1},
    "loop": {"train__pipeline": "loop"},
    "kvssample": {"negatives__regime": "kvssample"},
    "fbgemm": {"train__optimizer": "rowwise_adagrad"},  # steps by its own table, as on CUDA
}


def take_route_of_cuda(held: ExitStack) -> set[tuple[str, int]]:
    """Make ids and rows travel as between GPUs until ``held`` is left; return what travels."""
    routes: set[tuple[str, int]] = set()

    def watch(kind: type, what: str) -> None:
        forward = kind.forward

        def watched(self, sent, *others):
            routes.add((what, sent.stride() if what == "ids" else sent.shape[1]))
            return forward(self, sent, *others)

        held.enter_context(patch.object(kind, "forward", watched))

    watch(RwSparseFeaturesDist, "ids")
    watch(sharder._OrderedOutputDist, "rows")
    held.enter_context(patch.dict(LOOKUP_BAGS, cpu=LOOKUP_BAGS["cuda"]))
    held.enter_context(patch.object(sharder, "skips_permutation", lambda device: True))
    return routes


def rank_trains_by_both(store: Path, folder: Path) -> dict:
    results = {}
    for name, changes in VARIANTS.items():
        options = {"train__optimizer": "adam", "train__pipeline": "sparse_dist", **changes}
        with kernels_of_cuda(name == "fbgemm"):
            config = config_of(store, folder / f"{name}-usual", **options)
            usual = fit(config, without_checkpoints).parameters
            with ExitStack() as held:
                routes = take_route_of_cuda(held)
                config = config_of(store, folder / f"{name}-cuda", **options)
                forced = fit(config, without_checkpoints).parameters
        results[name] = usual, forced, routes
    return results


def test_gpu_route_trains_bitwise_the_same(store, tmp_path):
    for rank in run_world(2, rank_trains_by_both, store, tmp_path):
        for name, (usual, forced, routes) in rank.items():
            assert routes == {("ids", 4096), ("rows", 8)}, name
            assert largest_difference(usual, forced) == 0, name


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

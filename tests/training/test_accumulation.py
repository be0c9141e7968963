"""Micro-batches: together they are the step in one piece, for table and dense parameters."""

from __future__ import annotations

import functools
import itertools
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from training_runs import config_of, fit, largest_difference, shared_folder, tiny_store
from worlds import run_world

from kge_torchrec.config import ConfigError
from kge_torchrec.data.batches import BatchPlan, Candidates, Delivery
from kge_torchrec.data.batches.triples import TripleBatches
from kge_torchrec.data.negatives import UniformSampler
from kge_torchrec.training.trainer import Trainer

# By the number of ranks; the first is the whole batch on one rank, which all are compared with.
PARTS = {1: (1,), 2: (1, 2, 3, 4, 8), 4: (1, 3, 8)}
# Of two ranks, what the first tier has: every optimizer and every number of micro-batches.
COVERING = {"adam": (1,), "rowwise_adagrad": (2,), "rowwise_adam": (4,), "adagrad": (3,),
            "sgd": (8,)}  # fmt: skip
# optimizer, engine (and with it pipeline), options of one run; two triples are left for the last
# step of an epoch, so that most of its micro-batches are empty
VARIANTS = {
    "adam": {"entities__engine": "torchrec"},
    "rowwise_adagrad": {"entities__engine": "handrolled", "negatives__chunk_size": 8},
    "rowwise_adam": {"entities__engine": "torchrec", "negatives__filtered": True},
    "adagrad": {"entities__engine": "handrolled", "negatives__chunk_size": 1},
    "sgd": {
        "entities__engine": "torchrec",
        "loss__n3": 0.01,
        "negatives__sides": "tail",
        "model__reciprocal": False,
    },
}


@functools.cache
def the_store() -> Path:
    return tiny_store(shared_folder() / "store").path


def changes_of(optimizer: str, parts: int) -> dict:
    return {
        "train__optimizer": optimizer,
        "train__accumulation": parts,
        "train__epochs": 2,
        "train__lr": 0.5 if optimizer == "sgd" else 0.02,
        "train__optimizer_options__eps": 1e-3,
        "train__schedule": "cosine",
        **VARIANTS[optimizer],
    }


def is_slow(optimizer: str, parts: int, world_size: int) -> bool:
    return world_size == 4 or (world_size == 2 and parts not in COVERING[optimizer])


def rank_trains_all(store: Path, folder: Path, slow: bool) -> dict:
    """Parameters and counters of every optimizer and number of micro-batches, of one tier."""
    results, world_size = {}, dist.get_world_size()
    for optimizer, parts in itertools.product(VARIANTS, PARTS[world_size]):
        if is_slow(optimizer, parts, world_size) != slow:
            continue
        config = config_of(store, folder / f"{optimizer}-{parts}", **changes_of(optimizer, parts))
        progress = []

        def prepare(loop: Trainer, progress=progress) -> None:
            loop._save = lambda: None
            progress.append(loop.progress)

        session = fit(config, prepare)
        engine_step = int(session.backend.state()["table_step"])
        counters = progress[0].global_step, progress[0].triples, engine_step
        results[optimizer, parts] = session.parameters, counters
    return results


@functools.cache
def trained(world_size: int, slow: bool = False) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        return run_world(world_size, rank_trains_all, the_store(), Path(folder), slow)


@pytest.mark.parametrize(
    "optimizer, parts, world_size",
    [
        pytest.param(
            optimizer, parts, ranks,
            marks=pytest.mark.slow if is_slow(optimizer, parts, ranks) else (),
        )
        for ranks in PARTS
        for parts in PARTS[ranks]
        for optimizer in VARIANTS
    ],
)  # fmt: skip
def test_micro_batches_equal_one_batch(optimizer, parts, world_size):
    ranks = trained(world_size, is_slow(optimizer, parts, world_size))
    actual, counters = ranks[0][optimizer, parts]
    one_batch, expected = trained(1)[0][optimizer, 1]
    assert largest_difference(actual, one_batch) < 1e-6
    assert counters == expected == (10, 260, 10)
    for other in ranks[1:]:
        assert largest_difference(other[optimizer, parts][0], actual) == 0


def rank_trains(store: Path, folder: Path, changes: dict) -> dict:
    return fit(config_of(store, folder, **changes)).parameters


@pytest.mark.parametrize("wrapper", ["fsdp", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_sharded_dense_parameters_accumulate(tmp_path, wrapper):
    changes = changes_of("adam", 4) | {"dense__wrapper": wrapper}
    results = run_world(2, rank_trains, the_store(), tmp_path, changes)
    one_batch, _ = trained(1)[0]["adam", 1]
    assert largest_difference(results[0], one_batch) < 1e-6
    assert largest_difference(results[0], results[1]) == 0


def test_run_resumes_with_another_number_of_micro_batches(tmp_path):
    run_world(2, rank_trains, the_store(), tmp_path, changes_of("adam", 3) | {"train__epochs": 1,
              "train__schedule": "constant"})  # fmt: skip
    rest = changes_of("adam", 2) | {"train__schedule": "constant"}
    results = run_world(1, rank_trains, the_store(), tmp_path, rest)[0]
    uninterrupted = run_world(1, rank_trains, the_store(), tmp_path / "whole", rest | {
        "train__accumulation": 1})[0]  # fmt: skip
    assert largest_difference(results, uninterrupted) < 1e-6


def rank_counts_reductions(store: Path, folder: Path) -> tuple[int, int]:
    """All-reduces of dense gradients of a step in one piece, and of one in four."""
    results = []
    for parts in (1, 4):
        calls = []

        def count(bucket_state, bucket, calls=calls):
            calls.append(1)
            work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
            return work.get_future().then(lambda done: done.value()[0])

        def watch(loop: Trainer, count=count) -> None:
            loop.session.backend.model.register_comm_hook(None, count)
            loop._save = lambda: None

        changes = changes_of("adam", parts) | {"entities__engine": "handrolled"}
        fit(config_of(store, folder / str(parts), **changes), watch)
        results.append(len(calls))
    return results[0], results[1]


def test_dense_gradients_are_reduced_once_per_step(tmp_path):
    for whole, in_parts in run_world(2, rank_counts_reductions, the_store(), tmp_path):
        assert whole == in_parts == 10


@given(
    size=st.integers(1, 40),
    batch_size=st.integers(1, 17),
    chunk_size=st.integers(0, 6),
    ranks=st.integers(1, 3),
    parts=st.integers(1, 5),
)
@settings(max_examples=40, deadline=None)
def test_micro_batches_contain_the_examples_of_the_whole_step(
    size, batch_size, chunk_size, ranks, parts
):
    triples = np.stack([np.arange(size), np.arange(size) % 3, np.arange(size)[::-1]], 1)

    def step_of(ranks: int, parts: int) -> list[dict]:
        """Return by step the weight, relation and negatives of each head."""
        steps = [{} for _ in range(-(-size // batch_size))]
        for rank in range(ranks):
            candidates = Candidates(UniformSampler(size), 4, chunk_size=chunk_size)
            plan = BatchPlan(batch_size, seed=7, candidates=candidates, accumulation=parts)
            builder = TripleBatches(triples, plan, Delivery(rank, ranks))
            batches = list(builder.epoch(1))
            assert len(batches) == parts * len(steps)
            for number, batch in enumerate(batches):
                steps[number // parts].update(contents(batch, ranks))
        return steps

    assert step_of(ranks, parts) == step_of(1, 1)


def contents(batch, ranks: int) -> dict:
    chunks, width = batch.relation.shape
    ids = batch.ids.values()[batch.entities]
    heads = ids[: chunks * width].view(chunks, width)
    negatives = ids[2 * chunks * width :].view(2, chunks, -1) if chunks else None
    return {
        int(heads[c, i]): (
            round(float(batch.weight[c, i]) / ranks, 6),
            int(batch.relation[c, i]),
            negatives[:, c].tolist(),
        )
        for c in range(chunks)
        for i in range(width)
        if batch.weight[c, i] > 0
    }


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"train__accumulation": 0}, "train.accumulation must be an integer >= 1"),
        (
            {"train__accumulation": 2, "entities__engine": "handrolled",
             "entities__options__duplicates": "mean"},
            "train.accumulation: .*use entities.options.duplicates sum",
        ),
    ],
)  # fmt: skip
def test_inexact_accumulation_is_rejected(changes, words):
    with pytest.raises(ConfigError, match=words):
        config_of("countries", **changes)


def test_losses_of_micro_batches_add_up(tmp_path):
    losses = []
    for parts in (1, 3):

        def listen(loop: Trainer) -> None:
            loop.callbacks.append(
                lambda kind, values: losses.append(values["loss"]) if kind == "epoch" else None
            )

        fit(config_of(the_store(), tmp_path / str(parts), **changes_of("adam", parts)), listen)
    torch.testing.assert_close(losses[:2], losses[2:], rtol=1e-5, atol=0)

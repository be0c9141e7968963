"""Whole runs against all entities on 1, 2 and 4 ranks against the dense oracle."""

from __future__ import annotations

import functools
import itertools
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from oracle_full_candidates import train_dense
from training_runs import (
    config_of,
    fit,
    largest_difference,
    parameters,
    shared_folder,
    tiny_store,
    without_checkpoints,
)
from worlds import run_world

from kge_torchrec.config import OPTIMIZER_NAMES, Config, RunConfig
from kge_torchrec.data.store import TripleStore
from kge_torchrec.distributed.processes import processes
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session
from kge_torchrec.training.trainer import Trainer

SCORERS = ("complex", "transe_l2", "keci", "distmult")  # of oracle_full_candidates.score
PAIRS = [
    *zip(OPTIMIZER_NAMES, itertools.cycle(SCORERS), strict=False),
    *zip(OPTIMIZER_NAMES, itertools.cycle(SCORERS[1:] + SCORERS[:1]), strict=False),
]
TOLERANCE = 1e-5
BATCH_SIZES = {"1vsall": 16, "kvsall": 24, "allvsall": 48, "kvssample": 24}


def variant(store: Path, number: int, engine: str) -> Config:
    """The number-th optimizer and scorer; the other options rotate so that all of them occur."""
    optimizer, scorer = PAIRS[number]
    regime, loss = (
        ("1vsall", "softmax"), ("kvsall", "bce"), ("1vsall", "bce"), ("kvsall", "softmax"),
        ("allvsall", "bce"), ("kvssample", "softmax"), ("kvssample", "bce"),
    )[number % 7]  # fmt: skip
    smoothing = "libkge" if number in (3, 4, 7, 8) else "standard"  # every regime
    reduction = "mean" if loss == "bce" and number % 2 else "sum"
    rate = {"sgd": 0.5}.get(optimizer, 0.02)
    if optimizer == "sgd" and reduction == "mean":  # gradients are 1/N of the sum's
        rate *= 20
    reciprocal = number % 3 != 0
    return config_of(
        store,
        model__scorer=scorer,
        model__reciprocal=reciprocal,
        loss__name=loss,
        loss__options__reduction=reduction,
        loss__options__label_smoothing=0.1 if number % 4 == 1 or smoothing == "libkge" else None,
        loss__options={"smoothing": smoothing},
        loss__n3=(0.0, 0.01)[number // 2 % 2],
        loss__regularizers__l2=(0.0, 0.0, 0.02)[number % 3],
        loss__relation_weight=0.5 if regime == "1vsall" and number % 2 == 0 else 0.0,
        negatives__regime=regime,
        negatives__max_answers=2,
        negatives__sides="both" if reciprocal else ("both", "head", "tail")[number // 3 % 3],
        entities__engine=engine,
        train__batch_size=BATCH_SIZES[regime],
        train__epochs=1,
        train__optimizer=optimizer,
        train__lr=rate,
        train__optimizer_options__eps=1e-3,
        train__optimizer_options__weight_decay=None if optimizer in ("adagrad", "sgd") else 0.02,
        train__schedule=("constant", "cosine")[number // 4 % 2],
        seed=number,
    )


@functools.cache
def the_store() -> Path:
    return tiny_store(shared_folder() / "store", entities=23, train=90, held_out=2).path


def in_small_blocks(loop: Trainer) -> None:
    """Scores of two or three entities at a time, computed twice."""
    without_checkpoints(loop)
    if loop.config.negatives.is_full:
        loop.pipeline.full.kept_bytes, loop.pipeline.full.block_bytes = 0, 200


def rank_trains_all(store: Path, folder: Path, engine: str, prepare_fit) -> list[dict]:
    """The parameters of every variant: at its start, without prepare_fit, or at its end."""
    out = []
    for number in range(len(PAIRS)):
        config = variant(store, number, engine)
        run = RunConfig(str(folder / str(number)), progress=False, trackers={"tensorboard": False})
        config = replace(config, run=run)
        if prepare_fit is not None:
            out.append(fit(config, prepare_fit).parameters)
            continue
        with processes("cpu") as ranks:
            out.append(parameters(Session(config, RunFolder(run.dir), ranks)))
    return out


@functools.cache
def trained(world_size: int, engine: str, blocks: str) -> list[dict]:
    preparations = {"start": None, "whole": without_checkpoints, "small": in_small_blocks}
    with tempfile.TemporaryDirectory() as folder:
        arguments = the_store(), Path(folder), engine, preparations[blocks]
        ranks = run_world(world_size, rank_trains_all, *arguments)
    for other in ranks[1:]:
        for one, same in zip(ranks[0], other, strict=True):
            assert largest_difference(one, same) == 0  # on all ranks alike
    return ranks[0]


@functools.cache
def dense(number: int) -> dict:
    start = trained(1, "torchrec", "start")[number]
    return train_dense(
        variant(the_store(), number, "torchrec"), TripleStore.open(the_store()), start
    )


RUNS = [
    ("torchrec", 1, "whole"),
    ("handrolled", 2, "small"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("handrolled", 1, "whole"),
            ("torchrec", 2, "whole"),
            ("torchrec", 2, "small"),
            ("torchrec", 4, "whole"),
            ("handrolled", 4, "whole"),
        )
    ),
]


@pytest.mark.parametrize("engine, world_size, blocks", RUNS)
@pytest.mark.parametrize("number", range(len(PAIRS)), ids=["-".join(pair) for pair in PAIRS])
def test_epoch_equals_the_dense_oracle(number, engine, world_size, blocks):
    actual, expected = trained(world_size, engine, blocks)[number], dense(number)
    assert largest_difference(trained(1, "torchrec", "start")[number], expected) > 0.02  # learnt
    assert largest_difference(actual, expected) < TOLERANCE

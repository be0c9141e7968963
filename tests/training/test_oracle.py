"""Whole runs on 1, 2 and 4 ranks against the dense oracle, for every optimizer and scorer."""

from __future__ import annotations

import functools
import itertools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from oracle_training import train_dense
from training_runs import (
    config_of,
    largest_difference,
    shared_folder,
    start_and_end,
    tiny_store,
)
from worlds import run_world

from kge_torchrec.config import OPTIMIZER_NAMES, Config, RunConfig
from kge_torchrec.data.store import TripleStore

SCORERS = ("transe_l1", "transe_l2", "distmult", "complex", "rotate")  # of oracle_training.score
PAIRS = list(itertools.product(OPTIMIZER_NAMES, SCORERS))
DIAGONAL = range(0, len(PAIRS), len(SCORERS) + 1)  # every optimizer and every scorer once
# On two ranks, which is where things are sent, every optimizer and scorer twice; all in make slow.
SECOND = [5 * number + (number + 1) % 5 for number in range(5)]
TWICE = sorted([*DIAGONAL, *SECOND])
NUMBERS = {1: SECOND[::2], 2: TWICE, 4: SECOND[1::2]}
TOLERANCE = 1e-5


def variant(store: Path, number: int) -> Config:
    """The number-th optimizer and scorer; the other options rotate so that all of them occur."""
    optimizer, scorer = PAIRS[number]
    loss = ("softmax", "bce", "margin", "self_adversarial")[number % 4]
    smooth = 0.1 if number % 3 == 0 else 0.0
    options: dict[str, Any] = {
        "softmax": {"label_smoothing": smooth},
        "bce": {"label_smoothing": smooth, "reduction": "mean" if number % 8 == 1 else "sum"},
        "margin": {"margin": 2.0},
        "self_adversarial": {"margin": 2.0, "temperature": 0.6},
    }[loss]
    reciprocal = number % 2 == 0
    sides = ("both", "both", "tail", "both", "head")[number * 3 % 5]
    chunk_size, log_q = (0, 8, 1)[number % 3], loss == "softmax" and number // 4 % 2 == 0
    return config_of(
        store,
        model__scorer=scorer,
        model__reciprocal=reciprocal,
        loss__name=loss,
        loss__options=options,
        loss__n3=(0.0, 0.01)[number // 2 % 2],
        loss__regularizers__l2=(0.0, 0.0, 0.02)[number % 3],
        negatives__chunk_size=chunk_size,
        negatives__in_batch=number // 6 % 2 == 0 and chunk_size != 1,
        negatives__log_q=log_q,
        negatives__hardest=3 if number % 5 in (1, 2) and not log_q else 0,
        negatives__head_count=5
        if number // 3 % 3 == 1 and (reciprocal or sides != "tail")
        else None,
        negatives__sides="both" if reciprocal else sides,
        negatives__filtered=number % 7 < 3,
        negatives__sampling=("uniform", "degree")[number // 3 % 2],
        train__optimizer=optimizer,
        train__lr=0.5 if optimizer == "sgd" else 0.02,
        train__optimizer_options__eps=1e-3,
        train__optimizer_options__weight_decay=None if optimizer in ("adagrad", "sgd") else 0.02,
        train__schedule=("constant", "cosine")[number // 4 % 2],
        train__warmup_steps=(0, 3)[number // 5 % 2],
        seed=number,
    )


@functools.cache
def the_store() -> Path:
    return tiny_store(shared_folder() / "store").path


def rank_trains_all(store: Path, folder: Path, pipeline: str, numbers: list[int]) -> dict:
    """Start and end of variants: two epochs of five steps, the last one of two triples."""
    out = {}
    for number in numbers:
        config = variant(store, number)
        run = RunConfig(str(folder / str(number)), progress=False, trackers={"tensorboard": False})
        config = replace(config, run=run, train=replace(config.train, pipeline=pipeline))
        out[number] = start_and_end(config)
    return out


@functools.cache
def trained(world_size: int, pipeline: str = "sparse_dist", rest: bool = False) -> dict[int, dict]:
    numbers = list(NUMBERS[world_size] if pipeline == "sparse_dist" else DIAGONAL[::2])
    if rest:
        numbers = [number for number in range(len(PAIRS)) if number not in numbers]
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_world(world_size, rank_trains_all, the_store(), Path(folder), pipeline, numbers)
    for other in ranks[1:]:
        for number in numbers:  # on all ranks alike
            assert largest_difference(ranks[0][number]["end"], other[number]["end"]) == 0
    return ranks[0]


@functools.cache
def dense(number: int) -> dict:
    start = trained(2, rest=number not in TWICE)[number]["start"]
    return train_dense(variant(the_store(), number), TripleStore.open(the_store()), start)


@pytest.mark.parametrize(
    "number, world_size",
    [
        pytest.param(number, world_size, id="-".join((*PAIRS[number], str(world_size))))
        for world_size, numbers in NUMBERS.items()
        for number in numbers
    ]
    + [
        pytest.param(number, 2, id="-".join((*PAIRS[number], "2")), marks=pytest.mark.slow)
        for number in range(len(PAIRS))
        if number not in TWICE
    ],
)
def test_ten_steps_equal_the_dense_oracle(number, world_size):
    rest = number not in TWICE
    actual, expected = trained(world_size, rest=rest)[number], dense(number)
    assert largest_difference(actual["start"], trained(2, rest=rest)[number]["start"]) == 0
    moved = largest_difference(actual["start"], expected)
    difference = largest_difference(actual["end"], expected)
    assert moved > 0.05  # it has learnt something
    assert difference < TOLERANCE


@pytest.mark.parametrize("world_size", [2])
def test_the_pipeline_equals_the_loop_bitwise(world_size):
    for number, looped in trained(world_size, "loop").items():
        pipelined = trained(world_size)[number]
        assert largest_difference(pipelined["end"], looped["end"]) == 0

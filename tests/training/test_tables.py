"""Tables per node type: runs on 1, 2 and 4 ranks against the dense oracle, and what follows."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest
from oracle_full_candidates import train_dense as train_dense_on_all
from oracle_training import train_dense
from training_runs import config_of, fit, largest_difference, parameters, shared_folder
from worlds import run_world

from kge_torchrec.config import Config
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.store import TripleStore
from kge_torchrec.training.trainer import Trainer

SIZES = {"author": 5, "place": 21, "user": 17}
ENDS = (("author", "made", "place"), ("user", "visits", "place"), ("user", "follows", "user"))
TABLES = {
    "author": {"optimizer": "sgd", "lr": 0.5, "init": "uniform", "init_scale": 0.2},
    "place": {"optimizer": "adam", "lr": 0.02, "optimizer_options": {"weight_decay": 0.02}},
    "user": {"optimizer": "rowwise_adagrad", "lr": 0.05},
}


def typed_triples(count: int, seed: int = 0) -> list[tuple[str, str, str]]:
    """Distinct triples in which every entity occurs."""
    random = np.random.default_rng(seed)
    triples = {}
    for turn in range(10 * count):
        head, name, tail = ENDS[turn % 3]
        places = turn // 3 % SIZES[head], random.integers(SIZES[tail])
        triples[f"{head}:{places[0]}", name, f"{tail}:{places[1]}"] = None
        if len(triples) == count:
            break
    unseen = [f"place:{k}" for k in range(SIZES["place"])]
    return [*triples, *(("user:0", "visits", place) for place in unseen)]


@functools.cache
def typed_store() -> Path:
    triples = [*dict.fromkeys(typed_triples(120))]
    splits = {"train": triples[:-10], "valid": triples[-10:-5], "test": triples[-5:]}
    store = prepare(splits, shared_folder() / "typed", types="prefix", log_notes=False)
    assert store.report["types"]["sizes"] == SIZES
    return store.path


def tables_config(folder: Path | str, **changes) -> Config:
    return config_of(
        typed_store(), folder, **{"entities__tables": TABLES, "negatives__among": "all", **changes}
    )


FULL = {"negatives__regime": "1vsall", "negatives__count": 256}
REGIMES = {
    "sampled": {"train__optimizer": "adagrad"},
    "clipped": {"train__clip_norm": 0.05, "train__accumulation": 2},
    "handrolled": {"entities__engine": "handrolled"},
    "pipeline": {"train__pipeline": "sparse_dist"},
    "duplicates": {"entities__deduplicate": False},
    "1vsall": FULL,
    "1vsall handrolled": {**FULL, "entities__engine": "handrolled"},
}  # fmt: skip


def rank_trains(folder: Path, names: list[str]) -> dict[str, dict]:
    results = {}
    for name in names:
        own = results[name] = {}

        def remember(loop: Trainer, own: dict = own) -> None:
            own["start"] = parameters(loop.session)
            loop._save = lambda: None

        own["end"] = fit(tables_config(folder / name, **REGIMES[name]), remember).parameters
    return results


@functools.cache
def trained(world_size: int) -> dict[str, dict]:
    names = [name for name in REGIMES if world_size > 1 or name != "pipeline"]
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_world(world_size, rank_trains, Path(folder), names)
    for other in ranks[1:]:
        for name in names:
            assert largest_difference(ranks[0][name]["end"], other[name]["end"]) == 0
    return ranks[0]


@functools.cache
def dense(name: str) -> dict:
    start, config = trained(2)[name]["start"], tables_config("unused", **REGIMES[name])
    train = train_dense_on_all if config.negatives.is_full else train_dense
    return train(config, TripleStore.open(typed_store()), start)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_three_optimizers_equal_the_dense_oracle(world_size):
    for name, results in trained(world_size).items():
        assert largest_difference(results["end"], dense(name)) < 1e-5, name

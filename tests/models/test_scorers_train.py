"""A scorer of each family trains, and on two ranks ends where it ends on one."""

from __future__ import annotations

import functools
import math
import tempfile
from pathlib import Path

import pytest
from training_runs import config_of, fit, largest_difference, parameters, tiny_store
from worlds import run_world

from kge_torchrec.config import SCORER_NAMES, RunConfig
from kge_torchrec.training.trainer import Trainer

OPTIONS = {
    "coke": {"model__options__layers": 1},
    "keci": {"model__options__p": 1, "model__options__q": 2},
    "conve": {"model__options__channels": 4},
    "tucker": {"model__options__relation_dim": 4},
    "operator": {"model__options__head": "translation", "model__options__comparator": "cosine"},
}
# One of each family.
NAMES = ("transe_l1", "complex", "tucker", "keci", "mure", "house", "pyke", "conve", "coke",
        "lfmult", "roth", "meim", "operator")  # fmt: skip
RECIPROCAL = ("conve", "conex", "aconex", "convq", "convo", "coke", "roth")


def config(name: str, store: Path, folder: Path):
    """Reciprocal for half of those that can choose, with a normalization each."""
    number = SCORER_NAMES.index(name)
    changes = {
        "model__scorer": name,
        "model__reciprocal": name in RECIPROCAL or number % 2 == 0,
        "model__normalization": ("none", "layer", "none", "unit")[number % 4],
        "train__optimizer": ("adagrad", "adam", "sgd")[number % 3],
        "train__lr": 0.02,
        "train__optimizer_options__eps": 1e-2,
        "train__epochs": 1,
        "negatives__chunk_size": (0, 8)[number % 2],
        **OPTIONS.get(name, {}),
    }
    run = RunConfig(str(folder / name), progress=False, trackers={"tensorboard": False})
    return config_of(store, run.dir, **changes)


def rank_trains_all(store: Path, folder: Path, names: tuple[str, ...]) -> dict[str, tuple]:
    """Start, end and test MRR of some scorers."""
    out = {}
    for name in names:
        starts = []

        def prepare(loop: Trainer, starts=starts) -> None:
            starts.append(parameters(loop.session))
            loop._save = lambda ends=False: None  # for speed: checkpoints have tests of their own

        session = fit(config(name, store, folder), prepare)
        mrr = session.rank("test")["both"]["realistic"]["mrr"]
        out[name] = starts[0], session.parameters, mrr
    return out


@functools.cache
def trained(world_size: int) -> dict[str, tuple]:
    with tempfile.TemporaryDirectory() as folder:
        store = tiny_store(Path(folder) / "store", train=70).path
        return run_world(world_size, rank_trains_all, store, Path(folder), NAMES)[0]


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_end_where_one_does(name):
    (start, end, mrr), (other_start, other_end, other_mrr) = (
        trained(world_size)[name] for world_size in (1, 2)
    )
    assert largest_difference(start, other_start) == 0
    assert all(largest_difference({k: start[k]}, {k: end[k]}) > 0 for k in start)  # all learn
    assert largest_difference(start, end) > 1e-3
    assert largest_difference(end, other_end) < 1e-5
    assert 0 < mrr <= 1 and math.isclose(mrr, other_mrr, abs_tol=0.02)

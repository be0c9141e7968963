"""Runs with biases, penalties of triples and of relations apart, and scorers with penalties.

On 1, 2 and 4 ranks against the dense oracles.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import oracle_full_candidates
import oracle_training
import pytest
from training_runs import config_of, fit, largest_difference, parameters, shared_folder, tiny_store
from worlds import run_world

from kge_torchrec.config import Config, ConfigError
from kge_torchrec.data.store import TripleStore
from kge_torchrec.training.trainer import Trainer

BIASED = {"model__biases": True, "model__dim": 10}
ONE_SIDE = {"model__reciprocal": False, "negatives__sides": "head"}
FULL = {"negatives__regime": "1vsall"}
IVR = {"alpha": 2.25, "lambda1": 0.02, "lambda2": 0.05}
RUNS = {
    "rote": {"model__scorer": "rote", "model__reciprocal": False, "negatives__chunk_size": 8,
             "loss__regularizers__l2": 0.02, **BIASED},
    "roth": {"model__scorer": "roth", "loss__name": "self_adversarial",
             "loss__options__margin": 2.0,
             "loss__regularizers": {"lp": {"weight": 0.02, "p": 1.5, "relation_weight": 0.05}},
             **BIASED},
    "dura": {"loss__regularizers": {"dura": 0.05}, "negatives__filtered": True, **BIASED,
             **ONE_SIDE},
    "1vsall dura": {"loss__regularizers": {"dura": 0.05}, "loss__relation_weight": 0.5, **BIASED,
                    **FULL},
    "1vsall dura of one side": {"model__scorer": "distmult", "loss__name": "bce",
                                "loss__regularizers": {"dura": 0.05}, **ONE_SIDE, **FULL},
    "ivr": {"loss__regularizers": {"ivr": IVR}, **BIASED, **ONE_SIDE},
    "1vsall ivr": {"loss__regularizers": {"ivr": {**IVR, "lambda4": 0.1}}, **BIASED, **FULL},
    "1vsall ivr tucker": {"loss__regularizers": {"ivr": IVR}, "model__scorer": "tucker",
                          "model__options": {"relation_dim": 4}, **FULL},
    "1vsall rote": {"model__scorer": "rote", **BIASED, **FULL},
    "1vsall roth": {"model__scorer": "roth", "loss__n3": 0.02, **BIASED, **FULL},
    "kvsall meim": {"model__scorer": "meim", "loss__name": "bce", "negatives__regime": "kvsall",
                    "model__options": {"partitions": 2, "relation_dim": 3, "orthogonality": 0.02},
                    "loss__regularizers": {"n3": {"weight": 0.01, "relation_weight": 0.1}}},
    "kvssample rote": {"model__scorer": "rote", "negatives__regime": "kvssample", "loss__n3": 0.02,
                       **BIASED},
    "kvssample meim": {"model__scorer": "meim", "negatives__regime": "kvssample",
                       "model__options": {"partitions": 4, "orthogonality": 0.02}},
}  # fmt: skip
ENGINES = {1: "torchrec", 2: "handrolled", 4: "torchrec"}
# Four ranks have a run of triples and one of queries.
OF_FOUR = ("dura", "kvsall meim", "1vsall ivr")
NUMBERS = [(name, world) for world in (1, 2, 4) for name in (OF_FOUR if world == 4 else RUNS)]
# On one and two ranks; the others are slow.
FIRST = (
    "rote",
    "dura",
    "1vsall dura",
    "1vsall ivr",
    "1vsall roth",
    "kvsall meim",
    "kvssample rote",
)


def variant(name: str, engine: str, folder: Path | None = None) -> Config:
    return config_of(
        the_store(), folder and folder / name, seed=3, entities__engine=engine, train__epochs=1,
        train__lr=0.02, train__optimizer_options__eps=1e-3, model__init="uniform", **RUNS[name],
    )  # fmt: skip


@functools.cache
def the_store() -> Path:
    return tiny_store(shared_folder() / "store", entities=23, train=70, held_out=2).path


def rank_trains(
    folder: Path, names: list[str], engine: str, in_small_blocks: bool
) -> dict[str, tuple]:
    """Start and end of some of the runs."""
    out = {}
    for name in names:
        starts = []

        def prepare(loop: Trainer, starts=starts) -> None:
            starts.append(parameters(loop.session))
            loop._save = lambda: None  # for speed: checkpoints have tests of their own
            if in_small_blocks and loop.config.negatives.is_full:
                loop.pipeline.full.kept_bytes, loop.pipeline.full.block_bytes = 0, 200

        session = fit(variant(name, engine, folder), prepare)
        out[name] = starts[0], session.parameters
    return out


def is_slow(name: str, world_size: int) -> bool:
    return world_size == 4 or name not in FIRST


@functools.cache
def trained(world_size: int, slow: bool = False) -> dict[str, tuple]:
    the_store()  # before the ranks are forked
    with tempfile.TemporaryDirectory() as folder:
        names = [name for name, world in NUMBERS if world == world_size]
        names = [name for name in names if is_slow(name, world_size) == slow]
        arguments = Path(folder), names, ENGINES[world_size], world_size == 2
        ranks = run_world(world_size, rank_trains, *arguments)
    for name in names:
        for other in ranks[1:]:
            assert largest_difference(ranks[0][name][1], other[name][1]) == 0
    return ranks[0]


@functools.cache
def dense(name: str) -> dict:
    config, (start, _) = variant(name, "torchrec"), trained(1, is_slow(name, 1))[name]
    oracle = oracle_training if config.negatives.regime == "sampled" else oracle_full_candidates
    return oracle.train_dense(config, TripleStore.open(the_store()), start)


@pytest.mark.parametrize(
    "name, world_size",
    [pytest.param(*case, marks=pytest.mark.slow if is_slow(*case) else ()) for case in NUMBERS],
)
def test_epoch_equals_the_dense_oracle(name, world_size):
    start, end = trained(world_size, is_slow(name, world_size))[name]
    assert largest_difference(start, trained(1, is_slow(name, 1))[name][0]) == 0
    assert all(largest_difference({k: start[k]}, {k: dense(name)[k]}) > 0.01 for k in start)
    assert largest_difference(end, dense(name)) < 1e-5
    if RUNS[name].get("model__biases"):
        assert not start["entities"][:, -2:].any() and start["entities"][:, -3].all()
        assert end["entities"][:, -2:].any(0).all()  # both learn


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"negatives__regime": "kvsall"},
            "regularizers.dura: queries of .*kvsall may have several",
        ),
        ({"negatives__regime": "kvssample"}, "may have several answers"),
        ({"model__scorer": "rotate"}, "regularizers.dura: DURA takes .* which rotate is not"),
        ({"model__scorer": "keci"}, "which keci is not"),
    ],
)
def test_unsupported_penalties_of_triples_are_rejected(changes, words):
    with pytest.raises(ConfigError, match=words):
        config_of("countries", loss__regularizers={"dura": 0.1}, **changes)

"""Every dense wrapper beside either engine's table: equal to the dense oracle, small, resumable."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from unittest.mock import Mock, call

import pytest
import torch
import torch.distributed as dist
from oracle_training import train_dense
from torch.distributed.tensor import DTensor
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

from kge_torchrec.config import Config, ConfigError, DenseConfig
from kge_torchrec.data.store import TripleStore
from kge_torchrec.distributed.dense import Sharded, dense_wrapper
from kge_torchrec.distributed.processes import processes
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session

LAYOUTS = {
    "ddp": {"dense__wrapper": "ddp"},
    "fsdp": {"dense__wrapper": "fsdp"},
    "grad_op": {"dense__wrapper": "fsdp", "dense__options__sharding": "grad_op"},
    "offload": {"dense__wrapper": "fsdp", "dense__options__cpu_offload": True},
    "hybrid": {"dense__wrapper": "hybrid", "dense__options__replicas": 2},
}


@functools.cache
def the_store() -> Path:
    return tiny_store(shared_folder() / "store").path


def variant(store: Path, layout: str, folder: Path | None = None, **more) -> Config:
    """Each layout with another optimizer, engine and pipeline; 6 relation rows on 4 ranks."""
    number = list(LAYOUTS).index(layout)
    optimizer = ("adam", "rowwise_adagrad", "adam", "adagrad", "rowwise_adam")[number]
    changes = {
        "train__optimizer": optimizer,
        "train__optimizer_options__weight_decay": None if optimizer == "adagrad" else 0.02,
        "train__lr": 0.02,
        "train__optimizer_options__eps": 1e-3,
        "entities__engine": ("torchrec", "handrolled")[number % 2],
        "evaluation__every": 2,
        "checkpoint__every__epochs": 0,
    }
    return config_of(store, folder, **changes | LAYOUTS[layout] | more)


def layouts_for(world_size: int) -> list[str]:
    """Return all layouts for four ranks; for fewer ranks, those that differ there."""
    return {1: ["ddp", "fsdp", "grad_op", "offload"], 2: ["fsdp", "offload"]}.get(
        world_size, list(LAYOUTS)
    )


def rank_trains_all(store: Path, folder: Path) -> dict[str, dict]:
    """Start, end and layout of a run with each wrapper; ranking valid in between."""
    results = {}
    for layout in layouts_for(dist.get_world_size()):
        config = variant(store, layout, folder / layout)
        with processes("cpu") as ranks:
            start = parameters(Session(config, RunFolder(folder), ranks))
        session = fit(config, without_checkpoints)
        results[layout] = {
            "start": start,
            "end": session.parameters,
            "layout": session.backend.layout,
            "kinds": [type(p) for p in session.scorer.parameters()],
        }
    return results


@functools.cache
def trained(world_size: int) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        return run_world(world_size, rank_trains_all, the_store(), Path(folder))


@functools.cache
def oracle(layout: str) -> dict:
    start = trained(1)[0]["ddp" if layout == "hybrid" else layout]["start"]
    return train_dense(variant(the_store(), layout), TripleStore.open(the_store()), start)


@pytest.mark.parametrize(
    "layout, world_size", [(layout, size) for size in (1, 2, 4) for layout in layouts_for(size)]
)
@pytest.mark.first_tier("ddp-1", "fsdp-2", "hybrid-4")
def test_parameters_match_the_dense_oracle(layout, world_size):
    first, *rest = (results[layout] for results in trained(world_size))
    assert all(largest_difference(first["end"], other["end"]) == 0 for other in rest)
    assert largest_difference(first["start"], oracle(layout)) > 0.05
    assert largest_difference(first["end"], oracle(layout)) < 1e-5
    assert (DTensor in first["kinds"]) == (layout != "ddp")


def test_layout_names_the_part_of_every_rank():
    results = trained(4)[0]
    assert "dense parameters: ddp, all of them on each of 4 ranks" in results["ddp"]["layout"]
    text = results["fsdp"]["layout"]
    assert "objective.scorer.relations: 6 x 8, rows 0 to 2, 2 to 4, 4 to 6, 6 to 6" in text
    text = results["hybrid"]["layout"]
    assert "hybrid, full, ranks replicas x parts, 2 x 2" in text
    assert "relations: 6 x 8, rows 0 to 3, 3 to 6" in text


def rank_weighs(store: Path, folder: Path) -> dict[str, int]:
    """Numbers of the dense parameters, their gradients and optimizer state on this rank."""
    results = {}
    for layout in layouts_for(dist.get_world_size()):
        changes = {"train__optimizer": "adam", "model__scorer": "rescal", "model__dim": 16}
        config = variant(store, layout, folder / layout, train__epochs=1, evaluation__every=0,
                         **changes)  # fmt: skip
        session = fit(config, without_checkpoints)
        tensors = []
        for parameter in session.backend.dense.parameters():
            states = session.backend.dense_optimizer.state[parameter].values()
            tensors += [parameter, parameter.grad, *(s for s in states if s.dim())]
        results[layout] = sum(
            (t.to_local() if isinstance(t, DTensor) else t).numel() for t in tensors
        )
    return results


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 4])
def test_each_rank_holds_its_part_of_parameters_gradients_and_state(tmp_path, world_size):
    whole = 4 * 6 * 16 * 16  # value, gradient and two moments of six relation matrices
    per_rank = run_world(world_size, rank_weighs, the_store(), tmp_path)
    for layout in layouts_for(world_size):
        together = sum(results[layout] for results in per_rank)
        copies = {"ddp": world_size, "hybrid": 2}.get(layout, 1)
        assert together == whole * copies
        largest = max(results[layout] for results in per_rank)
        parts = 1 if layout == "ddp" else world_size // copies
        assert largest == whole // 6 * -(-6 // parts)


def rank_trains(store: Path, folder: Path, layout: str, epochs: int) -> dict:
    changes = {"entities__engine": "torchrec", "train__optimizer": "adam",
               "train__optimizer_options__weight_decay": 0.02, "train__epochs": epochs}  # fmt: skip
    return fit(variant(store, layout, folder, **changes)).parameters


@functools.cache
def uninterrupted() -> dict:
    with tempfile.TemporaryDirectory() as folder:
        return run_world(1, rank_trains, the_store(), Path(folder), "ddp", 4)[0]


@pytest.mark.parametrize(
    "before, after",
    [
        (("fsdp", 4), ("ddp", 1)),
        pytest.param(("ddp", 2), ("fsdp", 4), marks=pytest.mark.slow),
        pytest.param(("fsdp", 2), ("hybrid", 4), marks=pytest.mark.slow),
        pytest.param(("hybrid", 4), ("offload", 2), marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_checkpoint_resumes_with_another_wrapper(tmp_path, before, after):
    for (layout, world_size), epochs in ((before, 2), (after, 4)):
        results = run_world(world_size, rank_trains, the_store(), tmp_path, layout, epochs)
    assert largest_difference(results[0], uninterrupted()) < 1e-5


def rank_asks_for(config: dict) -> str:
    with processes("cpu") as ranks:
        try:
            dense_wrapper(DenseConfig(**config), ranks)
        except ConfigError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    "config, words",
    [
        ({"wrapper": "none"}, "dense.wrapper none would let the relations of 4 ranks drift"),
        ({"wrapper": "hybrid", "options": {"replicas": 3}}, "4 ranks cannot form 3"),
    ],
)
def test_invalid_wrapper_is_rejected_on_every_rank(config, words):
    assert all(words in message for message in run_world(4, rank_asks_for, config))


@pytest.mark.parametrize(
    "config, words",
    [
        ({"wrapper": "fdsp"}, "dense.wrapper must be one of .*did you mean 'fsdp'"),
        ({"options": {"sharding": "half"}}, "dense.options.sharding must be one of full, grad_op"),
        ({"wrapper": "hybrid", "options": {"replicas": 0}}, "replicas must be an integer >= 1"),
    ],
)
def test_contradictory_keys_are_named(config, words):
    with pytest.raises(ConfigError, match=words):
        DenseConfig(**config)


def test_one_rank_has_no_wrapper_by_default():
    with processes("cpu") as ranks:
        assert dense_wrapper(DenseConfig(), ranks).name == "none"
        assert dense_wrapper(DenseConfig(wrapper="fsdp"), ranks).name == "fsdp"
    assert torch.distributed.is_initialized() is False


def test_ranks_exchange_gradients_again_after_a_micro_batch_that_fails():
    wrapper = Sharded(Mock(ndim=1), frees_between=True, offload=False)
    wrapper._parts = Mock()
    with pytest.raises(MemoryError), wrapper.without_exchange():
        raise MemoryError
    assert wrapper._parts.set_requires_gradient_sync.mock_calls == [call(False), call(True)]

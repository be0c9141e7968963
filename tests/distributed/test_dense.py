"""Dense wrappers: each rank holds its part, and checkpoints fit all; test_exact trains by them."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock, call

import pytest
import torch
from torch.distributed.tensor import DTensor
from training_runs import (
    config_of,
    fit,
    largest_difference,
    parameters,
    without_checkpoints,
)
from worlds import run_world

from kge_torchrec.config import ConfigError, DenseConfig
from kge_torchrec.config.parser import config_from_dict
from kge_torchrec.distributed.dense import Sharded, dense_wrapper, start_optimizer_state
from kge_torchrec.distributed.processes import processes
from kge_torchrec.training.trainer import Trainer

LAYOUTS = {
    "ddp": {"dense__wrapper": "ddp"},
    "fsdp": {"dense__wrapper": "fsdp"},
    "grad_op": {"dense__wrapper": "fsdp", "dense__options__sharding": "grad_op"},
    "offload": {"dense__wrapper": "fsdp", "dense__options__cpu_offload": True},
    "hybrid": {"dense__wrapper": "hybrid", "dense__options__replicas": 2},
}


def rank_weighs(store: Path, folder: Path) -> dict[str, tuple[str, int]]:
    """By wrapper its words, and the numbers of parameters, gradients and state on this rank."""
    results = {}
    for layout, keys in LAYOUTS.items():
        config = config_of(store, folder / layout, train__optimizer="adam", train__epochs=1,
                           model__scorer="rescal", model__dim=16, **keys)  # fmt: skip
        session = fit(config, without_checkpoints)
        tensors = []
        for parameter in session.backend.dense.parameters():
            states = session.backend.dense_optimizer.state[parameter].values()
            tensors += [parameter, parameter.grad, *(s for s in states if s.dim())]
        parts = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        assert (layout == "ddp") == (parts[0] is tensors[0])
        results[layout] = session.backend.layout, sum(part.numel() for part in parts)
    return results


def test_each_rank_holds_its_part_of_parameters_gradients_and_state(store, tmp_path):
    whole = 4 * 6 * 16 * 16  # value, gradient and two moments of six relation matrices
    per_rank = run_world(4, rank_weighs, store, tmp_path)
    for layout in LAYOUTS:
        sizes = [results[layout][1] for results in per_rank]
        copies = {"ddp": 4, "hybrid": 2}.get(layout, 1)
        assert sum(sizes) == whole * copies
        assert max(sizes) == whole // 6 * -(-6 // (4 // copies))
    words = {layout: words for layout, (words, _) in per_rank[0].items()}
    assert "dense parameters: ddp, all of them on each of 4 ranks" in words["ddp"]
    assert "hybrid, full, ranks replicas x parts, 2 x 2" in words["hybrid"]


# Layers, cores and coefficients beside the relations, and the parameters of a loss.
MODELS = {
    "tucker": {"model__options__relation_dim": 4},
    "keci": {"model__options__p": 1, "model__options__q": 2},
    "conve": {"model__options__channels": 4},
    "coke": {"model__options__layers": 1},
    "distmult": {"loss__name": "foreign_parts:Scaled", "negatives__regime": "kvssample",
                 "dense__wrapper": "fsdp"},
}  # fmt: skip


def rank_trains_models(store: Path, folder: Path) -> dict[str, dict]:
    keys = {"train__optimizer": "adam", "train__epochs": 1, "model__normalization": "layer"}
    results = {}
    for name, options in MODELS.items():
        ends = {}

        def watch(loop: Trainer, ends=ends) -> None:
            def all_parameters() -> dict:
                found = parameters(loop.session)
                for parameter in loop.session.backend.unwrapped_model.objective.loss.parameters():
                    whole = parameter.full_tensor() if is_sharded(parameter) else parameter
                    found["factor of the loss"] = whole.detach().clone()
                return found

            ends["start"] = all_parameters()
            loop._save = lambda ends=False, into=ends: into.update(end=all_parameters())

        fit(config_of(store, folder / name, model__scorer=name, **keys, **options), watch)
        results[name] = ends
    return results


def is_sharded(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, DTensor)


def test_all_parameters_learn_the_same_on_two_ranks(store, tmp_path):
    one, two = (
        run_world(ranks, rank_trains_models, store, tmp_path / f"{ranks}")[0] for ranks in (1, 2)
    )
    for name, ends in one.items():
        start, end = ends["start"], ends["end"]
        assert all(largest_difference({k: start[k]}, {k: end[k]}) > 0 for k in start), name
        assert largest_difference(end, two[name]["end"]) < 1e-5, name


def rank_asks_for(config: dict) -> str:
    with processes("cpu") as ranks:
        try:
            dense_wrapper(config_from_dict(config).dense, ranks)
        except ConfigError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    "config, words",
    [
        ({"dense.wrapper": "none"}, "dense.wrapper none would let the relations of 4 ranks drift"),
        ({"dense.wrapper": "hybrid", "dense.options.replicas": 3}, "4 ranks cannot form 3"),
    ],
)
def test_invalid_wrapper_is_rejected_on_every_rank(config, words):
    assert all(words in message for message in run_world(4, rank_asks_for, config))


def test_one_rank_has_no_wrapper_by_default():
    with processes("cpu") as ranks:
        assert dense_wrapper(DenseConfig(), ranks).name == "none"
        assert dense_wrapper(DenseConfig(wrapper="fsdp"), ranks).name == "fsdp"
    assert torch.distributed.is_initialized() is False


def test_ranks_exchange_gradients_again_after_a_micro_batch_that_fails():
    wrapper = Sharded(Mock(ndim=1, shape=(2,)), frees_between=True, offload=False)
    wrapper._parts = Mock()
    with pytest.raises(MemoryError), wrapper.without_exchange():
        raise MemoryError
    assert wrapper._parts.set_requires_gradient_sync.mock_calls == [call(False), call(True)]


def test_state_of_an_optimizer_begins_without_a_step():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.5)
    start_optimizer_state(optimizer)
    assert weight.tolist() == [1, 1, 1]
    assert all(not state.any() for state in optimizer.state[weight].values())
    optimizer.state[weight]["exp_avg"].fill_(2)
    start_optimizer_state(optimizer)  # state that exists stays
    assert optimizer.state[weight]["exp_avg"].tolist() == [2, 2, 2]

"""Fifty steps on this device against the same steps on a CPU; graphs, wrappers, checkpoints."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from cached_tables import tables_with_a_cache
from gpu_runs import EPOCHS, FIFTY_STEPS, config_of, trained, trained_by_two_ranks
from training_runs import parameters, with_duplicates

from kge_torchrec import api
from kge_torchrec.distributed.processes import processes
from kge_torchrec.embeddings.torchrec.collection import kernel_of
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session
from kge_torchrec.training.trainer import Trainer

CPU = torch.device("cpu")
CLOSE = 2e-3  # sums in another order, over 50 steps with learning rate 0.05
CLOSE_LOSSES = 1e-3
# Only losses are compared: gradients of an L1 distance are signs, which feel the last bits of a
# sum, and cuDNN adds gradients of filters in any order.
BY_LOSS = ("1vsall, distances computed twice", "ConvE")
OPTIMIZERS = ("adam", "rowwise_adam", "adagrad", "rowwise_adagrad", "sgd")
CLIPPED = {"train__accumulation": 2, "train__clip": {"norm": 0.02, "value": 1e-3}}
MARGIN = {"model__scorer": "transe_l2", "model__reciprocal": False, "loss__name": "margin"}
KINDS: dict[str, dict[str, Any]] = {
    **{name: {"train__optimizer": name} for name in OPTIMIZERS},
    **{f"{name}, loop": {"train__optimizer": name, "train__pipeline": "loop"}
       for name in OPTIMIZERS},
    "1vsall": {"negatives__regime": "1vsall"},
    "1vsall, distances computed twice": {
        "negatives__regime": "1vsall", "model__scorer": "transe_l1"},
    "kvsall": {"negatives__regime": "kvsall", "loss__name": "bce", "train__batch_size": 128},
    "kvssample": {"negatives__regime": "kvssample", "train__batch_size": 128},
    "1vsall, clipped": {"negatives__regime": "1vsall", **CLIPPED},
    "filtered negatives": {"negatives__filtered": True},
    "own negatives of every triple": {"negatives__chunk_size": 1},
    "TransE, margin": MARGIN,
    "accumulation 3": {"train__accumulation": 3},
    "clipped, Adam": {"train__optimizer": "adam", **CLIPPED},
}  # fmt: skip


def keys_of(keys: dict[str, Any]) -> dict[str, Any]:
    """The keys without a number of negatives where all entities are candidates."""
    is_full = keys.get("negatives__regime") in ("1vsall", "kvsall")
    return {**keys, **({"negatives__count": None} if is_full else {})}


@pytest.mark.parametrize("name", KINDS)
def test_training_is_that_of_a_cpu(device, tmp_path, name):
    def keep_no_scores(loop: Trainer) -> None:
        if "twice" in name:
            loop.pipeline.kept_bytes = 0

    here, there = (trained(where, tmp_path / str(where), keep_no_scores, **keys_of(KINDS[name]))
                   for where in (device, CPU))  # fmt: skip
    if name in BY_LOSS:
        assert here.off_in_loss(there) < CLOSE_LOSSES
    else:
        assert here.off(there) < CLOSE and there.losses[-1] < there.losses[0]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns_as_float32_does(device, tmp_path, precision):
    full = trained(device, tmp_path / "full")
    half = trained(device, tmp_path / "half", train__precision=precision)
    assert half.losses[-1] == pytest.approx(full.losses[-1], rel=0.03)


@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
def test_overflow_changes_nothing(device, tmp_path, optimizer):
    keys = {"train__precision": "fp16", "train__optimizer": optimizer}
    config = config_of(device, tmp_path, FIFTY_STEPS, **keys)
    with processes(device.type) as ranks:
        session = Session(config, RunFolder(tmp_path), ranks)
        loop = Trainer(session, session.restore(), None)

        def everything() -> dict[str, torch.Tensor]:
            return {rows.name: rows.local.cpu().clone() for rows in session.backend.state()}

        stream, scale = loop.batches.epoch(0), session.backend.unwrapped_model.scale
        loop.pipeline.progress(stream)
        before, forward = everything(), scale.forward
        scale.forward = lambda loss: forward(loss) * math.inf
        loop.pipeline.progress(stream)
        scale.forward = forward
        assert all((after == before[name]).all() for name, after in everything().items())
        assert scale.skipped == 1
        loop.pipeline.progress(stream)
        assert any((after != before[name]).any() for name, after in everything().items())


GRAPHS = {  # what a graph could freeze, or a capture could change
    "default": {},
    "Adam, schedule, clip.norm": {"train__optimizer": "adam", "train__schedule": "linear",
                                  "train__clip__norm": 0.02},
    "dropout": {"model__dropout__entity": 0.3},
    "ConvE": {"model__scorer": "conve"},
    "bf16": {"train__precision": "bf16"},
    "filtered, penalties": {"negatives__filtered": True, "loss__n3": 0.01,
                            "loss__relation_weight": 0.1},
    "TransE, margin": MARGIN,
}  # fmt: skip


@pytest.mark.parametrize("name", GRAPHS)
def test_steps_with_a_graph_train_as_plain_ones(device, tmp_path, name):
    """Plain ones that look every place up."""
    with with_duplicates():
        plain = trained(device, tmp_path / "plain", train__pipeline="loop", **GRAPHS[name])
    loops: list[Trainer] = []
    keys = {"train__pipeline": "graph", **GRAPHS[name]}
    graph = trained(device, tmp_path / "graph", loops.append, **keys)
    if name in BY_LOSS:
        assert graph.off_in_loss(plain) < CLOSE_LOSSES
    else:
        assert graph.off(plain) < CLOSE
    assert device.type == "cpu" or loops[0].pipeline._graph is not None


@pytest.mark.parametrize(
    "keys",
    [
        {"dense__wrapper": "ddp"},
        {"dense__wrapper": "fsdp"},
        {"dense__wrapper": "fsdp", "dense__options__sharding": "grad_op"},
        {"entities__engine": "handrolled", "train__pipeline": "loop"},
        {"entities__engine": "handrolled", "dense__wrapper": "ddp"},
        {"entities__engine": "handrolled", "train__optimizer": "adam"},
    ],
    ids=str,
)
def test_wrappers_and_engines_train_alike(device, tmp_path, keys):
    """On one rank, with NCCL on a card."""
    shared = {key: keys[key] for key in ("train__optimizer",) if key in keys}
    usual = trained(device, tmp_path / "usual", dense__wrapper="none", **shared)
    assert trained(device, tmp_path / "other", **keys).off(usual) < CLOSE


@pytest.mark.parametrize("pipeline", ["loop", "sparse_dist"])
def test_two_ranks_on_one_card_train_as_one(device, tmp_path, pipeline):
    one = trained(device, tmp_path / "one")
    two = trained_by_two_ranks(device, tmp_path / "two", train__pipeline=pipeline)
    assert two.off(one) < CLOSE


def run_of(folder, **changes):
    """The parameters of a run that ends after its epochs, maybe after a resume."""
    with api.resume(folder, changes) as run:
        return {name: x.cpu() for name, x in parameters(run.model).items()}


@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
def test_half_a_run_resumes_here_and_on_a_cpu(device, tmp_path, optimizer):
    keys = {"train__optimizer": optimizer}
    whole = trained(device, tmp_path / "whole", **keys).parameters
    for where in {device.type, "cpu"}:
        config = config_of(device, tmp_path / where, FIFTY_STEPS, train__epochs=EPOCHS // 2, **keys)
        api.train(config).close()
        resumed = run_of(tmp_path / where, **{"train.epochs": EPOCHS, "device": where})
        assert max(float((resumed[k] - x).abs().max()) for k, x in whole.items()) < CLOSE


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_checkpoint_holds_the_tensors_of_the_kernel(device, tmp_path, optimizer):
    """Copies would be the initial values."""
    config = config_of(device, tmp_path, FIFTY_STEPS, train__optimizer=optimizer)
    with processes(device.type) as ranks:
        session = Session(config, RunFolder(tmp_path), ranks)
        used = {session.backend.shard().rows.data_ptr()}
        for own in session.backend.table.optimizers:
            used |= {state.data_ptr() for state in own.states.values() if state.numel() > 1}
        assert used <= {rows.local.data_ptr() for rows in session.backend.state()}


CACHES: dict[str, dict[str, Any]] = {  # validations in between write the cache back
    "Adam": {"train__optimizer": "adam", "evaluation__every": 3},
    "Adam, loop": {"train__optimizer": "adam", "train__pipeline": "loop"},
    "row-wise Adagrad": {"train__optimizer": "rowwise_adagrad", "evaluation__every": 2},
    "Adam, clipped": {"train__optimizer": "adam", **CLIPPED},
    "fp16": {"train__precision": "fp16", "train__optimizer": "rowwise_adagrad"},
    "kvssample": {"negatives__regime": "kvssample", "train__batch_size": 128},
}
PLACED = {  # 32 places of 271 entities, fewer than a batch looks up
    "entities__placement": "managed_caching",
    "entities__placement_options": {"cache_ratio": 0.1},
}


@pytest.mark.parametrize("name", CACHES)
def test_cached_rows_train_as_rows_of_the_card(device, tmp_path, name):
    keys, on_card = CACHES[name], device.type == "cuda"
    if not on_card and keys.get("train__optimizer") == "adam":
        keys = {**keys, "train__optimizer": "adagrad"}  # FBGEMM has no Adam on a CPU
    places: list[int] = []

    def watch(loop: Trainer) -> None:
        kernel = kernel_of(loop.session.backend.model)
        places.append(len(kernel.emb_module.lxu_cache_weights))

    with nullcontext() if on_card else tables_with_a_cache():
        usual = trained(device, tmp_path / "usual", **keys)
        watched = (watch,) if on_card else ()
        cached = trained(device, tmp_path / "cached", *watched, **keys, **PLACED)
        assert cached.off(usual) < CLOSE
        assert all(0 < count < 271 for count in places)
        if name == "Adam, loop":  # a run: checkpoint, resume, ranking
            folder = tmp_path / "half"
            config = config_of(
                device, folder, FIFTY_STEPS, **keys, **PLACED, train__epochs=EPOCHS // 2
            )
            api.train(config).close()
            resumed = run_of(folder, **{"train.epochs": EPOCHS})
            off = max(float((resumed[k] - x).abs().max()) for k, x in usual.parameters.items())
            assert off < CLOSE

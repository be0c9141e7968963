"""Losses with parameters of their own."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from training_runs import config_of, fit, largest_difference, shared_folder, tiny_store
from worlds import run_world

from kge_torchrec.training.session import Session

RUNS = {"plain": {}, "fsdp": {"dense__wrapper": "fsdp"}}


@functools.cache
def the_store() -> Path:
    return tiny_store(shared_folder() / "store", entities=23, train=90, held_out=2).path


def factor_of(session: Session) -> torch.Tensor:
    """The parameter of the loss.  Collective."""
    (factor,) = session.backend.unwrapped_model.objective.loss.parameters()
    return (factor.full_tensor() if isinstance(factor, DTensor) else factor).detach().clone()


def rank_trains(store: Path, folder: Path) -> dict:
    """Parameters at the end of every run."""

    def remember(loop) -> None:
        loop._save = lambda ends=False: setattr(loop.session, "of_loss", factor_of(loop.session))

    results = {}
    for name, keys in RUNS.items():
        session = fit(
            config_of(
                store,
                folder / name,
                **keys,
                loss__name="foreign_parts:Scaled",
                negatives__regime="kvssample",
                train__batch_size=26,
                train__lr=0.1,
            ),
            remember,
        )
        results[name] = session.parameters | {"factor of the loss": session.of_loss}
    return results


@functools.cache
def trained(world_size: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        first, *others = run_world(world_size, rank_trains, the_store(), Path(folder))
    for other in others:
        assert all(largest_difference(first[name], other[name]) == 0 for name in RUNS)
    return first


@pytest.mark.parametrize("name", RUNS)
def test_a_loss_learns_its_parameters_the_same_on_any_number_of_ranks(name):
    one = trained(1)[name]
    assert abs(one["factor of the loss"] - 0.7) > 1e-3
    assert largest_difference(one, trained(2)[name]) < 1e-5

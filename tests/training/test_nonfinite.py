"""A loss that is no finite number ends all ranks in words and leaves good checkpoints."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from training_runs import fit, longer_config, rank
from worlds import run_world

from kge_torchrec.distributed.processes import processes
from kge_torchrec.training.checkpoint_files import is_finite
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session
from kge_torchrec.training.trainer import NonFiniteLoss, NonFiniteParameters, Trainer


def rank_breaks(store: Path, run: Path) -> tuple[str, int]:
    """Rank 1's loss is infinite at the 8th step: epoch 2, step 3."""

    def break_it(loop: Trainer) -> None:
        progress = loop.pipeline.progress

        def broken(batches):
            loss = progress(batches)
            return loss * math.inf if rank() == 1 and loop.progress.global_step == 7 else loss

        loop.pipeline.progress = broken

    config = longer_config(store, run, checkpoint__every__steps=2)
    with pytest.raises(NonFiniteLoss) as caught:
        fit(config, break_it)
    with processes("cpu") as ranks:
        progress = Session(config, RunFolder(run), ranks).restore()
    return str(caught.value), progress.global_step


def test_epoch_step_and_rank_are_named_on_every_rank(store, tmp_path):
    for message, restored in run_world(2, rank_breaks, store, tmp_path):
        assert "the loss is inf at epoch 2, step 3, rank 1" in message
        assert restored == 7  # the last one saved before; it was read before it was saved


def test_excessive_learning_rate_is_reported(store, tmp_path):
    options = {"train__optimizer": "sgd", "loss__n3": 1.0}
    with pytest.raises(NonFiniteLoss, match=r"at epoch 1, step \d, rank 0.*smaller train.lr"):
        fit(longer_config(store, tmp_path, train__lr=1e30, **options))
    assert not (tmp_path / "checkpoints").exists()


def poison(loop: Trainer, step: int, of: str) -> None:
    """The update of a step (from 1) leaves NaN behind, which no loss has seen yet."""
    progress = loop.pipeline.progress

    def poisoned(batches):
        loss = progress(batches)
        if (
            loop.progress.global_step == step - 1
            and rank() == loop.session.processes.world_size - 1
        ):
            if of == "table":
                loop.session.backend.shard().rows[-1, -1] = math.nan
            elif of == "dense":
                loop.session.scorer.relations.data[0, 0] = math.inf
            else:
                next(iter(loop.session.backend.table.optimizers[0].states.values()))[0] = math.nan
        return loss

    loop.pipeline.progress = poisoned


def rank_is_poisoned(store: Path, run: Path, step: int, of: str) -> tuple[str, int]:
    engine = "handrolled" if of == "state" else "torchrec"
    config = longer_config(store, run, entities__engine=engine, train__optimizer="adam")
    with pytest.raises(NonFiniteParameters) as caught:
        fit(config, lambda loop: poison(loop, step, of))
    with processes("cpu") as ranks:
        session = Session(config, RunFolder(run), ranks)
        progress = session.restore()
        assert all(is_finite(rows.local) for rows in session.backend.state())
    return str(caught.value), progress.global_step


@pytest.mark.parametrize("step, of", [(10, "table"), (20, "dense"), (15, "state")])
def test_nan_of_an_epochs_last_update_is_not_saved(store, tmp_path, step, of):
    """An epoch has 5 steps; step 20 is the last of the run, so no later loss depends on it."""
    name = {"table": "model.entities", "dense": "scorer.relations", "state": "momentum1"}[of]
    for message, restored in run_world(2, rank_is_poisoned, store, tmp_path, step, of):
        assert name in message and "(rank 1)" in message
        assert restored == step - 5

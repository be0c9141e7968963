"""Training side by side: every variant takes step i before any takes step i + 1.

All variants live in one world, so they share store, batches and ranks, and the distance between
their parameters can be measured while they train.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kge_torchrec.comparison.launch import Reporter
from kge_torchrec.config import Config
from kge_torchrec.distributed.processes import Processes
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session
from kge_torchrec.training.trainer import NonFiniteLoss, Trainer
from kge_torchrec.training.warm_start import begin

CHUNK_NUMBERS = 1 << 22  # elements of the table that are compared at once: 16 MiB of each


def train_side_by_side(
    reporter: Reporter, ranks: Processes, configs: dict[str, Config]
) -> dict[str, Any]:
    """Train the variants for train.epochs epochs; 0 epochs compare their initial values only.

    Every rank calls it. It keeps the results so far every train.log_every steps.

    Args:
        reporter: To the process that started this world.
        ranks: Of this world.
        configs: By name; they share the data.

    Returns:
        {"complete", "steps", "threads", "losses": {name: loss per step}, "differences": {name:
        [{"step", "entities", "dense"}]} from the first variant, "split": the split that was ranked
        at the end or None, "metrics": {name: as from Session.rank}}.

    Raises:
        NonFiniteLoss: A loss is not finite; the message names the variant.
    """
    train = next(iter(configs.values())).train
    trainers = {name: _trainer(config, ranks) for name, config in configs.items()}
    first, *others = trainers
    steps_per_epoch = trainers[first].batches.steps_per_epoch
    compared = set(measured_steps(train.epochs * steps_per_epoch))
    results: dict[str, Any] = {
        "complete": False,
        "steps": 0,
        "threads": torch.get_num_threads(),
        "losses": {name: [] for name in trainers},
        "differences": {name: [] for name in others},
        "split": None,
        "metrics": {},
    }

    def compare(step: int) -> None:
        for name in others:
            apart = largest_differences(trainers[first].session, trainers[name].session)
            results["differences"][name].append({"step": step, **apart})

    compare(0)
    for epoch in range(train.epochs):
        streams = {name: trainer.batches.epoch(epoch) for name, trainer in trainers.items()}
        for trainer in trainers.values():
            trainer.progress.step = 0
        for step in range(1, steps_per_epoch + 1):
            for name, trainer in trainers.items():
                trainer.train_step(streams[name])
            reporter.advance(len(trainers))
            steps = epoch * steps_per_epoch + step
            if steps in compared:
                compare(steps)
            if step % train.log_every == 0 or step == steps_per_epoch:
                for name, trainer in trainers.items():
                    results["losses"][name] += _losses(name, trainer, epoch, step)
                results["steps"] = steps
                reporter.keep(results)
    store = trainers[first].session.store
    split = next((name for name in ("test", "valid") if len(store.split(name))), None)
    if train.epochs and split is not None:
        results["split"] = split
        results["metrics"] = {
            name: trainer.session.rank(split) for name, trainer in trainers.items()
        }
    return {**results, "complete": True}


def _trainer(config: Config, ranks: Processes) -> Trainer:
    assert config.run.dir is not None  # the comparison's folder
    session = Session(config, RunFolder(config.run.dir), ranks)
    return Trainer(session, begin(session), None)


def _losses(name: str, trainer: Trainer, epoch: int, step: int) -> list[float]:
    """Return the losses of the steps since the last call. Collective."""
    try:
        return trainer.losses.read(epoch, step)
    except NonFiniteLoss as error:
        raise NonFiniteLoss(f"{name}: {error}") from None


@torch.no_grad()
def largest_differences(one: Session, other: Session) -> dict[str, float]:
    """Return {"entities", "dense"}: the largest absolute difference between parameters. Collective.

    It is NaN where either has one. No rank holds more than a part of the table.
    """
    first, second = one.backend.shard(), other.backend.shard()
    device, entities = first.rows.device, torch.zeros((), device=first.rows.device)
    step = max(1, CHUNK_NUMBERS // first.dim)
    for start in range(0, first.num_entities, step):
        ids = torch.arange(start, min(start + step, first.num_entities), device=device)
        entities = torch.maximum(entities, _largest(first.fetch(ids), second.fetch(ids)))
    with one.trained_model() as ours, other.trained_model() as others:
        pairs = zip(ours.scorer.parameters(), others.scorer.parameters(), strict=True)
        dense = [_largest(mine, theirs) for mine, theirs in pairs if mine.numel()]
    largest = float(torch.stack(dense).max()) if dense else 0.0
    return {"entities": float(entities), "dense": largest}


def _largest(first: Tensor, other: Tensor) -> Tensor:
    return (first.float() - other.float()).abs().max()


def measured_steps(last: int) -> list[int]:
    """Return 0, 1, 2, 5, 10, 20, 50, ... and the last step."""
    steps, unit = {0, last}, 1
    while unit < last:
        steps.update(step for step in (unit, 2 * unit, 5 * unit) if step < last)
        unit *= 10
    return sorted(steps)

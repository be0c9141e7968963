"""Training side by side: every variant takes step i before any takes step i + 1.

All live in one world, so they see the same store, batches and ranks, and how far their parameters
lie apart can be measured while they train.

Shapes: N entities, D numbers per entity.
"""

from __future__ import annotations

from collections.abc import Iterator
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


def train_side_by_side(
    reporter: Reporter, ranks: Processes, configs: dict[str, Config]
) -> dict[str, Any]:
    """Trains the variants for train.epochs epochs; 0 epochs compare their starts only.

    configs: by name; they share the data.  Every rank calls it.  Returns, and keeps at intervals
    while training, {"complete", "steps", "threads", "losses": {name: a loss a step},
    "differences": {name: [{"step", "entities", "dense"}]} from the first variant,
    "split": what was ranked at the end or None, "metrics": {name: as Session.rank}}.
    Raises NonFiniteLoss naming the variant.
    """
    first = next(iter(configs.values()))
    trainees = [_Trainee(name, config, ranks) for name, config in configs.items()]
    lockstep = _Lockstep(trainees, reporter)
    lockstep.train(first.train.epochs, first.train.log_every)
    return lockstep.finish(ranked=first.train.epochs > 0)


class _Trainee:
    """One variant: its session and what trains it."""

    def __init__(self, name: str, config: Config, ranks: Processes):
        self.name = name
        assert config.run.dir is not None  # the comparison's folder
        self.session = Session(config, RunFolder(config.run.dir), ranks)
        self.trainer = Trainer(self.session, begin(self.session), None)

    def epoch(self, epoch: int) -> Iterator[Any]:
        """The batches of an epoch, to be trained from its start."""
        self.trainer.progress.step = 0
        return self.trainer.batches.epoch(epoch)

    def losses(self, epoch: int, last_step: int) -> list[float]:
        """Of the steps since the last call.  Collective."""
        try:
            return self.trainer.losses.read(epoch, last_step)
        except NonFiniteLoss as error:
            raise NonFiniteLoss(f"{self.name}: {error}") from None


class _Lockstep:
    """Steps the trainees by turns and writes down what they do."""

    def __init__(self, trainees: list[_Trainee], reporter: Reporter):
        self.trainees, self.reporter, self.step = trainees, reporter, 0
        names = [trainee.name for trainee in trainees]
        self.found: dict[str, Any] = {
            "complete": False,
            "steps": 0,
            "threads": torch.get_num_threads(),
            "losses": {name: [] for name in names},
            "differences": {name: [] for name in names[1:]},
            "split": None,
            "metrics": {},
        }

    def train(self, epochs: int, log_every: int) -> None:
        steps_per_epoch = self.trainees[0].trainer.batches.steps_per_epoch
        compared = set(measured_steps(epochs * steps_per_epoch))
        self._compare()
        for epoch in range(epochs):
            streams = [trainee.epoch(epoch) for trainee in self.trainees]
            for step in range(1, steps_per_epoch + 1):
                for trainee, stream in zip(self.trainees, streams, strict=True):
                    trainee.trainer.train_step(stream)
                self.step += 1
                self.reporter.advance(len(self.trainees))
                if self.step in compared:
                    self._compare()
                if step % log_every == 0 or step == steps_per_epoch:
                    self._read_losses(epoch, step)

    def finish(self, ranked: bool) -> dict[str, Any]:
        """Ranks test (valid without one, nothing if there is neither); returns everything."""
        store = self.trainees[0].session.store
        split = next((name for name in ("test", "valid") if len(store.split(name))), None)
        if ranked and split is not None:
            self.found["split"] = split
            for trainee in self.trainees:
                self.found["metrics"][trainee.name] = trainee.session.rank(split)
        return {**self.found, "complete": True}

    def _compare(self) -> None:
        first, *others = self.trainees
        for other in others:
            found = largest_differences(first.session, other.session)
            self.found["differences"][other.name].append({"step": self.step, **found})

    def _read_losses(self, epoch: int, step: int) -> None:
        for trainee in self.trainees:
            self.found["losses"][trainee.name] += trainee.losses(epoch, step)
        self.found["steps"] = self.step
        self.reporter.keep(self.found)


CHUNK_NUMBERS = 1 << 22  # of the table that are compared at once: 16 MiB of each


@torch.no_grad()
def largest_differences(one: Session, other: Session) -> dict[str, float]:
    """{"entities", "dense"}: the largest absolute difference between parameters.

    NaN where either has one.  Collective; no rank holds more than a part of the table.
    """
    return {"entities": _of_tables(one, other), "dense": _of_dense(one, other)}


def _of_tables(one: Session, other: Session) -> float:
    first, second = one.backend.shard(), other.backend.shard()
    device, largest = first.rows.device, torch.zeros((), device=first.rows.device)
    step = max(1, CHUNK_NUMBERS // first.dim)
    for start in range(0, first.num_entities, step):
        ids = torch.arange(start, min(start + step, first.num_entities), device=device)
        largest = torch.maximum(largest, _largest(first.fetch(ids), second.fetch(ids)))
    return float(largest)


def _of_dense(one: Session, other: Session) -> float:
    with one.whole_scorer() as ours, other.whole_scorer() as others:
        values = dict(others.named_parameters())
        pairs = [(mine, values[name]) for name, mine in ours.named_parameters()]
        largest = [_largest(mine, theirs) for mine, theirs in pairs if mine.numel()]
    return float(torch.stack(largest).max()) if largest else 0.0


def _largest(one: Tensor, other: Tensor) -> Tensor:
    return (one.float() - other.float()).abs().max()


def measured_steps(last: int) -> list[int]:
    """0, 1, 2, 5, 10, 20, 50, ... and the last step."""
    found, unit = {0, last}, 1
    while unit < last:
        found.update(step for step in (unit, 2 * unit, 5 * unit) if step < last)
        unit *= 10
    return sorted(found)

"""The training loop: epochs of steps, validation, early stopping, checkpoints, final results.

One step reads: set the learning rate, train the next batch, remember its loss.  Everything that
waits for the device happens at intervals.
"""

from __future__ import annotations

import logging
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from kge_torchrec.training.assembly import build_batches
from kge_torchrec.training.checkpoints import name_of
from kge_torchrec.training.losses_seen import LossesSeen
from kge_torchrec.training.progress import Progress
from kge_torchrec.training.run_folder import MetricsLog
from kge_torchrec.training.schedule import Schedule
from kge_torchrec.training.session import Session
from kge_torchrec.training.steps import build_pipeline

log = logging.getLogger(__name__)


class Fit:
    """Trains a session from ``progress`` on.  Collective."""

    def __init__(self, session: Session, progress: Progress, metrics: MetricsLog | None):
        self.session, self.config = session, session.config
        self.progress, self.metrics = progress, metrics
        self.batches = build_batches(self.config, session.store, session.processes)
        self.schedule = Schedule.of(self.config.train, self.batches.steps_per_epoch)
        self.pipeline = build_pipeline(
            self.config.train.pipeline, session.engine, session.processes.device
        )
        self.losses = LossesSeen()
        # Called with (kind, values) after every interval, epoch and validation.
        self.callbacks: list[Callable[[str, dict[str, Any]], None]] = []

    def run(self) -> Progress:
        """Trains until the last epoch or early stopping; returns the final progress.

        Raises NonFiniteLoss or CheckpointError; checkpoints written before stay.
        """
        epochs, progress = self.config.train.epochs, self.progress
        while progress.epoch < epochs and not self._stop_early():
            self._epoch()
            last = progress.epoch == epochs
            improved = self._validate() if self._due(last) else False
            every = self.config.checkpoint.every_epochs
            ending = last or self._stop_early()
            if improved or ending or (every and progress.epoch % every == 0):
                self._save()
        return progress

    def _epoch(self) -> None:
        progress, size = self.progress, len(self.session.store.train)
        batch_size, every_steps = self.config.train.batch_size, self.config.checkpoint.every_steps
        batches = self.batches.epoch(progress.epoch, progress.step)
        started = self._seconds()
        start_seconds, start_triples = progress.seconds, progress.triples
        with self._bar(size, progress.step * batch_size) as bar:
            while progress.step < self.batches.steps_per_epoch:
                factor = self.schedule.factor(progress.global_step, progress.plateaus)
                self.session.engine.set_learning_rate(factor)
                self.losses.add(self.pipeline.progress(batches))
                trained = min(batch_size, size - progress.step * batch_size)
                progress.step += 1
                progress.global_step += 1
                progress.triples += trained
                bar.update(trained)
                done = progress.step == self.batches.steps_per_epoch
                saving = every_steps and progress.step % every_steps == 0 and not done
                if not (done or saving or progress.step % self.config.train.log_every == 0):
                    continue
                losses = self.losses.read(progress.epoch, progress.step)
                progress.seconds += self._seconds() - started
                progress.epoch_loss += sum(losses)
                self._log_interval(losses, factor, bar)
                if saving:
                    self._save()
                started = self._seconds()
        seconds = progress.seconds - start_seconds
        self._write(
            "epoch",
            {
                "epoch": progress.epoch + 1,
                "loss": progress.epoch_loss / progress.step,
                "seconds": seconds,
                "triples_per_second": (progress.triples - start_triples) / max(seconds, 1e-9),
            },
        )
        progress.epoch, progress.step, progress.epoch_loss = progress.epoch + 1, 0, 0.0

    def _log_interval(self, losses: list[float], factor: float, bar: tqdm) -> None:
        progress, mean = self.progress, sum(losses) / len(losses)
        bar.set_postfix(loss=f"{mean:.4f}", refresh=False)
        self._write(
            "step",
            {
                "epoch": progress.epoch + 1,
                "loss": mean,
                "lr": self.config.train.lr * factor,
                "triples_per_second": progress.triples / max(progress.seconds, 1e-9),
            },
        )

    def _due(self, last: bool) -> bool:
        every = self.config.evaluation.every
        return bool(every and len(self.session.store.valid)) and (
            last or self.progress.epoch % every == 0
        )

    def _validate(self) -> bool:
        """Ranks valid; True if this is the best model so far."""
        progress, metric = self.progress, self.config.evaluation.metric
        results = self.session.validate()
        value = results["both"]["realistic"][metric]
        better = progress.is_better(metric, value)
        if better:
            progress.best_metric, progress.best_checkpoint = value, name_of(progress)
        progress.bad_validations = 0 if better else progress.bad_validations + 1
        self._plateau(better)
        self._write("valid", {"epoch": progress.epoch, **results})
        if self.session.show:
            mark = " (best)" if better else ""
            tqdm.write(f"epoch {progress.epoch}: valid {metric} {value:.4f}{mark}", file=sys.stderr)
        return better

    def _plateau(self, better: bool) -> None:
        progress = self.progress
        progress.plateau_wait = 0 if better else progress.plateau_wait + 1
        if progress.plateau_wait > self.config.train.plateau_patience:
            progress.plateaus, progress.plateau_wait = progress.plateaus + 1, 0

    def _stop_early(self) -> bool:
        patience = self.config.evaluation.patience
        return bool(patience) and self.progress.bad_validations >= patience

    def _save(self) -> None:
        self.session.checkpoints.save(self.session.engine.state(), self.progress)

    def _write(self, kind: str, values: dict[str, Any]) -> None:
        if self.metrics is not None:
            self.metrics.write(kind, self.progress.global_step, values)
        for callback in self.callbacks:
            callback(kind, values)

    def _bar(self, size: int, done: int) -> tqdm:
        name = f"epoch {self.progress.epoch + 1}/{self.config.train.epochs}"
        return tqdm(
            total=size,
            initial=done,
            desc=name,
            unit=" triples",
            unit_scale=True,
            disable=not self.session.show,
            leave=False,
        )

    def _seconds(self) -> float:
        if self.session.processes.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def peak_memory_bytes() -> int:
    """The largest resident size of any rank so far.  Collective."""
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in KiB but on macOS
    peak = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return int(peak)

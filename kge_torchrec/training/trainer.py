"""The training loop: epochs of steps, validation, early stopping and checkpoints.

A step (``Trainer.train_step``) sets the learning rate, trains the next batch and keeps its loss on
the device.  The loop waits for the device only at intervals, when it reads the losses.  Parameters
are checked for NaN before they are saved, because no loss covers the update of the last step yet.
The learning rate is a function of the step, so a resume needs no extra state.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from kge_torchrec.data.batches import SampledBatch
from kge_torchrec.data.batches.queries import QueryBatch
from kge_torchrec.distributed.processes import gathered, on_all_ranks
from kge_torchrec.errors import KGEError
from kge_torchrec.lines import say
from kge_torchrec.ranking.ranks import value_of
from kge_torchrec.training.assembly import build_batches, build_pipeline
from kge_torchrec.training.checkpoints import NonFiniteParameters as NonFiniteParameters
from kge_torchrec.training.checkpoints import name_of
from kge_torchrec.training.schedules import Plateau, Schedule
from kge_torchrec.training.session import Session, validation_triples
from kge_torchrec.training.start import freeze
from kge_torchrec.training.state import TrainState, beats
from kge_torchrec.training.step import seed_generators
from kge_torchrec.training.stop_signal import StopSignal, TrainingInterrupted, TrainingStopped
from kge_torchrec.training.trackers import MetricsLog

# Called on every rank with "step", "epoch", "valid" or "checkpoint" (one that is complete), and
# with the values of metrics.jsonl.
Callback = Callable[[str, dict[str, Any]], object]
_DROPOUT = 0xD60  # separates the random streams of dropout from others with the same seed


class Trainer:
    """The training loop of a session.  Collective.

    ``progress`` is where to start, and is updated in place; only rank 0 has ``metrics``.
    """

    def __init__(
        self,
        session: Session,
        progress: TrainState,
        metrics: MetricsLog | None,
        callbacks: Sequence[Callback] = (),
    ):
        self.session, self.config = session, session.config
        self.progress, self.metrics = progress, metrics
        self.batches = build_batches(self.config, session.store, session.processes, session.disk)
        self.schedule = Schedule.of(self.config.train, self.batches.steps_per_epoch)
        freeze(session)
        parts = self.config, session.backend, session.processes, session.features
        self.pipeline = build_pipeline(*parts)
        # This rank's losses until they are read: shares of the global mean, times the world size.
        self.losses: list[Tensor] = []
        note = "stopping after this step, with a checkpoint; Ctrl-C again ends at once\n"
        self.stop = StopSignal(session.processes, f"\n{note}" if session.processes.is_first else "")
        self.callbacks = list(callbacks)
        self._has_named_candidates = False

    def run(self) -> TrainState:
        """Train until the last epoch or early stopping; return the final progress.

        Errors are as of ``api.train``; earlier checkpoints remain after each.
        """
        epochs, progress = self.config.train.epochs, self.progress
        with self._bar() as bar, self.stop, self.session.checkpoints.closing():
            if not epochs and not self.session.checkpoints.names():
                self._save(ends=True)  # the initial values, which other verbs then read
            while progress.epoch < epochs and not progress.early_stop(self.config.evaluation):
                self._epoch(bar)
                self._settle(waits=False)
                last, every = progress.epoch == epochs, self.config.evaluation.every
                due = every and len(self.session.store.valid)
                improved = bool(due and (last or progress.epoch % every == 0)) and self._validate()
                period = self.config.checkpoint.every.epochs
                ending = last or bool(progress.early_stop(self.config.evaluation))
                stopping = self.stop.now()
                if improved or ending or stopping or (period and progress.epoch % period == 0):
                    self._save(ends=ending or stopping)
                if stopping:
                    raise self._stopped()
            if self.stop.now():  # a signal may arrive during the last checkpoint
                raise self._stopped()
        reason = progress.early_stop(self.config.evaluation)
        if reason and progress.epoch < epochs:
            self._say(
                f"training ends here, before epoch {epochs}: {reason}. To train on: `train "
                f"--resume {self.session.folder.path} --evaluation.patience 0`"
            )
        return progress

    def _epoch(self, bar: tqdm) -> None:
        progress, device = self.progress, self.session.processes.device
        bar.set_description(f"epoch {progress.epoch + 1}/{self.config.train.epochs}", refresh=False)
        batches = self.batches.epoch(progress.epoch, progress.step)
        started = seconds_on(device)
        start_seconds, start_triples = progress.seconds, progress.triples
        period = self.config.checkpoint.every.steps
        while progress.step < self.batches.steps_per_epoch:
            bar.update(self.train_step(batches))
            stopping = self.stop.after_step()
            step, is_last = progress.step, progress.step == self.batches.steps_per_epoch
            saving = stopping or bool(period and step % period == 0 and not is_last)
            if not (saving or is_last or step % self.config.train.log_every == 0):
                continue
            losses = self.read_losses(progress.epoch, progress.step)
            progress.seconds += seconds_on(device) - started
            progress.epoch_loss += sum(losses)
            self._log_interval(sum(losses) / len(losses), bar)
            self._settle(waits=False)
            if saving:
                self._save(ends=stopping)
            if stopping:
                raise self._stopped()
            started = seconds_on(device)
        if self.session.averaging.every_steps == 0:
            self.session.averaging.add()
        progress.seconds += seconds_on(device) - started
        seconds = max(progress.seconds - start_seconds, 1e-9)
        self._end_epoch(seconds, (progress.triples - start_triples) / seconds)

    def train_step(self, batches: Iterator[SampledBatch | QueryBatch]) -> int:
        """Train the next batch; return its number of examples over all ranks."""
        progress = self.progress
        factor = self.schedule.factor(progress.global_step, progress.plateaus)
        self.session.backend.optimizer.set_rate(factor)
        # A resumed run repeats the dropout of an uninterrupted one with as many ranks.
        rank = self.session.processes.rank
        seed_generators(self.config.seed, _DROPOUT, progress.global_step, rank)
        self.losses.append(self.pipeline.progress(batches))
        _, trained = self.batches.positions(progress.epoch, progress.step)
        progress.step += 1
        progress.global_step += 1
        progress.triples += trained
        averaging = self.session.averaging
        if averaging.every_steps and progress.global_step % averaging.every_steps == 0:
            averaging.add()
        return trained

    def read_losses(self, epoch: int, last_step: int) -> list[float]:
        """Return the global losses of the steps since the last read, until ``last_step``.

        Collective.  All ranks raise NonFiniteLoss, with the first bad step and its rank.
        """
        if not self.losses:
            return []
        mine = torch.stack(self.losses).double()
        self.losses.clear()
        losses = torch.stack(gathered(mine)).cpu()  # (ranks, steps)
        bad = ~losses.isfinite()
        if bad.any():
            column = int(bad.any(0).nonzero()[0])
            rank = int(bad[:, column].nonzero()[0])
            step = last_step - losses.shape[1] + column + 1
            raise NonFiniteLoss(
                f"the loss is {losses[rank, column].item()} at epoch {epoch + 1}, step {step}, "
                f"rank {rank}; training stops, the last good checkpoint is kept. A smaller "
                "train.lr or model.init_scale usually helps."
            )
        return losses.mean(0).tolist()

    def _log_interval(self, loss: float, bar: tqdm) -> None:
        progress = self.progress
        bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
        factor = self.schedule.factor(progress.global_step - 1, progress.plateaus)
        self._write(
            "step",
            {
                "epoch": progress.epoch + 1,
                "loss": loss,
                "lr": self.config.train.lr * factor,
                "triples_per_second": progress.triples / max(progress.seconds, 1e-9),
            },
        )

    def _end_epoch(self, seconds: float, triples_per_second: float) -> None:
        progress = self.progress
        loss = progress.epoch_loss / progress.step
        progress.epoch, progress.step, progress.epoch_loss = progress.epoch + 1, 0, 0.0
        values = {
            "epoch": progress.epoch,
            "loss": loss,
            "seconds": seconds,
            "triples_per_second": triples_per_second,
        }
        self._write("epoch", values)
        if self.session.hide_bars or not sys.stderr.isatty():  # otherwise the bar shows it
            rate = f"{triples_per_second:,.0f} {self.config.negatives.examples}/s"
            self._say(f"loss {loss:.4f}, {rate}", "epoch", **values)

    def _validate(self) -> bool:
        """Rank valid; return whether this is the best model so far."""
        progress, metric = self.progress, self.config.evaluation.metric
        start = time.perf_counter()
        results = self.session.validate()
        seconds = time.perf_counter() - start
        value = value_of(results, metric)
        better = beats(metric, value, progress.best_metric)
        if better:
            progress.best_metric, progress.best_checkpoint = value, name_of(progress)
        progress.bad_validations = 0 if better else progress.bad_validations + 1
        progress.validations.append([progress.epoch, value])
        if isinstance(self.schedule, Plateau):
            options = self.schedule.options
            if progress.waits_on_plateau(metric, value, options.threshold) > options.patience:
                progress.plateaus, progress.plateau_wait = progress.plateaus + 1, 0
        store = self.session.store
        ranked, total = len(validation_triples(self.config, store)), len(store.valid)
        counts = {"epoch": progress.epoch, "seconds": seconds, "triples": ranked, "of": total}
        values = {**counts, **results}
        self._write("valid", values)
        sample = f" on a sample of {ranked:,} triples" if ranked < total else ""
        if "candidates" in results and not self._has_named_candidates:
            self._has_named_candidates = True
            self._say(f"validations rank among {results['candidates']['restricted_to']}")
        text = f"valid {metric} {value:.4f}{sample}{' (best)' if better else ''}"
        self._say(text, "valid", best=better, **values)
        return better

    def _settle(self, waits: bool) -> None:
        """End the writing of the last checkpoint, see ``Checkpoints.settle``; log its figures."""
        figures = self.session.checkpoints.settle(waits)
        if figures is not None:
            self._write("checkpoint", figures)

    def _save(self, ends: bool = False) -> None:
        """Write a checkpoint, and wait for it if training ``ends`` there."""
        self._settle(waits=True)
        state = self.session.state(self.progress)
        background = self.config.checkpoint.options.background and not ends
        figures = self.session.checkpoints.save(state, self.progress, background)
        if figures is not None:
            self._write("checkpoint", figures)

    def _stopped(self) -> TrainingStopped | TrainingInterrupted:
        is_interrupt = self.stop.is_interrupt
        kind = TrainingInterrupted if is_interrupt else TrainingStopped
        why = "interrupted" if is_interrupt else "stopped by a signal"
        name, folder = name_of(self.progress), self.session.folder.path
        return kind(f"{why}; checkpoint {name} is written. Resume with `train --resume {folder}`.")

    def _write(self, kind: str, values: dict[str, Any]) -> None:
        """Write metrics to the log (on rank 0) and call the callbacks.  Collective."""

        def write() -> None:
            if self.metrics is not None:
                self.metrics.write(kind, self.progress.global_step, values)
            for callback in self.callbacks:
                callback(kind, values)

        on_all_ranks(self.session.processes, write)

    def _say(self, text: str, kind: str = "note", **values: Any) -> None:
        step = {"epoch": self.progress.epoch, "step": self.progress.global_step}
        say(f"epoch {self.progress.epoch}: {text}", kind, **(step | values))

    def _bar(self) -> tqdm:
        """Make one progress bar for all epochs."""
        progress, size = self.progress, self.batches.examples
        return tqdm(
            total=self.config.train.epochs * size,
            initial=progress.epoch * size + progress.step * self.config.train.batch_size,
            unit=f" {self.config.negatives.examples}",
            unit_scale=True,
            disable=self.session.hide_bars,
        )


def seconds_on(device: torch.device) -> float:
    """Return the time, once a device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class NonFiniteLoss(KGEError, RuntimeError):
    """A training loss is not finite; the message says when and on which rank."""

    on_every_rank = True

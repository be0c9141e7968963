"""Averages of the weights over the training: ``train.averaging``.

Each rank averages its own rows of the table and its own parts of the dense parameters, so averaging
sends nothing.  Training continues from the raw weights.  Validation, ranking and everything that
reads a checkpoint use the average: a checkpoint has the average as its model, and the raw weights
besides it.

    ema    an exponential moving average (Polyak and Juditsky 1992)
    aswa   the mean of the weights that validation accepts (Demir et al. 2024)

Shapes: n rows on this rank, D elements per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from kge_torchrec.config import Config
from kge_torchrec.distributed.dense import local_part
from kge_torchrec.distributed.processes import Processes
from kge_torchrec.embeddings.backend import ENTITY_WEIGHT, EmbeddingBackend
from kge_torchrec.embeddings.chunks import row_chunks, row_sharded
from kge_torchrec.ranking.metrics import value_of
from kge_torchrec.training.checkpoints import RAW
from kge_torchrec.training.state import beats

Results = dict[str, Any]  # of a validation


class Averaging:
    """No average, and the base class of the averages.

    Args:
        config: The config of the run.
        backend: Its table and model.
        processes: The ranks of the run.
    """

    def __init__(self, config: Config, backend: EmbeddingBackend, processes: Processes):
        self.config, self.backend, self.processes = config, backend, processes
        self.options = config.train.average
        self.clear()

    def clear(self) -> None:
        """Forget the average."""
        self.count = 0  # of the weights in the average
        self.results: Results = {}  # of the average, where validation decides about it
        self._average: dict[str, Tensor] = {}

    def end_step(self, step: int) -> None:
        """Follow a step.

        Args:
            step: Number of finished steps of the run.
        """

    def end_epoch(self) -> None:
        """Follow an epoch, before its validation."""

    def validate(self, rank: Callable[[], Results]) -> Results:
        """Validate the average.

        Args:
            rank: Ranks the triples with the weights of the model.

        Returns:
            The results of the average, or of the raw weights if there is no average yet.
        """
        with self.applied():
            return rank()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Exchange the weights and their average inside the context, if there is an average."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def progress(self) -> dict[str, Any]:
        """Return plain values for JSON that a resume needs; {} if there is no average."""
        if not self.count:
            return {}
        kind = self.config.train.averaging
        return {"kind": kind, "count": self.count, "results": self.results}

    def resume(self, progress: dict[str, Any]) -> None:
        """Take the weights of the model as the average, if the config still has this average.

        Args:
            progress: Result of ``progress`` when the checkpoint was written.
        """
        self.clear()
        if progress.get("kind") == self.config.train.averaging:
            self._average = _copies(self._weights())
            self.count, self.results = progress["count"], progress["results"]

    def with_average(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a checkpoint with the average as its model, and the raw weights.

        Args:
            state: Result of ``EmbeddingBackend.state``.
        """
        if not self.count:
            return state
        raw = state["model"]
        average = {name: self._as_in_checkpoint(name, raw[name]) for name in self._average}
        return {**state, "model": {**raw, **average}, RAW: {name: raw[name] for name in average}}

    def load_raw(self, load: Callable[[dict[str, Any]], object]) -> None:
        """Replace the weights of the model by the raw weights of a checkpoint.

        Args:
            load: Fills a state from the checkpoint in place.
        """
        parameters = self.backend.parameter_state()
        load({RAW: {name: parameters[name] for name in self._weights()}})
        self.backend.load_parameter_state(parameters)

    def _weights(self) -> dict[str, Tensor]:
        """Return views of this rank's rows and dense parts, by their names in a checkpoint."""
        dense = self.backend.dense.objective.named_parameters()
        parts = {f"objective.{name}": local_part(weight.detach()) for name, weight in dense}
        return {ENTITY_WEIGHT: self.backend.shard().rows, **parts}

    def _as_in_checkpoint(self, name: str, weight: Tensor) -> Tensor:
        """Describe this rank's part of an average like the weight that it is of."""
        part = self._average[name]
        if name == ENTITY_WEIGHT:
            shard = self.backend.shard()
            pieces = [(part, shard.first_row)]
            return row_sharded(pieces, shard.num_entities, self.processes.group)
        if not isinstance(weight, DTensor):
            return part
        return DTensor.from_local(
            part,
            weight.device_mesh,
            weight.placements,
            run_check=False,
            shape=weight.shape,
            stride=weight.stride(),
        )

    @torch.no_grad()
    def _exchange(self) -> None:
        if not self.count:
            return
        for name, weight in self._weights().items():
            whole = torch.atleast_1d(weight, self._average[name])
            for one, other in zip(*map(row_chunks, whole), strict=True):
                kept = one.clone()
                one.copy_(other)
                other.copy_(kept)

    def _move(self, update: Callable[..., None], count: int | None = None) -> None:
        """Move the average towards the weights by one of torch's functions."""
        for name, weight in self._weights().items():
            update([self._average[name]], [weight], count)


class Ema(Averaging):
    """An exponential moving average of the weights after each epoch, or each few steps.

    The first averages would be mostly the first weights.  So the decay grows from 2 / 11 to the
    configured one, as in TensorFlow's ExponentialMovingAverage: (1 + n) / (10 + n) for n weights.
    """

    def end_step(self, step: int) -> None:
        every = self.options.every_steps
        if every and step % every == 0:
            self._add()

    def end_epoch(self) -> None:
        if not self.options.every_steps:
            self._add()

    def _add(self) -> None:
        if self.count:
            growing = (1 + self.count) / (10 + self.count)
            decay = min(self.options.decay, growing)
            self._move(get_ema_multi_avg_fn(decay))
        else:
            self._average = _copies(self._weights())
        self.count += 1


class Aswa(Averaging):
    """Adaptive stochastic weight averaging (Demir et al. 2024).

    Each validation ranks the weights, and the mean with these weights added.  The weights replace
    the mean if they are better than both means.  Otherwise the mean takes them in if that is
    better than the mean before.  A second copy keeps the mean before.
    """

    def validate(self, rank: Callable[[], Results]) -> Results:
        if self.count and not self.results:  # validations are compared in a new way from here on
            self.results = super().validate(rank)
        raw = rank()
        if not self.count:
            return self._restart(raw)
        before = _copies(self._average)
        self._move(get_swa_multi_avg_fn(), self.count)
        added = super().validate(rank)
        if self._beats(raw, added) and self._beats(raw, self.results):
            return self._restart(raw)
        if self._beats(added, self.results):
            self.count, self.results = self.count + 1, added
        else:
            self._average = before
        return self.results

    def _restart(self, results: Results) -> Results:
        """Let the average be the weights, whose results these are."""
        self._average = _copies(self._weights())
        self.count, self.results = 1, results
        return results

    def _beats(self, one: Results, other: Results) -> bool:
        metric = self.config.evaluation.metric
        values = (value_of(results, metric) for results in (one, other))
        return beats(metric, *values)


KINDS = {"none": Averaging, "ema": Ema, "aswa": Aswa}


def _copies(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: part.clone() for name, part in parts.items()}

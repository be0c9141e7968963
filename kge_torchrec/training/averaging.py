"""An exponential moving average of the weights (Polyak and Juditsky 1992): ``train.averaging``.

Each rank averages its own rows of the table and its own parts of the dense parameters, so averaging
sends nothing.  Training continues from the raw weights.  Validation, ranking and everything that
reads a checkpoint use the average: a checkpoint has the average as its model, and the raw weights
besides it.

Shapes: n rows on this rank, D elements per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from kge_torchrec.config import TrainConfig
from kge_torchrec.distributed.dense import local_part
from kge_torchrec.distributed.processes import Processes
from kge_torchrec.embeddings.backend import ENTITY_WEIGHT, EmbeddingBackend
from kge_torchrec.embeddings.chunks import row_chunks, row_sharded
from kge_torchrec.training.checkpoints import RAW


class Averaging:
    """The average of a run, of no weights as long as ``count`` is 0.

    The first averages would be mostly the first weights.  So the decay grows from 2 / 11 to the
    configured one, as in TensorFlow's ExponentialMovingAverage: (1 + n) / (10 + n) for n weights.

    Attributes:
        count: Number of weights in the average.
        every_steps: Steps between weights that come in; 0: those at the end of each epoch, or none.
    """

    def __init__(self, train: TrainConfig, backend: EmbeddingBackend, processes: Processes):
        self.backend, self.processes = backend, processes
        self._is_on, self._decay = train.averaging == "ema", train.average.decay
        self.every_steps = train.average.every_steps if self._is_on else 0
        self.clear()

    def clear(self) -> None:
        """Forget the average."""
        self.count = 0
        self._average: dict[str, Tensor] = {}

    def end_epoch(self) -> None:
        """Follow an epoch, before its validation."""
        if self._is_on and not self.every_steps:
            self.add()

    def add(self) -> None:
        """Take the current weights into the average."""
        if self.count:
            update = get_ema_multi_avg_fn(min(self._decay, (1 + self.count) / (10 + self.count)))
            for name, weight in self._weights().items():
                update([self._average[name]], [weight], None)
        else:
            self._average = {name: weight.clone() for name, weight in self._weights().items()}
        self.count += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Exchange the weights and their average inside the context, if there is an average."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def resume(self, count: int) -> None:
        """Take the weights of the model as the average of so many, if the config has an average."""
        self.clear()
        if self._is_on and count:
            self.add()
            self.count = count

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

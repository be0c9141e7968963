"""An exponential moving average of the weights (Polyak and Juditsky 1992): ``train.averaging``.

Each rank averages its own rows of the table and its own parts of the dense parameters, so averaging
sends nothing.  Training continues from the raw weights.  Validation, ranking and everything that
reads a checkpoint use the average: a checkpoint has the average as its model, and the raw weights
besides it.

Shapes: n rows on this rank, D elements per row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from kge_torchrec.config import TrainConfig
from kge_torchrec.distributed.dense import local_part
from kge_torchrec.distributed.processes import Rows
from kge_torchrec.embeddings.backend import ENTITY_WEIGHT, EmbeddingBackend

_CHUNK_ROWS = 1 << 16  # rows that are exchanged at a time, which need memory for a copy


class Averaging:
    """The average of ``count`` weights, one ``every_steps``; 0: one per epoch, None: none.

    The first averages would be mostly the first weights.  So the decay grows from 2 / 11 to the
    configured one, as in TensorFlow's ExponentialMovingAverage: (1 + n) / (10 + n) for n weights.
    """

    def __init__(self, train: TrainConfig, backend: EmbeddingBackend):
        self.backend = backend
        self._decay = train.averaging_options.decay
        self.every_steps = train.averaging_options.every_steps if train.averaging == "ema" else None
        self._average: dict[str, Tensor] = {}
        self.clear()

    def clear(self) -> None:
        """Forget the average."""
        self.count, self._average = 0, {}

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
        """Have an average of so many weights, whose values are about to be loaded."""
        self.clear()
        if count:
            self.add()
            self.count = count

    def with_average(self, state: list[Rows]) -> list[Rows]:
        """Return the rows of a checkpoint, which has the average as its model, and raw weights."""
        if not self.count:
            return state
        averages = {f"model.{name}": average for name, average in self._average.items()}
        rows = [own for own in state if own.name not in averages]
        for own in state:
            if own.name in averages:
                rows.append(own._replace(name=own.name.replace("model.", "raw.", 1)))
                rows.append(own._replace(local=averages[own.name]))
        return rows

    def _weights(self) -> dict[str, Tensor]:
        """Return views of this rank's rows and dense parts, by their names in a checkpoint."""
        dense = self.backend.dense.objective.named_parameters()
        parts = {f"objective.{name}": local_part(weight.detach()) for name, weight in dense}
        return {ENTITY_WEIGHT: self.backend.shard().rows, **parts}

    @torch.no_grad()
    def _exchange(self) -> None:
        if not self.count:
            return
        for name, weight in self._weights().items():
            whole = torch.atleast_1d(weight, self._average[name])
            for one, other in zip(*(rows.split(_CHUNK_ROWS) for rows in whole), strict=True):
                kept = one.clone()
                one.copy_(other)
                other.copy_(kept)

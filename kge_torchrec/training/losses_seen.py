"""Noticing that training has gone astray: losses and parameters that are no finite numbers.

Losses are kept on the device until somebody asks, so that no step waits.  Parameters are looked at
before they are saved: the last step's update is in no loss yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from kge_torchrec.errors import KGEError
from kge_torchrec.parallel.processes import Processes


class NonFiniteLoss(KGEError, RuntimeError):
    """Training met a loss that is no finite number; the message says when and on which rank."""

    on_every_rank = True


class NonFiniteParameters(KGEError, RuntimeError):
    """A parameter or its optimizer state holds NaN or infinity; the message says which."""

    on_every_rank = True


class LossesSeen:
    """Collects a loss a step and reads them all at once.

    Each rank's loss is its share of the global mean, times the world size.
    """

    def __init__(self) -> None:
        self._losses: list[Tensor] = []

    def add(self, loss: Tensor) -> None:
        """Remembers the loss of a step."""
        self._losses.append(loss)

    def read(self, epoch: int, last_step: int) -> list[float]:
        """The global losses of the steps since the last read, the newest at ``last_step``.

        Collective.  Raises NonFiniteLoss, on every rank, naming the first bad step and its rank.
        """
        if not self._losses:
            return []
        mine = torch.stack(self._losses).double()
        self._losses.clear()
        world = dist.get_world_size() if dist.is_initialized() else 1
        every = [mine]
        if world > 1:
            every = [torch.empty_like(mine) for _ in range(world)]
            dist.all_gather(every, mine)
        losses = torch.stack(every).cpu()  # (ranks, steps)
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


@torch.no_grad()
def check_finite(state: dict[str, Any], processes: Processes) -> None:
    """Raises NonFiniteParameters, on every rank, if a tensor of a nested state has NaN or infinity.

    Collective.  One pass over this rank's parts, in no memory of their size.
    """
    bad = [name for name, part in _local_parts(state) if not _is_finite(part)]
    found = [names[0] if names else None for names in processes.gather(bad)]
    for rank, name in enumerate(found):
        if name is not None:
            raise NonFiniteParameters(
                f"{name} holds NaN or infinity (rank {rank}); training stops, the last good "
                "checkpoint is kept. A smaller train.lr or model.init_scale, or train.clip_norm, "
                "usually helps."
            )


def _local_parts(state: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """This rank's tensors by dotted name."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield from _local_parts(value, f"{name}.{key}" if name else str(key))
    elif isinstance(state, DTensor):
        local = state.to_local()
        for part in local.local_shards() if hasattr(local, "local_shards") else [local]:
            yield name, part
    elif isinstance(state, Tensor):
        yield name, state


def _is_finite(values: Tensor) -> bool:
    if not values.is_floating_point() or values.numel() == 0:
        return True
    return all(bound.isfinite() for bound in values.aminmax())  # a NaN is both

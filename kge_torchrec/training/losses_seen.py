"""The losses of the last steps, kept on the device until somebody asks: no wait inside a step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from kge_torchrec.errors import KGEError


class NonFiniteLoss(KGEError, RuntimeError):
    """Training met a loss that is no finite number; the message says when and on which rank."""

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

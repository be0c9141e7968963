"""Dynamic loss scaling for float16, which reaches the entity table.

Small gradients vanish in float16, so the loss is multiplied by a scale before backward and every
gradient divided by it after; when a gradient overflows the step is skipped and the scale halved
(Micikevicius et al. 2018; the constants are torch.amp.GradScaler's).

An optimizer that is fused with the lookup would consume scaled gradients, or infinite ones.  So
backward ends at the looked-up rows, and goes on into the table once the gradients are known to be
finite and have been divided by the scale.
"""

from __future__ import annotations

from torch import Tensor, nn

from kge_torchrec.errors import KGEError

START, LARGEST, SMALLEST = 2.0**16, 2.0**24, 2.0**-14
GROWTH_INTERVAL = 2000  # steps without an overflow before the scale doubles


class ScaleTooSmall(KGEError, RuntimeError):
    """Gradients overflow however small the scale: they are not finite to begin with."""

    on_every_rank = True


class LossScale(nn.Module):
    """Multiplies a loss, () -> ().

    Powers of two, so that scaling changes no bit of a number within range.
    """

    def __init__(self) -> None:
        super().__init__()
        self.value = START
        self.good_steps = 0  # since the scale last changed
        self.skipped = 0  # steps, since training began

    def forward(self, loss: Tensor) -> Tensor:
        return loss * self.value

    def after_step(self, overflow: bool) -> None:
        """Halves or grows the scale.  Raises ScaleTooSmall when halving has no use any more."""
        if overflow:
            self.value, self.good_steps, self.skipped = self.value / 2, 0, self.skipped + 1
            if self.value < SMALLEST:
                raise ScaleTooSmall(
                    "train.precision fp16: gradients are not finite however small the loss scale "
                    f"(now {self.value:g}); training stops, the last checkpoint is kept. Use "
                    "train.precision bf16 or fp32, or a smaller train.lr or model.init_scale."
                )
            return
        self.good_steps += 1
        if self.good_steps == GROWTH_INTERVAL:
            self.value, self.good_steps = min(2 * self.value, LARGEST), 0

    def state(self) -> dict[str, float]:
        """Plain values, for a checkpoint."""
        return {"value": self.value, "good_steps": self.good_steps, "skipped": self.skipped}

    def load_state(self, state: dict[str, float]) -> None:
        """Takes back what ``state`` gave; nothing keeps the start."""
        for name, value in state.items():
            setattr(self, name, value)


class GradientBarrier(nn.Module):
    """Stops backward at looked-up rows (U, D), until ``release`` sends it on to the table."""

    def __init__(self) -> None:
        super().__init__()
        self._held: list[tuple[Tensor, Tensor]] = []

    def forward(self, rows: Tensor) -> Tensor:
        if not rows.requires_grad:  # no gradients are taken
            return rows
        leaf = rows.detach().requires_grad_()
        self._held.append((rows, leaf))
        return leaf

    def gradients(self) -> list[Tensor]:
        """Of the rows (U, D) of every lookup since the last release, as backward left them."""
        return [_gradient(leaf) for _, leaf in self._held]

    def release(self, factor: float) -> None:
        """Multiplies the gradients and sends them to the table.  Collective."""
        held, self._held = self._held, []
        for rows, leaf in held:
            rows.backward(_gradient(leaf).mul_(factor))

    def drop(self) -> None:
        """Forgets them."""
        self._held.clear()


def _gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None  # backward has been there
    return leaf.grad

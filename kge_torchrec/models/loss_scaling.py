"""Dynamic loss scaling for float16 that includes the entity table (Micikevicius et al. 2018).

The constants are those of torch.amp.GradScaler. An optimizer fused with the lookup would apply
scaled or infinite gradients, so backward stops at the looked-up rows (``GradientBarrier``) and
continues once the gradients are known to be finite and are divided by the scale.
"""

from __future__ import annotations

from torch import Tensor, nn

from kge_torchrec.errors import KGEError

START, LARGEST, SMALLEST = 2.0**16, 2.0**24, 2.0**-14
GROWTH_INTERVAL = 2000  # steps without an overflow before the scale doubles


class ScaleTooSmall(KGEError, RuntimeError):
    """Gradients overflow at every scale, so they are not finite to begin with."""

    on_every_rank = True


class LossScale(nn.Module):
    """Multiplies a loss, () -> (), by a power of two.

    A power of two changes no mantissa bits within float range.
    """

    def __init__(self) -> None:
        super().__init__()
        self.value = START
        self.good_steps = 0  # since the scale last changed
        self.skipped = 0  # skipped steps since training began

    def forward(self, loss: Tensor) -> Tensor:
        return loss * self.value

    def after_step(self, overflow: bool) -> None:
        """Halve the scale after an overflow; double it after 2,000 steps without one.

        Raises:
            ScaleTooSmall: Halving no longer helps.
        """
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
        """Return the state as plain values, for a checkpoint."""
        return {"value": self.value, "good_steps": self.good_steps, "skipped": self.skipped}

    def load_state(self, state: dict[str, float]) -> None:
        """Restore a state from ``state``; an empty state keeps the initial values."""
        for name, value in state.items():
            setattr(self, name, value)


class GradientBarrier(nn.Module):
    """Stops backward at looked-up rows (U, D) until ``release`` passes gradients to the table."""

    def __init__(self) -> None:
        super().__init__()
        self._held: list[tuple[Tensor, Tensor]] = []

    def forward(self, rows: Tensor) -> Tensor:
        if not rows.requires_grad:  # gradients are disabled
            return rows
        leaf = rows.detach().requires_grad_()
        self._held.append((rows, leaf))
        return leaf

    def of_rows(self) -> list[Tensor]:
        """Return the gradients (U, D) of the rows of every lookup since the last release."""
        return [_gradient(leaf) for _, leaf in self._held]

    def release(self, factor: float) -> None:
        """Multiply the gradients by a factor and pass them to the table. Collective."""
        held, self._held = self._held, []
        for rows, leaf in held:
            rows.backward(_gradient(leaf).mul_(factor))

    def drop(self) -> None:
        """Discard the gradients."""
        self._held.clear()


def _gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None  # backward has run
    return leaf.grad

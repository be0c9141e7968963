"""An optimizer of rows: Lion (Chen et al. 2023)."""

from dataclasses import dataclass

from kge_torchrec import RowOptimizer, State


class Lion(RowOptimizer):
    """w -= lr (sign(beta1 m + (1 - beta1) g) + decay w), then m = beta2 m + (1 - beta2) g."""

    @dataclass(frozen=True)
    class Options:
        """Settings of Lion."""

        beta1: float = 0.9
        """Share of the momentum in the direction."""
        beta2: float = 0.99
        """Share of the momentum that is kept."""
        decay: float = 0.0
        """Decoupled weight decay."""

    states = (State("momentum"),)

    def __init__(self, beta1, beta2, decay):
        self.beta1, self.beta2, self.decay = beta1, beta2, decay

    def step(self, rows, grad, states, lr, step):
        momentum = states["momentum"]
        change = (self.beta1 * momentum + (1 - self.beta1) * grad).sign_()
        rows.sub_(lr * (change + self.decay * rows))
        momentum.mul_(self.beta2).add_((1 - self.beta2) * grad)

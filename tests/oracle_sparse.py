"""The table optimizers of all presets one row after another, in float64, and what tests share.

Shapes: N rows, D elements per row, M gradients.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from oracle_table import NAMES

from kge_torchrec.embeddings.optimizers import RowOptimizer, make_optimizer
from kge_torchrec.embeddings.row_gradients import RowGradients, TableRows

ADAMS = ("adam", "rowwise_adam")
ADAGRADS = ("adagrad", "rowwise_adagrad")
PRESETS = [
    *(("fbgemm", name) for name in NAMES),
    ("dicee", "adam"),
    ("dgl", "adam"),
    ("dgl", "adagrad"),
]


class Formulas:
    """The table optimizers one row after another, in float64; shares no code with the package."""

    def __init__(self, values: torch.Tensor, optimizer: RowOptimizer, preset: str):
        self.optimizer, self.preset = optimizer, preset
        self.weights = values.double().numpy().copy()
        self.m = np.zeros_like(self.weights)
        self.v = np.zeros_like(self.weights)  # of row-wise states every column is the same
        self.row_steps = [0] * len(values)
        self.steps = 0

    def step(self, ids, grad, occurrences=None):
        ids, grad = ids.tolist(), grad.double().numpy()
        occurrences = [1] * len(ids) if occurrences is None else occurrences.tolist()
        if ids or self.preset != "dicee":
            self.steps += 1
        for row in set(ids):
            places = [place for place, other in enumerate(ids) if other == row]
            g = sum(grad[place] for place in places)
            if self.preset == "dgl":
                g = g / sum(occurrences[place] for place in places)
            self.row_steps[row] += 1
            self.weights[row] -= self.optimizer.lr * self.change(row, g)

    def change(self, row, g):
        name = self.optimizer.name
        if name == "sgd":
            return g
        eps, decay = self.optimizer.eps, getattr(self.optimizer, "weight_decay", 0.0)
        decay = decay if self.preset == "fbgemm" else 0.0  # the others have none
        if name == "rowwise_adagrad":
            g = g + decay * self.weights[row]
        square = np.full_like(g, np.mean(g**2)) if name.startswith("rowwise") else g**2
        if name in ADAGRADS:
            self.v[row] += square
            inside = self.preset == "dgl"
            return g / (np.sqrt(self.v[row] + eps) if inside else np.sqrt(self.v[row]) + eps)
        betas = self.optimizer.beta1, self.optimizer.beta2
        (beta1, c1), (beta2, c2) = (self.numbers(beta, row) for beta in betas)
        self.m[row] = beta1 * self.m[row] + (1 - beta1) * g
        self.v[row] = beta2 * self.v[row] + (1 - beta2) * square
        m, v = self.m[row], self.v[row]
        if self.preset == "dicee":
            change = math.sqrt(c2) / c1 * m / (np.sqrt(v) + eps)
        else:
            change = m / c1 / (np.sqrt(v / c2) + eps)
        return change + decay * self.weights[row]

    def numbers(self, beta, row):
        """(beta, 1 - beta^t) in the precision of the system that counts steps this way."""
        single = float(np.float32(beta))
        if self.preset == "fbgemm":
            return single, 1 - float(np.float32(single**self.steps))
        if self.preset == "dicee":
            return beta, 1 - beta**self.steps
        return beta, 1 - float(np.float32(single ** self.row_steps[row]))

    def states(self):
        name = self.optimizer.name
        squares = self.v[:, 0] if name.startswith("rowwise") else self.v
        if name == "sgd":
            return {}
        if name in ADAGRADS:
            return {"momentum1": squares}
        states = {"momentum1": self.m, "exp_avg_sq": squares}
        return states | ({"row_step": self.row_steps} if self.preset == "dgl" else {})


def new_values(rows=12, dim=5, seed=1):
    return torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed))


def batches(rows=12, dim=5, count=15, steps=20, seed=0):
    """Gradients of random rows, most of them several times, and of how many places each is."""
    random = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randint(0, rows, (count,), generator=random),
            torch.randn(count, dim, generator=random),
            torch.randint(1, 5, (count,), generator=random),
        )
        for _ in range(steps)
    ]


def sparse(values, optimizer, preset, **changes):
    """A table of its own that starts with ``values``, with the preset's variant of an optimizer."""
    options = {name: getattr(optimizer, name) for name in vars(optimizer.Options())}
    variant = make_optimizer(optimizer.name, optimizer.lr, preset, **options)
    made = TableRows(variant, values.clone())
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def take_step(optimizer, ids, grad, occurrences=None, distinct=False):
    """Take one step with all gradients, as ``TableShard`` does."""
    optimizer.count(bool(len(ids)))
    optimizer.step_part(RowGradients(ids, grad, occurrences, distinct))


def train(table, steps):
    for arguments in steps:
        take_step(table, *arguments)
    return table


def assert_equal_formulas(made, formulas, rtol=1e-6, atol=1e-6):
    close = {"rtol": rtol, "atol": atol, "check_dtype": False}
    torch.testing.assert_close(made.rows, torch.from_numpy(formulas.weights), **close)
    expected = formulas.states()
    assert list(made.states) == list(expected)
    for name, state in made.states.items():
        wanted = torch.tensor(np.array(expected[name]))
        assert state.shape == wanted.shape
        torch.testing.assert_close(state, wanted, **close)
    assert made.steps == formulas.steps


def assert_same_bits(left, right):
    assert torch.equal(left.rows, right.rows)
    assert list(left.states) == list(right.states)
    for name in left.states:
        assert torch.equal(left.states[name], right.states[name]), name


def exact(made):
    """Keep the states in float32, also those of dicee."""
    made.states = {
        name: state.float() if state.dtype == torch.bfloat16 else state
        for name, state in made.states.items()
    }
    return made


def compare_with_formulas(optimizer, preset, steps, atol=1e-6, **changes):
    made = train(exact(sparse(new_values(), optimizer, preset, **changes)), steps)
    formulas = Formulas(new_values(), optimizer, preset)
    for arguments in steps:
        formulas.step(*arguments)
    assert_equal_formulas(made, formulas, atol=atol)

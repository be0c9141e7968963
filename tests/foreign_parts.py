"""Parts that a config names by import path, for tests of the keys that are theirs alone."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import torch

from kge_torchrec import Loss, Reader, RowOptimizer, State
from kge_torchrec.training.schedules import Schedule


class Momentum(RowOptimizer):
    """Gradient descent with momentum (Polyak 1964)."""

    @dataclass(frozen=True)
    class Options:
        """The momentum.

        Args:
            keep: Share of it that stays from one step to the next.
        """

        keep: float = 0.5

    states = (State("velocity"),)

    def __init__(self, keep: float):
        self.keep = keep

    def step(self, rows, grad, states, lr, step):
        rows -= lr * states["velocity"].mul_(self.keep).add_(grad)


class Stairs(Schedule):
    """A rate that is halved after every few epochs."""

    @dataclass(frozen=True)
    class Options:
        epochs: int = 2

    def after_warmup(self, done, epoch, plateaus):
        return 0.5 ** (epoch // self.options.epochs)


class Words(Reader):
    """Three words a line."""

    @dataclass(frozen=True)
    class Options:
        """The lines.

        Args:
            backwards: Whether the tail comes first.
        """

        backwards: bool = False

    suffixes = (".words",)

    def __init__(self, backwards: bool):
        self.backwards = backwards

    def read(self, path, on_bytes=None):
        lines = [line.split()[:: -1 if self.backwards else 1] for line in path.open()]
        columns = [list(column) for column in zip(*lines, strict=True)]
        yield pa.record_batch(columns, names=["head", "relation", "tail"])


class CrossEntropy(Loss):
    """Over all entities, with float32 alone."""

    needs_answers = True

    def over_all(self, num_entities):
        return _OverAll()


class _OverAll:
    normalizes = True

    def observe(self, scores, answers):
        seen = scores.new_zeros(3, len(scores))
        seen[0] = scores.logsumexp(1)
        of_answers = scores[answers.query, answers.column] * answers.share
        seen[1].index_add_(0, answers.query, of_answers)
        return seen

    def join(self, seen):
        return torch.stack([seen[:, 0].logsumexp(0), *seen[:, 1:].sum(0)])

    def values(self, seen):
        return seen[0] - seen[1]

    def finish(self, scores, seen, answers, weight):
        place = answers.query, answers.column
        slopes = (scores[place] - seen[0][answers.query]).exp() - answers.share
        scores.sub_(seen[0][:, None]).exp_()
        scores[place] = slopes  # which torch refuses to be of another type
        scores.mul_(weight[:, None])

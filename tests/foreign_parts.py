"""Parts that a config names by import path, for tests of keys that only such parts have."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pyarrow as pa
import torch

from kge_torchrec import Loss, Reader, RowOptimizer, State
from kge_torchrec.models.losses import mean_over_answers
from kge_torchrec.models.over_all import OverAll
from kge_torchrec.training.schedules import Schedule


class Momentum(RowOptimizer):
    """Gradient descent with momentum (Polyak 1964)."""

    @dataclass(frozen=True)
    class Options:
        """The momentum."""

        keep: float = 0.5
        """Share of it that stays from one step to the next."""

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

    def read(self, path):
        lines = [line.split()[:: -1 if self.backwards else 1] for line in path.open()]
        columns = [list(column) for column in zip(*lines, strict=True)]
        yield pa.record_batch(columns, names=["head", "relation", "tail"])


class CrossEntropy(Loss):
    """A loss over all entities that supports only float32."""

    needs_answers = True

    def over_all(self, num_entities):
        return _OverAll()


class _OverAll(OverAll):
    normalizes = True

    def partial_statistics(self, scores, answers):
        stats = scores.new_zeros(3, len(scores))
        stats[0] = scores.logsumexp(1)
        answer_scores = scores[answers.query, answers.column] * answers.share
        stats[1].index_add_(0, answers.query, answer_scores)
        return stats

    def reduce(self, stats):
        return torch.stack([stats[:, 0].logsumexp(0), *stats[:, 1:].sum(0)])

    def loss(self, stats):
        return stats[0] - stats[1]

    def backward(self, scores, stats, answers, weight):
        place = answers.query, answers.column
        gradients = (scores[place] - stats[0][answers.query]).exp() - answers.share
        scores.sub_(stats[0][:, None]).exp_()
        scores[place] = gradients  # torch refuses another dtype here
        scores.mul_(weight[:, None])


class MeanGap(Loss):
    """log(1 + the mean of e^(negative - positive)), of any candidates; not over all entities."""

    def forward(self, positive, query, negative, mask):
        if query is not None:
            return mean_over_answers(
                partial(MeanGap.forward, self), positive, query, negative, mask
            )
        gap = negative - positive[:, None]
        mean = gap.masked_fill(~mask, -torch.inf).logsumexp(-1) - mask.sum(-1).log()
        return torch.nn.functional.softplus(mean)


class Scaled(MeanGap):
    """The same of scores times a factor that is learned."""

    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor([0.7]))

    def forward(self, positive, query, negative, mask):
        return super().forward(self.factor * positive, query, self.factor * negative, mask)

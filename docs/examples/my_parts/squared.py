"""A loss: squared error with a smaller weight for candidates (Hu et al. 2008)."""

from dataclasses import dataclass

from kge_torchrec import ConfigError, Loss
from kge_torchrec.models.losses import of_answers
from kge_torchrec.models.over_all import OverAll


class SquaredError(Loss):
    """(1 - s)^2 of every answer, and rest s^2 of every other candidate (Hu et al. 2008)."""

    @dataclass(frozen=True)
    class Options:
        """The weights."""

        rest: float = 0.1
        """Weight of candidates that are no answers."""

        def __post_init__(self):
            if self.rest <= 0:
                raise ConfigError(f"loss.options.rest must be > 0, got {self.rest}")

    def forward(self, positive, query, negative, mask):
        """Sampled candidates: (M,), (M,) or None, (Q, K), bool (Q, K) -> (Q,)."""
        answers = of_answers((1 - positive).square(), query, len(negative))
        return answers + self.options.rest * (negative.square() * mask).sum(1)

    def over_all(self, num_entities):
        """For negatives.regime 1vsall, kvsall and allvsall: all entities, in blocks."""
        return SquaredErrorOverAll(self.options.rest)


class SquaredErrorOverAll(OverAll):
    """rest sum_all s^2 + sum_answers (1 - s)^2 - rest s^2."""

    normalizes = False  # the gradient at one entity does not depend on the scores of others

    def __init__(self, rest):
        self.rest = rest

    def partial_statistics(self, scores, answers):
        """Statistics (3, Q) of a block of scores (Q, m), which are summed over the blocks."""
        statistics = scores.new_zeros(3, len(scores))
        statistics[0] = self.rest * scores.square().sum(1)
        of_answers = scores[answers.query, answers.column]
        of_answers = (1 - of_answers).square() - self.rest * of_answers.square()
        statistics[1].index_add_(0, answers.query, of_answers)
        return statistics

    def loss(self, statistics):
        """(Q,) losses."""
        return statistics[0] + statistics[1]

    def backward(self, scores, statistics, answers, weight):
        """Overwrite the scores by the gradients of the weighted losses, weight (Q,)."""
        place = answers.query, answers.column
        of_answers = 2 * (scores[place] - 1)
        scores.mul_(2 * self.rest)
        scores[place] = of_answers
        scores.mul_(weight[:, None])

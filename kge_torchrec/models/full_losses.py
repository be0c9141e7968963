"""Losses of queries over all entities, in closed form over blocks of scores.

No rank has all scores of a query.  A loss therefore works in two passes: it adds what it needs of
one block of scores after another to a few numbers a query, which are then joined over the ranks;
with these it turns every block into the gradient of the loss.

Both losses of a query are  normalizer - sum_answers target s - rest sum_all s , where s are its N
scores, and differ in the normalizer:

    softmax  log sum exp s               cross-entropy against answers alike (LibKGE's KvsAll)
    bce      1/N sum log(1 + exp s)      mean over the N entities, answers being 1 and others 0

Label smoothing e takes e of an answer's target and spreads it: over all N for softmax, as e/2 of
each 0 and 1 for bce (targets 1 - e/2 and e/2), as in the losses over sampled negatives.

Shapes: Q queries, m entities of a block, N entities, M answers of the queries within a block, W
ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import softplus

# Scores handled at once: on a CPU they stay in the cache from one operation to the next.
_CHUNK_SCORES = {"cpu": 1 << 18, "cuda": 1 << 28}


class BlockAnswers(NamedTuple):
    """Where the answers of a block's queries stand; no place occurs twice."""

    query: Tensor  # (M,) int64
    column: Tensor  # (M,) int64, in the block
    share: Tensor  # (M,) one over the number of answers of that query, wherever they are


class Seen(NamedTuple):
    """What a loss needs to know of the scores seen so far, (Q,) each."""

    normalizer: Tensor
    answers: Tensor  # sum over answers of their share of the target times their score
    total: Tensor  # sum of all scores; stays 0 without label smoothing


class FullLoss(Protocol):
    """One loss over all entities."""

    normalizes: bool  # whether the gradient at one entity depends on the scores of all others

    def nothing(self, queries: int, device: torch.device) -> Seen:
        """Before the first block."""

    def add(self, seen: Seen, scores: Tensor, answers: BlockAnswers) -> None:
        """Adds a block of scores (Q, m) to ``seen``, in place."""

    def join(self, seen: Tensor) -> Seen:
        """What several ranks saw, (W, 3, Q), as one."""

    def values(self, seen: Seen) -> Tensor:
        """(Q,) the losses, once all scores are seen."""

    def to_gradient(self, scores: Tensor, seen: Seen, answers: BlockAnswers, weight: float) -> None:
        """Overwrites scores (Q, m) by the gradient of the sum of weight times the losses."""


class _FullLoss:
    def __init__(self, num_entities: int, label_smoothing: float = 0.0):
        self.num_entities, self.smoothing = num_entities, label_smoothing

    def add(self, seen: Seen, scores: Tensor, answers: BlockAnswers) -> None:
        if scores.shape[1] == 0:  # a rank may have no entities
            return
        for part in _chunks(scores):
            self._add_normalizer(seen.normalizer[part], scores[part])
            if self.smoothing:
                seen.total[part] += scores[part].sum(1)
        of_answers = scores[answers.query, answers.column] * self._target(answers)
        seen.answers.index_add_(0, answers.query, of_answers)

    def values(self, seen: Seen) -> Tensor:
        rest = self._rest()
        return seen.normalizer - seen.answers - (rest * seen.total if rest else 0)

    def to_gradient(self, scores: Tensor, seen: Seen, answers: BlockAnswers, weight: float) -> None:
        at_answers = self._target(answers) * weight
        rest = self._rest() * weight
        for part in _chunks(scores):
            self._to_slope(scores[part], seen.normalizer[part], weight)
            if rest:
                scores[part].sub_(rest)
        place = answers.query, answers.column
        scores[place] = scores[place] - at_answers  # no place occurs twice

    def _target(self, answers: BlockAnswers) -> Tensor:
        """(M,) the factor of an answer's score."""
        raise NotImplementedError

    def _rest(self) -> float:
        """The factor of every score, by label smoothing."""
        raise NotImplementedError

    def _add_normalizer(self, normalizer: Tensor, scores: Tensor) -> None:
        raise NotImplementedError

    def _to_slope(self, scores: Tensor, normalizer: Tensor, weight: float) -> None:
        """Overwrites scores by weight times the normalizer's derivative."""
        raise NotImplementedError


class FullSoftmax(_FullLoss):
    """Cross-entropy of all entities against the uniform distribution over a query's answers.

    With a single answer it is the full softmax of Lacroix et al. (2018).  Every query has answers.
    """

    normalizes = True

    def nothing(self, queries: int, device: torch.device) -> Seen:
        zeros = torch.zeros(2, queries, device=device)
        return Seen(torch.full_like(zeros[0], -torch.inf), *zeros)

    def join(self, seen: Tensor) -> Seen:
        normalizer, answers, total = seen.unbind(1)
        return Seen(normalizer.logsumexp(0), answers.sum(0), total.sum(0))

    def _target(self, answers: BlockAnswers) -> Tensor:
        return answers.share * (1 - self.smoothing)

    def _rest(self) -> float:
        return self.smoothing / self.num_entities

    def _add_normalizer(self, normalizer: Tensor, scores: Tensor) -> None:
        torch.logaddexp(normalizer, scores.logsumexp(1), out=normalizer)

    def _to_slope(self, scores: Tensor, normalizer: Tensor, weight: float) -> None:
        scores.sub_(normalizer[:, None]).exp_().mul_(weight)


class FullBinaryCrossEntropy(_FullLoss):
    """Mean over all entities of the logistic loss; a query may have no answer."""

    normalizes = False

    def nothing(self, queries: int, device: torch.device) -> Seen:
        return Seen(*torch.zeros(3, queries, device=device))

    def join(self, seen: Tensor) -> Seen:
        return Seen(*seen.sum(0))

    def _target(self, answers: BlockAnswers) -> Tensor:
        return torch.full_like(answers.share, (1 - self.smoothing) / self.num_entities)

    def _rest(self) -> float:
        return self.smoothing / (2 * self.num_entities)

    def _add_normalizer(self, normalizer: Tensor, scores: Tensor) -> None:
        normalizer += softplus(scores).sum(1) / self.num_entities

    def _to_slope(self, scores: Tensor, normalizer: Tensor, weight: float) -> None:
        scores.sigmoid_().mul_(weight / self.num_entities)


def _chunks(scores: Tensor) -> Iterator[slice]:
    """Some queries at a time."""
    at_once = _CHUNK_SCORES["cpu" if scores.device.type == "cpu" else "cuda"]
    step = max(1, at_once // max(1, scores.shape[1]))
    for start in range(0, scores.shape[0], step):
        yield slice(start, start + step)

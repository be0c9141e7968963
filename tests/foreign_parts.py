"""Parts that a config names by import path, for tests of the keys that are theirs alone."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import torch

from kge_torchrec import Reader, RowOptimizer, Scorer, State


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


class Distance(Scorer):
    """TransE, by the bare contract of a scorer: it encodes no queries."""

    def score_candidates(self, anchor, relation, candidates, side):
        relation, side = self.direct(relation, side)
        sign = 1 if side == "tail" else -1
        return -torch.cdist(anchor + sign * self.relation(relation), candidates)

    def score_triples(self, anchor, relation, target, side="tail"):
        anchor, target = anchor[..., None, :], target[..., None, :]
        return self.score_candidates(anchor, relation[..., None], target, side)[..., 0, 0]

"""A scorer: RefE (Chami et al. 2020). A relation reflects complex numbers, then moves the point."""

import math
from dataclasses import dataclass

import torch

from kge_torchrec import Scorer
from kge_torchrec.kernels.comparisons import EachPair
from kge_torchrec.kernels.operators import rotated
from kge_torchrec.models.scorers.layers import uniform


def minus_squared_distance(query, rows):
    return -(query - rows).square().sum(-1)


class RefE(Scorer):
    """Rows of D/2 complex numbers. A relation has D/2 phases, then a translation of D elements."""

    @dataclass(frozen=True)
    class Options:
        """The effect of a relation."""

        moves: bool = True
        """Whether a relation moves entities after it has reflected them."""

    name = "refe"
    multiple = 2  # D is even
    formula = "RefE (Chami et al. 2020): score(h, r, t) = -|h* e^(i phase_r) + move_r - t|^2."
    comparison = EachPair(minus_squared_distance)
    is_distance = True  # a query is a point, so hidden dropout does not apply
    is_complex = True  # N3 takes moduli of entity rows; relation rows are real

    @classmethod
    def relation_dim(cls, dim, options):
        return dim // 2 + (dim if options.moves else 0)

    def reset_parameters(self, fill, stream):
        super().reset_parameters(fill, stream)
        uniform(self.relations[:, : self.dim // 2], math.pi, stream)

    def query(self, anchor, relation, side):
        phase, move = relation.split([self.dim // 2, relation.shape[-1] - self.dim // 2], -1)
        move = move if self.options.moves else 0
        if side == "tail":
            return rotated(conjugate(anchor), phase) + move
        # A reflection is its own inverse, so this distance equals that of the tail query.
        return rotated(conjugate(anchor - move), phase)


def conjugate(rows):
    return torch.stack([rows[..., 0::2], -rows[..., 1::2]], -1).flatten(-2)

"""Scorers that are networks of other kinds: a transformer, and a hidden layer over two entities.

Their score(h, r, t):

    CoKE     Wang et al. 2019    <z, t>, z a transformer's state of the masked t
    Shallom  Demir et al. 2021   W_r ReLU(H [h; t] + b) + c_r

Shapes: D numbers a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import numpy as np
import torch
from torch import Tensor, nn

from kge_torchrec.config.checks import at_least
from kge_torchrec.models.ops import lookup, pairwise
from kge_torchrec.models.scorers.base import Side
from kge_torchrec.models.scorers.layers import Fill, uniform
from kge_torchrec.models.scorers.queries import DotScorer, QueryScorer

_POSITIONS = {"head": 0, "tail": 2}  # of the mask


class CoKE(DotScorer):
    """Entity, relation and mask, each with its position, go through a transformer encoder.

    D numbers a row.  The last state of the mask, through a layer of its own, is compared with the
    entities' rows.  (?, r, t) is asked as [MASK], r, t: without reciprocal relations a triple has
    another score on either side, as in the paper.  The authors' code adds a bias of each entity,
    which the paper's formula lacks: left out.

    layers, heads, feed_forward_dim: of the encoder; the width None takes 2 D.  hidden_dropout is
    also the encoder's.  Raises ValueError when the heads cannot share D.
    """

    @dataclass(frozen=True)
    class Options:
        """The transformer.

        Args:
            layers: Transformer layers.
            heads: Attention heads.
            feed_forward_dim: Width inside a transformer layer; null takes 2 model.dim.
        """

        layers: int = 6
        heads: int = 4
        feed_forward_dim: Optional[int] = None  # noqa: UP045 - jsonargparse on Python 3.10

        def __post_init__(self) -> None:
            at_least("model.options.layers", self.layers, 1)
            at_least("model.options.heads", self.heads, 1)
            if self.feed_forward_dim is not None:
                at_least("model.options.feed_forward_dim", self.feed_forward_dim, 1)

    name = "coke"
    start = ("xavier_normal", 1.0)
    formula = (
        "CoKE (Wang et al. 2019): score(h, r, t) = <z, t>, z a transformer's state of the masked t."
    )

    def __init__(self, num_relations: int, dim: int, reciprocal: bool = False, **shared: Any):
        super().__init__(num_relations, dim, reciprocal, **shared)
        heads, width = self.options.heads, self.options.feed_forward_dim or 2 * dim
        dropout = self.hidden_dropout.p
        self.mask = nn.Parameter(torch.empty(1, dim))
        self.positions = nn.Parameter(torch.empty(3, dim))
        self.input_norm = nn.LayerNorm(dim)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(dim, heads, width, dropout, "gelu", batch_first=True),
            self.options.layers,
            enable_nested_tensor=False,
        )
        self.output = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.LayerNorm(dim))

    @classmethod
    def multiple(cls, options: Options) -> tuple[int, str]:
        return options.heads, "model.options.heads share it"

    @torch.no_grad()
    def reset_parameters(self, fill: Fill, stream: np.random.Generator) -> None:
        """Relations, mask and positions take the configured draw, layers torch's."""
        super().reset_parameters(fill, stream)
        for rows in (self.mask, self.positions):
            fill(stream, rows.numpy())

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        anchor, relation, mask = torch.broadcast_tensors(anchor, relation, self.mask[0])
        tokens = [anchor, relation, mask]
        if side == "head":
            tokens.reverse()
        states = torch.stack(tokens, -2).reshape(-1, 3, self.dim) + self.positions
        states = self.encoder(self.hidden_dropout(self.input_norm(states)))
        return self.output(states[:, _POSITIONS[side]]).view(anchor.shape)


class Half(NamedTuple):
    """The anchor's half of the hidden layer, and what is left to do with a row's."""

    hidden: Tensor  # (..., E)
    weight: Tensor  # (..., E): W_r
    bias: Tensor  # (..., 1): c_r
    layer: Tensor  # (E, D): the half of H that rows go through


class Shallom(QueryScorer):
    """A network that tells the relation of two entities; entities rank by the relation's score.

    D numbers an entity.  A relation's row is W_r, then c_r, E + 1 numbers; the hidden layer has E
    units, hidden_dim, None takes 2 D.  input_dropout reaches the anchor only, hidden_dropout the
    hidden layer.  As H [h; t] = H_1 h + H_2 t, rows go through their half once for all queries.
    """

    @dataclass(frozen=True)
    class Options:
        """The network.

        Args:
            hidden_dim: Width of the hidden layer; null takes 2 model.dim.
        """

        hidden_dim: Optional[int] = None  # noqa: UP045 - jsonargparse on Python 3.10

        def __post_init__(self) -> None:
            if self.hidden_dim is not None:
                at_least("model.options.hidden_dim", self.hidden_dim, 1)

    name = "shallom"
    start = ("xavier_normal", 1.0)
    formula = "Shallom (Demir et al. 2021): score(h, r, t) = W_r ReLU(H [h; t] + b) + c_r."

    def __init__(self, num_relations: int, dim: int, reciprocal: bool = False, **shared: Any):
        super().__init__(num_relations, dim, reciprocal, **shared)
        self.hidden = nn.Linear(2 * dim, self.relations.shape[1] - 1)

    @classmethod
    def relation_dim(cls, dim: int, options: Options) -> int:
        return (options.hidden_dim or 2 * dim) + 1

    @torch.no_grad()
    def reset_parameters(self, fill: Fill, stream: np.random.Generator) -> None:
        """Both layers start as torch's own do: the configured distribution plays no part."""
        super().reset_parameters(fill, stream)
        uniform(self.relations, 1 / math.sqrt(self.relations.shape[1]), stream)

    def relation(self, ids: Tensor, drop: bool = True) -> Tensor:
        """Without dropout: the rows are weights of the output layer."""
        return self.relation_norm(lookup(self.relations, ids))

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Half:
        ours, theirs = self._halves(side)
        weight, bias = relation.split([relation.shape[-1] - 1, 1], -1)
        return Half(anchor @ ours.t() + self.hidden.bias, weight, bias, theirs)

    @property
    def drops_pairs(self) -> bool:
        """With dropout of the hidden layer, of which each pair has one of its own."""
        return self.hidden_dropout.p > 0

    def picked(self, query: Half, index: Tensor) -> Half:
        """All queries share the layer."""
        hidden, weight, bias = super().picked(tuple(query[:-1]), index)
        return Half(hidden, weight, bias, query.layer)

    def similarity(self, query: Half, rows: Tensor) -> Tensor:
        score = self._score(query.hidden, query.weight, rows @ query.layer.t())
        return score + query.bias[..., 0]

    def similarity_matrix(self, query: Half, rows: Tensor) -> Tensor:
        # Of rows that lie apart (biases beside them) bits would depend on how many there are.
        rows, width = rows.contiguous() @ query.layer.t(), query.weight.shape[-1]
        return pairwise(self._score, [query.hidden, query.weight], [rows], width) + query.bias

    def score_relations(self, anchor: Tensor, target: Tensor, side: Side = "tail") -> Tensor:
        relations = self.relation(torch.arange(self.relation_rows, device=anchor.device))
        weight, bias = relations[:, :-1], relations[:, -1]
        ours, theirs = self._halves("tail" if self.reciprocal else side)
        anchor = self.input_dropout(self.entity(anchor))
        hidden = anchor @ ours.t() + self.entity(target) @ theirs.t() + self.hidden.bias
        return self.hidden_dropout(hidden.relu()) @ weight.t() + bias

    def _halves(self, side: Side) -> tuple[Tensor, Tensor]:
        """The halves of H for the anchor and for the other side: (E, D) each."""
        of_head, of_tail = self.hidden.weight.chunk(2, -1)
        return (of_head, of_tail) if side == "tail" else (of_tail, of_head)

    def _score(self, hidden: Tensor, weight: Tensor, other: Tensor) -> Tensor:
        return (self.hidden_dropout((hidden + other).relu()) * weight).sum(-1)

"""Other neural scorers: a transformer, and a hidden layer over two entities.

    CoKE     Wang et al. 2019    <z, t>, z the transformer's state of the masked t
    Shallom  Demir et al. 2021   W_r ReLU(H [h; t] + b) + c_r

Shapes: D elements per entity row, E hidden units.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import numpy as np
import torch
from torch import Tensor, nn

from kge_torchrec.config.checks import at_least
from kge_torchrec.kernels.comparisons import products
from kge_torchrec.kernels.operators import lookup, pairwise
from kge_torchrec.models.scorers.base import Side
from kge_torchrec.models.scorers.layers import Fill, uniform
from kge_torchrec.models.scorers.queries import DotScorer, QueryScorer

_POSITIONS = {"head": 0, "tail": 2}  # of the mask token, by side


class CoKE(DotScorer):
    """Passes entity, relation and a mask token, with position embeddings, through a transformer.

    An entity row holds D real numbers. The final state of the mask goes through an output layer and
    is compared with entity rows. The head query (?, r, t) has the tokens [MASK], r, t. Without
    reciprocal relations the two sides score a triple differently, as in the paper. The authors'
    code adds a bias per entity, which the paper's formula lacks; it is left out. hidden_dropout
    also applies inside the encoder. Raises ConfigError when heads does not divide D.
    """

    @dataclass(frozen=True)
    class Options:
        """Options of the transformer.

        Args:
            layers: Number of transformer layers.
            heads: Number of attention heads.
            feed_forward_dim: Width of the feed-forward layers; null: 2 model.dim.
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
        """Initialize relations, mask and positions from the configured distribution."""
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
    """The anchor's part of the hidden layer, and the parameters to complete it with a row."""

    hidden: Tensor  # (..., E)
    weight: Tensor  # (..., E): W_r
    bias: Tensor  # (..., 1): c_r
    layer: Tensor  # (E, D): the half of H that rows go through


class Shallom(QueryScorer):
    """A network that scores the relation of two entities; entities are ranked by that score.

    An entity row holds D real numbers. A relation row holds W_r, then c_r, E + 1 elements. The
    hidden layer has E = hidden_dim units. input_dropout applies to the anchor only, hidden_dropout
    to the hidden layer. H [h; t] = H_1 h + H_2 t, so rows are multiplied by their half of H once
    for all queries.
    """

    @dataclass(frozen=True)
    class Options:
        """Options of the network.

        Args:
            hidden_dim: Width of the hidden layer; null: 2 model.dim.
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
        """Initialize both layers with torch's defaults; the configured distribution is not used."""
        super().reset_parameters(fill, stream)
        uniform(self.relations, 1 / math.sqrt(self.relations.shape[1]), stream)

    def relation(self, ids: Tensor, drop: bool = True) -> Tensor:
        """Look up relation rows without dropout: they are weights of the output layer."""
        return self.relation_norm(lookup(self.relations, ids))

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Half:
        ours, theirs = self._halves(side)
        weight, bias = relation.split([relation.shape[-1] - 1, 1], -1)
        return Half(anchor @ ours.t() + self.hidden.bias, weight, bias, theirs)

    @property
    def drops_pairs(self) -> bool:
        """True with hidden dropout: every pair has a hidden layer of its own."""
        return self.hidden_dropout.p > 0

    def picked(self, query: Half, index: Tensor) -> Half:
        """Select queries; the layer's weights are shared by all queries."""
        hidden, weight, bias = super().picked(tuple(query[:-1]), index)
        return Half(hidden, weight, bias, query.layer)

    def similarity(self, query: Half, rows: Tensor) -> Tensor:
        score = self._score(query.hidden, query.weight, rows @ query.layer.t())
        return score + query.bias[..., 0]

    def similarity_matrix(self, query: Half, rows: Tensor) -> Tensor:
        # For non-contiguous rows (a view without biases) the bits would depend on their number.
        hidden, width = products(rows.contiguous(), query.layer[None]), query.weight.shape[-1]
        return pairwise(self._score, [query.hidden, query.weight], [hidden], width) + query.bias

    def score_relations(self, anchor: Tensor, target: Tensor, side: Side = "tail") -> Tensor:
        relations = self.relation(torch.arange(self.relation_rows, device=anchor.device))
        weight, bias = relations[:, :-1], relations[:, -1]
        ours, theirs = self._halves("tail" if self.reciprocal else side)
        anchor = self.input_dropout(self.entity(anchor))
        hidden = anchor @ ours.t() + self.entity(target) @ theirs.t() + self.hidden.bias
        return self.hidden_dropout(hidden.relu()) @ weight.t() + bias

    def _halves(self, side: Side) -> tuple[Tensor, Tensor]:
        """Return the halves of H for the anchor and for the other end, (E, D) each."""
        head_weight, tail_weight = self.hidden.weight.chunk(2, -1)
        return (head_weight, tail_weight) if side == "tail" else (tail_weight, head_weight)

    def _score(self, hidden: Tensor, weight: Tensor, other: Tensor) -> Tensor:
        return (self.hidden_dropout((hidden + other).relu()) * weight).sum(-1)

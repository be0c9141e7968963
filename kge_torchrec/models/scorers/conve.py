"""ConvE (Dettmers et al. 2018): score(h, r, t) = <f(vec(f([h; r] * w)) W), t>, f = ReLU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kge_torchrec.models.scorer_options import image_shape
from kge_torchrec.models.scorers.base import DotScorer, Side


class ConvE(DotScorer):
    """h and r as images, one above the other, are convolved with w and mapped back by W.

    D numbers a row are an image of height x width.  Normalization is by layer where the authors'
    code has BatchNorm, and their bias of each entity, which is not in the paper's formula, is left
    out.  Answers tail queries only.  Raises ValueError when not reciprocal, when height does not
    divide D or the filters do not fit the image.

    feature_dropout: of whole feature maps.  hidden_dropout: of the query, after its ReLU.
    """

    name = "conve"

    def __init__(
        self,
        num_relations: int,
        dim: int,
        reciprocal: bool = True,
        *,
        channels: int = 32,
        kernel_size: int = 3,
        feature_dropout: float = 0.0,
        height: int | None = None,
        **shared: Any,
    ):
        options = {"channels": channels, "kernel_size": kernel_size, "height": height,
                   "feature_dropout": feature_dropout}  # fmt: skip
        super().__init__(num_relations, dim, reciprocal, options=options, **shared)
        self.height, self.width = image_shape(dim, height)
        cells = (2 * self.height - kernel_size + 1) * (self.width - kernel_size + 1)
        self.image_norm = nn.GroupNorm(1, 1)
        self.convolution = nn.Conv2d(1, channels, kernel_size)
        self.map_norm = nn.GroupNorm(1, channels)
        self.feature_dropout = nn.Dropout2d(feature_dropout)
        self.linear = nn.Linear(channels * cells, dim)
        self.query_norm = nn.LayerNorm(dim)

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        anchor, relation = torch.broadcast_tensors(anchor, relation)
        image = torch.cat([anchor, relation], -1).reshape(-1, 1, 2 * self.height, self.width)
        maps = self.map_norm(self.convolution(self.image_norm(image))).relu()
        flat = self.feature_dropout(maps).flatten(1)
        return self.query_norm(self.linear(flat)).relu().view(anchor.shape)

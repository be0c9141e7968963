"""Scorers that pass entity and relation through a network: a convolution or a transformer (CoKE).

    ConvE   Dettmers et al. 2018         <f(vec(f([h; r] * w)) W), t>, f = ReLU
    ConEx   Demir and Ngonga Ngomo 2021  ComplEx with conv(h, r) as a fourth factor:
            <re c, re h, re r, re t> + <re c, re h, im r, im t> + <im c, im h, re r, im t>
            - <im c, im h, im r, re t>, c = conv(h, r), <w, x, y, z> = sum_k w_k x_k y_k z_k
    AConEx  dice-embeddings              ComplEx with conv(h, r) added to its four products:
            <a + re h re r, re t> + <b + re h im r, im t> + <c + im h re r, im t>
            - <d + im h im r, re t>, (a, b, c, d) = conv(h, r)
    ConvQ   Demir et al. 2021            <conv(h, r) * (h r), t>, quaternions
    ConvO   Demir et al. 2021            <conv(h, r) * (h r), t>, octonions

conv(h, r) is ``Convolution`` over an image of 2 n rows, one per component of h, then of r, and D/n
columns, padded so that feature maps keep its size.

Shapes: n components per algebra number, D elements per row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kge_torchrec.config.checks import ConfigError, PositiveInt, Share
from kge_torchrec.kernels.comparisons import InnerProduct
from kge_torchrec.models.scorers.algebra import cayley_dickson, components, product
from kge_torchrec.models.scorers.base import Scorer, Side
from kge_torchrec.models.scorers.layers import Fill


@dataclass(frozen=True)
class ConvolutionOptions(Scorer.Options):
    """Options of a convolution scorer."""

    channels: PositiveInt = 32
    """Number of feature maps."""
    kernel_size: PositiveInt = 3
    """Height and width of the filters; must be odd except for conve."""
    feature_dropout: Share = 0.0
    """Dropout probability for whole feature maps."""


class Convolution(nn.Module):
    """f(vec(f(image * w)) W), f a layer normalization (BatchNorm in the authors' codes), then ReLU.

    feature_dropout drops whole feature maps.

    Args:
        shape: (height, width) of the image.
        outputs: Elements of the result.
        options: Those of the scorer.
        padding: Zeros around the image.
    """

    def __init__(
        self, shape: tuple[int, int], outputs: int, options: ConvolutionOptions, padding: int = 0
    ):
        super().__init__()
        channels, size = options.channels, options.kernel_size
        height, width = (n + 2 * padding - size + 1 for n in shape)
        self.convolution = nn.Conv2d(1, channels, size, padding=padding)
        self.map_norm = nn.GroupNorm(1, channels)
        self.feature_dropout = nn.Dropout2d(options.feature_dropout)
        self.linear = nn.Linear(channels * height * width, outputs)
        self.output_norm = nn.LayerNorm(outputs)

    def forward(self, image: Tensor) -> Tensor:
        """Convolve images: (n, 1, height, width) -> (n, outputs)."""
        maps = self.map_norm(self.convolution(image)).relu()
        return self.output_norm(self.linear(self.feature_dropout(maps).flatten(1))).relu()


class ConvE(Scorer):
    """Convolves head and relation as stacked images with filters w and maps the result back by W.

    The D elements of a row form an image of height x width. hidden_dropout applies to the query
    after its ReLU. The authors' BatchNorm is replaced by layer normalization. Their bias per
    entity, which the paper's formula lacks, is left out. Answers tail queries only.
    """

    @dataclass(frozen=True)
    class Options(ConvolutionOptions):
        """Options of ConvE."""

        height: PositiveInt | None = None
        """Height of the image of an entity row; null: the largest divisor of model.dim up to its
        square root."""

    comparison = InnerProduct()
    needs_reciprocal = True
    name = "conve"
    start = ("xavier_normal", 1.0)
    formula = (
        "ConvE (Dettmers et al. 2018): score(h, r, t) = <f(vec(f([h; r] * w)) W), t>, f = ReLU."
    )

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        height, width = image_shape(self.dim, self.options.height)
        self.shape = 2 * height, width
        self.image_norm = nn.GroupNorm(1, 1)
        self.convolution = Convolution(self.shape, self.dim, self.options)

    @classmethod
    def multiple_of(cls, options: Options) -> int:
        return options.height or 1

    @classmethod
    def check(cls, dim: int, reciprocal: bool, options: Options) -> None:
        super().check(dim, reciprocal, options)
        height, width = image_shape(dim, options.height)
        if options.kernel_size > min(2 * height, width):
            raise ConfigError(
                f"model.options.kernel_size {options.kernel_size} does not fit the image of conve, "
                f"{2 * height} x {width} for model.dim {dim}; set model.options.height or another "
                "model.dim"
            )

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        anchor, relation = torch.broadcast_tensors(anchor, relation)
        image = torch.cat([anchor, relation], -1).reshape(-1, 1, *self.shape)
        return self.convolution(self.image_norm(image)).view(anchor.shape)


def image_shape(dim: int, height: int | None) -> tuple[int, int]:
    """Return (height, width) of the image that ConvE reshapes a row of dim elements to.

    None stands for the largest divisor of dim up to its square root.
    """
    if height is None:
        height = next(n for n in range(math.isqrt(dim), 0, -1) if dim % n == 0)
    return height, dim // height


class ConvolvedScorer(Scorer):
    """Combines a product of h and r with conv(h, r). Answers tail queries only.

    ``multiple`` is n. ``outputs`` is the size of the convolution's output in multiples of D.
    """

    start = ("xavier_normal", 1.0)
    Options = ConvolutionOptions
    comparison = InnerProduct()
    needs_reciprocal = True
    outputs = 1

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        shape = 2 * self.multiple, self.dim // self.multiple
        padding = self.options.kernel_size // 2
        self.convolution = Convolution(shape, self.outputs * self.dim, self.options, padding)

    def convolved(self, head: Tensor, relation: Tensor) -> Tensor:
        """Return conv(h, r): (..., D), (..., D) -> (..., outputs * D)."""
        head, relation = torch.broadcast_tensors(head, relation)
        parts = [components(x, self.multiple).transpose(-1, -2) for x in (head, relation)]
        image = torch.cat(parts, -2)  # (..., 2 n, D/n)
        out = self.convolution(image.reshape(-1, 1, *image.shape[-2:]))
        return out.view(*head.shape[:-1], out.shape[-1])

    @classmethod
    def check(cls, dim: int, reciprocal: bool, options: ConvolutionOptions) -> None:
        super().check(dim, reciprocal, options)
        size = options.kernel_size
        if size % 2 == 0:  # padding keeps the image size only for odd filters
            raise ConfigError(f"model.options.kernel_size must be odd for {cls.name}, got {size}")


class ConEx(ConvolvedScorer):
    """An entity row holds D/2 complex numbers, stored (re, im, re, im, ...)."""

    name = "conex"
    formula = "ConEx (Demir and Ngonga Ngomo 2021): ComplEx with conv(h, r) as a fourth factor."
    multiple = 2
    is_complex = relation_is_complex = True

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        c_re, c_im = components(self.convolved(anchor, relation), 2).unbind(-1)
        (h_re, h_im), (r_re, r_im) = (components(x, 2).unbind(-1) for x in (anchor, relation))
        real = c_re * h_re * r_re - c_im * h_im * r_im
        imaginary = c_re * h_re * r_im + c_im * h_im * r_re
        return torch.stack([real, imaginary], -1).flatten(-2)


class AConEx(ConvolvedScorer):
    """An entity row holds D/2 complex numbers, stored (re, im, re, im, ...)."""

    name = "aconex"
    formula = "AConEx (dice-embeddings): ComplEx with conv(h, r) added to its four products."
    multiple = outputs = 2
    is_complex = relation_is_complex = True

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        a, b, c, d = self.convolved(anchor, relation).chunk(4, -1)  # D/2 each
        (h_re, h_im), (r_re, r_im) = (components(x, 2).unbind(-1) for x in (anchor, relation))
        real = (a + h_re * r_re) - (d + h_im * r_im)
        imaginary = (b + h_re * r_im) + (c + h_im * r_re)
        return torch.stack([real, imaginary], -1).flatten(-2)


class ConvQ(ConvolvedScorer):
    """QMult whose product is multiplied elementwise by a convolution of h and r.

    An entity row holds D/4 quaternions a + b i + c j + d k, stored (a, b, c, d, a, ...).
    """

    name = "convq"
    formula = "ConvQ (Demir et al. 2021): score(h, r, t) = <conv(h, r) * (h r), t>, quaternions."
    multiple, levels = 4, 2
    table: Tensor  # multiplication table, (n, n, n)

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.register_buffer("table", cayley_dickson(self.levels), persistent=False)

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        return self.convolved(anchor, relation) * product(anchor, relation, self.table)


class ConvO(ConvQ):
    """OMult whose product is multiplied elementwise by a convolution of h and r.

    An entity row holds D/8 octonions, with eight consecutive components each.
    """

    name = "convo"
    formula = "ConvO (Demir et al. 2021): score(h, r, t) = <conv(h, r) * (h r), t>, octonions."
    multiple, levels = 8, 3


_POSITIONS = {"head": 0, "tail": 2}  # of the mask token, by side


class CoKE(Scorer):
    """Passes entity, relation and a mask token, with position embeddings, through a transformer.

    An entity row holds D real numbers. The final state of the mask goes through an output layer and
    is compared with entity rows. The head query (?, r, t) has the tokens [MASK], r, t. Without
    reciprocal relations the two sides score a triple differently, as in the paper. The authors'
    code adds a bias per entity, which the paper's formula lacks; it is left out. hidden_dropout
    also applies inside the encoder.
    """

    @dataclass(frozen=True)
    class Options:
        """Options of the transformer."""

        layers: PositiveInt = 6
        """Number of transformer layers."""
        heads: PositiveInt = 4
        """Number of attention heads."""
        feed_forward_dim: PositiveInt | None = None
        """Width of the feed-forward layers; null: 2 model.dim."""

    name = "coke"
    comparison = InnerProduct()
    start = ("xavier_normal", 1.0)
    formula = (
        "CoKE (Wang et al. 2019): score(h, r, t) = <z, t>, z a transformer's state of the masked t."
    )

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        dim, heads, dropout = self.dim, self.options.heads, self.hidden_dropout.p
        width = self.options.feed_forward_dim or 2 * dim
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
    def multiple_of(cls, options: Options) -> int:
        return options.heads

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

"""Scorers that pass head and relation through a convolution.

    ConvE   Dettmers et al. 2018         <f(vec(f([h; r] * w)) W), t>, f = ReLU
    ConEx   Demir and Ngonga Ngomo 2021  ComplEx with conv(h, r) as a fourth factor:
            <re c, re h, re r, re t> + <re c, re h, im r, im t> + <im c, im h, re r, im t>
            - <im c, im h, im r, re t>, c = conv(h, r), <w, x, y, z> = sum_k w_k x_k y_k z_k
    AConEx  dice-embeddings              ComplEx with conv(h, r) added to its four products:
            <a + re h re r, re t> + <b + re h im r, im t> + <c + im h re r, im t>
            - <d + im h im r, re t>, (a, b, c, d) = conv(h, r)
    ConvQ   Demir et al. 2021            <conv(h, r) * (h r), t>, quaternions
    ConvO   Demir et al. 2021            <conv(h, r) * (h r), t>, octonions

conv(h, r) is ``ResidualConvolution`` over the components of both rows.

Shapes: n components per algebra number, D elements per row.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Optional

import torch
from torch import Tensor, nn

from kge_torchrec.config.checks import ConfigError, at_least, check_share
from kge_torchrec.kernels.comparisons import InnerProduct
from kge_torchrec.models.scorers.algebra import cayley_dickson, components, product
from kge_torchrec.models.scorers.base import GROUPS, Scorer, Side


@dataclass(frozen=True)
class ConvolutionOptions(Scorer.Options):
    """Options of a convolution scorer.

    Args:
        channels: Number of feature maps.
        kernel_size: Height and width of the filters; must be odd except for conve.
        feature_dropout: Dropout probability for whole feature maps.
    """

    channels: int = 32
    kernel_size: int = 3
    feature_dropout: float = 0.0

    def __post_init__(self) -> None:
        at_least("model.options.channels", self.channels, 1)
        at_least("model.options.kernel_size", self.kernel_size, 1)
        check_share("model.options.feature_dropout", self.feature_dropout)


class ConvE(Scorer):
    """Convolves head and relation as stacked images with filters w and maps the result back by W.

    The D elements of a row form an image of height x width. feature_dropout drops whole feature
    maps; hidden_dropout applies to the query after its ReLU. The authors' BatchNorm is replaced by
    layer normalization. Their bias per entity, which the paper's formula lacks, is left out.
    Answers tail queries only. Raises ConfigError when not reciprocal, when height does not divide D
    or when the filters do not fit the image.
    """

    @dataclass(frozen=True)
    class Options(ConvolutionOptions):
        """Options of ConvE.

        Args:
            channels: Number of feature maps.
            kernel_size: Height and width of the filters.
            feature_dropout: Dropout probability for whole feature maps.
            height: Height of the image of an entity row; null: the largest divisor of model.dim up
                to its square root.
        """

        height: Optional[int] = None  # noqa: UP045 - jsonargparse on Python 3.10

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.height is not None:
                at_least("model.options.height", self.height, 1)

    comparison = InnerProduct()
    needs_reciprocal = True
    name = "conve"
    start = ("xavier_normal", 1.0)
    formula = (
        "ConvE (Dettmers et al. 2018): score(h, r, t) = <f(vec(f([h; r] * w)) W), t>, f = ReLU."
    )

    def __init__(self, num_relations: int, dim: int, reciprocal: bool = True, **shared: Any):
        super().__init__(num_relations, dim, reciprocal, **shared)
        channels, kernel_size = self.options.channels, self.options.kernel_size
        self.height, self.width = image_shape(dim, self.options.height)
        cells = (2 * self.height - kernel_size + 1) * (self.width - kernel_size + 1)
        self.image_norm = nn.GroupNorm(1, 1)
        self.convolution = nn.Conv2d(1, channels, kernel_size)
        self.map_norm = nn.GroupNorm(1, channels)
        self.feature_dropout = nn.Dropout2d(self.options.feature_dropout)
        self.linear = nn.Linear(channels * cells, dim)
        self.query_norm = nn.LayerNorm(dim)

    @classmethod
    def multiple(cls, options: Options) -> tuple[int, str]:
        return options.height or 1, "its image has model.options.height rows"

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
        image = torch.cat([anchor, relation], -1).reshape(-1, 1, 2 * self.height, self.width)
        maps = self.map_norm(self.convolution(self.image_norm(image))).relu()
        flat = self.feature_dropout(maps).flatten(1)
        return self.query_norm(self.linear(flat)).relu().view(anchor.shape)


def image_shape(dim: int, height: int | None) -> tuple[int, int]:
    """Return (height, width) of the image that ConvE reshapes a row of dim elements to.

    Args:
        dim: Elements per row.
        height: The configured height, or None for the largest divisor of dim up to its square root.

    Raises:
        ConfigError: The height does not divide dim.
    """
    if height is None:
        height = next(n for n in range(math.isqrt(dim), 0, -1) if dim % n == 0)
    if dim % height:
        raise ConfigError(f"model.options.height must divide model.dim {dim}, got {height}")
    return height, dim // height


class ResidualConvolution(nn.Module):
    """f(vec(f([h; r] * w)) W) over an image of 2 n rows, one per component, and D/n columns.

    The image is padded so that feature maps keep its size. f is layer normalization (BatchNorm in
    the authors' code), then ReLU. feature_dropout drops whole feature maps.
    """

    def __init__(
        self, dim: int, units: int, channels: int, kernel_size: int, feature_dropout: float,
        outputs: int,
    ):  # fmt: skip
        super().__init__()
        self.units = units
        self.convolution = nn.Conv2d(1, channels, kernel_size, padding=kernel_size // 2)
        self.map_norm = nn.GroupNorm(1, channels)
        self.feature_dropout = nn.Dropout2d(feature_dropout)
        self.linear = nn.Linear(channels * 2 * dim, outputs)
        self.output_norm = nn.LayerNorm(outputs)

    def forward(self, head: Tensor, relation: Tensor) -> Tensor:
        """Convolve head and relation rows: (..., D), (..., D) -> (..., outputs)."""
        head, relation = torch.broadcast_tensors(head, relation)
        parts = [components(x, self.units).transpose(-1, -2) for x in (head, relation)]
        image = torch.cat(parts, -2)  # (..., 2 n, D/n)
        maps = self.map_norm(self.convolution(image.reshape(-1, 1, *image.shape[-2:]))).relu()
        out = self.output_norm(self.linear(self.feature_dropout(maps).flatten(1))).relu()
        return out.view(*head.shape[:-1], out.shape[-1])


class ConvolvedScorer(Scorer):
    """Combines a product of h and r with conv(h, r). Answers tail queries only.

    ``units`` is n. ``outputs`` is the size of the convolution's output in multiples of D. Raises
    ConfigError when not reciprocal.
    """

    start = ("xavier_normal", 1.0)
    Options = ConvolutionOptions
    comparison = InnerProduct()
    needs_reciprocal = True
    units: int
    outputs = 1

    def __init__(self, num_relations: int, dim: int, reciprocal: bool = True, **shared: Any):
        super().__init__(num_relations, dim, reciprocal, **shared)
        self.convolution = ResidualConvolution(
            dim, self.units, outputs=self.outputs * dim, **asdict(self.options)
        )

    @classmethod
    def multiple(cls, options: ConvolutionOptions) -> tuple[int, str]:
        return cls.units, GROUPS[cls.units]

    @classmethod
    def check(cls, dim: int, reciprocal: bool, options: ConvolutionOptions) -> None:
        super().check(dim, reciprocal, options)
        size = options.kernel_size
        if size % 2 == 0:  # padding keeps the image size only for odd filters
            raise ConfigError(f"model.options.kernel_size must be odd for {cls.name}, got {size}")


class ConEx(ConvolvedScorer):
    """An entity row holds D/2 complex numbers, stored (re, im, re, im, ...).

    Answers tail queries only. Raises ConfigError when D is odd or not reciprocal.
    """

    name = "conex"
    formula = "ConEx (Demir and Ngonga Ngomo 2021): ComplEx with conv(h, r) as a fourth factor."
    units = 2
    is_complex = relation_is_complex = True

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        c_re, c_im = components(self.convolution(anchor, relation), 2).unbind(-1)
        (h_re, h_im), (r_re, r_im) = (components(x, 2).unbind(-1) for x in (anchor, relation))
        real = c_re * h_re * r_re - c_im * h_im * r_im
        imaginary = c_re * h_re * r_im + c_im * h_im * r_re
        return torch.stack([real, imaginary], -1).flatten(-2)


class AConEx(ConvolvedScorer):
    """An entity row holds D/2 complex numbers, stored (re, im, re, im, ...).

    Answers tail queries only. Raises ConfigError when D is odd or not reciprocal.
    """

    name = "aconex"
    formula = "AConEx (dice-embeddings): ComplEx with conv(h, r) added to its four products."
    units, outputs = 2, 2
    is_complex = relation_is_complex = True

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        a, b, c, d = self.convolution(anchor, relation).chunk(4, -1)  # D/2 each
        (h_re, h_im), (r_re, r_im) = (components(x, 2).unbind(-1) for x in (anchor, relation))
        real = (a + h_re * r_re) - (d + h_im * r_im)
        imaginary = (b + h_re * r_im) + (c + h_im * r_re)
        return torch.stack([real, imaginary], -1).flatten(-2)


class ConvQ(ConvolvedScorer):
    """QMult whose product is multiplied elementwise by a convolution of h and r.

    An entity row holds D/4 quaternions a + b i + c j + d k, stored (a, b, c, d, a, ...).
    Answers tail queries only. Raises ConfigError when D is not a multiple of 4 or not reciprocal.
    """

    name = "convq"
    formula = "ConvQ (Demir et al. 2021): score(h, r, t) = <conv(h, r) * (h r), t>, quaternions."
    units, levels = 4, 2
    table: Tensor  # multiplication table, (units, units, units)

    def __init__(self, num_relations: int, dim: int, reciprocal: bool = True, **shared: Any):
        super().__init__(num_relations, dim, reciprocal, **shared)
        self.register_buffer("table", cayley_dickson(self.levels), persistent=False)

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        return self.convolution(anchor, relation) * product(anchor, relation, self.table)


class ConvO(ConvQ):
    """OMult whose product is multiplied elementwise by a convolution of h and r.

    An entity row holds D/8 octonions, with eight consecutive components each. Answers tail queries
    only. Raises ConfigError when D is not a multiple of 8 or not reciprocal.
    """

    name = "convo"
    formula = "ConvO (Demir et al. 2021): score(h, r, t) = <conv(h, r) * (h r), t>, octonions."
    units, levels = 8, 3

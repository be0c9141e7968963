"""What each scorer can be told, and what it asks of the rest of the config.

One table for both sides: the config checks its ``model`` section with it, the scorers check their
arguments.  It imports no torch, so that reading a config stays fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Optional


@dataclass(frozen=True)
class ScorerOptions:
    """Settings that only some scorers have; null takes the scorer's own default.

    Args:
        p: Of keci, ckeci and decal: basis vectors whose square is 1.
        q: Of keci, ckeci and decal: basis vectors whose square is -1.
        r: Of decal: basis vectors whose square is 0.
        channels: Of conve, conex, aconex, convq and convo: feature maps of the convolution.
        kernel_size: Of the same five: height and width of the filters.
        feature_dropout: Of the same five: share of the feature maps dropped; of tucker: of the
            entries of a relation's matrix.
        height: Of conve: rows of the image that an entity is reshaped to; null takes the largest
            divisor of model.dim up to its root.
        relation_dim: Of tucker: numbers a relation; null takes model.dim.
        hidden_dim: Of shallom: width of the hidden layer; null takes 2 model.dim.
        layers: Of coke: transformer layers.
        heads: Of coke: attention heads.
        feed_forward_dim: Of coke: width inside a transformer layer; null takes 2 model.dim.
        block: Of house: numbers that are rotated together.
        reflections: Of house: reflections that make a rotation; null takes 2 (block // 2).
        projections: Of house: projections of head and tail; 0 is HousE-r.
        degree: Of lfmult: degree of the polynomials.
    """

    p: Optional[int] = None  # noqa: UP045 - jsonargparse on Python 3.10
    q: Optional[int] = None  # noqa: UP045
    r: Optional[int] = None  # noqa: UP045
    channels: Optional[int] = None  # noqa: UP045
    kernel_size: Optional[int] = None  # noqa: UP045
    feature_dropout: Optional[float] = None  # noqa: UP045
    height: Optional[int] = None  # noqa: UP045
    relation_dim: Optional[int] = None  # noqa: UP045
    hidden_dim: Optional[int] = None  # noqa: UP045
    layers: Optional[int] = None  # noqa: UP045
    heads: Optional[int] = None  # noqa: UP045
    feed_forward_dim: Optional[int] = None  # noqa: UP045
    block: Optional[int] = None  # noqa: UP045
    reflections: Optional[int] = None  # noqa: UP045
    projections: Optional[int] = None  # noqa: UP045
    degree: Optional[int] = None  # noqa: UP045


_MAY_BE_ZERO = ("p", "q", "r", "projections", "degree")


@dataclass(frozen=True)
class Declaration:
    """A scorer's options with their defaults, and what it asks of the other keys."""

    options: Mapping[str, Any] = field(default_factory=dict)
    numbers: Callable[[Mapping[str, Any]], int] = lambda options: 1  # model.dim's divisor
    because: str = ""  # of the divisor, in words
    is_distance: bool = False  # its query is a point: nothing to apply hidden dropout to
    needs_reciprocal: bool = False  # answers tail queries only


def _groups(count: int, because: str, **more: Any) -> Declaration:
    return Declaration(numbers=lambda options: count, because=because, **more)


_COMPLEX = "two real numbers make a complex one"
_QUATERNION = "four real numbers make a quaternion"
_OCTONION = "eight real numbers make an octonion"
_DISTANCE = Declaration(is_distance=True)
_CLIFFORD = Declaration(
    {"p": 0, "q": 1},
    lambda options: 1 + options["p"] + options["q"],
    "1 + p + q real numbers make a Clifford number",
)
_MAPS = {"channels": 32, "kernel_size": 3, "feature_dropout": 0.0}


def _residual(count: int, because: str) -> Declaration:
    return _groups(count, because, options=_MAPS, needs_reciprocal=True)


DECLARATIONS: dict[str, Declaration] = {
    "transe_l1": _DISTANCE,
    "transe_l2": _DISTANCE,
    "transh": _DISTANCE,
    "distmult": Declaration(),
    "complex": _groups(2, _COMPLEX),
    "rotate": _groups(2, _COMPLEX, is_distance=True),
    "simple": _groups(2, "a row is two vectors, for head and for tail"),
    "rescal": Declaration(),
    "tucker": Declaration({"relation_dim": None, "feature_dropout": 0.0}),
    "qmult": _groups(4, _QUATERNION),
    "quate": _groups(4, _QUATERNION),
    "omult": _groups(8, _OCTONION),
    "duale": _groups(8, "eight real numbers make a dual quaternion"),
    "keci": _CLIFFORD,
    "ckeci": _CLIFFORD,
    "decal": Declaration(
        {"p": 1, "q": 1, "r": 1},
        lambda options: 1 + options["p"] + options["q"] + options["r"],
        "1 + p + q + r real numbers make a Clifford number",
    ),
    "mure": _DISTANCE,
    "pairre": _DISTANCE,
    "house": Declaration(
        {"block": 4, "reflections": None, "projections": 1},
        lambda options: options["block"],
        "model.options.block numbers are rotated together",
        is_distance=True,
    ),
    "pyke": _DISTANCE,
    "conve": Declaration({**_MAPS, "height": None}, needs_reciprocal=True),
    "conex": _residual(2, _COMPLEX),
    "aconex": _residual(2, _COMPLEX),
    "convq": _residual(4, _QUATERNION),
    "convo": _residual(8, _OCTONION),
    "coke": Declaration(
        {"layers": 6, "heads": 4, "feed_forward_dim": None},
        lambda options: options["heads"],
        "model.options.heads share it",
    ),
    "shallom": Declaration({"hidden_dim": None}),
    "lfmult": Declaration(
        {"degree": 1},
        lambda options: options["degree"] + 1,
        "degree + 1 coefficients make a polynomial",
    ),
}


def chosen_options(scorer: str, options: ScorerOptions) -> dict[str, Any]:
    """The scorer's options: as set, or else its defaults.

    Raises ValueError, which names the key, when one is set that the scorer does not have.
    """
    known = DECLARATIONS[scorer].options
    chosen = {name: value for name, value in asdict(options).items() if value is not None}
    for name in sorted(chosen.keys() - known.keys()):
        has = f"has {', '.join(known)}" if known else "has none"
        raise ValueError(f"model.options.{name} is no option of {scorer}, which {has}")
    return {**known, **chosen}


def check_scorer(scorer: str, dim: int, reciprocal: bool, options: Mapping[str, Any]) -> None:
    """Raises ValueError, which names the key, unless the scorer can be made like this.

    options: by name; the scorer's defaults stand in for absent ones.
    """
    declared = DECLARATIONS[scorer]
    options = {**declared.options, **options}
    for name, value in options.items():
        if value is not None:
            _check_option(name, value)
    count = declared.numbers(options)
    if dim % count:
        multiple = "even" if count == 2 else f"a multiple of {count}"
        raise ValueError(
            f"model.dim must be {multiple} for {scorer} ({declared.because}), got {dim}"
        )
    if declared.needs_reciprocal and not reciprocal:
        raise ValueError(
            f"model.reciprocal must be true for {scorer}: it answers tail queries only, and head "
            "queries are tail queries of a relation's inverse"
        )
    if "kernel_size" in options:
        _check_kernel(scorer, dim, options)
    if scorer == "mure" and dim < 3:
        raise ValueError(f"model.dim must be at least 3 for mure (two are biases), got {dim}")


def image_shape(dim: int, height: int | None) -> tuple[int, int]:
    """(height, width) of the image that ConvE reshapes dim numbers to.

    Raises ValueError when the height does not divide dim.
    """
    if height is None:
        height = next(n for n in range(math.isqrt(dim), 0, -1) if dim % n == 0)
    if dim % height:
        raise ValueError(f"model.options.height must divide model.dim {dim}, got {height}")
    return height, dim // height


def _check_option(name: str, value: Any) -> None:
    if name == "feature_dropout":
        if not 0 <= value < 1:
            raise ValueError(f"model.options.feature_dropout must be in [0, 1), got {value!r}")
        return
    least = 0 if name in _MAY_BE_ZERO else 1
    if value < least:
        raise ValueError(f"model.options.{name} must be an integer >= {least}, got {value!r}")


def _check_kernel(scorer: str, dim: int, options: Mapping[str, Any]) -> None:
    size = options["kernel_size"]
    if scorer != "conve":  # the maps are padded to keep their size
        if size % 2 == 0:
            raise ValueError(f"model.options.kernel_size must be odd for {scorer}, got {size}")
        return
    height, width = image_shape(dim, options["height"])
    if size > min(2 * height, width):
        raise ValueError(
            f"model.options.kernel_size {size} does not fit the image of conve, {2 * height} x "
            f"{width} for model.dim {dim}; set model.options.height or another model.dim"
        )

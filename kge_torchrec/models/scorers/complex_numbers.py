"""Rows of D real numbers read as D/2 complex ones, interleaved: (re, im, re, im, ...).

Products come in two forms.  With torch's complex numbers they are one operation, on a CPU three
times as fast as the eight real ones; but Inductor compiles no complex numbers, so that what is
compiled takes the real form, which it makes one kernel of, with what is around it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def as_complex(rows: Tensor) -> Tensor:
    """(..., D) real -> (..., D/2) complex view."""
    return torch.view_as_complex(rows.unflatten(-1, (-1, 2)))


def as_real(numbers: Tensor) -> Tensor:
    """(..., D/2) complex -> (..., D) real view."""
    return torch.view_as_real(numbers).flatten(-2)


def parts(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Real and imaginary parts, (..., D/2) each."""
    return rows.unflatten(-1, (-1, 2)).unbind(-1)


def times(rows: Tensor, factor: Tensor, conjugate: bool = False) -> Tensor:
    """Products number by number, of the conjugate of the factor if so: (..., D), (..., D)."""
    if torch.compiler.is_compiling():
        return _times(parts(rows), parts(factor), conjugate)
    numbers = as_complex(factor)
    return as_real(as_complex(rows) * (numbers.conj() if conjugate else numbers))


def rotated(rows: Tensor, phase: Tensor) -> Tensor:
    """Each number turned by an angle: (..., D), (..., D/2) -> (..., D)."""
    if torch.compiler.is_compiling():
        return _times(parts(rows), (phase.cos(), phase.sin()), conjugate=False)
    return as_real(as_complex(rows) * torch.polar(torch.ones_like(phase), phase))


def _times(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], conjugate: bool) -> Tensor:
    """The real form."""
    (real, imaginary), (x, y) = one, other
    if conjugate:
        y = -y
    return torch.stack([real * x - imaginary * y, real * y + imaginary * x], -1).flatten(-2)

"""AConEx (dice-embeddings): ComplEx with conv(h, r) added to its four products.

score(h, r, t) = <a + re h re r, re t> + <b + re h im r, im t> + <c + im h re r, im t>
- <d + im h im r, re t> with (a, b, c, d) = conv(h, r).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kge_torchrec.models.scorers.algebra import components
from kge_torchrec.models.scorers.base import Side
from kge_torchrec.models.scorers.residual_convolution import ConvolvedScorer


class AConEx(ConvolvedScorer):
    """D real numbers a row make D/2 complex ones, stored (re, im, re, im, ...).

    Answers tail queries only.  Raises ValueError when D is odd or not reciprocal.
    """

    name = "aconex"
    units, outputs = 2, 2
    is_complex = relation_is_complex = True

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        a, b, c, d = self.convolution(anchor, relation).chunk(4, -1)  # D/2 each
        (h_re, h_im), (r_re, r_im) = (components(x, 2).unbind(-1) for x in (anchor, relation))
        real = (a + h_re * r_re) - (d + h_im * r_im)
        imaginary = (b + h_re * r_im) + (c + h_im * r_re)
        return torch.stack([real, imaginary], -1).flatten(-2)

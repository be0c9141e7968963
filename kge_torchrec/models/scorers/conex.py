"""ConEx (Demir and Ngonga Ngomo 2021): ComplEx with conv(h, r) as a fourth factor.

score(h, r, t) = <re c, re h, re r, re t> + <re c, re h, im r, im t> + <im c, im h, re r, im t>
- <im c, im h, im r, re t> with c = conv(h, r) and <w, x, y, z> = sum_k w_k x_k y_k z_k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kge_torchrec.models.scorers.algebra import components
from kge_torchrec.models.scorers.base import Side
from kge_torchrec.models.scorers.residual_convolution import ConvolvedScorer


class ConEx(ConvolvedScorer):
    """D real numbers a row make D/2 complex ones, stored (re, im, re, im, ...).

    Answers tail queries only.  Raises ValueError when D is odd or not reciprocal.
    """

    name = "conex"
    units = 2
    is_complex = relation_is_complex = True

    def query(self, anchor: Tensor, relation: Tensor, side: Side) -> Tensor:
        c_re, c_im = components(self.convolution(anchor, relation), 2).unbind(-1)
        (h_re, h_im), (r_re, r_im) = (components(x, 2).unbind(-1) for x in (anchor, relation))
        real = c_re * h_re * r_re - c_im * h_im * r_im
        imaginary = c_re * h_re * r_im + c_im * h_im * r_re
        return torch.stack([real, imaginary], -1).flatten(-2)

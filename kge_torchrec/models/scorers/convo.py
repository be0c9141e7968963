"""ConvO (Demir et al. 2021): score(h, r, t) = <conv(h, r) * (h r), t>, octonions."""

from __future__ import annotations

from kge_torchrec.models.scorers.convq import ConvQ


class ConvO(ConvQ):
    """OMult whose product is multiplied, number by number, by a convolution of h and r.

    D real numbers a row make D/8 octonions, eight components after another.  Answers tail queries
    only.  Raises ValueError when D is no multiple of 8 or not reciprocal.
    """

    name = "convo"
    units, levels = 8, 3

"""Operations that scorers use: complex products, blocks of pairs of rows, and dropout."""

from __future__ import annotations

from torch import Tensor, nn

from kge_torchrec.kernels.complex_numbers import as_complex as as_complex
from kge_torchrec.kernels.complex_numbers import as_real as as_real
from kge_torchrec.kernels.complex_numbers import parts as parts
from kge_torchrec.kernels.complex_numbers import rotated as rotated
from kge_torchrec.kernels.complex_numbers import times as times
from kge_torchrec.kernels.operators import dropped
from kge_torchrec.kernels.pairwise import pairwise as pairwise


class Dropout(nn.Dropout):
    """torch's dropout; on a CPU with other draws, which depend on torch's generator state only."""

    def forward(self, input: Tensor) -> Tensor:
        """Apply dropout: (...) -> (...)."""
        return dropped(input, self.p) if self.training else input

"""Operations that scorers use: complex products, blocks of pairs of rows, and dropout."""

from __future__ import annotations

from torch import Tensor, nn

from kge_torchrec.kernels.operators import as_complex as as_complex
from kge_torchrec.kernels.operators import as_real as as_real
from kge_torchrec.kernels.operators import dropped
from kge_torchrec.kernels.operators import pairwise as pairwise
from kge_torchrec.kernels.operators import parts as parts
from kge_torchrec.kernels.operators import rotated as rotated
from kge_torchrec.kernels.operators import times as times


class Dropout(nn.Dropout):
    """torch's dropout; on a CPU with other draws, which depend on torch's generator state only."""

    def forward(self, input: Tensor) -> Tensor:
        """Apply dropout: (...) -> (...)."""
        return dropped(input, self.p) if self.training else input

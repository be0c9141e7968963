"""A regularizer: the sum of |x|^p of every row."""

from dataclasses import dataclass

from kge_torchrec import Regularizer


class Lp(Regularizer):
    """Sum of |x|^p."""

    @dataclass(frozen=True)
    class Options(Regularizer.Options):
        """Settings of the penalty."""

        p: float = 1.0
        """Exponent, at least 1."""

    def penalty(self, rows, is_complex):
        return rows.abs().pow(self.options.p).sum(-1)

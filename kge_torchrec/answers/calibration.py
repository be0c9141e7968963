"""Curves that turn scores into probabilities, fitted to held-out true and false triples.

    Platt     Platt 1999                p(s) = 1 / (1 + exp(-(``slope`` s + ``intercept``)))
    isotonic  Zadrozny and Elkan 2002   the ascending step function nearest to the labels,
                                        with linear interpolation

A probability of p means: of triples like those that the curve was fitted to, the share p is
true (Tabacof and Costabello 2020, Probability Calibration for Knowledge Graph Embedding Models).

Shapes: M triples.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kge_torchrec import files
from kge_torchrec.errors import DataError, KGEError

Method = Literal["platt", "isotonic"]
METHODS = ("platt", "isotonic")
FILE = "calibration.json"
BOTH = "both"  # key of the common curve, used if head and tail query give the same score
TIE = 1e-6  # largest difference of probabilities inside one step of an isotonic curve
BINS = 15  # bins of the expected calibration error, the default of Guo et al. 2017


@dataclass(frozen=True)
class Curve:
    """A Platt curve or an isotonic curve; the fields of the other kind keep their defaults."""

    slope: float = 0.0
    intercept: float = 0.0
    scores: tuple[float, ...] = ()  # ascending
    probabilities: tuple[float, ...] = ()  # at these scores

    def at(self, scores: np.ndarray) -> np.ndarray:
        """Return the probabilities of scores.

        A larger score has a larger probability, by up to ``TIE`` inside an isotonic step, so
        answers keep their order.

        Args:
            scores: (M,). NaN counts as -inf.

        Returns:
            (M,) float64.
        """
        scores = np.nan_to_num(np.asarray(scores, np.float64), nan=-np.inf, posinf=np.inf,
                               neginf=-np.inf)  # fmt: skip
        if self.scores:
            steps = np.interp(scores, self.scores, self.probabilities)
            centre, spread = np.median(self.scores), np.std(self.scores) or 1.0
            return (1 - TIE) * steps + TIE * sigmoid((scores - centre) / spread)
        with np.errstate(invalid="ignore"):  # 0 times infinity
            return sigmoid(np.nan_to_num(self.slope * scores + self.intercept, posinf=np.inf,
                                         neginf=-np.inf))  # fmt: skip


@dataclass(frozen=True)
class Calibration:
    """The curves of a run.

    Attributes:
        method: "platt" or "isotonic".
        curves: One curve per missing part ("head", "relation", "tail"). ``BOTH`` replaces
            head and tail if a triple has one score.
        step: The training steps of the calibrated checkpoint.
        data: The fingerprint of the triples.
        about: Options and errors of the calibration, for display.
    """

    method: str
    curves: Mapping[str, Curve]
    step: int
    data: str
    about: Mapping[str, Any]

    def probabilities(self, scores: np.ndarray, missing: str) -> np.ndarray:
        """Return the probabilities (M,) of the scores (M,) of answers.

        Args:
            scores: (M,).
            missing: The part that the queries miss: "head", "relation" or "tail".
        """
        keys = (missing, "tail", BOTH)  # older calibrations have no curve for relations
        curve = next((self.curves[key] for key in keys if key in self.curves), Curve())
        return curve.at(scores)

    def is_of(self, step: int, data: str) -> bool:
        """Return whether this calibrates the checkpoint at ``step`` on ``data``."""
        return (self.step, self.data) == (step, data)

    def write(self, folder: Path) -> None:
        """Write ``FILE`` into the folder of a run or an export."""
        curves = {side: _form(self.method, curve) for side, curve in self.curves.items()}
        value = {"method": self.method, "curves": curves, "step": self.step,
                 "data": self.data, "about": dict(self.about)}  # fmt: skip
        files.write_json(folder / FILE, value)

    @classmethod
    def read(cls, folder: Path) -> Calibration | None:
        """Read the calibration of a folder; None if there is none.

        Raises:
            DataError: The file is damaged.
        """
        file = folder / FILE
        try:
            values = json.loads(file.read_text("utf-8"))
            curves = {part: Curve(**curve) for part, curve in values.pop("curves").items()}
            return cls(curves=curves, **values)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise DataError(
                f"{file} is damaged ({error}); remove it, or write it again with "
                "`kge-torchrec calibrate`"
            ) from error


def _form(method: str, curve: Curve) -> dict[str, Any]:
    if method == "platt":
        return {"slope": curve.slope, "intercept": curve.intercept}
    return {"scores": curve.scores, "probabilities": curve.probabilities}


def fit(method: Method, scores: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> Curve:
    """Fit a curve to labeled scores.

    Args:
        method: "platt" or "isotonic".
        scores: (M,).
        labels: (M,) bool, True for true triples.
        weights: (M,).

    Raises:
        KGEError: scikit-learn is not installed, or all labels are the same.
    """
    if labels.all() or not labels.any():
        raise KGEError(
            "a calibration needs true and false triples, and there is only one kind; train longer, "
            "or calibrate more answers of each query (top)"
        )
    try:
        from sklearn.isotonic import IsotonicRegression
        from sklearn.linear_model import LogisticRegression
    except ImportError:
        raise KGEError(
            "calibrating needs scikit-learn: pip install 'kge-torchrec[calibrate]'"
        ) from None
    if method == "isotonic":
        steps = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip")
        steps.fit(scores, labels, weights)
        return Curve(scores=tuple(steps.X_thresholds_.tolist()),
                     probabilities=tuple(steps.y_thresholds_.tolist()))  # fmt: skip
    # Standardized scores help the solver converge. C=1e6 makes the penalty negligible.
    centre, spread = float(scores.mean()), float(scores.std()) or 1.0
    line = LogisticRegression(C=1e6).fit((scores[:, None] - centre) / spread, labels, weights)
    slope = float(line.coef_[0, 0]) / spread
    return Curve(slope=slope, intercept=float(line.intercept_[0]) - slope * centre)


def expected_calibration_error(
    probabilities: np.ndarray, labels: np.ndarray, weights: np.ndarray
) -> float:
    """Return the expected calibration error over ``BINS`` bins of equal width.

    This is the weighted mean, over the bins, of |mean probability - share of true triples|.
    All arguments are (M,). Source: Guo et al. 2017, On Calibration of Modern Neural Networks.
    """
    bins = np.minimum((probabilities * BINS).astype(np.int64), BINS - 1)
    gaps = np.bincount(bins, weights * (probabilities - labels), BINS)
    return float(np.abs(gaps).sum() / weights.sum())


def brier_score(probabilities: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> float:
    """Return the weighted mean squared difference of probabilities and labels (Brier 1950).

    All arguments are (M,).
    """
    return float((weights * (probabilities - labels) ** 2).sum() / weights.sum())


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Return 1 / (1 + e^-x) without overflow."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, small) / (1 + small)

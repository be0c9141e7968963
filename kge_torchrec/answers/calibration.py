"""Probabilities of scores, by a curve that was fitted to held-out true and false triples.

    Platt     Platt 1999                p(s) = 1 / (1 + exp(-(slope s + intercept)))
    isotonic  Zadrozny and Elkan 2002   the ascending steps nearest to the labels, joined by lines

A probability means: this share of triples like those that the curve was fitted to is true
(Tabacof and Costabello 2020, Probability Calibration for Knowledge Graph Embedding Models).

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
BOTH = "both"  # the curve of either side, where a triple has one score
TIE = 1e-6  # of a probability by steps, which differs between the scores of one step
BINS = 15  # of the expected calibration error, as Guo et al. 2017 have them


@dataclass(frozen=True)
class Curve:
    """One of the two forms; the other one's fields are empty."""

    slope: float = 0.0
    intercept: float = 0.0
    scores: tuple[float, ...] = ()  # ascending
    probabilities: tuple[float, ...] = ()  # at these

    def at(self, scores: np.ndarray) -> np.ndarray:
        """Scores (M,) -> probabilities (M,) float64; of NaN the lowest there is.

        Larger scores have larger probabilities, by up to ``TIE`` inside a step, so that the order
        of answers stays that of the scores.
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
    """The curves of a run: for heads, relations and tails, or one for both sides of a triple.

    step, data: of what was calibrated: steps trained, and the fingerprint of the triples.
    about: how, and how well, for people.
    """

    method: str
    curves: Mapping[str, Curve]
    step: int
    data: str
    about: Mapping[str, Any]

    def probabilities(self, scores: np.ndarray, asked: str) -> np.ndarray:
        """Return those of scores (M,) of answers to queries for a head, a relation or a tail."""
        keys = (asked, "tail", BOTH)  # older calibrations have no curve for relations
        curve = next((self.curves[key] for key in keys if key in self.curves), Curve())
        return curve.at(scores)

    def is_of(self, step: int, data: str) -> bool:
        """Whether parameters after so many steps on this data were calibrated."""
        return (self.step, self.data) == (step, data)

    def write(self, folder: Path) -> None:
        """Into the folder of a run, or of an export."""
        curves = {side: _form(self.method, curve) for side, curve in self.curves.items()}
        value = {"method": self.method, "curves": curves, "step": self.step,
                 "data": self.data, "about": dict(self.about)}  # fmt: skip
        files.write_json(folder / FILE, value)

    @classmethod
    def read(cls, folder: Path) -> Calibration | None:
        """What ``write`` wrote, None if nobody did.  Raises DataError for a damaged file."""
        file = folder / FILE
        try:
            found = json.loads(file.read_text("utf-8"))
            curves = {side: Curve(**values) for side, values in found.pop("curves").items()}
            return cls(curves=curves, **found)
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
    """The curve of a method through scores (M,), labels (M,) bool, weighted (M,).

    Raises KGEError without scikit-learn, or where all labels are alike.
    """
    if labels.all() or not labels.any():
        raise KGEError(
            "there is nothing to calibrate by: it takes true triples and false ones; train longer, "
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
    # Of mean 0 and deviation 1, for the solver; the penalty is next to none.
    centre, spread = float(scores.mean()), float(scores.std()) or 1.0
    line = LogisticRegression(C=1e6).fit((scores[:, None] - centre) / spread, labels, weights)
    slope = float(line.coef_[0, 0]) / spread
    return Curve(slope=slope, intercept=float(line.intercept_[0]) - slope * centre)


def expected_calibration_error(
    probabilities: np.ndarray, labels: np.ndarray, weights: np.ndarray
) -> float:
    """Mean distance of probability and share of true ones over ``BINS`` equal bins.

    All (M,).  Guo et al. 2017, On Calibration of Modern Neural Networks.
    """
    bins = np.minimum((probabilities * BINS).astype(np.int64), BINS - 1)
    gaps = np.bincount(bins, weights * (probabilities - labels), BINS)
    return float(np.abs(gaps).sum() / weights.sum())


def brier_score(probabilities: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> float:
    """Mean squared distance of probabilities and labels, all (M,).  Brier 1950."""
    return float((weights * (probabilities - labels) ** 2).sum() / weights.sum())


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^-x) of any size of x."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, small) / (1 + small)

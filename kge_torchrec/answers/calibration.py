"""Calibration: curves that turn scores into probabilities, fitted to valid and measured on test.

    Platt     Platt 1999                p(s) = 1 / (1 + exp(-(``slope`` s + ``intercept``)))
    isotonic  Zadrozny and Elkan 2002   the ascending step function nearest to the labels,
                                        with linear interpolation

A probability of p means: of triples like those that the curve was fitted to, the share p is
true.

The labeled scores are those of the answers that ``predict`` lists for the queries of a held-out
split. A query is a triple of the split without its head,
relation or tail. Its candidates are all entities, or all relations, except the answers that other
splits hold. A listed candidate is true if the split holds the completed triple.

Shapes: M scores of triples, B queries per batch, k listed candidates per query.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from kge_torchrec import files
from kge_torchrec.answers.predictions import PARTS, Part, are_known, find_best
from kge_torchrec.config.checks import at_least
from kge_torchrec.data import SPLITS
from kge_torchrec.distributed.processes import on_first_rank
from kge_torchrec.environment import announced
from kge_torchrec.errors import DataError, KGEError
from kge_torchrec.models.scorers.base import SIDES
from kge_torchrec.trained_model import TrainedModel

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
        """Return the probabilities (M,) float64 of scores (M,); NaN counts as -inf.

        A larger score has a larger probability, by up to ``TIE`` inside an isotonic step, so
        answers keep their order.
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
        """Return the probabilities (M,) of the scores (M,) of answers; see ``TrainedModel``."""
        keys = (missing, "tail", BOTH)  # relations have no curve if all answers have one label
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


def fit(method: Method, scores: np.ndarray, labels: np.ndarray) -> Curve:
    """Fit a curve to scores (M,) with labels (M,) bool, True for true triples.

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
        steps.fit(scores, labels)
        return Curve(scores=tuple(steps.X_thresholds_.tolist()),
                     probabilities=tuple(steps.y_thresholds_.tolist()))  # fmt: skip
    # Standardized scores help the solver converge. C=1e6 makes the penalty negligible.
    centre, spread = float(scores.mean()), float(scores.std()) or 1.0
    line = LogisticRegression(C=1e6).fit((scores[:, None] - centre) / spread, labels)
    slope = float(line.coef_[0, 0]) / spread
    return Curve(slope=slope, intercept=float(line.intercept_[0]) - slope * centre)


def expected_calibration_error(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Return the expected calibration error over ``BINS`` bins of equal width.

    This is the mean, over the answers in the bins, of |mean probability - share of true triples|.
    All arguments are (M,). Source: Guo et al. 2017, On Calibration of Modern Neural Networks.
    """
    bins = np.minimum((probabilities * BINS).astype(np.int64), BINS - 1)
    gaps = np.bincount(bins, probabilities - labels, BINS)
    return float(np.abs(gaps).sum() / len(labels))


def brier_score(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean squared difference of probabilities and labels (Brier 1950).

    All arguments are (M,).
    """
    return float(((probabilities - labels) ** 2).mean())


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Return 1 / (1 + e^-x) without overflow."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, small) / (1 + small)


STEPS_FROM = 1000  # labeled scores per curve from which the curves are isotonic
QUERIES = 512  # queries per batch
RELATION_QUERIES = 1000  # a low limit: each entity pair is scored with all relations

Scored = tuple[np.ndarray, np.ndarray]  # scores (M,) float32 and labels (M,) bool


def calibrate(model: TrainedModel, step: int, top: int, limit: int, seed: int) -> Calibration:
    """Fit curves on valid and measure them on test; see ``Run.calibrate``. Collective.

    ``about`` of the result has the errors on test before and after the calibration. The
    probability before is the sigmoid of the score.
    """
    at_least("top", top, 1)
    at_least("limit", limit, 1)
    at_least("seed", seed, 0)
    store = model.known("calibrating")
    test = _listed(model, "test", top, limit, 2 * seed + 1) if len(store.test) else None
    queries, valid = _listed(model, "valid", top, limit, 2 * seed)
    if not model.scorer.reciprocal:  # head and tail query give the same score, so one curve
        valid = _joined(valid)

    @announced("fitting the curves")  # loads scikit-learn
    def fitted() -> Calibration:
        fewest = min(len(labels) for _, labels in valid.values())
        method: Method = "isotonic" if fewest >= STEPS_FROM else "platt"
        curves = {
            part: fit(method, scores, labels)
            for part, (scores, labels) in valid.items()
            if part != "relation" or (labels.any() and not labels.all())
        }
        about: dict[str, Any] = {
            "method": method, "top": top, "limit": limit, "seed": seed, "valid_queries": queries
        }  # fmt: skip
        made = Calibration(method, curves, step, store.fingerprint, about)
        if test is not None:
            about["test"] = {"queries": test[0], **_errors(made, test[1])}
        return made

    return on_first_rank(model.processes, fitted)


def _listed(
    model: TrainedModel, split: str, top: int, limit: int, seed: int
) -> tuple[int, dict[str, Scored]]:
    """Return the number of queries of a split, and their listed answers by missing part."""
    candidates = {
        missing: candidate_answers(model, split, missing, top, limit, seed) for missing in PARTS
    }
    scored: dict[str, Scored] = {
        missing: (answers.scores, answers.labels) for missing, answers in candidates.items()
    }
    return sum(answers.queries for answers in candidates.values()), scored


def _joined(scored: dict[str, Scored]) -> dict[str, Scored]:
    """Merge both sides into one entry; keep the entry for relations."""
    scores, labels = zip(*(scored[side] for side in SIDES), strict=True)
    rest = {part: entry for part, entry in scored.items() if part not in SIDES}
    return {BOTH: (np.concatenate(scores), np.concatenate(labels)), **rest}


def _errors(made: Calibration, scored: Mapping[str, Scored]) -> dict[str, Any]:
    """Return the mean probability and the calibration errors, before and after."""
    labels = np.concatenate([labels for _, labels in scored.values()])
    before = np.concatenate([sigmoid(scores.astype(np.float64)) for scores, _ in scored.values()])
    after = np.concatenate(
        [made.probabilities(scores, part) for part, (scores, _) in scored.items()]
    )
    errors: dict[str, Any] = {"candidates": len(labels), "true": float(labels.mean())}
    for name, measure in (
        ("mean_probability", lambda probabilities, _: float(probabilities.mean())),
        ("expected_calibration_error", expected_calibration_error),
        ("brier_score", brier_score),
    ):
        errors[name] = {"before": measure(before, labels), "after": measure(after, labels)}
    return errors


class CandidateAnswers(NamedTuple):
    """The M listed candidates of all distinct queries of a split."""

    queries: int
    scores: np.ndarray  # (M,) float32
    labels: np.ndarray  # (M,) bool, True for true answers


def candidate_answers(
    model: TrainedModel, split: str, missing: Part, top: int, limit: int, seed: int
) -> CandidateAnswers:
    """Return the ``top`` best candidates of each query of a held-out split. Collective.

    A split with more queries than ``limit`` is sampled. Relation queries have the additional limit
    ``RELATION_QUERIES``.

    Raises:
        DataError: The split has no triples.
    """
    store = model.known("calibrating")
    triples = np.array(store.split(split), np.int64)
    if not len(triples):
        raise DataError(f"{store.path} has no {split} triples")
    triples[:, PARTS.index(missing)] = 0
    queries = np.unique(triples, axis=0)
    limit = min(limit, RELATION_QUERIES) if missing == "relation" else limit
    if len(queries) > limit:
        chosen = np.random.default_rng(seed).choice(len(queries), limit, replace=False)
        queries = queries[np.sort(chosen)]
    own = store.filter_index((split,))
    other_splits = store.filter_index([name for name in SPLITS if name != split])
    scores, labels = [], []
    with model.bar(len(queries), f"{split}: {missing}s", "query") as bar:
        for batch in np.array_split(queries, range(QUERIES, len(queries), QUERIES)):
            best, ids = find_best(model, missing, torch.from_numpy(batch), top, other_splits)
            is_listed = ((ids >= 0) & best.isfinite()).numpy()
            scores.append(best.numpy()[is_listed])
            labels.append(are_known(own, missing, batch, ids.numpy())[is_listed])
            bar.update(len(batch))
    return CandidateAnswers(len(queries), np.concatenate(scores), np.concatenate(labels))

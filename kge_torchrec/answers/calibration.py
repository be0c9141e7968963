"""Calibration: curves that turn scores into probabilities, fitted to valid and measured on test.

    Platt     Platt 1999                p(s) = 1 / (1 + exp(-(``slope`` s + ``intercept``)))
    isotonic  Zadrozny and Elkan 2002   the ascending step function nearest to the labels,
                                        with linear interpolation

A probability of p means: of the answers that ``predict`` lists with this score, the share p is
true. A query is a triple of a held-out split without its head, relation or tail. A listed answer is
true if the split holds the completed triple; answers that other splits hold are not listed.

Shapes: M listed answers, B queries per batch, k answers per query.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from kge_torchrec import files
from kge_torchrec.answers.queries import PARTS, Choice, Part, are_known, best
from kge_torchrec.config.checks import at_least
from kge_torchrec.data import SPLITS
from kge_torchrec.distributed.processes import on_first_rank
from kge_torchrec.environment import announced
from kge_torchrec.errors import DataError, KGEError
from kge_torchrec.trained_model import TrainedModel

Method = Literal["platt", "isotonic"]
FILE = "calibration.json"
BOTH = "both"  # key of the common curve, used if head and tail query give the same score
TIE = 1e-6  # largest difference of probabilities inside one step of an isotonic curve
BINS = 15  # bins of the expected calibration error, the default of Guo et al. 2017
STEPS_FROM = 1000  # answers per curve from which the curves are isotonic
QUERIES = 512  # queries per batch
RELATION_QUERIES = 1000  # a low limit: each entity pair is scored with all relations


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
        files.write_json(folder / FILE, asdict(self))

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
        raise KGEError("calibrating needs scikit-learn: pip install -e '.[calibrate]'") from None
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


def errors(probabilities: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return the mean probability and the errors of probabilities (M,) of labels (M,).

    The expected calibration error is the mean over ``BINS`` bins of equal width, weighted by their
    answers, of |mean probability - share of true answers| (Guo et al. 2017). The Brier score is the
    mean squared difference of probabilities and labels (Brier 1950).
    """
    bins = np.minimum((probabilities * BINS).astype(np.int64), BINS - 1)
    gaps = np.bincount(bins, probabilities - labels, BINS)
    return {
        "mean_probability": float(probabilities.mean()),
        "expected_calibration_error": float(np.abs(gaps).sum() / len(labels)),
        "brier_score": float(((probabilities - labels) ** 2).mean()),
    }


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Return 1 / (1 + e^-x) without overflow."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, small) / (1 + small)


def calibrate(model: TrainedModel, step: int, top: int, limit: int, seed: int) -> Calibration:
    """Fit curves on valid and measure them on test; see ``Run.calibrate``. Collective.

    ``about`` of the result has the errors on test before and after the calibration. The
    probability before is the sigmoid of the score.
    """
    for name, value, least in (("top", top, 1), ("limit", limit, 1), ("seed", seed, 0)):
        at_least(name, value, least)
    store = model.known("calibrating")
    test: dict[str, Listed] = {}
    if len(store.test):
        test = {part: listed(model, "test", part, top, limit, 2 * seed + 1) for part in PARTS}
    valid: dict[str, Listed] = {
        part: listed(model, "valid", part, top, limit, 2 * seed) for part in PARTS
    }
    queries = sum(answers.queries for answers in valid.values())
    if not model.scorer.reciprocal:  # head and tail query give the same score, so one curve
        heads, tails = valid.pop("head"), valid.pop("tail")
        scores, labels = (np.concatenate(pair) for pair in zip(heads[1:], tails[1:], strict=True))
        valid = {BOTH: Listed(heads.queries + tails.queries, scores, labels), **valid}

    @announced("fitting the curves")  # loads scikit-learn
    def fitted() -> Calibration:
        fewest = min(len(answers.labels) for answers in valid.values())
        method: Method = "isotonic" if fewest >= STEPS_FROM else "platt"
        curves = {
            part: fit(method, scores, labels)
            for part, (_, scores, labels) in valid.items()
            if part != "relation" or (labels.any() and not labels.all())
        }
        about: dict[str, Any] = {
            "method": method, "top": top, "limit": limit, "seed": seed, "valid_queries": queries
        }  # fmt: skip
        made = Calibration(method, curves, step, store.fingerprint, about)
        if test:
            labels = np.concatenate([answers.labels for answers in test.values()])
            raw = [sigmoid(answers.scores.astype(np.float64)) for answers in test.values()]
            own = [made.probabilities(answers.scores, part) for part, answers in test.items()]
            before, after = (errors(np.concatenate(values), labels) for values in (raw, own))
            about["test"] = {
                "queries": sum(answers.queries for answers in test.values()),
                "candidates": len(labels),
                "true": float(labels.mean()),
                **{name: {"before": before[name], "after": after[name]} for name in before},
            }
        return made

    return on_first_rank(model.processes, fitted)


class Listed(NamedTuple):
    """The M listed answers to all queries of a split that miss the same part."""

    queries: int
    scores: np.ndarray  # (M,) float32
    labels: np.ndarray  # (M,) bool, True for true answers


def listed(
    model: TrainedModel, split: str, missing: Part, top: int, limit: int, seed: int
) -> Listed:
    """Return the ``top`` best answers to each distinct query of a held-out split. Collective.

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
    choice = Choice(top, store.filter_index([name for name in SPLITS if name != split]))
    scores, labels = [], []
    with model.bar(len(queries), f"{split}: {missing}s", "query") as bar:
        for batch in np.array_split(queries, range(QUERIES, len(queries), QUERIES)):
            found, ids = best(model, missing, torch.from_numpy(batch), choice)
            is_listed = ((ids >= 0) & found.isfinite()).numpy()
            scores.append(found.numpy()[is_listed])
            labels.append(are_known(own, missing, batch, ids.numpy())[is_listed])
            bar.update(len(batch))
    return Listed(len(queries), np.concatenate(scores), np.concatenate(labels))

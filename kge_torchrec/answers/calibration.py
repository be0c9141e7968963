"""Calibration: curves that turn scores into probabilities, fitted to valid and measured on test.

    isotonic  Zadrozny and Elkan 2002   the ascending step function nearest to the labels,
                                        with linear interpolation
    Platt     Platt 1999                p(s) = 1 / (1 + exp(-(``slope`` s + ``intercept``)))

A probability of p means: of the answers that ``predict`` lists with this score, the share p is
true. A query is a triple of a held-out split without its head, relation or tail. A listed answer is
true if the split holds the completed triple; answers that other splits hold are not listed.

Each missing part has a common curve. A relation with ``OWN_FROM`` queries or more has a curve of
its own where the log loss of that curve is lower than that of the common one by more than a
standard error. Both are measured on queries of valid that they were not fitted to
(cross-validation with ``FOLDS`` folds).

Shapes: M listed answers, B queries per batch, k answers per query.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kge_torchrec import files
from kge_torchrec.answers.queries import PARTS, Choice, Part, are_known, best
from kge_torchrec.config.checks import at_least
from kge_torchrec.data import SIDES, SPLITS
from kge_torchrec.distributed.processes import on_first_rank
from kge_torchrec.errors import DataError, KGEError
from kge_torchrec.trained_model import TrainedModel

FILE = "calibration.json"
TIE = 1e-6  # largest difference of probabilities inside one step of an isotonic curve
BINS = 15  # bins of the expected calibration error, the default of Guo et al. 2017
STEPS_FROM = 1000  # answers from which a curve is isotonic; a sigmoid needs fewer
OWN_FROM = 10  # queries from which a relation may have a curve of its own
FOLDS = 3  # of the queries of valid, to choose curves
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
        answers keep their order. Scores beyond those of the fit have steps, too.
        """
        scores = np.nan_to_num(np.asarray(scores, np.float64), nan=-np.inf, posinf=np.inf,
                               neginf=-np.inf)  # fmt: skip
        if self.scores:
            steps = np.interp(scores, self.scores, self.probabilities)
            centre, spread = np.median(self.scores), np.std(self.scores) or 1.0
            with np.errstate(invalid="ignore"):  # infinity by infinity
                away = np.abs(scores - centre) / spread
                inside = np.nan_to_num(away / (1 + away), nan=1.0)
            return (1 - TIE) * steps + TIE * (1 + np.sign(scores - centre) * inside) / 2
        with np.errstate(invalid="ignore"):  # 0 times infinity
            return sigmoid(np.nan_to_num(self.slope * scores + self.intercept, posinf=np.inf,
                                         neginf=-np.inf))  # fmt: skip


@dataclass(frozen=True)
class Calibration:
    """The curves of a run.

    Attributes:
        curves: The common curve of each missing part ("head", "relation", "tail").
        own: Curves of relations, by missing part and id.
        step: The training steps of the calibrated checkpoint.
        data: The fingerprint of the triples.
        about: Options and errors of the calibration, for display.
    """

    curves: Mapping[str, Curve]
    own: Mapping[str, Mapping[int, Curve]]
    step: int
    data: str
    about: Mapping[str, Any]

    def probabilities(self, scores: np.ndarray, missing: str, relations: np.ndarray) -> np.ndarray:
        """Return the probabilities (M,) of the scores (M,) of answers; see ``TrainedModel``."""
        # Relations have no curve if all their answers have one label.
        found = self.curves.get(missing, self.curves["tail"]).at(scores)
        # The answers to a query that misses the relation have several, so one curve orders them.
        for relation, curve in self.own.get(missing, {}).items():
            chosen = relations == relation
            found[chosen] = curve.at(scores[chosen])
        return found

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
            own = {
                part: {int(relation): Curve(**curve) for relation, curve in of_part.items()}
                for part, of_part in values.pop("own").items()
            }
            return cls(curves=curves, own=own, **values)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise DataError(
                f"{file} is damaged ({error}); remove it, or write it again with "
                "`kge-torchrec calibrate`"
            ) from error


def fit(scores: np.ndarray, labels: np.ndarray) -> Curve:
    """Fit a curve to scores (M,) with labels (M,) bool, True for true triples.

    It is isotonic from ``STEPS_FROM`` answers on, and never certain: a step is at least 1 / 2M away
    from 0 and 1.

    Raises:
        KGEError: scikit-learn is not installed, or all labels are the same.
    """
    if not is_mixed(labels):
        raise KGEError(
            "a calibration needs true and false triples, and there is only one kind; train longer, "
            "or calibrate more answers of each query (top)"
        )
    try:
        from sklearn.isotonic import IsotonicRegression
        from sklearn.linear_model import LogisticRegression
    except ImportError:
        raise KGEError("calibrating needs scikit-learn: pip install -e '.[calibrate]'") from None
    if len(labels) >= STEPS_FROM:
        least = 0.5 / len(labels)
        steps = IsotonicRegression(y_min=least, y_max=1 - least, out_of_bounds="clip")
        steps.fit(scores, labels)
        return Curve(scores=tuple(steps.X_thresholds_.tolist()),
                     probabilities=tuple(steps.y_thresholds_.tolist()))  # fmt: skip
    # Standardized scores help the solver converge. C=1e6 makes the penalty negligible.
    centre, spread = float(scores.mean()), float(scores.std()) or 1.0
    line = LogisticRegression(C=1e6).fit((scores[:, None] - centre) / spread, labels)
    slope = float(line.coef_[0, 0]) / spread
    if slope < 0:  # false answers score higher: the score says nothing, and the order is kept
        share = float(labels.mean())
        return Curve(intercept=float(np.log(share / (1 - share))))
    return Curve(slope=slope, intercept=float(line.intercept_[0]) - slope * centre)


def is_mixed(labels: np.ndarray) -> bool:
    """Return whether labels (M,) are of both kinds."""
    return bool(labels.any() and not labels.all())


def errors(probabilities: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return the mean probability and the errors of probabilities (M,) of labels (M,).

    The expected calibration error is the mean over ``BINS`` bins of equal width, weighted by their
    answers, of |mean probability - share of true answers| (Guo et al. 2017). The Brier score is the
    mean squared difference of probabilities and labels (Brier 1950). The log loss is the mean of
    -log of the probability of the label.
    """
    bins = np.minimum((probabilities * BINS).astype(np.int64), BINS - 1)
    gaps = np.bincount(bins, probabilities - labels, BINS)
    return {
        "mean_probability": float(probabilities.mean()),
        "expected_calibration_error": float(np.abs(gaps).sum() / len(labels)),
        "brier_score": float(((probabilities - labels) ** 2).mean()),
        "log_loss": float(log_losses(probabilities, labels).mean()),
    }


def log_losses(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return -log of the probability of each label (M,); a probability is 1e-15 or more."""
    return -np.log(np.where(labels, probabilities, 1 - probabilities).clip(1e-15))


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Return 1 / (1 + e^-x) without overflow."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, small) / (1 + small)


def calibrate(model: TrainedModel, step: int, top: int, limit: int) -> Calibration:
    """Fit curves on valid and measure them on test; see ``Run.calibrate``. Collective.

    ``about`` of the result has the errors on test: of all answers and by relation, with the sigmoid
    of the score, the common curves and the chosen ones.
    """
    for name, value in (("top", top), ("limit", limit)):
        at_least(name, value, 1)
    store = model.store
    test: dict[str, Listed] = {}
    if len(store.test):
        test = {part: listed(model, "test", part, top, limit, 1) for part in PARTS}
    valid: dict[str, Listed] = {part: listed(model, "valid", part, top, limit, 0) for part in PARTS}

    def fitted() -> Calibration:
        curves: dict[str, Curve] = {}
        own: dict[str, dict[int, Curve]] = {}
        if model.scorer.reciprocal:
            for side in SIDES:
                curves[side], own[side] = fit_by_relation(valid[side])
        else:  # head and tail query give the same score
            both = fit_by_relation(Listed.merged([valid[side] for side in SIDES]))
            for side in SIDES:
                curves[side], own[side] = both
        if is_mixed(valid["relation"].labels):
            curves["relation"] = fit(valid["relation"].scores, valid["relation"].labels)
        about: dict[str, Any] = {
            "top": top, "limit": limit,
            "valid_queries": sum(len(np.unique(x.queries)) for x in valid.values()),
        }  # fmt: skip
        made = Calibration(curves, own, step, store.fingerprint, about)
        about.update(_errors_on(test, made, model) if test else {})
        return made

    return on_first_rank(model.processes, fitted)


def fit_by_relation(answers: Listed, seed: int = 0) -> tuple[Curve, dict[int, Curve]]:
    """Return the common curve of answers, and the curves of relations that predict better."""
    queries, scores, labels, relations = answers
    common = fit(scores, labels)
    numbers, first, place = np.unique(queries, return_index=True, return_inverse=True)
    kinds, counts = np.unique(relations[first], return_counts=True)
    folds = (np.random.default_rng(seed).permutation(len(numbers)) % FOLDS)[place]
    chosen = {}
    bases = [
        fit(scores[folds != i], labels[folds != i]).at(scores)
        if is_mixed(labels[folds != i]) else common.at(scores)
        for i in range(FOLDS)
    ]  # fmt: skip
    for relation in kinds[counts >= OWN_FROM].tolist():
        mine = relations == relation
        gains = []
        for fold, base in enumerate(bases):
            fitted, held = mine & (folds != fold), mine & (folds == fold)
            if is_mixed(labels[fitted]):
                own = fit(scores[fitted], labels[fitted]).at(scores[held])
                gains.append(log_losses(base[held], labels[held]) - log_losses(own, labels[held]))
        gain = np.concatenate(gains or [np.zeros(1)])
        if len(gains) == FOLDS and gain.sum() > np.sqrt((gain**2).sum()):
            chosen[relation] = fit(scores[mine], labels[mine])
    return common, chosen


def _errors_on(
    test: Mapping[str, Listed], made: Calibration, model: TrainedModel
) -> dict[str, Any]:
    """Return the errors on the answers to the queries of test, "test", and those by relation."""
    joined = Listed.merged([*test.values()])
    values = {"sigmoid": sigmoid(joined.scores.astype(np.float64))}
    for name, curves in (("common", replace(made, own={})), ("calibrated", made)):
        values[name] = np.concatenate([
            curves.probabilities(x.scores, part, x.relations) for part, x in test.items()
        ])  # fmt: skip
    is_side = np.repeat(
        [part != "relation" for part in test], [len(x.labels) for x in test.values()]
    )

    def measured(chosen: np.ndarray) -> dict[str, Any]:
        labels = joined.labels[chosen]
        return {
            "queries": len(np.unique(joined.queries[chosen])),
            "answers": len(labels),
            "true": int(labels.sum()),
            **{name: errors(x[chosen], labels) for name, x in values.items()},
        }

    relations = np.unique(joined.relations[is_side])
    by_relation = [
        {
            "relation": label,
            "own_curve": any(relation in curves for curves in made.own.values()),
            **measured(np.flatnonzero(is_side & (joined.relations == relation))),
        }
        for relation, label in zip(
            relations.tolist(), model.relation_labels.labels(relations), strict=True
        )
    ]
    by_relation.sort(key=lambda row: -row["answers"])
    return {"test": measured(np.arange(len(joined.labels))), "relations": by_relation}


class Listed(NamedTuple):
    """The M listed answers to all queries of a split that miss the same part."""

    queries: np.ndarray  # (M,) int64, the number of each answer's query
    scores: np.ndarray  # (M,) float32
    labels: np.ndarray  # (M,) bool, True for true answers
    relations: np.ndarray  # (M,) int64, of the query; of the answer, if the query misses it

    @classmethod
    def merged(cls, several: Sequence[Listed]) -> Listed:
        """Return the answers to different queries as one."""
        starts = np.cumsum([0, *(x.queries.max(initial=-1) + 1 for x in several[:-1])])
        shifted = [x._replace(queries=x.queries + n) for x, n in zip(several, starts, strict=True)]
        return cls(*map(np.concatenate, zip(*shifted, strict=True)))


def listed(
    model: TrainedModel, split: str, missing: Part, top: int, limit: int, seed: int
) -> Listed:
    """Return the ``top`` best answers to each distinct query of a held-out split. Collective.

    A split with more queries than ``limit`` is sampled. Relation queries have the additional limit
    ``RELATION_QUERIES``.

    Raises:
        DataError: The split has no triples.
    """
    store = model.store
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
    found: list[Listed] = []
    with model.bar(len(queries), f"{split}: {missing}s", "query") as bar:
        for first in range(0, len(queries), QUERIES):
            batch = queries[first : first + QUERIES]
            scores, ids = (x.numpy() for x in best(model, missing, batch, choice))
            row, column = ((ids >= 0) & np.isfinite(scores)).nonzero()
            answers, is_true = ids[row, column], are_known(own, missing, batch, ids)[row, column]
            relations = answers if missing == "relation" else batch[row, 1]
            found.append(Listed(first + row, scores[row, column], is_true, relations))
            bar.update(len(batch))
    return Listed(*map(np.concatenate, zip(*found, strict=True)))

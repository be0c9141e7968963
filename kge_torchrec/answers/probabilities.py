"""Calibrating a run on valid, and how well it went on test."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from kge_torchrec.answers.calibration import (
    BOTH,
    METHODS,
    Calibration,
    Curve,
    Method,
    brier_score,
    expected_calibration_error,
    fit,
    sigmoid,
)
from kge_torchrec.answers.corruptions import Among, Labelled, labelled
from kge_torchrec.answers.model import AnsweringModel
from kge_torchrec.config import ConfigError
from kge_torchrec.distributed.processes import on_first_rank


@dataclass(frozen=True)
class CalibrationOptions:
    """How a run is calibrated.

    method: platt, two numbers, or isotonic, steps (better with 1,000 triples and more).
    corruptions: of each true triple and side.
    among: what they are drawn from: entities "seen" with the relation on that side, or "all".
    positive_share: of true triples among those that will be asked about; weights give both kinds
        this share, however many corruptions there are.
    limit: triples of valid and of test that are used at most, a sample.
    seed: of sample and corruptions.

    Raises ConfigError for values that make no sense.
    """

    method: Method = "platt"
    corruptions: int = 4
    among: Among = "seen"
    positive_share: float = 0.5
    limit: int = 100_000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"method must be one of {', '.join(METHODS)}, got {self.method!r}")
        for name, number in (("corruptions", self.corruptions), ("limit", self.limit)):
            if number < 1:
                raise ConfigError(f"{name} must be an integer >= 1, got {number}")
        if not 0 < self.positive_share < 1:
            raise ConfigError(f"positive_share must lie in (0, 1), got {self.positive_share}")


def calibrate(model: AnsweringModel, step: int, options: CalibrationOptions) -> Calibration:
    """Curves fitted to valid; ``about`` has the errors on test before and after.

    Before means: by the sigmoid of the score.  Raises KGEError without scikit-learn, DataError
    where valid is empty.
    """
    store = model.known("calibrating")
    valid = _scored(model, labelled(store, "valid", *_drawn(options, 0)))
    has_test = len(store.test) > 0
    test = _scored(model, labelled(store, "test", *_drawn(options, 1))) if has_test else {}
    if not model.scorer.reciprocal:  # a triple has one score, so it gets one probability
        valid = {BOTH: _joined(valid)}
        test = {BOTH: _joined(test)} if has_test else {}

    def fitted() -> tuple[dict[str, Curve], dict[str, Any]]:
        curves = {
            side: fit(options.method, scores, labels, _weights(labels, options.positive_share))
            for side, (scores, labels) in valid.items()
        }
        return curves, _about(options, curves, valid, test)

    curves, about = on_first_rank(model.processes, fitted)
    return Calibration(options.method, curves, step, store.fingerprint, about)


def _drawn(options: CalibrationOptions, part: int) -> tuple[int, Among, int, int]:
    return options.corruptions, options.among, 2 * options.seed + part, options.limit


Scored = tuple[np.ndarray, np.ndarray]  # scores (M,) float32 and labels (M,) bool


def _scored(model: AnsweringModel, parts: list[Labelled]) -> dict[str, Scored]:
    return {
        side: (model.scores(torch.from_numpy(triples), side).numpy(), labels)
        for side, triples, labels in parts
    }


def _joined(parts: dict[str, Scored]) -> Scored:
    scores, labels = zip(*parts.values(), strict=True)
    return np.concatenate(scores), np.concatenate(labels)


def _weights(labels: np.ndarray, positive_share: float) -> np.ndarray:
    """(M,) that give true ones their share of the sum, M."""
    true = labels.mean()
    return np.where(labels, positive_share / true, (1 - positive_share) / (1 - true))


def _about(
    options: CalibrationOptions,
    curves: dict[str, Curve],
    valid: dict[str, Scored],
    test: dict[str, Scored],
) -> dict[str, Any]:
    triples = sum(int(labels.sum()) for _, labels in valid.values()) // 2
    about = asdict(options) | {"valid_triples": triples}
    if test:
        labels = np.concatenate([labels for _, labels in test.values()])
        before = np.concatenate([sigmoid(scores.astype(np.float64)) for scores, _ in test.values()])
        after = np.concatenate([curves[side].at(scores) for side, (scores, _) in test.items()])
        weights = _weights(labels, options.positive_share)
        about["test"] = {
            "triples": int(labels.sum()) // 2,
            "expected_calibration_error": {
                "before": expected_calibration_error(before, labels, weights),
                "after": expected_calibration_error(after, labels, weights),
            },
            "brier_score": {
                "before": brier_score(before, labels, weights),
                "after": brier_score(after, labels, weights),
            },
        }
    return about

"""Weights of relations in the loss: ``loss.relation_weights``.

Shapes: T training triples, R relations, M indices.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import DTypeLike

from kge_torchrec.config.checks import ConfigError, positive
from kge_torchrec.data import RELATION
from kge_torchrec.errors import DataError

if TYPE_CHECKING:
    from kge_torchrec.data.store import Vocabulary

_BLOCK = 1 << 20  # triples whose weights are in memory at once for the mean


class TripleWeights:
    """The weight of each training triple: its relation's, times its own if it has one.

    It stands for an array (T,), but looks weights up when a batch is made.

    Args:
        triples: (T, 3) integers; may be memory-mapped.
        of_relation: (R,) float32.
        own: (T,) weights of single triples, or None.
    """

    def __init__(self, triples: np.ndarray, of_relation: np.ndarray, own: np.ndarray | None = None):
        self.triples, self.of_relation, self.own = triples, of_relation, own

    def __getitem__(self, index: np.ndarray | slice) -> np.ndarray:
        """Return the weights (M,) of some triples, float32."""
        weights = self.of_relation[self.triples[index, RELATION]]
        return weights if self.own is None else weights * self.own[index]

    def mean(self, dtype: DTypeLike = np.float64) -> float:
        """Return the mean over all training triples."""
        starts = range(0, len(self.triples), _BLOCK)
        sums = [self[slice(start, start + _BLOCK)].sum(dtype=dtype) for start in starts]
        return float(sum(sums) / len(self.triples))


Weights = np.ndarray | TripleWeights


def weights_of_relations(chosen: Mapping[str, float] | str, relations: Vocabulary) -> np.ndarray:
    """Return the weight of every relation, (R,) float32; 1 for relations that are not named.

    Args:
        chosen: {label: weight}, or a file of lines label, tab, weight.
        relations: The labels of the graph's relations.

    Raises:
        ConfigError: A label is no relation of the graph.
        DataError: The file cannot be read, or has a bad line.
    """
    named = read_weights(Path(chosen)) if isinstance(chosen, str) else dict(chosen)
    ids = relations.find(list(named))
    for label, place in zip(named, ids, strict=True):
        if place < 0:
            few = ", ".join(relations.labels(range(min(3, len(relations)))))
            raise ConfigError(
                f"loss.relation_weights: {label!r} is no relation of the graph; its relations "
                f"begin with {few}"
            )
    weights = np.ones(len(relations), np.float32)
    weights[ids] = list(named.values())
    return weights


def read_weights(path: Path) -> dict[str, float]:
    """Return {label: weight} of a file of lines label, tab, weight.

    Raises:
        DataError: The file cannot be read, or a line is no label and number > 0, or repeats a
            label.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"loss.relation_weights: {path} cannot be read: {error}") from None
    named: dict[str, float] = {}
    for number, line in enumerate(lines, 1):
        label, tab, text = line.rpartition("\t")
        try:
            weight = float(text)
            positive("weight", weight)
        except (ValueError, ConfigError):
            tab = ""
        if not tab or label in named:
            problem = "repeats a relation" if tab else "is not a relation, a tab and a number > 0"
            raise DataError(f"{path}:{number}: {line!r} {problem}; correct the line")
        named[label] = weight
    return named

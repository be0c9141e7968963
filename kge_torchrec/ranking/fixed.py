"""Ranks among fixed candidates of each triple, as the Open Graph Benchmark has them.

The lists come from a NumPy file. Ties follow the exact ranking, so a realistic rank is the mean of
the optimistic and the pessimistic one, as in the evaluator of the Open Graph Benchmark.

Shapes: T triples, B queries, m candidates per triple, N entities.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kge_torchrec.data import COLUMNS
from kge_torchrec.data.store import TripleStore, Vocabulary
from kge_torchrec.errors import DataError
from kge_torchrec.models.scorers.base import SIDES, Side
from kge_torchrec.ranking.blocks import Queries, Scores
from kge_torchrec.ranking.ranks import Ranks

LISTS = 512  # ranked at once
MISSING = -1  # fills up the rows of lists that are shorter than others


class FixedLists:
    """Lists that belong to the triples, unfiltered; a candidate may be repeated.

    A true answer is compared with the entities of its list only. Such ranks are better than ranks
    among all entities, mostly much better.

    Args:
        triples: (T, 3), the triples with lists.
        lists: Per side (T, m) entity ids; ``MISSING`` where a triple has fewer.
        source: The file, for messages and ``label``.

    Raises:
        DataError: A triple is repeated.
    """

    def __init__(self, triples: np.ndarray, lists: Mapping[Side, np.ndarray], source: str):
        self._row = {tuple(triple): row for row, triple in enumerate(triples.tolist())}
        if len(self._row) < len(triples):
            raise DataError(f"{source} gives candidates twice for the same triple; leave one out")
        self._lists, self._source = lists, source
        sizes = " and ".join(f"{lists[side].shape[1]:,} {side}" for side in SIDES)
        self.label = f"{sizes} candidates per triple, given by {source}"

    def of(self, side: Side, triples: np.ndarray) -> np.ndarray:
        """Return the candidates (B, m) int64 for one side of triples (B, 3).

        Raises:
            DataError: A triple has no list.
        """
        return np.asarray(self._lists[side][self.rows_of(triples)], np.int64)

    def rows_of(self, triples: np.ndarray) -> list[int]:
        """Return the rows of the lists of triples (B, 3); raise DataError as ``of`` does."""
        rows = [self._row.get(tuple(triple), MISSING) for triple in triples.tolist()]
        if MISSING in rows:
            missing = tuple(triples[rows.index(MISSING)].tolist())
            raise DataError(
                f"{self._source} gives no candidates for the triple with the ids {missing}; "
                "evaluation.candidates fixed ranks only triples that have a list"
            )
        return rows


def read_lists(path: str | Path | None, store: TripleStore, split: str | None) -> FixedLists:
    """Return the candidates of a .npz file.

    Its arrays "head_neg" and "tail_neg" (T, m) are labels, or ids of the store; an empty label or
    -1 fills up shorter rows. With "head", "relation" and "tail" (T,) too, the rows are of those
    triples, otherwise of the split, in its order.

    Raises:
        DataError: The file is unusable; the message names the array.
    """
    assert path is not None  # EvaluationConfig has checked it
    path = Path(path)
    arrays = _load(path)
    lists: dict[Side, np.ndarray] = {
        side: _ids(arrays[f"{side}_neg"], store.entities, f"{path}: {side}_neg", MISSING)
        for side in SIDES
    }
    if all(name in arrays for name in COLUMNS):
        vocabularies = {name: store.entities for name in COLUMNS} | {"relation": store.relations}
        columns = [_ids(arrays[n], vocabularies[n], f"{path}: {n}", 0) for n in COLUMNS]
        triples, whose = np.stack(columns, 1), "triples"
    elif split is None:
        raise DataError(
            f"{path}: has no arrays head, relation and tail, so its rows cannot be those of "
            "triples of your own; add them"
        )
    else:
        triples, whose = np.asarray(store.split(split), np.int64), f"{split} triples"
    for side in SIDES:
        if lists[side].ndim != 2 or len(lists[side]) != len(triples):
            raise DataError(
                f"{path}: {side}_neg must have one row for each of the {len(triples):,} {whose}, "
                f"and has shape {lists[side].shape}"
            )
    return FixedLists(triples, lists, str(path))


def _load(path: Path) -> Mapping[str, np.ndarray]:
    names = [f"{side}_neg" for side in SIDES]
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in (*names, *COLUMNS) if name in file}
    except FileNotFoundError:
        raise DataError(f"{path}: no such file of candidates") from None
    except (ValueError, OSError, zipfile.BadZipFile, TypeError) as error:
        raise DataError(
            f"{path}: is no NumPy file of candidates ({error}); write it with "
            "numpy.savez(path, head_neg=..., tail_neg=...), text as arrays of str"
        ) from None
    missing = [name for name in names if name not in arrays]
    if missing:
        raise DataError(f"{path}: has no array {missing[0]}; it needs {' and '.join(names)}")
    return arrays


def _ids(array: np.ndarray, vocabulary: Vocabulary, what: str, lowest: int) -> np.ndarray:
    """Return the ids of an array of labels, or of ids from ``lowest`` on; ``what`` names it."""
    if array.dtype.kind == "U":
        labels = pa.array(array.ravel(), pa.large_string())
        ids = pc.index_in(labels, value_set=vocabulary.array).fill_null(MISSING).to_numpy()
        wrong = ids == MISSING
        if lowest == MISSING:
            wrong &= array.ravel() != ""
        if wrong.any():
            raise DataError(f"{what}: {str(array.ravel()[wrong][0])!r} is not in the graph")
        return ids.reshape(array.shape)
    if array.dtype.kind not in "iu":
        raise DataError(f"{what}: must be text or integers, not {array.dtype}")
    if array.size and not (array.min() >= lowest and array.max() < len(vocabulary)):
        raise DataError(
            f"{what}: ids must lie in [{lowest}, {len(vocabulary)}), as in the store; write "
            "labels as text"
        )
    return array.astype(np.int64)


def rank_among_lists(
    scores: Scores,
    triples: np.ndarray,
    lists: FixedLists,
    progress: Callable[[int], object] = lambda queries: None,
) -> Ranks:
    """Rank the true head and tail of triples (T, 3) among their lists, as ``rank_triples`` does.

    Collective; ``progress`` is called with the number of queries since the last call.
    """
    ranks, sizes = Ranks({}, {}), []
    for side in SIDES:
        less, equal, size = np.zeros((3, len(triples)), np.int64)
        for first in range(0, len(triples), LISTS):
            part = slice(first, first + LISTS)
            queries, answers = Queries.of(triples[part], side)
            ids = lists.of(side, triples[part])
            found = scores.of(queries, np.append(answers, ids, 1)).cpu().numpy()
            true, others, is_there = found[:, :1], found[:, 1:], ids != MISSING
            less[part] = ((others < true) & is_there).sum(1)
            equal[part] = ((others == true) & is_there).sum(1)
            size[part] = is_there.sum(1)
            progress(len(ids))
        ranks.pessimistic[side] = 1 + size - less
        ranks.optimistic[side] = ranks.pessimistic[side] - equal
        sizes.append(size)
    every = np.concatenate(sizes)
    ranks.candidates.update(
        restricted_to=lists.label, kind="fixed", per_query=[int(every.min()), int(every.max())]
    )
    return ranks

"""The model that answers queries: entity rows, scorer and labels of a run or an export.

If several ranks hold the rows, every function of this package is collective: each rank calls it
with the same arguments and gets the same result. No rank ever holds the whole table.

Shapes: B queries, M ids, T triples, N entities, R relations, D elements per row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from kge_torchrec.answers.calibration import Calibration
from kge_torchrec.data.store import TripleStore, Vocabulary
from kge_torchrec.distributed.processes import Processes
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.errors import KGEError
from kge_torchrec.models.scorers.base import SIDES, Scorer, Side
from kge_torchrec.ranking.blocks import SMALLEST, score_block, scoring

Label = str | int  # a label, or an id
Labels = str | int | Sequence[str] | Sequence[int] | np.ndarray | Tensor

FETCH_BYTES = 32 << 20  # entity rows per fetch
ALONE = Processes(0, 1, 1, torch.device("cpu"))
_NO_DATA = "the data is no part of an export: {} needs the run"


@dataclass(frozen=True)
class AnsweringModel:
    """A trained model that answers queries.

    Attributes:
        scorer: The scorer.
        shard: The entity rows of this rank.
        entity_labels: Returns the entity vocabulary. It is called when a label is first needed.
        relation_labels: Returns the relation vocabulary; called like ``entity_labels``.
        store: The data; None for an export.
        processes: The ranks.
        calibration: Turns scores into probabilities; None if the run is not calibrated.
    """

    scorer: Scorer
    shard: EntityShard
    entity_labels: Callable[[], Vocabulary]
    relation_labels: Callable[[], Vocabulary]
    store: TripleStore | None = None
    processes: Processes = ALONE
    calibration: Calibration | None = None

    @property
    def entities(self) -> Vocabulary:
        return self.entity_labels()

    @property
    def relations(self) -> Vocabulary:
        return self.relation_labels()

    @property
    def num_entities(self) -> int:
        """The number of entities N on all ranks."""
        return self.shard.num_entities

    @property
    def num_relations(self) -> int:
        """The number of relations R, without inverses."""
        return self.scorer.num_relations

    def probabilities(self, scores: np.ndarray, asked: str) -> list[float | None]:
        """Return the probabilities (M,) of answers; each is None without a calibration.

        Args:
            scores: (M,).
            asked: The part that the queries miss: "head", "relation" or "tail".
        """
        if self.calibration is None:
            return [None] * len(scores)
        return self.calibration.probabilities(scores, asked).tolist()

    def bar(self, total: int | None, what: str, unit: str) -> tqdm[Any]:
        """Return a progress bar on rank 0's terminal, shown after one second."""
        hidden = None if self.processes.is_first else True  # None: tqdm looks for a terminal
        return tqdm(total=total, desc=what, unit=unit, disable=hidden, leave=False, delay=1)

    def known(self, purpose: str) -> TripleStore:
        """Return the data.

        Raises:
            KGEError: The model is an export, which has no data; the message names the purpose.
        """
        if self.store is None:
            raise KGEError(_NO_DATA.format(purpose))
        return self.store

    def entity_ids(self, given: Labels) -> Tensor:
        """Return int64 entity ids, () or (M,).

        Raises:
            UnknownLabelError: A label is not in the data.
            IndexError: An id is out of range.
        """
        return ids_of(given, "entity", self.num_entities, self.entity_labels)

    def relation_ids(self, given: Labels) -> Tensor:
        """Return int64 relation ids, () or (M,).

        Raises:
            UnknownLabelError: A label is not in the data.
            IndexError: An id is out of range.
        """
        return ids_of(given, "relation", self.num_relations, self.relation_labels)

    def triple_ids(self, triples: Sequence[Sequence[Label]]) -> Tensor:
        """Return the ids (T, 3) int64 of triples of labels or ids.

        Raises:
            UnknownLabelError: A label is not in the data.
            IndexError: An id is out of range.
        """
        if not len(triples):
            return torch.empty(0, 3, dtype=torch.int64)
        heads, relations, tails = (list(column) for column in zip(*triples, strict=True))
        columns = self.entity_ids(heads), self.relation_ids(relations), self.entity_ids(tails)
        return torch.stack(columns, 1)

    def scores(self, triples: Tensor, side: Side = "tail") -> Tensor:
        """Return the scores (T,) float32 of triples. Collective.

        They are bit for bit those of the ranking.

        Args:
            triples: (T, 3) int64.
            side: Score as a query for the "tail" or the "head". With reciprocal relations the two
                scores differ.
        """
        queries = triples if side == "tail" else triples.flip(1)
        batch = max(1, FETCH_BYTES // (2 * 4 * self.shard.dim * SMALLEST)) * SMALLEST
        found = [torch.empty(0)]
        with scoring(self.scorer):
            for group in queries.split(batch):
                ids = torch.cat([group[:, 0], group[:, 2]]).to(self.shard.rows.device)
                anchor, target = self.shard.fetch(ids).view(2, len(group), self.shard.dim)
                relation = group[:, 1].to(anchor.device)
                for part in torch.arange(len(group), device=anchor.device).split(SMALLEST):
                    # Only a block of scores has the same bits as in ranking; keep its diagonal.
                    block = score_block(
                        self.scorer, anchor[part], relation[part], target[part], side
                    )
                    found.append(block.diagonal().cpu())
        return torch.cat(found)


def check_side(side: str) -> None:
    """Check that ``side`` is "head" or "tail".

    Raises:
        ValueError: It is neither.
    """
    if side not in SIDES:
        raise ValueError(f"side must be one of {', '.join(SIDES)}, got {side!r}")


def ids_of(given: Labels, kind: str, count: int, vocabulary: Callable[[], Vocabulary]) -> Tensor:
    """Return int64 ids, () or (M,), of labels, or of ids in [0, count).

    Raises:
        UnknownLabelError: A label is not in the vocabulary.
        IndexError: An id is out of range.
        TypeError: The values are neither labels nor integers.
    """
    array = np.asarray(given)
    if array.dtype.kind in "UTO":  # text, or objects, such as labels from a data frame
        found = vocabulary().ids(array.reshape(-1).tolist())
        return torch.from_numpy(found.reshape(array.shape))
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{kind} ids must be integers or labels, not {array.dtype}")
    if array.size and not (array.min() >= 0 and array.max() < count):
        raise IndexError(f"{kind} ids must lie in [0, {count})")
    return torch.from_numpy(np.array(array, np.int64))

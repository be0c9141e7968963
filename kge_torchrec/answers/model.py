"""What questions are answered from: rows, scorer and labels, of a run or of an export.

Everything in this room is collective where the rows lie on several ranks: each calls it with the
same arguments and gets the same answers.  No rank ever holds all rows.

Shapes: B queries, T triples, N entities, R relations, D numbers per entity.
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

FETCH_BYTES = 32 << 20  # rows of triples that are in memory together
ALONE = Processes(0, 1, 1, torch.device("cpu"))
_NO_DATA = "the data is no part of an export: {} needs the run"


@dataclass(frozen=True)
class AnsweringModel:
    """A trained model to put questions to.

    entity_labels, relation_labels: called when a label is needed, for the first time at least.
    store: the data, for what is known already; None of an export.
    calibration: what makes probabilities of scores, if somebody has calibrated the run.
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
        """N, over all ranks."""
        return self.shard.num_entities

    @property
    def num_relations(self) -> int:
        """R, inverses not counted."""
        return self.scorer.num_relations

    def probabilities(self, scores: np.ndarray, asked: str) -> list[float | None]:
        """Of scores (M,) of answers to a query for a head, a tail or a relation; None of each
        without a calibration."""
        if self.calibration is None:
            return [None] * len(scores)
        return self.calibration.probabilities(scores, asked).tolist()

    def bar(self, total: int | None, what: str, unit: str) -> tqdm[Any]:
        """A bar on the first rank's terminal, for work that takes more than a second."""
        hidden = None if self.processes.is_first else True  # None: tqdm looks for a terminal
        return tqdm(total=total, desc=what, unit=unit, disable=hidden, leave=False, delay=1)

    def known(self, purpose: str) -> TripleStore:
        """The data.  Raises KGEError, which names the purpose, where there is none."""
        if self.store is None:
            raise KGEError(_NO_DATA.format(purpose))
        return self.store

    def entity_ids(self, given: Labels) -> Tensor:
        """int64 ids () or (M,).  Raises UnknownLabelError for a label, IndexError for an id."""
        return ids_of(given, "entity", self.num_entities, self.entity_labels)

    def relation_ids(self, given: Labels) -> Tensor:
        """int64 ids () or (M,).  Raises UnknownLabelError for a label, IndexError for an id."""
        return ids_of(given, "relation", self.num_relations, self.relation_labels)

    def triple_ids(self, triples: Sequence[Sequence[Label]]) -> Tensor:
        """Triples of labels or ids -> (T, 3) int64.  Raises as the other two."""
        if not len(triples):
            return torch.empty(0, 3, dtype=torch.int64)
        heads, relations, tails = (list(column) for column in zip(*triples, strict=True))
        columns = self.entity_ids(heads), self.relation_ids(relations), self.entity_ids(tails)
        return torch.stack(columns, 1)

    def scores(self, triples: Tensor, side: Side = "tail") -> Tensor:
        """Scores of triples (T, 3) int64, with the bits that ranking gives them: (T,) float32.

        side: the end that is asked for; with reciprocal relations the two ends score differently.
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
                    # A small matrix: its diagonal is computed as the blocks of ranking are.
                    block = score_block(
                        self.scorer, anchor[part], relation[part], target[part], side
                    )
                    found.append(block.diagonal().cpu())
        return torch.cat(found)


def check_side(side: str) -> None:
    """Raises ValueError unless side is one."""
    if side not in SIDES:
        raise ValueError(f"side must be one of {', '.join(SIDES)}, got {side!r}")


def ids_of(given: Labels, kind: str, count: int, vocabulary: Callable[[], Vocabulary]) -> Tensor:
    """int64 ids () or (M,) of labels, or of ids, which must lie in [0, count)."""
    array = np.asarray(given)
    if array.dtype.kind in "UTO":  # text, or objects such as a data frame's labels
        found = vocabulary().ids(array.reshape(-1).tolist())
        return torch.from_numpy(found.reshape(array.shape))
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{kind} ids must be integers or labels, not {array.dtype}")
    if array.size and not (array.min() >= 0 and array.max() < count):
        raise IndexError(f"{kind} ids must lie in [0, {count})")
    return torch.from_numpy(np.array(array, np.int64))

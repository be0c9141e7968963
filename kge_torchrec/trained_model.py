"""A trained model: the entity rows, the scorer and what belongs to them.

Training hands one out for validation, a checkpoint is read as one, and so is an export. Ranking,
prediction, export and serving take this class. If several ranks hold the rows, every method is
collective: each rank calls it with the same arguments and gets the same result. Only ``entities``
and ``embedding`` hold the whole table.

Shapes: B queries, M ids, T triples, N entities, R relations, D elements per row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from kge_torchrec.config import Config, EvaluationConfig
from kge_torchrec.config.checks import check
from kge_torchrec.data import SPLITS
from kge_torchrec.data.store import TripleStore, Vocabulary
from kge_torchrec.data.store.filter_index import Answers, FilterIndex
from kge_torchrec.data.types import Ends
from kge_torchrec.distributed.processes import ALONE, Processes, on_all_ranks
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.models.scorers.base import Scorer, Side
from kge_torchrec.ranking.blocks import ModelScores, Queries, Scores
from kge_torchrec.ranking.candidates import (
    Candidates,
    Frequencies,
    SeenCandidates,
    TypedCandidates,
)
from kge_torchrec.ranking.fixed import rank_among_lists, read_lists
from kge_torchrec.ranking.popularity import (
    FREQUENT,
    KNN,
    POPULAR,
    FrequentScores,
    NovelScores,
)
from kge_torchrec.ranking.ranks import Ranks, metrics, rank_triples
from kge_torchrec.ranking.recommendation import Recommendations, means, recommend
from kge_torchrec.ranking.search import RankOptions, top_k

Label = str | int  # a label, or an id
Labels = str | int | Sequence[str] | Sequence[int] | np.ndarray | Tensor

# The filter for valid excludes test triples, so that model selection does not see them.
FILTERS = {
    "train": ("train", "valid", "test"),
    "valid": ("train", "valid"),
    "test": ("train", "valid", "test"),
}
# The splits whose answers are not recommended.
KNOWN_OF = {"train": (), "valid": ("train",), "test": ("train", "valid")}


class Probabilities(Protocol):
    """A calibration: it turns scores (M,) into probabilities (M,), and goes into exports."""

    def probabilities(
        self, scores: np.ndarray, missing: str, relations: np.ndarray
    ) -> np.ndarray: ...

    def write(self, folder: Path) -> None: ...


@dataclass(eq=False, repr=False)
class TrainedModel:
    """A trained model that ranks, scores and finds the best answers.

    Attributes:
        scorer: The scorer.
        shard: The entity rows of this rank.
        store: The data.
        processes: The ranks.
        calibration: Turns scores into probabilities; None if the model is not calibrated.
        path: Folder of the run or the export.
        description: Contents of config.json of an export.
        table: (N, D) float32, the table of an export as it was opened; read-only.
        hides_bars: Whether no progress bars are shown on a terminal.
        config: The config of a run, with values in place of null; None for an export.
        facts: The facts of new entities that are folded in; None without such entities.
    """

    scorer: Scorer
    shard: EntityShard
    store: TripleStore
    processes: Processes = ALONE
    calibration: Probabilities | None = None
    path: Path | None = None
    description: Mapping[str, Any] = field(default_factory=dict)
    table: np.ndarray | None = None
    hides_bars: bool = False
    config: Config | None = None
    facts: FilterIndex | None = None
    # Candidates and frequencies, which copies of the model share.
    _kept: dict[tuple[str | None, ...], Any] = field(default_factory=dict)

    @cached_property
    def entity_labels(self) -> Vocabulary:
        """Entity labels and ids, those of folded-in entities included."""
        return self.store.entities

    @property
    def relation_labels(self) -> Vocabulary:
        """Relation labels and ids."""
        return self.store.relations

    @property
    def num_entities(self) -> int:
        """The number of entities N on all ranks."""
        return self.shard.num_entities

    @property
    def num_relations(self) -> int:
        """The number of relations R, without inverses."""
        return self.scorer.num_relations

    @property
    def entities(self) -> np.ndarray:
        """The rows of all entities, (N, D) float32.

        Those of an export are memory-mapped, and of a run a copy of the whole table on every rank.
        """
        if self.table is not None:
            return self.table
        return self.rows(torch.arange(self.num_entities)).cpu().numpy()

    def embedding(self, freeze: bool = True) -> nn.Embedding:
        """Return the entities as an embedding layer; copies the whole table into memory."""
        return nn.Embedding.from_pretrained(torch.from_numpy(np.array(self.entities)), freeze)

    def rows(self, ids: Tensor) -> Tensor:
        """Copy the rows of entity ids: (...) int64 -> (..., D) float32."""
        rows = self.shard.fetch(ids.flatten().to(self.shard.device))
        return rows.view(*ids.shape, self.shard.dim)

    def probabilities(
        self, scores: np.ndarray, missing: str, relations: np.ndarray
    ) -> list[float | None]:
        """Return the probabilities (M,) of answers; each is None without a calibration.

        The queries of scores (M,) miss "head", "relation" or "tail"; the answered triples have
        the relations (M,).
        """
        if self.calibration is None:
            return [None] * len(scores)
        return self.calibration.probabilities(scores, missing, relations).tolist()

    def bar(self, total: int | None, what: str, unit: str) -> tqdm[Any]:
        """Return a progress bar on rank 0's terminal, shown after one second."""
        shows = self.processes.is_first and not self.hides_bars
        hidden = None if shows else True  # None: tqdm looks for a terminal
        return tqdm(total=total, desc=what, unit=unit, disable=hidden, leave=False, delay=1)

    @cached_property
    def ends(self) -> Ends | None:
        """The types at the ends of relations; None unless every entity has one type."""
        return Ends(self.store) if self.store.size.typed else None

    @property
    def known(self) -> FilterIndex:
        """What the data and the facts of new entities hold."""
        known = self.store.filter_index()
        return known if self.facts is None else known.joined(self.facts)

    def known_by_split(self) -> dict[str, FilterIndex]:
        """Return the known answers of each split, and of "facts"; the first ones win."""
        splits = {split: self.store.filter_index((split,)) for split in SPLITS}
        if self.facts is not None:
            splits["facts"] = self.facts
        return splits

    def entity_ids(self, labels: Labels) -> Tensor:
        """Return int64 entity ids, () or (M,); see ``ids_of``."""
        return ids_of(labels, "entity", self.num_entities, lambda: self.entity_labels)

    def relation_ids(self, labels: Labels) -> Tensor:
        """Return int64 relation ids, () or (M,); see ``ids_of``."""
        return ids_of(labels, "relation", self.num_relations, lambda: self.relation_labels)

    def triple_ids(self, triples: Iterable[Sequence[Label]]) -> Tensor:
        """Return the ids (T, 3) int64 of triples of labels or ids; see ``ids_of``."""
        columns = [list(column) for column in zip(*triples, strict=True)]
        if not columns:
            return torch.empty(0, 3, dtype=torch.int64)
        heads, relations, tails = columns
        ids = self.entity_ids(heads), self.relation_ids(relations), self.entity_ids(tails)
        return torch.stack(ids, 1)

    def scores(self, triples: Tensor, side: Side = "tail") -> Tensor:
        """Return the scores (T,) float32 of triples (T, 3) int64 as queries for a side. Collective.

        They are bit for bit those of the ranking.
        """
        return self._scores().of(*Queries.of(triples.numpy(), side))[:, 0].cpu()

    def best(
        self, queries: Queries, k: int, exclude: Answers | None = None, novelty: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Return the k best entities of each query, and fewer if N is less; see ``top_k``.

        Collective. Popular answers lose ``novelty * log(1 + n)``; see ``NovelScores``.
        """
        k = min(k, self.num_entities)
        scores, ids = top_k(self._scores(novelty), queries, k, exclude)
        return scores.cpu(), ids.cpu()

    def _scores(self, novelty: float = 0.0) -> Scores:
        check(math.isfinite(novelty), "novelty", "a finite number, such as 0.5", novelty)
        own = ModelScores(self.scorer, self.shard)
        return NovelScores(own, self.frequencies, novelty) if novelty else own

    def ranks_of(
        self,
        triples: np.ndarray,
        split: str | None,
        evaluation: EvaluationConfig,
        scores: Scores | None = None,
    ) -> Ranks:
        """Return the ranks of triples (T, 3), filtered unless their candidates are fixed.

        Collective. Without a split, all splits and the triples themselves filter. ``scores`` are
        those of a baseline; None: those of the model.
        """
        triples = np.asarray(triples, dtype=np.int64)
        known = self.store.filter_index(FILTERS[split or "test"])
        if split is None:
            known = known.joined(FilterIndex.of(triples))
        with self.bar(2 * len(triples), f"rank {split or 'triples'}", "query") as bar:
            scores = scores or self._scores()
            if evaluation.candidates == "fixed":
                store, file = self.store, evaluation.candidate_file
                lists = self._keep(("fixed", file, split), lambda: read_lists(file, store, split))
                return rank_among_lists(scores, triples, lists, bar.update)
            return rank_triples(scores, triples, known, self._options(evaluation, bar))

    def recommendations_of(
        self,
        triples: np.ndarray,
        split: str,
        evaluation: EvaluationConfig,
        k: int,
        side: Side = "tail",
        novelty: float = 0.0,
        scores: Scores | None = None,
    ) -> Recommendations:
        """Return the ranks of triples (T, 3) as answers to their users, and the users' lists.

        Collective. What users know of the splits before this one is not recommended. ``scores``
        are those of a baseline; None: those of the model.

        Raises:
            ConfigError: The candidates are lists of single triples.
        """
        evaluation.check_recommends()
        known = self.store.filter_index(KNOWN_OF[split])
        with self.bar(len(triples), f"recommend {split}", "answer") as bar:
            options = self._options(evaluation, bar)
            return recommend(scores or self._scores(novelty), triples, known, k, options, side)

    def _options(self, evaluation: EvaluationConfig, bar: tqdm[Any]) -> RankOptions:
        only = self.candidates(evaluation.candidates)
        return RankOptions(only, None, evaluation.batch_size, bar.update)

    def baselines_of(
        self, triples: np.ndarray, split: str | None, evaluation: EvaluationConfig
    ) -> dict[str, Any]:
        """Return the metrics of baselines beside those of ``ranks_of``, by name. Collective."""
        frequent = FrequentScores(self.shard, self.frequencies)
        return {FREQUENT: metrics(self.ranks_of(triples, split, evaluation, frequent))}

    def list_baselines_of(
        self,
        triples: np.ndarray,
        split: str,
        evaluation: EvaluationConfig,
        cutoffs: Sequence[int],
        side: Side = "tail",
    ) -> dict[str, Any]:
        """Return the metrics of baselines beside those of ``recommendations_of``. Collective.

        They are None for item-kNN where it would take too long.
        """
        from kge_torchrec.ranking.neighbors import NeighborScores, is_feasible  # compiled

        def results_of(scores: Scores) -> dict[str, float]:
            found = self.recommendations_of(triples, split, evaluation, 0, side, scores=scores)
            return means(found, cutoffs)

        relations = np.unique(triples[:, 1])
        popular = results_of(FrequentScores(self.shard, self.frequencies))
        if not is_feasible(self.store, side, relations):
            return {POPULAR: popular, KNN: None}
        nearest = on_all_ranks(
            self.processes, lambda: NeighborScores(self.shard, self.store, side, relations)
        )
        return {POPULAR: popular, KNN: results_of(nearest)}

    @property
    def frequencies(self) -> Frequencies:
        """What train has of the entities of this rank. Collective."""
        rows = self.shard.row_range
        return self._keep(("frequencies",), lambda: Frequencies(self.store, rows))

    def candidates(self, kind: str | None) -> Candidates | None:
        """Return the candidates "all" (None), "seen" or "types". Collective.

        Raises:
            DataError: The file of types cannot be used, or the store has no types.
        """
        if kind in (None, "all"):
            return None
        frequencies, store = self.frequencies, self.store
        if kind == "seen":
            return SeenCandidates(frequencies)
        return self._keep((kind,), lambda: TypedCandidates(frequencies, store))

    def _keep(self, key: tuple[str | None, ...], make: Callable[[], Any]) -> Any:
        """Return what ``make`` returned the first time. Collective."""
        if key not in self._kept:  # a file may be missing on one rank only
            self._kept[key] = on_all_ranks(self.processes, make)
        return self._kept[key]

    def __repr__(self) -> str:
        size = f"{self.num_entities:,} entities x {self.scorer.row_dim}"
        where = "" if self.path is None else f"{str(self.path)!r}: "
        relations = f"{self.num_relations:,} relations"
        return f"TrainedModel({where}{type(self.scorer).__name__}, {size}, {relations})"


def ids_of(labels: Labels, kind: str, count: int, vocabulary: Callable[[], Vocabulary]) -> Tensor:
    """Return int64 ids, () or (M,), of labels, or of ids in [0, count).

    Raises:
        UnknownLabelError: A label is not in the vocabulary; the message has close ones.
        IndexError: An id is out of range.
        TypeError: The values are neither labels nor integers.
    """
    array = np.asarray(labels)
    if array.dtype.kind in "UTO":  # text, or objects, such as labels from a data frame
        ids = vocabulary().ids(array.reshape(-1).tolist())
        return torch.from_numpy(ids.reshape(array.shape))
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{kind} ids must be integers or labels, not {array.dtype}")
    if array.size and not (array.min() >= 0 and array.max() < count):
        raise IndexError(f"{kind} ids must lie in [0, {count})")
    return torch.from_numpy(np.array(array, np.int64))

"""Answer queries: the methods that a trained run and an exported model share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias, overload

import numpy as np
import pyarrow as pa
import torch

from kge_torchrec.answers.files import FileReport, answer_file, score_file
from kge_torchrec.answers.queries import (
    FEW,
    MEANINGS,
    PARTS,
    Choice,
    Neighbour,
    Prediction,
    known_answers,
    metric_of,
    missing_part,
    nearest,
    predictions,
    recommended,
)
from kge_torchrec.answers.tables import (
    UNUSED_FACTS,
    answer_table,
    is_many,
    is_table,
    score_table,
)
from kge_torchrec.config import ConfigError, DataConfig
from kge_torchrec.data.readers.columns import Columns
from kge_torchrec.data.readers.tables import InMemory
from kge_torchrec.data.reading import columns_of
from kge_torchrec.models.scorers.base import Side
from kge_torchrec.trained_model import Label, TrainedModel, check_side

# Labels or ids, one per query; or a table of queries, such as a data frame of pandas.
Many: TypeAlias = "Sequence[str] | Sequence[int] | np.ndarray | pa.Table"


class Answering:
    """A mixin that answers queries with a trained model.

    Entities and relations are passed as labels or as ids.
    """

    @property
    def model(self) -> TrainedModel:
        """The model that answers the queries."""
        raise NotImplementedError

    @property
    def columns(self) -> Columns:
        """The columns of a table of triples, where the config names them."""
        raise NotImplementedError

    @overload
    def predict(
        self,
        head: Label | None = None,
        relation: Label | None = None,
        tail: Label | None = None,
        k: int = FEW,
        known: bool = True,
        facts: InMemory | str | Path | None = None,
    ) -> list[Prediction]: ...

    @overload
    def predict(
        self,
        head: Many | None = None,
        relation: Many | None = None,
        tail: Many | None = None,
        k: int = FEW,
        known: bool = True,
        facts: InMemory | str | Path | None = None,
    ) -> Any: ...

    def predict(
        self,
        head: Any = None,
        relation: Any = None,
        tail: Any = None,
        k: int = FEW,
        known: bool = True,
        facts: InMemory | str | Path | None = None,
    ) -> Any:
        """Return the best answers to triples with one missing part, best first.

        A query is (head, relation, ?), (?, relation, tail) or (head, ?, tail). All entities, or
        all relations, are candidates. Equal scores come in order of id. Relations are scored as
        tail queries, like in ``score``.

        Args:
            head: A label or an id; None if the head is the missing part. Or a list of them, one
                per query. Or a table of queries, such as a data frame of pandas, with two of the
                columns head, relation and tail, or with one beside a ``relation`` for all rows.
                Its columns have labels, and the names that ``prepare`` and data.columns know.
            relation: Label or id, or a list; None if the relation is the missing part.
            tail: Label or id, or a list; None if the tail is the missing part.
            k: The number of answers per query.
            known: Whether to list answers that the data already holds. Listed ones are marked
                with their split.
            facts: Triples of new entities, which the query may then name: a file in any format,
                or triples of labels. Each has one entity that the model has; see ``fold_in``.

        Returns:
            The answers to one query with rank, label, score, split and probability. For many, a
            table with a row per answer: row (the query, from 0), rank, head, relation, tail,
            score; probability with a calibration, known with data, head_type and tail_type if
            every entity has one type. It is a data frame of pandas or polars if the queries are,
            and otherwise a pyarrow table.

        Raises:
            ConfigError: The query or an option is invalid.
            DataError: A table has an unknown label; the message names its row.
            UnknownLabelError: A label is not in the data; the message has close matches.
            IndexError: An id is out of range.
        """
        model, query = self._with(facts), (head, relation, tail)
        choice = Choice(k, known_answers(model, known))
        if any(map(is_many, query)):
            parts = dict(zip(PARTS, query, strict=True))
            return answer_table(model, parts, choice, self.columns)
        missing = missing_part(query)
        lookups = model.entity_ids, model.relation_ids, model.entity_ids
        ids = [
            0 if part is None else int(ids_of(part))
            for part, ids_of in zip(query, lookups, strict=True)
        ]
        if facts is not None and max(ids[0], ids[2]) < model.num_entities:
            raise ConfigError(UNUSED_FACTS)
        return predictions(model, missing, torch.tensor([ids]), choice)[0]

    def _with(self, facts: InMemory | str | Path | None) -> TrainedModel:
        """Return the model, with the new entities of facts if there are any. Collective."""
        if facts is None:
            return self.model
        from kge_torchrec.answers.fold_in import fold_in  # loads readers and losses

        return fold_in(self.model, facts)

    def answer_file(
        self,
        path: str | Path,
        output: str | Path | None = None,
        format: str = "tsv",
        k: int = FEW,
        known: bool = True,
        names: str | Path | None = None,
        facts: InMemory | str | Path | None = None,
    ) -> FileReport:
        """Answer a file of queries line by line and write the answers to another file.

        Args:
            path: The queries. Each line has head, relation and tail, separated by tabs, with ? for
                the missing part.
            output: The file to write; None prints.
            format: "table", "tsv", "json" (one object per line) or "parquet".
            k: The number of answers per query.
            known: Whether to list known answers; see ``predict``.
            names: A file of labels and readable names, which are written beside the labels.
            facts: Triples of new entities; see ``predict``.

        Returns:
            Counts of answered lines and written rows, and the lines without an answer, each with
            its number and the reason.

        Raises:
            DataError: The file cannot be read.
            OSError: The answers cannot be written. No output file is left behind.
        """
        model = self._with(facts)
        choice = Choice(k, known_answers(model, known))
        return answer_file(model, path, choice, output, format, names=names)

    @overload
    def recommend(
        self,
        head: Label,
        relation: Label,
        k: int = 10,
        exclude_known: bool = False,
        candidates: str | Path = "seen",
        novelty: float = 0.0,
        facts: InMemory | str | Path | None = None,
    ) -> list[Prediction]: ...

    @overload
    def recommend(
        self,
        head: Many,
        relation: Label | None = None,
        k: int = 10,
        exclude_known: bool = False,
        candidates: str | Path = "seen",
        novelty: float = 0.0,
        facts: InMemory | str | Path | None = None,
    ) -> Any: ...

    def recommend(
        self,
        head: Any,
        relation: Any = None,
        k: int = 10,
        exclude_known: bool = False,
        candidates: str | Path = "seen",
        novelty: float = 0.0,
        facts: InMemory | str | Path | None = None,
    ) -> Any:
        """Return the best tails of (head, relation, ?) without the head itself, best first.

        Args:
            head: Label or id, such as a user; a list of them; or a table with a column head, and
                perhaps one of relations.
            relation: Label or id, such as "visits"; None if a table has it.
            k: The number of answers per head.
            exclude_known: Whether to leave out tails that train, valid or test hold.
            candidates: The entities to recommend. "seen": those that train has as tails of the
                relation. "all". Otherwise a file of labels, one per line.
            novelty: Moves rare and new tails up: answers come in order of their score minus
                novelty * log(1 + training triples of the relation with this tail). 0: off.
            facts: Triples of new heads, such as what a new user has visited; see ``predict``.

        Returns:
            The answers in the form of ``predict``.

        Raises:
            ConfigError: ``k`` is below 1, or there is no relation.
            DataError: The file of candidates cannot be read, or has an unknown label.
            UnknownLabelError: A label is not in the data; the message has close matches.
        """
        model = self._with(facts)
        choice = recommended(model, k, exclude_known, candidates, novelty)
        if is_many(head):
            parts = {"head": head, "relation": relation, "tail": None}
            return answer_table(model, parts, choice, self.columns, "tail")
        if relation is None:
            raise ConfigError("recommend: name the relation, such as visits")
        ids = [int(model.entity_ids(head)), int(model.relation_ids(relation)), 0]
        if facts is not None and ids[0] < model.num_entities:
            raise ConfigError(UNUSED_FACTS)
        return predictions(model, "tail", torch.tensor([ids]), choice)[0]

    def recommend_file(
        self,
        path: str | Path,
        relation: str,
        output: str | Path | None = None,
        format: str = "tsv",
        k: int = 10,
        exclude_known: bool = False,
        candidates: str | Path = "seen",
        names: str | Path | None = None,
        novelty: float = 0.0,
        facts: InMemory | str | Path | None = None,
    ) -> FileReport:
        """Recommend tails to each head of a file, and write them to another file.

        Args:
            path: The heads, one label per line.
            relation: Label of the relation.
            output: The file to write; None prints.
            format: "table", "tsv", "json" (one object per line) or "parquet".
            k: The number of answers per head.
            exclude_known: See ``recommend``.
            candidates: See ``recommend``.
            names: See ``answer_file``.
            novelty: See ``recommend``.
            facts: See ``recommend``.

        Returns:
            The same report as ``answer_file``.

        Raises:
            DataError: A file cannot be read.
            UnknownLabelError: The relation is not in the data; the message has close matches.
            OSError: The answers cannot be written. No output file is left behind.
        """
        model = self._with(facts)
        model.relation_ids(relation)
        choice = recommended(model, k, exclude_known, candidates, novelty)
        return answer_file(model, path, choice, output, format, relation, names)

    def score_file(
        self,
        path: str | Path,
        output: str | Path | None = None,
        format: str = "tsv",
        side: Side = "tail",
        names: str | Path | None = None,
    ) -> FileReport:
        """Score each line of a file of triples and write the scores to another file.

        Args:
            path: The triples, in the format of ``answer_file`` without a missing part.
            output: The file to write; None prints.
            format: "table", "tsv", "json" or "parquet".
            side: The missing side of the queries; see ``score``.
            names: See ``answer_file``.

        Returns:
            The same report as ``answer_file``.

        Raises:
            DataError: The file cannot be read.
            OSError: The scores cannot be written. No output file is left behind.
        """
        check_side(side)
        return score_file(self.model, path, side, output, format, names)

    def score(self, triples: InMemory, side: Side = "tail") -> Any:
        """Return the scores of triples, bit for bit the same as in ``predict``.

        Args:
            triples: T triples (head, relation, tail) of labels or ids; or a table, such as a data
                frame of pandas, with columns head, relation and tail of labels; see ``predict``.
            side: Score as a query for the "tail" or the "head". With reciprocal relations the two
                scores differ.

        Returns:
            A list of T floats in the order of the triples. For a table a table in the form of
            ``predict``: row, head, relation, tail, score, and probability with a calibration.

        Raises:
            UnknownLabelError: A label is not in the data; the message has close matches.
            DataError: A table has an unknown label, or lacks a column.
            IndexError: An id is out of range.
            ValueError: ``side`` is unknown.
        """
        check_side(side)
        if is_table(triples):
            return score_table(self.model, triples, side, self.columns)
        return self.model.scores(self.model.triple_ids(triples), side).tolist()

    def nearest(self, entity: Label, k: int = 10) -> list[Neighbour]:
        """Return the k nearest entities to an entity, nearest first.

        The score is minus the distance of the two rows if the scorer measures a distance
        (Manhattan, Euclidean, or the sum of complex moduli), otherwise their cosine.

        Args:
            entity: Label or id.
            k: The number of neighbors.

        Raises:
            ConfigError: ``k`` is below 1.
            UnknownLabelError: The label is not in the data; the message has close matches.
            IndexError: The id is out of range.
        """
        return nearest(self.model, self.model.entity_ids(entity).reshape(1), k)[0]

    @property
    def nearness(self) -> str:
        """A description of the scores that ``nearest`` returns."""
        return MEANINGS[metric_of(self.model.scorer)]


class AnsweringModel(Answering, TrainedModel):
    """A trained model with the query methods, such as ``load_model`` returns."""

    @property
    def model(self) -> TrainedModel:
        """The model itself."""
        return self

    @property
    def columns(self) -> Columns:
        """The columns of a table of triples, by the config of the run that was exported."""
        return columns_of(DataConfig(**self.description.get("data", {})), False)

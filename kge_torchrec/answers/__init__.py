"""Answer queries: the methods that a trained run and an exported model share."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kge_torchrec.answers.bulk import answer_rows, score_rows, table_of
from kge_torchrec.answers.queries import (
    FEW,
    Choice,
    Link,
    Neighbour,
    Part,
    missing_part,
    nearest,
    new_links,
    predictions,
)
from kge_torchrec.answers.sources import (
    in_batches,
    queries_in,
    query_ids,
    recommended,
    triples_in,
)
from kge_torchrec.config import ConfigError
from kge_torchrec.config.checks import one_of
from kge_torchrec.data.readers.tables import InMemory
from kge_torchrec.models.scorers.base import SIDES, Side
from kge_torchrec.trained_model import Label, TrainedModel


class Answering:
    """A mixin that answers queries with a trained model.

    Entities and relations are passed as labels or as ids.
    """

    @property
    def model(self) -> TrainedModel:
        """The model that answers the queries."""
        raise NotImplementedError

    def predict(
        self,
        head: Any = None,
        relation: Any = None,
        tail: Any = None,
        k: int = FEW,
        known: bool = True,
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
        choice = Choice(k, None if known else self.model.known)
        return _answers(self.model, (head, relation, tail), choice)

    def recommend(
        self,
        head: Any,
        relation: Any = None,
        k: int = 10,
        exclude_known: bool = False,
        candidates: str | Path = "seen",
        novelty: float = 0.0,
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

        Returns:
            The answers in the form of ``predict``.

        Raises:
            ConfigError: ``k`` is below 1, or there is no relation.
            DataError: The file of candidates cannot be read, or has an unknown label.
            UnknownLabelError: A label is not in the data; the message has close matches.
        """
        if relation is None and not is_table(head):
            raise ConfigError("recommend: name the relation, such as visits")
        choice = recommended(self.model, k, exclude_known, candidates, novelty)
        return _answers(self.model, (head, relation, None), choice, "tail")

    def fold_in(self, facts: InMemory | str | Path) -> AnsweringModel:
        """Return a model that also answers queries about new entities, from facts about them.

        Nothing is trained: the row of each new entity is solved against the table, in milliseconds.

        Args:
            facts: Triples, each with one entity that the model has and a new one: a file in any
                format, or triples of labels.

        Raises:
            DataError: A fact has no new entity, two of them, or an unknown relation; or no type of
                entity has all facts of a new one.
            KGEError: The model does not say how it was trained.
        """
        from kge_torchrec.answers.fold_in import fold_in  # loads readers and losses

        folded = AnsweringModel.__new__(AnsweringModel)
        folded.__dict__.update(vars(fold_in(self.model, facts)))
        return folded

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
            ConfigError: ``side`` is unknown.
        """
        one_of("side", side, SIDES)
        if is_table(triples):
            rows_of = partial(score_rows, self.model, side)
            batches = triples_in(self.model, triples)
            return table_of(self.model, batches, rows_of, triples, "triples")
        return self.model.scores(self.model.triple_ids(triples), side).tolist()

    def new_links(
        self,
        relation: str,
        k: int = FEW,
        candidates: str = "all",
        loops: bool = False,
    ) -> list[Link]:
        """Return the best triples of a relation that are not in the data, best first.

        Every pair of candidates is scored as a tail query.

        Args:
            relation: Label of the relation.
            k: Number of triples.
            candidates: "all" entities, or those "seen" with the relation on their side in train.
                Large graphs need "seen".
            loops: Whether to include links of an entity to itself.

        Raises:
            ConfigError: An argument is invalid.
            UnknownLabelError: The relation is not in the data.
        """
        return new_links(self.model, relation, k, candidates, loops)

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


class AnsweringModel(Answering, TrainedModel):
    """A trained model with the query methods, such as ``load_model`` returns."""

    @property
    def model(self) -> TrainedModel:
        """The model itself."""
        return self


def is_table(value: Any) -> bool:
    """Return whether a value is an Arrow table or a data frame, such as of pandas or polars."""
    return hasattr(value, "__arrow_c_stream__") and hasattr(value, "columns")


def _answers(
    model: TrainedModel, query: tuple[Any, Any, Any], choice: Choice, missing: Part | None = None
) -> Any:
    """Return the answers to one query, or a table of those to many; see ``Answering.predict``.

    Collective. ``missing`` is the part that is found, whatever columns a table has.
    """
    rows_of, like = partial(answer_rows, model, choice), query[0]
    if is_table(like):
        return table_of(model, queries_in(model, *query, missing), rows_of, like, "queries")
    ids, lists = query_ids(model, query), [part for part in query if np.ndim(part)]
    if lists:
        return table_of(model, in_batches(ids), rows_of, lists[0], "queries")
    return predictions(model, missing_part(query), ids, choice)[0]

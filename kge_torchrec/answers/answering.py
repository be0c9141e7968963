"""The questions that a run and an export answer alike, as methods of both."""

from __future__ import annotations

from collections.abc import Sequence

from kge_torchrec.answers.model import AnsweringModel, Label, check_side
from kge_torchrec.answers.nearest import Neighbour, nearest
from kge_torchrec.answers.predictions import Prediction, Query, predict
from kge_torchrec.models.scorers.base import Side

Triple = tuple[Label, Label, Label]


class Answering:
    """Answers of a trained model.  Entities and relations are given as labels, or as ids."""

    def answering_model(self) -> AnsweringModel:
        """What questions are answered from."""
        raise NotImplementedError

    def predict(
        self,
        head: Label | None = None,
        relation: Label | None = None,
        tail: Label | None = None,
        k: int = 10,
        known: bool = True,
    ) -> list[Prediction]:
        """The k best tails of (head, relation, ?), heads of (?, relation, tail), or relations of
        (head, ?, tail), best first.

        All entities, or relations, are candidates.  Equal scores come in order of id.  Relations
        are scored as ``score`` does, by the tail's query.

        known: list answers that the data holds already, marked with their split; False leaves
        them out.  An export does not have the data: it marks nothing, and refuses False.

        Raises ConfigError for a query that makes no sense, UnknownLabelError, with close matches,
        for a label not in the data, and IndexError for an id.
        """
        return predict(self.answering_model(), Query(head, relation, tail), k, known)

    def score(self, triples: Sequence[Triple], side: Side = "tail") -> list[float]:
        """Scores of triples (head, relation, tail), to the last bit those of ``predict``.

        side: the end that is asked for; with reciprocal relations the two ends score differently.
        Raises as ``predict`` does.
        """
        check_side(side)
        model = self.answering_model()
        return model.scores(model.triple_ids(triples), side).tolist()

    def nearest(self, entity: Label, k: int = 10) -> list[Neighbour]:
        """The k entities nearest to one, nearest first, by the metric that fits the scorer.

        Scorers that measure a distance have minus that distance (Manhattan, Euclidean, or the sum
        of complex moduli) between the rows as the score, all others the cosine of the rows.
        Raises as ``predict`` does.
        """
        return nearest(self.answering_model(), entity, k)

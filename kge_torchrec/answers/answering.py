"""The questions that a run and an export answer alike, as methods of both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kge_torchrec.answers.files_of_questions import FileReport, answer_file, score_file
from kge_torchrec.answers.model import AnsweringModel, Label, check_side
from kge_torchrec.answers.nearest import MEANINGS, Neighbour, metric_of, nearest
from kge_torchrec.answers.predictions import Choice, Prediction, Query, predict
from kge_torchrec.models.scorers.base import Side

if TYPE_CHECKING:
    from kge_torchrec.answers.fuzzy_answers import Member

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
        k: int | None = None,
        known: bool = True,
        above: float | None = None,
    ) -> list[Prediction]:
        """The k best tails of (head, relation, ?), heads of (?, relation, tail), or relations of
        (head, ?, tail), best first.

        All entities, or relations, are candidates.  Equal scores come in order of id.  Relations
        are scored as ``score`` does, by the tail's query.

        k: None stands for 10, or for all answers where ``above`` is given.
        known: list answers that the data holds already, marked with their split; False leaves
        them out.  An export does not have the data: it marks nothing, and refuses False.
        above: list only answers with at least this score.

        Raises ConfigError for a query that makes no sense, UnknownLabelError, with close matches,
        for a label not in the data, and IndexError for an id.
        """
        return predict(self.answering_model(), Query(head, relation, tail), Choice(k, known, above))

    def answer_file(
        self,
        path: str | Path,
        output: str | Path | None = None,
        format: str = "tsv",
        k: int | None = None,
        known: bool = True,
        above: float | None = None,
    ) -> FileReport:
        """Answers a file of queries, line by line, into another one.

        path: lines of head, relation and tail with tabs between, ? for what is asked, or JSON
            objects with these keys.
        output: the file to write; None prints.
        format: table, tsv, json (an object a line) or parquet.
        k, known, above: as ``predict`` has them.

        Returns what was answered, and the lines that were not, with their numbers and why.  Raises
        DataError if the file cannot be read and OSError where the answers cannot be written; then
        no file is left behind.
        """
        choice = Choice(k, known, above)
        return answer_file(self.answering_model(), path, choice, output, format)

    def score_file(
        self,
        path: str | Path,
        output: str | Path | None = None,
        format: str = "tsv",
        side: Side = "tail",
    ) -> FileReport:
        """Scores a file of triples, line by line, into another one: ``answer_file`` without a ?."""
        check_side(side)
        return score_file(self.answering_model(), path, side, output, format)

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

    @property
    def nearness(self) -> str:
        """What the scores of ``nearest`` are, in words."""
        return MEANINGS[metric_of(self.answering_model().scorer)]

    def write_index(self, path: str | Path, kind: str = "HNSW32") -> dict[str, Any]:
        """Writes a FAISS index of all entities by the metric of ``nearest``, in order of id.

        kind: as ``faiss.index_factory`` has them: Flat (exact), HNSW32, "IVF4096,PQ32", ...

        Beside it are FILE.json, which says what it holds and is returned, and FILE.labels.arrow.
        Raises KGEError without faiss, ConfigError for a kind that does not fit.
        """
        from kge_torchrec.answers.index import write_index

        return write_index(self.answering_model(), path, kind)

    def ask(self, query: Any, **options: Any) -> list[Member]:
        """Answers a question of several steps (Arakelyan et al. 2021, CQD-Beam).

        query: the path of a JSON file, or its value as lists and dicts: {"relation": R, "from": Q}
            and {"relation": R, "to": Q} are tails and heads that R links to members of Q,
            {"and": [Q, {"not": Q}]} and {"or": [Q, Q]} join queries, a label alone is an entity.
        options: those of ``AskOptions``: k, beam, t_norm ("product" or "min"), facts ("all",
            "train" or "none": the splits whose triples are certain).

        The score is a degree in [0, 1], of calibrated probabilities or softmax; ``via`` has the
        entities between.  Raises KGEError for a query that makes no sense, and as ``predict`` does.
        """
        from kge_torchrec.answers.fuzzy_answers import AskOptions, ask
        from kge_torchrec.answers.logical_queries import parse_query, read_query

        chosen, model = AskOptions(**options), self.answering_model()
        is_file = isinstance(query, str | Path)
        return ask(model, (read_query if is_file else parse_query)(query, model), chosen)

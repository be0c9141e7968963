"""``predict``, ``recommend``, ``score`` and ``nearest``: answers of a run or an export."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Literal

from kge_torchrec.commands import (
    Count,
    File,
    Rows,
    RunPath,
    answering,
    is_first_rank,
    print_problems,
    write_records,
)
from kge_torchrec.config import ConfigError

if TYPE_CHECKING:
    from kge_torchrec.answers import AnsweringModel
    from kge_torchrec.trained_run import Run


def predict(
    run: RunPath,
    *,
    head: Annotated[str | None, "X"] = None,
    relation: Annotated[str | None, "Y"] = None,
    tail: Annotated[str | None, "Z"] = None,
    queries: File | None = None,
    facts: File | None = None,
    top: Count = 10,
    new: bool = False,
    candidates: Literal["all", "seen"] = "all",
    loops: bool = False,
    format: Rows = "table",
    output: File | None = None,
    names: File | None = None,
) -> int:
    """List the best answers of a trained run to a triple with one part missing.

      --head X --relation Y      (X, Y, ?): tails
      --relation Y --tail Z      (?, Y, Z): heads
      --head X --tail Z          (X, ?, Z): relations
      --queries FILE             one query per line
      --relation Y               (?, Y, ?): new links of the whole relation

    The verb score gives the scores of whole triples.

    Args:
        head: label of an entity
        relation: label of a relation
        tail: label of an entity
        queries: a file of queries: head, relation and tail with tabs, ? for the missing part
        facts: a file of triples of entities that the run does not have; the query may name these
        top: number of answers
        new: leave out answers that are already in the data
        candidates: candidates for new links: all entities, or those seen with the relation on
            their side in train; every pair is scored
        loops: include new links from an entity to itself
    """
    link = relation if {head, tail, queries} == {None} else None
    if link is None and (loops or candidates != "all"):
        raise ConfigError("--candidates and --loops are for new links: give --relation only")
    if link is not None and facts is not None:
        raise ConfigError("--facts has no effect on new links: name a head or a tail")
    parts = [part for part in (head, relation, tail) if part is not None]
    if queries is not None:
        if parts:
            raise ConfigError(
                "predict takes --queries or the parts of one query, not both; leave one out"
            )
        with answering(run) as trained:
            from kge_torchrec.answers.bulk import answer_file
            from kge_torchrec.answers.queries import Choice

            model = _with_facts(trained, facts).model
            choice = Choice(top, model.known if new else None)
            report = answer_file(model, queries, choice, output, format, names=names)
        return print_problems(report, queries)
    if link is not None:
        with answering(run) as trained:
            links = trained.new_links(link, top, candidates, loops)
        from kge_torchrec.answers.queries import Link

        write_records(links, Link, format, output, names)
        return 0
    if len(parts) != 2:
        raise ConfigError(
            "predict takes two of --head, --relation and --tail, or only --relation, or --queries"
        )
    with answering(run) as trained:
        asked = _with_facts(trained, facts, head, tail)
        answers = asked.predict(head, relation, tail, top, not new)
    from kge_torchrec.answers.queries import Prediction

    write_records(answers, Prediction, format, output, names)
    return 0


def _with_facts(
    trained: Run | AnsweringModel, facts: str | None, *labels: str | None
) -> Run | AnsweringModel:
    """Return what answers, with the new entities of facts; one of the ``labels`` must be new."""
    if facts is None:
        return trained
    folded = trained.fold_in(facts)
    ids = [int(folded.entity_ids(label)) for label in labels if label is not None]
    if ids and max(ids) < folded.num_entities:
        from kge_torchrec.answers.bulk import UNUSED_FACTS

        raise ConfigError(UNUSED_FACTS)
    return folded


def recommend(
    run: RunPath,
    *,
    relation: Annotated[str, "Y"],
    head: Annotated[str | None, "X"] = None,
    heads: File | None = None,
    head_facts: File | None = None,
    top: Count = 10,
    exclude_known: bool = False,
    candidates: Annotated[str, "seen|all|FILE"] = "seen",
    novelty: Annotated[float, "X"] = 0.0,
    format: Rows = "table",
    output: File | None = None,
    names: File | None = None,
) -> int:
    """List the best tails of a relation for one head or many.

    Args:
        head: label of an entity, such as user:17
        heads: a file of labels, one per line, instead of --head
        head_facts: a file of triples of heads that the run does not have, such as visits of new
            users
        relation: label of a relation
        top: number of recommendations
        exclude_known: leave out tails that train, valid or test hold
        candidates: entities to recommend: tails of the relation in train, all entities, or those of
            a file of labels, one per line
        novelty: list by score - X log(1 + training triples of the tail), which moves rare and new
            tails up; 0: by score
    """
    if (head is None) == (heads is None):
        raise ConfigError("recommend takes --head X for one head, or --heads FILE for many")
    with answering(run) as trained:
        if is_first_rank():
            what = {"all": "all entities", "seen": "tails of the relation in train"}
            named = what.get(candidates, f"the entities of {candidates}")
            print(f"candidates: {named}", file=sys.stderr)
        from kge_torchrec.answers.bulk import answer_file
        from kge_torchrec.answers.queries import Prediction
        from kge_torchrec.answers.sources import recommended

        asked = _with_facts(trained, head_facts, head)
        if head is not None:
            answers = asked.recommend(head, relation, top, exclude_known, candidates, novelty)
            write_records(answers, Prediction, format, output, names)
            return 0
        assert heads is not None
        choice = recommended(asked.model, top, exclude_known, candidates, novelty)
        report = answer_file(asked.model, heads, choice, output, format, relation, names)
    return print_problems(report, heads)


def score(
    run: RunPath,
    triples: File,
    *,
    side: Literal["tail", "head"] = "tail",
    format: Rows = "table",
    output: File | None = None,
    names: File | None = None,
) -> int:
    """Score the triples of a file.

    Args:
        triples: a file of triples: head, relation and tail with tabs between; bad lines are
            reported, and the others scored
        side: missing side of the queries; with reciprocal relations the two scores differ
    """
    with answering(run) as trained:
        from kge_torchrec.answers.bulk import score_file

        report = score_file(trained.model, triples, side, output, format, names)
    return print_problems(report, triples)


def nearest(
    run: RunPath,
    entity: str,
    *,
    top: Count = 10,
    format: Rows = "table",
    output: File | None = None,
    names: File | None = None,
) -> int:
    """List the entities nearest to one.

    Args:
        entity: label of an entity
        top: number of entities
    """
    with answering(run) as trained:
        results = trained.nearest(entity, top)
        from kge_torchrec.answers.queries import MEANINGS, Neighbour, metric_of

        meaning = MEANINGS[metric_of(trained.model.scorer)]
    write_records(results, Neighbour, format, output, names)
    if is_first_rank() and format == "table":
        print(f"score: {meaning}", file=sys.stderr)
    return 0

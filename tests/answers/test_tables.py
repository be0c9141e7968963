"""Queries and triples in lists and tables: the same answers as one query at a time."""

from __future__ import annotations

import pyarrow as pa
import pytest
from training_runs import config_of

from kge_torchrec import api, load_model
from kge_torchrec.answers import sources
from kge_torchrec.config import ConfigError
from kge_torchrec.errors import DataError, UnknownLabelError

HEADS = [f"e{i}" for i in (3, 1, 4, 1, 5, 9, 2, 6)]
TAILS = [f"e{i}" for i in (2, 7, 1, 8, 2, 8, 1, 8)]
QUERIES = {
    "tails": {"head": HEADS, "relation": ["r0", "r1"] * 4},
    "heads": {"relation": "r2", "tail": TAILS},
    "relations": {"head": HEADS, "tail": TAILS},
}


def one_by_one(model, parts, answer):
    """The rows of a table, made of the answers to each query alone."""
    missing = next(part for part in ("head", "relation", "tail") if part not in parts)
    rows = []
    for row in range(len(HEADS)):
        query = {p: x if isinstance(x, str) else x[row] for p, x in parts.items()}
        for one in answer(**query):
            values = {**query, missing: one.label, "score": one.score, "known": one.known}
            values |= {"row": row, "rank": one.rank}
            if one.probability is not None:
                values["probability"] = one.probability
            rows.append(values)
    return rows


def as_table(parts):
    count = len(HEADS)
    return pa.table({p: [x] * count if isinstance(x, str) else x for p, x in parts.items()})


@pytest.mark.parametrize("parts", QUERIES.values(), ids=QUERIES)
def test_many_queries_get_the_answers_of_each(run, model, parts, monkeypatch):
    for source in (model, run):
        expected = one_by_one(source.model, parts, lambda **query: source.predict(**query, k=4))  # noqa: B023
        results = source.predict(**parts, k=4)
        assert results.to_pylist() == [{name: row[name] for name in results.column_names}
                                       for row in expected]  # fmt: skip
        assert source.predict(as_table(parts), k=4) == results
    monkeypatch.setattr(sources, "BATCH", 3)  # queries per batch
    assert source.predict(**parts, k=4).to_pylist() == results.to_pylist()
    assert source.predict(as_table(parts), k=4).to_pylist() == results.to_pylist()


def test_many_heads_get_their_recommendations(run):
    options = {"k": 5, "exclude_known": True}
    expected = one_by_one(run.model, {"head": HEADS, "relation": "r1"},
                          lambda **query: run.recommend(**query, **options))  # fmt: skip
    results = run.recommend(HEADS, "r1", **options)
    assert results.to_pylist() == [{n: row[n] for n in results.column_names} for row in expected]
    table = pa.table({"src": HEADS, "relation": ["r1"] * len(HEADS), "tail": TAILS})
    assert run.recommend(table, **options) == results  # the tails are those to be found
    assert run.recommend(table.select(["src"]), "r1", **options) == results
    ids = run.entity_labels.ids(HEADS)
    assert run.recommend(ids, int(run.relation_labels.ids(["r1"])[0]), **options) == results


def test_columns_have_the_names_of_the_config(tmp_path):
    rows = [(f"u{i % 6}", f"i{i * i % 7}") for i in range(40)]
    users, items = (list(column) for column in zip(*rows, strict=True))
    table = pa.table({"who": users, "what": items})
    config = config_of("unused", tmp_path / "run", data__columns="head=who,tail=what",
                       data__relation="buys", data__split__by="head")  # fmt: skip
    with api.train(config, triples=table) as run:
        triples = [(user, "buys", item) for user, item in rows]
        assert run.score(table)["score"].to_pylist() == run.score(triples)
        expected = run.predict(users[:5], "buys", k=2)
        assert run.predict(table.select(["who"]).slice(0, 5), k=2) == expected
        answers = run.recommend(table.slice(0, 5), k=2)
        assert run.score(answers)["score"] == answers["score"]  # its columns are head and tail
        model = load_model(run.export(tmp_path / "export"))
        assert model.score(table) == run.score(table)
        assert model.predict(table.select(["who"]).slice(0, 5), k=2) == expected


def test_data_frames_give_data_frames(run):
    expected = run.predict(as_table(QUERIES["tails"]), k=2)
    pandas = pytest.importorskip("pandas")
    frame = as_table(QUERIES["tails"]).to_pandas()
    results = run.predict(frame, k=2)
    assert isinstance(results, pandas.DataFrame)
    assert results["tail"].tolist() == expected["tail"].to_pylist()
    assert isinstance(run.score(results), pandas.DataFrame)
    assert isinstance(run.recommend(frame["head"], "r0"), pandas.DataFrame)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda run: run.predict(["e1", "e2"], ["r0"]), ConfigError,
         "lists of a query must have one length, got 2 heads and 1 relations"),
        (lambda run: run.predict(["e1"], "r0", ["e2"]), ConfigError, "two of head, relation and"),
        (lambda run: run.predict([], "r0"), ConfigError, "no queries: the list or table is empty"),
        (lambda run: run.predict(["e1", "e11x"], "r0"), UnknownLabelError, "did you mean 'e11'"),
        (lambda run: run.predict([1, 99], "r0"), IndexError, r"entity ids must lie in \[0, "),
        (lambda run: run.predict(pa.table({"who": ["e1"]})), ConfigError,
         "needs columns of two of head, relation and tail.*'who' stand for none of them"),
        (lambda run: run.predict(as_table({"head": "e1", "relation": "r0", "tail": "e2"})),
         ConfigError, "stand for head and relation and tail"),
        (lambda run: run.predict(pa.table({"head": ["e1"]}), "r0", "e2"), ConfigError,
         "beside it only one relation"),
        (lambda run: run.predict(pa.table({"head": ["e1", "nobody", "none"]}), "r0"), DataError,
         r"queries: row 1: unknown entity 'nobody'.*\(1 more like this\)"),
        (lambda run: run.recommend(pa.table({"head": ["e1"]})), ConfigError, "stand for head$"),
        (lambda run: run.recommend("e1"), ConfigError, "recommend: name the relation"),
        (lambda run: run.score(pa.table({"head": ["e1"], "tail": ["e2"]})), DataError,
         "no column stands for the relation"),
        (lambda run: run.score(as_table({"head": "e1", "relation": "r0", "tail": "e2"})[:0]),
         ConfigError, "no triples: the list or table is empty"),
    ],
)  # fmt: skip
def test_what_cannot_be_answered_is_named(run, call, error, message):
    with pytest.raises(error, match=message):
        call(run)

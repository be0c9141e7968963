"""Entities that the run does not have are answered from facts given with the query."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from grown_runs import featured_run
from hypothesis import given, settings
from hypothesis import strategies as st
from training_runs import config_of, tiny_store

from kge_torchrec import api, load_model
from kge_torchrec.answers import AnsweringModel
from kge_torchrec.answers import fold_in as fold_in_module
from kge_torchrec.answers.fold_in import _Queries, fold_in, read_facts
from kge_torchrec.cli import main
from kge_torchrec.errors import DataError, UnknownLabelError

FACTS = [("new", "r0", "e3"), ("new", "r1", "e5"), ("e7", "r2", "new"), ("new", "r0", "e9")]
OTHERS = [("also", "r0", "e3"), ("e1", "r1", "third"), ("also", "r2", "e2")]


def row_of(model, facts, label="new"):
    folded = fold_in(model, facts)
    return folded.rows(folded.entity_ids(label))


@settings(max_examples=5)
@given(order=st.permutations(range(len(FACTS + OTHERS))), repeats=st.integers(0, 3))
def test_a_row_depends_on_nothing_but_its_facts(run, order, repeats):
    """Neither on the order of facts, repeats, or the other new entities."""
    together = [(FACTS + OTHERS)[place] for place in order]
    expected = row_of(run.model, FACTS)
    assert torch.equal(row_of(run.model, together + FACTS[:repeats]), expected)
    assert torch.equal(
        row_of(run.model, together, "third"), row_of(run.model, OTHERS[1:2], "third")
    )


@pytest.mark.parametrize("query", [{"head": "new"}, {"tail": "new"}])
def test_answers_are_those_of_the_row(run, query):
    """The answers to a new entity are those of an entity of the run that has its row."""
    folded, model = fold_in(run.model, FACTS), run.model
    rows = model.shard.rows.clone()
    number = int(model.entity_ids("e30"))
    rows[number] = folded.rows(folded.entity_ids("new"))
    swapped = replace(model.shard, rows=rows)
    twin = AnsweringModel(model.scorer, swapped, model.store)
    own = run.fold_in(FACTS).predict(**query, relation="r1", k=30)
    others = {"e30" if part == "new" else part for part in query.values()}
    expected = twin.predict(**dict.fromkeys(query, *others), relation="r1", k=40)
    listed = [(one.label, one.score) for one in own if one.label != "e30"]
    assert listed == [(x.label, x.score) for x in expected if x.label != "e30"][: len(listed)]
    assert "new" not in {one.label for one in own}


def test_facts_are_marked_and_left_out(run):
    answers = {one.label: one for one in run.fold_in(FACTS).predict("new", "r0", k=40)}
    assert {label for label, one in answers.items() if one.known} == {"e3", "e9"}
    assert answers["e3"].known == "facts"
    rest = {one.label for one in run.fold_in(FACTS).predict("new", "r0", k=40, known=False)}
    assert rest == answers.keys() - {"e3", "e9"}
    heads = {one.label for one in run.fold_in(FACTS).predict(None, "r2", "new", 40, False)}
    assert "e7" not in heads and len(heads) == 36
    others = run.fold_in(FACTS + OTHERS).predict("also", "r0", k=40)  # not those of "new"
    assert {one.label for one in others if one.known == "facts"} == {"e3"}
    between = run.fold_in(FACTS).predict("new", None, "e5")
    assert {one.label: one.known for one in between} == {"r0": None, "r1": "facts", "r2": None}


def test_negatives_are_no_facts(run, monkeypatch):
    """A candidate is a negative of a query unless it makes a fact of the new entity."""
    monkeypatch.setattr(fold_in_module, "_drawn", lambda *_: (np.arange(37), 37))
    (facts,) = read_facts(run.model, FACTS)
    for side, others in (("tail", facts.on("head")), ("head", facts.on("tail"))):
        queries = _Queries.of(run.model, side, others, run.model.config)
        for row, (_, relation, _) in zip(queries.mask, others.tolist(), strict=True):
            known = {max(h, t) for h, r, t in others.tolist() if r == relation}
            assert set((~row).nonzero()[:, 0].tolist()) == known


MODELS = [
    {"model__scorer": "transe_l2", "loss__name": "margin"},
    {"model__scorer": "distmult", "model__biases": True, "model__dim": 10},
    {"model__scorer": "rotate", "loss__name": "self_adversarial"},
    {"model__scorer": "complex", "model__reciprocal": True, "loss__regularizers": {"dura": 0.01}},
    {
        "model__scorer": "complex",
        "negatives__regime": "kvsall",
        "loss__options": {"answers": "sum"},
    },
    {"model__scorer": "distmult", "negatives__regime": "1vsall", "loss__name": "bce"},
    {"model__reciprocal": False, "negatives__sides": "tail"},
    {"model__scorer": "conve", "model__dim": 16, "model__reciprocal": True},
    {"model__scorer": "complex", "loss__relation_weight": 0.5, "loss__n3": 0.1},
]


@pytest.mark.parametrize(
    "changes", MODELS, ids=lambda changes: "-".join(map(str, changes.values()))
)
def test_every_kind_of_run(changes, tmp_path, monkeypatch):
    store = tiny_store(tmp_path / "store")
    with api.train(config_of(store.path, tmp_path / "run", **changes)) as run:
        before = run.model.shard.rows.clone()
        answers = run.fold_in(FACTS).predict("new", "r0", k=40)
        assert torch.equal(before, run.model.shard.rows)
        exported = load_model(run.export(tmp_path / "export"))
        assert exported.fold_in(FACTS).predict("new", "r0", k=40) == answers
        assert len(answers) == 37 and all(np.isfinite(one.score) for one in answers)
        totals, steps = [], fold_in_module._descended

        def spied(row, losses, scale):
            solution = steps(row, losses, scale)
            totals.extend(float(sum(loss(x) for loss in losses)) for x in (row, solution))
            return solution

        monkeypatch.setattr(fold_in_module, "_descended", spied)
        fold_in(run.model, FACTS)
        assert totals[1] < totals[0]


PROBLEMS = [
    ([("new", "r0", "nowhere")], "neither 'new' nor 'nowhere'"),
    ([("e1", "r0", "e2")], "has both entities"),
    ([("new", "likes", "e2")], "unknown relation 'likes'"),
    ([], "no triple"),
]


@pytest.mark.parametrize(("facts", "message"), PROBLEMS)
def test_wrong_facts_are_named(run, facts, message):
    with pytest.raises(DataError, match=message):
        run.fold_in(FACTS[:1] * bool(facts) + facts)
    with pytest.raises(UnknownLabelError, match="nobody"):
        run.fold_in(FACTS).predict("nobody", "r0")


def test_verbs_take_files_of_facts(trained, run, tmp_path, capsys):
    facts, queries = tmp_path / "facts.tsv", tmp_path / "queries.tsv"
    facts.write_text("".join("\t".join(triple) + "\n" for triple in FACTS + OTHERS))

    def column(name, *command):
        assert main([*map(str, command), "--format", "tsv"]) == 0
        header, *rows = (line.split("\t") for line in capsys.readouterr().out.splitlines())
        return [row[header.index(name)] for row in rows]

    verb = "predict", trained[0], "--facts", facts
    expected = [one.label for one in run.fold_in(FACTS).predict("new", "r0", k=3)]
    query = "--head", "new", "--relation", "r0", "--top", 3
    assert column("label", *verb, *query) == expected
    queries.write_text("new\nalso\ne4\n")
    verb_of_heads = ["recommend", trained[0], "--heads", queries, "--head-facts", facts]
    rows = column("tail", *verb_of_heads, "--relation", "r0", "--top", 2, "--exclude-known")
    own = run.fold_in(OTHERS).recommend("also", "r0", 2, exclude_known=True)
    assert len(rows) == 6 and rows[2:4] == [one.label for one in own]
    queries.write_text("new\tr0\t?\n?\tr2\tnew\n")
    assert column("asked", "predict", trained[1], "--queries", queries, "--facts", facts)
    queries.write_text("e4\tr0\t?\n?\tr2\te5\n")
    unused = "facts have no effect: no query has an entity of theirs"
    for options, words in (
        (["--relation", "r0"], "no effect on new links"),
        (["--relation", "r0", "--head", "e4"], unused),
        (["--queries", queries, "-o", tmp_path / "out"], unused),
    ):
        assert main([*map(str, (*verb, *options))]) == 1 and words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_new_entity_has_the_type_of_its_facts(typed, tmp_path):
    facts = [("user:new", "visits", "place:3"), ("user:new", "follows", "user:1")]
    for own in (typed, load_model(typed.export(tmp_path / "export"))):
        answers = own.fold_in(facts).predict("user:new", "visits", k=50)
        assert {one.label.split(":")[0] for one in answers} == {"place"}
        with pytest.raises(DataError, match="'user:new' is a user"):
            own.fold_in(facts).predict(None, "visits", "user:new")
        with pytest.raises(DataError, match="no type of entity"):
            own.fold_in([("x", "visits", "place:3"), ("user:1", "visits", "x")])


def test_many_queries_may_name_new_entities(run):
    """Lists and tables, beside entities of the run, answer as one query each."""
    facts, heads = FACTS + OTHERS, ["new", "e4", "also"]
    expected = [
        (row, head, one.label, one.score, one.known)
        for row, head in enumerate(heads)
        for one in run.fold_in(facts).predict(head, "r0", k=5)
    ]
    table = run.fold_in(facts).predict(heads, "r0", k=5)
    columns = ("row", "head", "tail", "score", "known")
    assert [*zip(*(table[name].to_pylist() for name in columns), strict=True)] == expected
    queries = pa.table({"head": heads})
    assert run.fold_in(facts).predict(queries, "r0", k=5).equals(table)
    listed = run.fold_in(facts).recommend(heads, "r0", 5)
    single = run.fold_in(facts).recommend("also", "r0", 5)
    assert listed["tail"].to_pylist()[-len(single) :] == [one.label for one in single]


def test_a_run_with_features_takes_no_features_of_new_entities(tmp_path):
    """Rows of known entities are sums, as in its export; a feature is no entity of a fact."""
    facts = [("new", "r0", "e3"), ("new", "r1", "e2")]
    with api.open_run(featured_run()) as run:
        answers = run.fold_in(facts).predict("new", "r0", k=99)
        assert len(answers) == run.model.num_entities
        exported = load_model(run.export(tmp_path / "export"))
        assert exported.fold_in(facts).predict("new", "r0", k=99) == answers
        with pytest.raises(DataError, match="neither 'new' nor 'kind 1'"):
            run.fold_in([("new", "r0", "kind 1")])

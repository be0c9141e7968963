"""An export answers every query as its run does, after the run is gone."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from grown_runs import base_config, featured_run, new_triples
from hypothesis import given, settings
from hypothesis import strategies as st
from training_runs import random_triples

from kge_torchrec import api, extend, load_model, prepare
from kge_torchrec.answers.bulk import answer_file
from kge_torchrec.answers.calibration import Curve
from kge_torchrec.answers.queries import PARTS, Choice, new_links
from kge_torchrec.errors import DataError

TABLES = {"user": {"optimizer": "adagrad"}, "place": {"lr": 0.02}}
TYPED = {"data__types": "prefix", "model__reciprocal": False}
KINDS: dict[str, dict[str, Any]] = {
    "complex": {},
    "options": {"model__scorer": "keci", "model__options__p": 1, "model__options__q": 2,
                "model__normalization": "layer"},
    "averaged": {"train__averaging": "ema"},
    "typed": TYPED,
    "tables": TYPED | {"entities__tables": TABLES},
    "featured": {},
    "extended": {},
}  # fmt: skip


def typed_splits():
    """Triples of users and places; a relation has the same types on its sides."""
    names = [f"user:{i}" for i in range(25)] + [f"place:{i}" for i in range(12)]
    triples = []
    for head, relation, tail in random_triples(37, 3, 350):
        head, tail = (names[int(x[1:])] for x in (head, tail))
        if head.startswith("user") and tail.startswith("place" if relation == "r0" else "user"):
            triples.append((head, relation, tail))
    return {"train": triples[60:], "valid": triples[:45], "test": triples[45:60]}


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """The calibrated run, open, and the loaded export; and their kind."""
    kind, folder = request.param, tmp_path_factory.mktemp(request.param)
    if kind == "featured":
        trained = shutil.copytree(featured_run(), folder / "run")
    else:
        changes, triples = dict(KINDS[kind]), random_triples(37, 3, 190)
        types = changes.pop("data__types", None)
        splits = {"train": triples[:130], "valid": triples[130:175], "test": triples[175:]}
        data = {"types": types} if types else {}
        store = prepare(
            typed_splits() if types else splits, folder / "store", data, log_notes=False
        )
        trained = api.train(base_config(store.path, folder / "run", **changes)).path
    if kind == "extended":
        trained = extend(trained, new_triples(), folder / "grown", epochs=1).path
    with api.open_run(trained) as run:
        fitted = run.calibrate(limit=50)
    own = {part: {0: Curve(slope=0.5, intercept=-1.0)} for part in fitted.curves}
    replace(fitted, own=own).write(trained)  # graphs of this size have no curves of relations
    with api.open_run(trained) as run:
        model = load_model(run.export(folder / "export"))
        assert model.calibration is not None
        yield run, model, kind


def outcome(ask, *arguments):
    """The answers, or the message of an error."""
    try:
        return ask(*arguments)
    except DataError as error:
        return str(error)


QUERIES = st.tuples(
    st.tuples(*[st.floats(0, 1, exclude_max=True)] * 3),  # shares of the ids
    st.integers(1, 60), st.booleans(), st.sampled_from(("seen", "all")),
)  # fmt: skip


def test_export_answers_like_its_run(pair):
    run, model, _ = pair

    @settings(max_examples=8)
    @given(QUERIES)
    def check(drawn):
        shares, k, flag, candidates = drawn
        counts = model.num_entities, model.num_relations, model.num_entities
        ids = [int(share * count) for share, count in zip(shares, counts, strict=True)]
        of = (model.entity_labels, model.relation_labels, model.entity_labels)
        h, r, t = (labels[i] for labels, i in zip(of, ids, strict=True))
        for query in ((h, r, None), (None, r, t), (h, None, t)):
            assert outcome(model.predict, *query, k, flag) == outcome(run.predict, *query, k, flag)
        user = h, r, k, flag, candidates
        assert outcome(model.recommend, *user) == outcome(run.recommend, *user)
        triples = [(h, r, t), (t, r, h)]
        for side in ("tail", "head"):
            assert model.score(triples, side=side) == run.score(triples, side)
        assert model.nearest(h, k) == run.nearest(h, k)
        links = new_links(model, r, k, candidates, flag)
        assert links == run.new_links(r, k, candidates, flag)

    check()


def test_export_answers_tables_like_its_run(pair):
    """Each missing part, recommendations and scores, with types and probabilities."""
    run, model, kind = pair
    triples = model.store.train[::9]
    of = (model.entity_labels, model.relation_labels, model.entity_labels)
    table = pa.table({
        part: labels.labels(column)
        for part, labels, column in zip(PARTS, of, triples.T, strict=True)
    })  # fmt: skip
    frame = pytest.importorskip("pandas").DataFrame(table.to_pydict())
    asks = [
        *(lambda m, part=part: m.predict(table.drop_columns([part]), k=50) for part in PARTS),
        lambda m: m.predict(table.drop_columns(["tail"]), k=50, known=False),
        lambda m: m.predict(frame[["head", "relation"]], k=5),
        lambda m: m.predict([*frame["head"]], "r1", k=5),
        lambda m: m.recommend(table, k=50, exclude_known=True),
        lambda m: m.recommend(table, k=50, candidates="all", novelty=0.3),
        lambda m: m.score(table, side="head"),
        lambda m: m.score(frame),
    ]
    for ask in asks:
        found, expected = outcome(ask, model), outcome(ask, run)
        assert type(found) is type(expected)
        assert found.equals(expected) if hasattr(found, "equals") else found == expected
    answers = model.predict(table.drop_columns(["tail"]), k=50)
    assert None not in answers["probability"].to_pylist()
    assert {*answers["known"].to_pylist()} >= {None, "train"}
    assert ("tail_type" in answers.column_names) == (kind in ("typed", "tables"))


def test_export_answers_new_entities_like_its_run(pair):
    run, model, _ = pair
    triples = model.store.train[:3]
    of = (model.entity_labels, model.relation_labels, model.entity_labels)
    heads, relations, tails = (labels.labels(x) for labels, x in zip(of, triples.T, strict=True))
    facts = [("new", relation, tail) for relation, tail in zip(relations, tails, strict=True)]
    asks = [
        lambda m: m.predict("new", relations[0], k=60),
        lambda m: m.predict("new", relations[0], k=60, known=False),
        lambda m: m.predict("new", None, tails[1], k=60),
        lambda m: m.predict(["new", heads[0]], relations[0], k=60),
        lambda m: m.recommend("new", relations[0], 60, exclude_known=True),
    ]
    folded, own = model.fold_in(facts), run.fold_in(facts)
    for number, ask in enumerate(asks):
        found, expected = ask(folded), ask(own)
        assert found == expected
        if number == 0:
            assert {tails[0]} <= {answer.label for answer in found if answer.known == "facts"}
            assert None not in [answer.probability for answer in found]


def test_exports_hold_what_each_kind_adds(pair):
    """The properties above compare what each kind adds, not models that are all alike."""
    _, model, kind = pair
    store = model.store
    assert store.has_features == (kind == "featured")
    assert (model.num_entities == 46) == (kind == "extended")
    if kind != "typed":
        return
    head = store.entities[store.train[store.train[:, 1] == store.relations.ids(["r0"])[0]][0, 0]]
    answers = model.predict(head, "r0", k=40)
    assert {answer.label.split(":")[0] for answer in answers} == {"place"}
    assert {answer.known for answer in answers} >= {None, "train"}
    assert answers[0].probability == pytest.approx(1 / (1 + np.exp(1 - answers[0].score / 2)))
    table = model.predict([head], "r0", k=40)
    assert {*table["head_type"].to_pylist()} == {"user"}
    assert {*table["tail_type"].to_pylist()} == {"place"}
    assert table["probability"].to_pylist() == [answer.probability for answer in answers]
    assert model.score(table)["probability"] == table["probability"]
    new = model.predict(head, "r0", k=40, known=False)
    assert [a.label for a in new] == [a.label for a in answers if a.known is None]


def test_export_lives_without_its_run(tmp_path):
    train = [("a", "r", "b"), ("b", "r", "c"), ("{x", "r", "a")]
    splits = {"train": train, "valid": [("a", "r", "c")]}
    store = prepare(splits, tmp_path / "store", log_notes=False)
    with api.train(base_config(store.path, tmp_path / "run")) as run:
        run.export(tmp_path / "export")
        expected = run.predict("a", "r"), run.recommend("{x", "r")
    for folder in ("run", "store"):
        shutil.rmtree(tmp_path / folder)
    moved = (tmp_path / "export").rename(tmp_path / "elsewhere")
    model = load_model(moved)
    assert (model.predict("a", "r"), model.recommend("{x", "r")) == expected
    (tmp_path / "queries").write_text('{x\tr\t?\n?\tr\t{x\n{"a"\tr\t?\n')
    report = answer_file(model, tmp_path / "queries", Choice(), tmp_path / "answers.tsv")
    assert report.answered == 2 and [x.line for x in report.problems] == [3]
    assert "{x\tr\tb" in (tmp_path / "answers.tsv").read_text()

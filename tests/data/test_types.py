"""Types of entities, such as user or place: of every source, at the ends of relations, extended."""

from __future__ import annotations

from itertools import pairwise, starmap

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from file_rows import labelled
from hypothesis import given, settings
from hypothesis import strategies as st
from training_runs import config_of

from kge_torchrec.api import train
from kge_torchrec.config.parser import load_config
from kge_torchrec.data.prepare import extend_store, prepare
from kge_torchrec.data.report import notes
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.store.attributes import Attributes
from kge_torchrec.data.type_sources import RDF_TYPE
from kge_torchrec.data.types import PARTS, Ends
from kge_torchrec.errors import DataError, KGEError
from kge_torchrec.trained_run import open_run

TRAIN = [("user:a", "follows", "user:b"), ("user:b", "visits", "place:x"),
         ("user:a", "visits", "place:y"), ("author:z", "made", "place:x"),
         ("user:c", "follows", "user:a"), ("user:c", "visits", "place:x")]  # fmt: skip
TEST = [("user:a", "visits", "place:x")]
SPLITS = {"train": TRAIN, "test": TEST}
KINDS = {label: label.partition(":")[0] for triple in TRAIN for label in triple[::2]}
ENDS = {"follows": [["user", "user"]], "visits": [["user", "place"]], "made": [["author", "place"]]}
GRAPH = """edges:
  - {file: follows.csv, head: user, relation: follows, tail: user}
  - {file: visits.tsv, head: user, relation: visits, tail: place}
  - {file: made.parquet, head: author, relation: made, tail: place}
  - {file: later.csv, head: user, relation: visits, tail: place, split: test}
"""


def types_of(store: TripleStore) -> dict[str, set[str]]:
    types, labels = store.types(), store.entities.array.to_pylist()
    names, bounds = types.names.to_pylist(), types.indptr.tolist()
    own = [types.ids[a:b].tolist() for a, b in pairwise(bounds)]
    assert all(kinds == sorted(set(kinds)) for kinds in own)
    return {label: {names[k] for k in kinds} for label, kinds in zip(labels, own, strict=True)}


def write(path, rows, form="{}\t{}\t{}\n"):
    path.write_text("".join(starmap(form.format, rows)))
    return path


@pytest.fixture
def graph(tmp_path):
    """A description and its files."""
    folder = tmp_path / "edges"
    folder.mkdir()
    rows = {"follows.csv": "user_id,user_id\na,b\nc,a\n", "visits.tsv": "b\tx\na\ty\nc\tx\n",
            "later.csv": "from,to\na,x\n", "empty.csv": "", "wide.csv": "1,2,3\n"}  # fmt: skip
    for name, text in rows.items():
        (folder / name).write_text(text)
    pq.write_table(pa.table({"author": ["z"], "place": ["x"]}), folder / "made.parquet")
    (folder / "graph.yaml").write_text(GRAPH)
    return folder / "graph.yaml"


def columns_of(rows) -> dict[str, list[str]]:
    """Columns head_type, head, relation, tail, tail_type; labels have no type."""
    heads, relations, tails = zip(*rows, strict=True)
    columns = [zip(*(label.split(":") for label in ends), strict=True) for ends in (heads, tails)]
    (head_types, heads), (tail_types, tails) = columns
    names = "head_type", "head", "relation", "tail", "tail_type"
    return dict(zip(names, (head_types, heads, relations, tails, tail_types), strict=True))


@pytest.mark.parametrize("source", ["prefix", "csv", "parquet", "file", "relation", "edges"])
def test_every_source_of_types_gives_the_same_store(graph, tmp_path, source):
    """Ids are in parts with an equal share of every type."""
    folder, data, extra = tmp_path / "data", {}, []
    folder.mkdir()
    if source == "prefix":
        data = {"types": "prefix"}
    elif source == "file":
        rows = [*KINDS.items(), ("other", "x")]
        data = {"types": str(write(tmp_path / "types.tsv", rows, "{}\t{}\n"))}
    elif source == "relation":
        data, extra = {"types": "is"}, [(label, "is", kind) for label, kind in KINDS.items()]
    for name, rows in SPLITS.items():
        if source == "parquet":
            pq.write_table(pa.table(columns_of(rows)), folder / f"{name}.parquet")
        elif source == "csv":
            lines = [columns_of(rows), *zip(*columns_of(rows).values(), strict=True)]
            write(folder / f"{name}.csv", lines, "{},{},{},{},{}\n")
        else:
            write(folder / f"{name}.tsv", [*rows, *(extra if name == "train" else [])])
    store = prepare(graph if source == "edges" else folder, tmp_path / "s", data)
    assert set(labelled(store)) == set(TRAIN) and labelled(store, "test") == TEST
    assert types_of(store) == {label: {kind} for label, kind in KINDS.items()}
    assert store.report["types"]["sizes"] == {"author": 1, "place": 2, "user": 3}
    assert store.report["types"]["ends"] == ENDS and store.size.typed
    said = " ".join(notes(store))
    assert "every entity has one: 1 author, 2 place, 3 user" in said
    assert ("6 triples of is were taken out" in said) == (source == "relation")
    assert ("follows.csv:1: this line is read as a header" in said) == (source == "edges")


@settings(max_examples=10)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 30), st.integers(0, 2),
                  st.sampled_from("abc"), st.integers(0, 30)),
        min_size=1, max_size=60,
    )
)  # fmt: skip
def test_ids_of_types_have_equal_shares_in_each_part(tmp_path_factory, rows):
    triples = list(dict.fromkeys((f"{a}:{i}", f"r{r}", f"{b}:{j}") for a, i, r, b, j in rows))
    folder, quiet = tmp_path_factory.mktemp("s"), {"progress": False, "log_notes": False}
    plain = prepare({"train": triples}, folder / "plain", **quiet).entities.array.to_pylist()
    store = prepare({"train": triples}, folder / "typed", {"types": "prefix"}, **quiet)
    by_type = [[label for label in plain if label[0] == kind] for kind in "abc"]
    expected = [label for part in range(PARTS) for own in by_type for label in own[part::PARTS]]
    assert store.entities.array.to_pylist() == expected
    assert labelled(store) == triples
    assert types_of(store) == {label: {label[0]} for label in expected}
    ends = {(r, *pair) for r, pairs in store.report["types"]["ends"].items() for pair in pairs}
    assert ends == {(r, h[0], t[0]) for h, r, t in triples}


@pytest.mark.parametrize("source", ["file", "relation"])
def test_entities_may_have_several_types_or_none(tmp_path, monkeypatch, source):
    """A label that occurs only in triples of types is no entity."""
    monkeypatch.setattr("kge_torchrec.data.readers.text_rows.BLOCK_BYTES", 40)
    train, test = [("a", "knows", "b"), ("b", "knows", "c"), ("c", "in", "d")], [("c", "in", "a")]
    types = [("a", "person"), ("b", "person"), ("b", "poet"), ("stranger", "ghost"),
             ("a", "person"), ("d", "place")]  # fmt: skip
    data = {"types": "is"}
    if source == "file":
        data = {"types": str(write(tmp_path / "types.tsv", types, "{}\t{}\n"))}
    else:
        train += [(label, "is", kind) for label, kind in types[:5]]
        test += [("d", "is", "place")]
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "train.tsv", train)
    write(tmp_path / "data" / "test.tsv", test)
    store = prepare(tmp_path / "data", tmp_path / "store", data)
    assert types_of(store) == {"a": {"person"}, "b": {"person", "poet"}, "c": set(), "d": {"place"}}
    assert (len(store.train), len(store.test), store.num_relations) == (3, 1, 2)
    assert not store.size.typed and isinstance(store.types().ids, np.memmap)
    said = " ".join(notes(store))
    assert (
        f"types: 3 entities have 3 types by {data['types']}; 1 have none, such as 'c'; 1 have "
        "several, such as 'b'; so relations have no types of their ends"
    ) in said
    assert ("types: 6 triples of is were taken out" in said) == (source == "relation")


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), max_size=60), st.integers(0, 60))
def test_pairs_become_a_table(pairs, cut):
    """The same in two steps, where the second one adds to the first; weights are summed."""
    pairs = [*pairs, (0, 0)]

    def table(some, before=None, weights=None):
        entities, types = np.array(some, np.int64).reshape(-1, 2).T
        labels = pa.array(map(str, types), pa.large_string())
        return Attributes.of_pairs(entities, labels, 10, weights, before)

    expected = sorted(set(pairs))
    whole, counted = table(pairs), table(pairs, weights=np.ones(len(pairs)))
    added = table(pairs[cut:], before=table(pairs[:cut]))
    for own in (whole, counted, added):
        assert (
            np.diff(own.indptr).tolist()
            == np.bincount([e for e, _ in expected], minlength=10).tolist()
        )
        names = own.names.to_pylist()
        ids = list(zip(own.entities.tolist(), (int(names[k]) for k in own.ids), strict=True))
        assert sorted(ids) == expected
    assert counted.weights.tolist() == [pairs.count(pair) for pair in expected]


@pytest.mark.parametrize(("edges", "said"), [
    ("{file: no.csv, head: user, relation: r, tail: place}", "no.csv: no such file"),
    ("{file: follows.csv, head: user, relation: r}", "entry 1: give file, head, relation, tail"),
    ("{file: follows.csv, head: 'a:b', relation: r, tail: c}", "head 'a:b' has a colon"),
    ("{file: follows.csv, head: 7, relation: r, tail: c}", "head 7 is no text; quote it"),
    ("{file: follows.csv, head: a, relation: r, tail: c, split: dev}", "split must be train"),
    ("{file: follows.csv, head: a, relation: r, tail: c, split: test}", "no edges are of train"),
    ("{file: empty.csv, head: a, relation: r, tail: c}", "empty file"),
    ("{file: wide.csv, head: a, relation: r, tail: c}", "expected 2 columns"),
])  # fmt: skip
def test_bad_descriptions(graph, edges, said):
    graph.write_text(f"edges: [{edges}]")
    with pytest.raises(KGEError, match=said):
        prepare(graph, graph.parent / "s")


@pytest.mark.parametrize(("text", "said"), [
    ("e1\tt1\ne2 t2\n", ":2: expected 2 columns"),
    ("someone\tt1\n", "none of its 1 entities is in the graph"),
    ('e1\tt1\ne2\tt2\t"x\n', "found 3: .*x'$"),
    ("e1\tt1\t1", "expected 2 columns .entity, type.. Give it columns with the names"),
    ("", "empty file"),
    (None, r"there is no file '.*', and no triple has such a relation"),
])  # fmt: skip
def test_unusable_files_of_types(tmp_path, text, said):
    path = tmp_path / "types.tsv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=said) as error:
        prepare({"train": TRAIN}, tmp_path / "s", {"types": str(path)})
    assert str(path) in str(error.value) and not (tmp_path / "s").exists()


def test_weights_of_edges(tmp_path):
    (tmp_path / "e.csv").write_text("user,place,weight\na,x,2\nb,x,0.5\n")
    (tmp_path / "g.yaml").write_text(
        "edges: [{file: e.csv, head: user, relation: r, tail: place, split: train}]"
    )
    store = prepare(tmp_path / "g.yaml", tmp_path / "s")
    assert store.weights().tolist() == [2, 0.5] and len(store.train) == 2


def test_a_type_relation_may_be_rdf_type_or_resemble_another(tmp_path):
    (tmp_path / "x.nt").write_text(f"<a> <knows> <b> .\n<a> <{RDF_TYPE}> <T> .\n")
    store = prepare(tmp_path / "x.nt", tmp_path / "store", {"types": "rdf:type"})
    assert types_of(store) == {"a": {"T"}, "b": set()}
    with pytest.raises(DataError, match=r"there is no file 'know', .* did you mean 'knows'"):
        prepare(tmp_path / "x.nt", tmp_path / "other", {"types": "know"})
    assert prepare(tmp_path / "x.nt", tmp_path / "plain").types() is None


# The ends of relations


def test_a_triple_between_wrong_types_is_refused(graph, tmp_path):
    wrong = [*TEST, ("user:a", "visits", "user:b"), ("place:x", "visits", "place:y")]
    said = (
        "test: 'user:a', 'visits', 'user:b' leads from user to user, as do 1 other such triples; "
        "by train, 'visits' leads from user to place"
    )
    with pytest.raises(KGEError, match=said):
        prepare({"train": TRAIN, "test": wrong}, tmp_path / "s", {"types": "prefix"})
    graph.write_text(GRAPH.replace("visits, tail: place, split", "made, tail: place, split"))
    check_ends = prepare(graph, tmp_path / "t").report["types"]["ends"]
    assert check_ends["made"] == [["author", "place"], ["user", "place"]]  # the description says so
    with pytest.raises(KGEError, match="1 entities have no type before a colon, such as 'b'"):
        prepare({"train": [("user:a", "r", "b")]}, tmp_path / "u", {"types": "prefix"})


def test_relations_that_train_lacks_may_have_any_ends(tmp_path):
    splits = {"train": TRAIN, "test": [("place:x", "near", "place:y")]}
    store = prepare(splits, tmp_path / "s", {"types": "prefix", "allow_unseen_relations": True})
    query = [*store.entities.ids(["user:a"]), *store.relations.ids(["near"]), 0]
    Ends(store).check("tail", np.array([query]))


def test_typed_graphs_of_one_file_are_split_by_any_seed(tmp_path):
    """A pair of types that only valid or test has is no error, since the split was drawn."""
    rows = [(f"user:{i % 9}", "likes", f"item:{i % 11}") for i in range(99)]
    rows += [("user:1", "likes", "author:2"), ("author:2", "wrote", "item:1")]
    rows += [("user:1", "wrote", "item:2"), ("author:2", "wrote", "item:3")]
    held_out, options = 0, {"types": "prefix", "split.ratio": (0.4, 0.3, 0.3)}
    for seed in range(4):
        store = prepare({"whole": rows}, tmp_path / f"{seed}", options, seed=seed,
                        progress=False, log_notes=False)  # fmt: skip
        ends = store.report["types"]["ends"]["likes"]
        assert sorted(ends) == [["user", "author"], ["user", "item"]]
        held_out += ("user:1", "likes", "author:2") not in labelled(store)
    assert held_out


def test_typed_graphs_draw_and_rank_among_the_right_type_by_default(graph, tmp_path):
    typed, plain = prepare(graph, tmp_path / "s"), prepare({"train": TRAIN}, tmp_path / "p")
    for keys, store, expected in (
        ({}, typed, "types"), ({}, plain, "all"), ({"negatives.regime": "1vsall"}, typed, "types"),
    ):  # fmt: skip
        settled = load_config(None, keys).settled(store.size)
        assert (settled.negatives.among, settled.evaluation.candidates) == (expected, expected)
    run = tmp_path / "run"
    train(config_of(graph, run, evaluation__every=1, default="rules"))
    with open_run(run) as results:
        assert "of the types" in results.evaluate("test")["candidates"]["restricted_to"]
        assert "candidates" not in results.evaluate("test", candidates="all")
        for query, said in (
            ({"head": "place:x", "relation": "visits"}, "a place; 'visits' has a user as its head"),
            ({"relation": "made", "tail": "user:a"}, "a user; 'made' has a place as its tail"),
        ):
            with pytest.raises(KGEError, match=said):
                results.predict(**query)
        places = {answer.label for answer in results.predict(head="user:a", relation="visits")}
        assert places == {"place:x", "place:y"}


# Extended stores


def test_extended_stores_keep_ids_and_ends(graph, tmp_path):
    base = prepare(graph, tmp_path / "s")
    new = {"train": [("user:d", "visits", "place:w"), ("author:q", "made", "place:w"),
                     ("user:d", "follows", "user:a")]}  # fmt: skip
    store = extend_store(base, new, tmp_path / "t", progress=False)
    more = {"train": [("user:e", "visits", "place:v")]}
    again = extend_store(store, more, tmp_path / "v", progress=False)
    for larger, smaller in ((store, base), (again, store)):
        old = smaller.num_entities
        assert larger.entities.array[:old].to_pylist() == smaller.entities.array.to_pylist()
        assert types_of(larger) == {label: {label.partition(":")[0]} for label in types_of(larger)}
    assert list(types_of(store).values())[6:] == [{"author"}, {"place"}, {"user"}]
    (graph.parent / "friends.csv").write_text("a,d\n")
    graph.write_text("edges: [{file: friends.csv, head: author, relation: follows, tail: user}]")
    described = extend_store(store, graph, tmp_path / "w")  # a description may give other ends
    assert ("author:a", "follows", "user:d") in labelled(described)
    assert described.report["types"]["ends"]["follows"] == [["author", "user"], ["user", "user"]]
    plain = prepare({"train": TRAIN}, tmp_path / "plain")
    for old, source, said in (
        (base, {"train": [("user:a", "visits", "user:c")]}, "leads from user to user"),
        (base, {"train": [("f", "follows", "user:a")]}, "no type before a colon"),
        (plain, graph, "has no types of nodes, so edges cannot have any"),
    ):
        with pytest.raises(KGEError, match=said):
            extend_store(old, source, tmp_path / "x", progress=False)


def test_new_triples_of_a_type_relation_add_types(tmp_path):
    train = [("a", "knows", "b"), ("a", "is", "person"), ("b", "is", "person"), ("b", "is", "poet")]
    base = prepare({"train": train}, tmp_path / "store", {"types": "is"})
    first = [("e", "knows", "a"), ("e", "is", "place"), ("a", "is", "poet"), ("x", "is", "y")]
    grown = extend_store(base, {"train": first}, tmp_path / "grown", progress=False)
    again = extend_store(grown, {"train": [("f", "knows", "e")]}, tmp_path / "again")
    expected = {"a": {"person", "poet"}, "b": {"person", "poet"}, "e": {"place"}}
    for store in (grown, again):
        assert {entity: own for entity, own in types_of(store).items() if own} == expected
    whole = prepare({"train": [*train, *first]}, tmp_path / "other", {"types": "is"})
    assert again.report["types"] == whole.report["types"]
    typed = prepare({"train": [*TRAIN, *((x, "is", k) for x, k in KINDS.items())]},
                    tmp_path / "typed", {"types": "is"})  # fmt: skip
    new = [("user:q", "visits", "place:x"), ("user:q", "is", "user")]
    grown = extend_store(typed, {"train": new}, tmp_path / "typed2")
    assert grown.size.typed and types_of(grown)["user:q"] == {"user"}
    for more, said in (((("q", "visits", "place:x")), "1 entities have no type"),
                       (("place:x", "is", "user"), "such as 'place:x'")):  # fmt: skip
        with pytest.raises(DataError, match=said):
            extend_store(typed, {"train": [("user:a", "visits", "place:x"), more]}, tmp_path / "h")

"""One type of every entity, such as user or place: from labels, columns, files of edges."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_runs import config_of

from kge_torchrec.api import train
from kge_torchrec.cli import main
from kge_torchrec.config.parser import load_config
from kge_torchrec.data.prepare import extend_store, prepare
from kge_torchrec.data.report import notes
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.types import PARTS, Ends
from kge_torchrec.errors import DataError, KGEError
from kge_torchrec.trained_run import open_run

TRAIN = [("user:a", "follows", "user:b"), ("user:b", "visits", "place:x"),
         ("user:a", "visits", "place:y"), ("author:z", "made", "place:x"),
         ("user:c", "follows", "user:a"), ("user:c", "visits", "place:x")]  # fmt: skip
TEST = [("user:a", "visits", "place:x")]
GRAPH = """edges:
  - {file: follows.csv, head: user, relation: follows, tail: user}
  - {file: visits.tsv, head: user, relation: visits, tail: place}
  - {file: made.parquet, head: author, relation: made, tail: place}
  - {file: later.csv, head: user, relation: visits, tail: place, split: test}
"""


def types_of(store: TripleStore) -> dict[str, str]:
    types = store.types()
    names = types.names.to_pylist()
    assert (types.indptr == np.arange(store.num_entities + 1)).all()
    return dict(zip(store.entities.array.to_pylist(), [names[k] for k in types.ids], strict=True))


def triples_of(store: TripleStore, split: str = "train") -> set[tuple[str, str, str]]:
    entities, relations = store.entities.array.to_pylist(), store.relations.array.to_pylist()
    return {(entities[h], relations[r], entities[t]) for h, r, t in store.split(split)}


def is_in_parts(kinds: list[str]) -> bool:
    """Whether each of the first parts has one entity of each type that has so many."""
    places = [(kinds[:place].count(kind), kind) for place, kind in enumerate(kinds)]
    return places == sorted(places)


def check(store: TripleStore) -> None:
    """The store has the triples above, and ids in parts with all types."""
    assert (triples_of(store), triples_of(store, "test")) == (set(TRAIN), set(TEST))
    kinds = [label.partition(":")[0] for label in store.entities.array.to_pylist()]
    assert is_in_parts(kinds) and list(types_of(store).values()) == kinds
    assert store.report["types"]["sizes"] == {"author": 1, "place": 2, "user": 3}
    assert store.report["types"]["ends"] == {
        "follows": [["user", "user"]], "visits": [["user", "place"]], "made": [["author", "place"]]
    }  # fmt: skip
    assert store.size.typed


@pytest.fixture
def graph(tmp_path):
    """A description and its files."""
    rows = {"follows.csv": "user_id,user_id\na,b\nc,a\n", "visits.tsv": "b\tx\na\ty\nc\tx\n",
            "later.csv": "from,to\na,x\n"}  # fmt: skip
    for name, text in rows.items():
        (tmp_path / name).write_text(text)
    pq.write_table(pa.table({"author": ["z"], "place": ["x"]}), tmp_path / "made.parquet")
    (tmp_path / "graph.yaml").write_text(GRAPH)
    return tmp_path / "graph.yaml"


def test_types_by_prefix(tmp_path, capsys):
    for name, rows in (("train", TRAIN), ("test", TEST)):
        (tmp_path / f"{name}.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    assert main(["prepare", str(tmp_path), "-o", str(tmp_path / "s"), "--types", "prefix"]) == 0
    assert "every entity has one: 1 author, 2 place, 3 user" in capsys.readouterr().out
    check(TripleStore.open(tmp_path / "s"))


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_types_by_columns(tmp_path, form):
    folder = tmp_path / "data"
    folder.mkdir()
    for name, rows in (("train", TRAIN), ("test", TEST)):
        columns = {"head_type": [], "head": [], "relation": [], "tail": [], "tail_type": []}
        for head, relation, tail in rows:
            for end, label in (("head", head), ("tail", tail)):
                kind, _, own = label.partition(":")
                columns[f"{end}_type"].append(kind)
                columns[end].append(own)
            columns["relation"].append(relation)
        if form == "parquet":
            pq.write_table(pa.table(columns), folder / f"{name}.parquet")
        else:
            lines = [",".join(columns), *map(",".join, zip(*columns.values(), strict=True))]
            (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    check(prepare(folder, tmp_path / "s"))


def test_types_by_files_of_edges(graph, tmp_path, capsys):
    assert main(["prepare", str(graph), "-o", str(tmp_path / "s")]) == 0
    said = capsys.readouterr().out
    assert "follows.csv:1: this line is read as a header: head 'user_id'" in said
    check(TripleStore.open(tmp_path / "s"))


def test_weights_of_edges(tmp_path):
    (tmp_path / "e.csv").write_text("user,place,weight\na,x,2\nb,x,0.5\n")
    (tmp_path / "g.yaml").write_text(
        "edges: [{file: e.csv, head: user, relation: r, tail: place, split: train}]"
    )
    store = prepare(tmp_path / "g.yaml", tmp_path / "s")
    assert store.weights().tolist() == [2, 0.5] and len(store.train) == 2


def test_types_by_a_file(tmp_path):
    rows = {label: label.partition(":")[0] for triple in TRAIN for label in triple[::2]}
    file = tmp_path / "types.tsv"
    file.write_text("".join(f"{label}\t{kind}\n" for label, kind in rows.items()) + "other\tx\n")
    check(prepare({"train": TRAIN, "test": TEST}, tmp_path / "s", {"types": str(file)}))
    twice = file.read_text() + "user:a\tplace\n"
    for text, said in (
        (twice, "; 1 have several, such as 'user:a'; so relations have no types"),
        ("user:a\tuser\n", "1 entities have 1 types by {}; 5 have none, such as"),
    ):
        file.write_text(text)
        store = prepare({"train": TRAIN}, tmp_path / "t", {"types": str(file)}, overwrite=True)
        assert said.format(file) in " ".join(notes(store)) and not store.size.typed
        assert store.types().of(store.entities.ids(["user:a"]))[1].size > 0
    file.write_text("other\tuser\n")
    with pytest.raises(KGEError, match="none of its 1 entities is in the graph"):
        prepare({"train": TRAIN}, tmp_path / "u", {"types": str(file)})


@settings(max_examples=15)
@given(
    st.lists(
        st.tuples(st.sampled_from("uvw"), st.integers(0, 4), st.integers(0, 2),
                  st.sampled_from("uvw"), st.integers(0, 4)),
        min_size=1, max_size=40,
    )
)  # fmt: skip
def test_new_ids_keep_the_triples(tmp_path_factory, rows):
    train = list(dict.fromkeys((f"{a}:{i}", f"r{r}", f"{b}:{j}") for a, i, r, b, j in rows))
    folder = tmp_path_factory.mktemp("s")
    store = prepare({"train": train}, folder / "s", {"types": "prefix"}, progress=False)
    assert triples_of(store) == set(train) and len(store.train) == len(train)
    kinds = [*types_of(store).values()]
    assert is_in_parts(kinds) and kinds == [label[0] for label in types_of(store)]
    ends = {(r, *pair) for r, pairs in store.report["types"]["ends"].items() for pair in pairs}
    assert ends == {(r, h[0], t[0]) for h, r, t in train}


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
    (graph.parent / "empty.csv").write_text("")
    (graph.parent / "wide.csv").write_text("1,2,3\n")
    graph.write_text(f"edges: [{edges}]")
    with pytest.raises(KGEError, match=said):
        prepare(graph, graph.parent / "s")


def test_a_triple_between_wrong_types_is_refused(graph, tmp_path):
    wrong = [*TEST, ("user:a", "visits", "user:b"), ("place:x", "visits", "place:y")]
    said = (
        "test: 'user:a', 'visits', 'user:b' leads from user to user, as do 1 other such triples; "
        "by train, 'visits' leads from user to place"
    )
    with pytest.raises(KGEError, match=said):
        prepare({"train": TRAIN, "test": wrong}, tmp_path / "s", {"types": "prefix"})
    (graph.parent / "later.csv").write_text("from,to\na,x\n")
    graph.write_text(GRAPH.replace("visits, tail: place, split", "made, tail: place, split"))
    check_ends = prepare(graph, tmp_path / "t").report["types"]["ends"]
    assert check_ends["made"] == [["author", "place"], ["user", "place"]]  # the description says so
    with pytest.raises(KGEError, match="1 entities have no type before a colon, such as 'b'"):
        prepare({"train": [("user:a", "r", "b")]}, tmp_path / "u", {"types": "prefix"})


def test_extended_stores_keep_ids_and_ends(graph, tmp_path):
    base = prepare(graph, tmp_path / "s")
    new = {"train": [("user:d", "visits", "place:w"), ("author:q", "made", "place:w"),
                     ("user:d", "follows", "user:a")]}  # fmt: skip
    store = extend_store(base, new, tmp_path / "t", progress=False)
    again = extend_store(
        store, {"train": [("user:e", "visits", "place:v")]}, tmp_path / "v", progress=False
    )
    for larger, smaller in ((store, base), (again, store)):
        old = smaller.num_entities
        assert larger.entities.array[:old].to_pylist() == smaller.entities.array.to_pylist()
        assert all(label.startswith(f"{kind}:") for label, kind in types_of(larger).items())
    assert list(types_of(store).values())[6:] == ["author", "place", "user"]
    (graph.parent / "friends.csv").write_text("a,d\n")
    graph.write_text("edges: [{file: friends.csv, head: author, relation: follows, tail: user}]")
    described = extend_store(store, graph, tmp_path / "w")  # a description may give other ends
    assert ("author:a", "follows", "user:d") in triples_of(described)
    assert described.report["types"]["ends"]["follows"] == [["author", "user"], ["user", "user"]]
    for rows, said in (([("user:a", "visits", "user:c")], "leads from user to user"),
                       ([("f", "follows", "user:a")], "no type before a colon")):  # fmt: skip
        with pytest.raises(KGEError, match=said):
            extend_store(base, {"train": rows}, tmp_path / "x", progress=False)
    plain = prepare({"train": TRAIN}, tmp_path / "plain")
    with pytest.raises(KGEError, match="has no types of nodes, so edges cannot have any"):
        extend_store(plain, graph, tmp_path / "x", progress=False)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30)), min_size=2, max_size=60))
@settings(max_examples=40)
def test_types_have_equal_shares_in_each_part(tmp_path_factory, ends):
    labels = [f"{kind}:{number}" for kind, number in ends]
    triples = list(zip(labels, ["r"] * len(labels), reversed(labels), strict=True))
    folder = tmp_path_factory.mktemp("parts")
    plain = prepare({"train": triples}, folder / "plain", log_notes=False)
    store = prepare({"train": triples}, folder / "typed", {"types": "prefix"}, log_notes=False)
    assert triples_of(store) == triples_of(plain) == set(triples)
    by_type = {
        kind: [label for label in plain.entities.array.to_pylist() if label[0] == kind]
        for kind in "abc"
    }
    expected = [
        label for part in range(PARTS) for own in by_type.values() for label in own[part::PARTS]
    ]
    assert store.entities.array.to_pylist() == expected


def test_typed_graphs_draw_and_rank_among_the_right_type_by_default(graph, tmp_path, capsys):
    config = load_config(None, {})
    typed, plain = prepare(graph, tmp_path / "s"), prepare({"train": TRAIN}, tmp_path / "p")
    by_type = config.settled(typed.size)
    assert (by_type.negatives.among, by_type.evaluation.candidates) == ("types", "types")
    other = config.settled(plain.size)
    assert (other.negatives.among, other.evaluation.candidates) == ("all", "all")
    full = load_config(None, {"negatives.regime": "1vsall"}).settled(typed.size)
    assert (full.negatives.among, full.evaluation.candidates) == ("types", "types")
    run = tmp_path / "run"
    train(config_of(graph, run, evaluation__every=1, default="rules"))
    with open_run(run) as results:
        assert "of the types" in results.evaluate("test")["candidates"]["restricted_to"]
        every = results.evaluate("test", candidates="all")
        assert "candidates" not in every
        with pytest.raises(
            KGEError, match=r"the head 'place:x' is a place; 'visits' has a user as"
        ):
            results.predict(head="place:x", relation="visits")
        with pytest.raises(KGEError, match=r"the tail 'user:a' is a user; 'made' has a place as"):
            results.predict(relation="made", tail="user:a")
        places = {answer.label for answer in results.predict(head="user:a", relation="visits")}
        assert places == {"place:x", "place:y"}


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
    held_out = 0
    options = {"types": "prefix", "split.ratio": (0.4, 0.3, 0.3)}
    for seed in range(8):
        store = prepare({"whole": rows}, tmp_path / "store", options, seed=seed,
                        overwrite=True, progress=False, log_notes=False)  # fmt: skip
        assert sorted(store.report["types"]["ends"]["likes"]) == [
            ["user", "author"], ["user", "item"],
        ]  # fmt: skip
        pair = store.entities.ids(["user:1", "author:2"]).tolist()
        held_out += pair not in store.train[:, 0::2].tolist()
    assert held_out
    splits = {"train": rows[:99], "test": rows[99:100]}
    with pytest.raises(DataError, match="leads from user to author"):
        prepare(splits, tmp_path / "given", {"types": "prefix"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("e1\tt1\ne2 t2\n", ":2: expected 2 columns"),
        ("someone\tt1\n", "none of its 1 entities is in the graph"),
        ('e1\tt1\ne2\tt2\t"x\n', "found 3: .*x'$"),
        ("e1\tt1\t1", "expected 2 columns .entity, type.. Give it columns with the names"),
        ("", "empty file"),
    ],
)
def test_unusable_type_files_are_rejected(tmp_path, text, words):
    path = tmp_path / "types.tsv"
    path.write_text(text)
    with pytest.raises(DataError, match=words) as error:
        prepare({"train": TRAIN}, tmp_path / "s", {"types": str(path)})
    assert str(path) in str(error.value)
    assert "data." not in str(error.value)  # keys of triples do not act on the file

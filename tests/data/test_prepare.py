import gzip
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from file_rows import labelled
from hypothesis import given
from hypothesis import strategies as st

from kge_torchrec.cli import main
from kge_torchrec.config.data import SplitOptions
from kge_torchrec.data import SPLITS
from kge_torchrec.data import sort as ordering
from kge_torchrec.data import split as splitting
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.readers.files import find_sources
from kge_torchrec.data.report import notes as report_notes
from kge_torchrec.data.split import Split
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.store.contents import unseen_relations
from kge_torchrec.data.store.filter_index import build_side
from kge_torchrec.environment import cores
from kge_torchrec.errors import DataError, StoreError

TRAIN = [("a", "r", "b"), ("b", "s", "c"), ("c", "r", "a")]


def write(path: Path, rows) -> Path:
    path.write_text("".join("\t".join(row) + "\n" for row in rows), "utf-8")
    return path


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# Reading splits


def test_directory(tmp_path):
    rows = {"train": TRAIN, "valid": [("a", "s", "c")], "test": [("b", "r", "b")]}
    data = tmp_path / "data"
    data.mkdir()
    write(data / "train.txt", rows["train"])
    (data / "dev.tsv.gz").write_bytes(gzip.compress(b"head\trel\ttail\na\ts\tc\n"))
    pq.write_table(pa.table({"h": ["b"], "r": ["r"], "t": ["b"]}), data / "test.parquet")
    (data / "README.md").write_text("hello")
    write(data / "test_neg.txt", [("x", "y", "z")])
    store = prepare(data, tmp_path / "store")
    assert {split: labelled(store, split) for split in rows} == rows
    assert store.report["triples"] == {"train": 3, "valid": 1, "test": 1}
    assert store.report["sources"]["valid"] == [str(data / "dev.tsv.gz")]
    assert store.report["split"] is None
    assert names(tmp_path) == ["data", "store"]


def test_list_of_files_in_parts(tmp_path):
    files = [
        write(tmp_path / "train-00000-of-00002.tsv", TRAIN[:1]),
        write(tmp_path / "train-00001-of-00002.tsv", TRAIN[1:]),
        write(tmp_path / "test.tsv", TRAIN[:1]),
    ]
    store = prepare(files, tmp_path / "store")
    assert labelled(store, "train") == TRAIN
    assert labelled(store, "test") == TRAIN[:1]
    assert len(store.valid) == 0


NTRIPLES = """<a> <r> <b> .
<a> <name> "Ann" .
_:x <r> _:y .
_:x <age> "7"^^<int> .
<b> <name> ""@en .
"""


def test_literals_are_dropped_and_counted(tmp_path, monkeypatch):
    """Blank nodes are entities; who occurs with literals only is none."""
    monkeypatch.setattr("kge_torchrec.data.readers.text_rows.BLOCK_BYTES", 20)
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.nt").write_text(NTRIPLES + '<c> <name> "C" .\n')
    (data / "test.nt").write_text('<b> <r> <a> .\n<a> <name> "Bob" .\n')
    store = prepare(data, tmp_path / "store")
    assert labelled(store, "train") == [("a", "r", "b"), ("_:x", "r", "_:y")]
    assert labelled(store, "test") == [("b", "r", "a")]
    assert (store.num_entities, store.num_relations) == (4, 1)
    assert store.report["literals"] == {"train": 4, "test": 1}
    kept = prepare(data, tmp_path / "kept", {"literals": "keep"})
    assert ("b", "name", '""@en') in labelled(kept, "train") and len(kept.train) == 6
    assert kept.report["literals"] == {}
    (data / "train.nt").write_text('<a> <name> "Ann" .\n')
    (data / "test.nt").unlink()
    with pytest.raises(DataError, match=r"no training triples: 1 have a literal .*literals keep"):
        prepare(data, tmp_path / "none")


@pytest.mark.parametrize(
    "files, message",
    [
        ([], "no file of triples here"),
        (["a.tsv", "b.tsv"], "none of its 2 files is named train, valid or test"),
        (["valid.tsv", "test.tsv"], "no train file among"),
        (["train.tsv", "train.csv"], "more than one train file"),
        (["train.tsv", "training.tsv"], "more than one train file"),
        (["train.tsv", "train-1.tsv"], "more than one train file"),
    ],
)
def test_ambiguous_directory(tmp_path, files, message):
    for name in files:
        write(tmp_path / name, TRAIN)
    with pytest.raises(DataError, match=message):
        find_sources(tmp_path)


def test_ambiguous_files(tmp_path):
    train, other = write(tmp_path / "train.tsv", TRAIN), write(tmp_path / "other.tsv", TRAIN)
    with pytest.raises(DataError, match=r"other.tsv: not named train, valid or test"):
        find_sources([train, other])
    with pytest.raises(DataError, match="is a directory"):
        find_sources([train, tmp_path])
    with pytest.raises(DataError, match="no such file"):
        find_sources(tmp_path / "none")
    with pytest.raises(DataError, match="no input files"):
        find_sources([])


# What the report says


def test_triples_shared_by_splits_are_kept_and_counted(tmp_path):
    new = ("a", "s", "a")
    splits = {"train": TRAIN, "valid": [TRAIN[0], new], "test": [*TRAIN[:2], new]}
    store = prepare(splits, tmp_path / "store")
    assert store.report["shared"] == {"train-valid": 1, "train-test": 2, "valid-test": 2}
    assert store.report["triples"] == {"train": 3, "valid": 2, "test": 3}


def test_unseen_entities_stay_and_are_counted(tmp_path):
    splits = {"train": TRAIN, "test": [("x", "r", "y"), ("x", "r", "a"), ("a", "r", "c")]}
    store = prepare(splits, tmp_path / "store")
    assert len(store.test) == 3
    assert store.report["unseen_entities"] == {
        "test": {"entities": 2, "triples": 2, "examples": ["y", "x"]}
    }


def test_unseen_relations_are_rejected_unless_allowed(tmp_path):
    splits = {"train": TRAIN, "valid": [("a", "new", "b"), ("b", "new", "a")]}
    with pytest.raises(DataError, match=r"'new' \(2 triples in valid\)"):
        prepare(splits, tmp_path / "store")
    assert names(tmp_path) == []
    store = prepare(splits, tmp_path / "store", {"allow_unseen_relations": True})
    assert store.report["unseen_relations"] == {"valid": {"new": 2}}
    assert labelled(store, "valid") == splits["valid"]


@pytest.mark.parametrize(
    "splits, said",
    [
        ({"train": [("a", "r", "a")]}, "there is 1 entity: every rank is 1, and nothing can be"),
        ({"train": TRAIN}, "valid and test: no triples, so that nothing is ranked; name files so"),
        ({"train": TRAIN, "valid": TRAIN}, "test: no triples, so that nothing is ranked; name"),
        ({"train": TRAIN, "test": TRAIN}, "valid: no triples, so that the last checkpoint is the"),
        ({"train": TRAIN, "test": TRAIN[:1]}, "too few triples for figures to mean much: train "
         "has 3, test has 1"),
    ],
)  # fmt: skip
def test_too_small_graphs_are_reported(tmp_path, caplog, splits, said):
    prepare(splits, tmp_path / "store")
    assert sum(said in message for message in caplog.messages) == 1


def test_large_enough_graphs_are_not_reported(tmp_path):
    rows = [(f"e{i}", "r", f"e{i + j}") for i in range(100) for j in range(4)]
    splits = {"train": rows[:200], "valid": rows[200:300], "test": rows[300:]}
    store = prepare(splits, tmp_path / "store")
    assert [note for note in report_notes(store) if "never occur" not in note] == []
    one = prepare(write(tmp_path / "x.tsv", rows), tmp_path / "one", {"split.ratio": (1, 0, 0)})
    assert report_notes(one) == []  # the ratio has no valid and test


def test_one_triple_a_thousand_times_is_no_graph(tmp_path):
    store = prepare(write(tmp_path / "x.tsv", TRAIN[:1] * 500), tmp_path / "store")
    said = report_notes(store)
    assert said[0].endswith("train needs all triples, to have every entity and relation; give more")
    assert said[1:] == ["too few triples for figures to mean much: train has 1",
                        "whole: 499 duplicate triples were dropped of 500; to train with how "
                        "often each occurs, count them into a column of weights and set "
                        "data.weights loss"]  # fmt: skip
    rows = [(f"a{i}", "r", "b") for i in range(30)]
    few = prepare({"train": [*rows, rows[0]], "test": rows[:1]}, tmp_path / "few")
    assert "train: 1 duplicate triples were dropped" in report_notes(few)


# Splitting one file


def test_one_file_is_split(tmp_path):
    rows = [(f"e{i % 50}", f"r{i % 3}", f"e{i * 7 % 53}") for i in range(2000)]
    path = write(tmp_path / "all.tsv", rows)
    store = prepare(path, tmp_path / "store", {"split.ratio": (0.8, 0.15, 0.05)}, seed=3)
    distinct = list(dict.fromkeys(rows))
    assert len(store.valid) == round(0.15 * len(distinct))
    assert len(store.test) == round(0.05 * len(distinct))
    results = [row for split in ("train", "valid", "test") for row in labelled(store, split)]
    assert sorted(results) == sorted(distinct)
    assert store.report["unseen_entities"] == {} == store.report["unseen_relations"]
    assert store.report["split"] == {
        "by": "random", "ratio": [0.8, 0.15, 0.05], "seed": 3,
    }  # fmt: skip
    assert store.report["duplicates"] == {"whole": len(rows) - len(distinct)}
    again = prepare(path, tmp_path / "again", {"split.ratio": (0.8, 0.15, 0.05)}, seed=3)
    other = prepare(path, tmp_path / "other", {"split.ratio": (0.8, 0.15, 0.05)}, seed=4)
    assert again.fingerprint == store.fingerprint != other.fingerprint


@given(
    total=st.integers(1, 200), entities=st.integers(1, 60), relations=st.integers(1, 9),
    shares=st.tuples(st.floats(0, 0.6), st.floats(0, 0.39)), seed=st.integers(0, 9),
)  # fmt: skip
def test_every_entity_and_relation_is_in_train(
    tmp_path_factory, total, entities, relations, shares, seed
):
    high = (entities, relations, entities)
    triples = np.random.default_rng(seed).integers(0, high, (total, 3), np.int32)
    split = Split(SplitOptions(ratio=(1 - sum(shares), *shares)), seed)
    folder = tmp_path_factory.getbasetemp()
    split_of = split.apply(triples, None, (entities, relations), 1000, folder)
    parts = [triples[split_of == place] for place in range(3)]
    assert set(parts[0][:, 0::2].ravel()) == set(triples[:, 0::2].ravel())
    assert set(parts[0][:, 1]) == set(triples[:, 1])
    for part, share in zip(parts[1:], shares, strict=True):
        assert len(part) <= round(share * total)


def test_few_free_triples_are_distributed_over_splits(tmp_path):
    rows = np.array([[i, 0, i] for i in range(10)] + [[0, 0, 0]] * 6, np.int32)
    split = Split(SplitOptions(ratio=(0.2, 0.4, 0.4)))
    assert np.bincount(split.apply(rows, None, (10, 1), 100, tmp_path)).tolist() == [10, 3, 3]


# Whole or not at all


def test_failure_keeps_the_old_store(tmp_path):
    path = write(tmp_path / "x.tsv", [*TRAIN, ("a", "b")])
    with pytest.raises(DataError, match=r"x.tsv:4: expected 3"):
        prepare(path, tmp_path / "store")
    assert names(tmp_path) == ["x.tsv"]
    old = prepare({"train": TRAIN}, tmp_path / "store")
    with pytest.raises(DataError):
        prepare(path, old.path, overwrite=True)
    assert TripleStore.open(old.path).fingerprint == old.fingerprint
    assert names(tmp_path) == ["store", "x.tsv"]


def test_overwriting(tmp_path):
    old = prepare({"train": TRAIN}, tmp_path / "deep" / "store")
    with pytest.raises(StoreError, match="a store exists here"):
        prepare({"train": TRAIN[:1]}, old.path)
    new = prepare({"train": TRAIN[:1]}, old.path, overwrite=True)
    assert len(new.train) == 1
    assert len(old.train) == 3  # still mapped by those who opened it
    assert names(tmp_path / "deep") == ["store"]


def test_symbolic_link_is_kept(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "store")
    for rows in (TRAIN, TRAIN[:1]):
        store = prepare({"train": rows}, tmp_path / "link", overwrite=True)
        assert (tmp_path / "link").is_symlink() and len(store.train) == len(rows)
        assert names(tmp_path / "elsewhere") == ["store"]
    assert names(tmp_path) == ["elsewhere", "link"]


def test_other_data_is_never_overwritten(tmp_path):
    (tmp_path / "photos").mkdir()
    write(tmp_path / "photos" / "x.tsv", TRAIN)
    with pytest.raises(StoreError, match="is no store"):
        prepare({"train": TRAIN}, tmp_path / "photos", overwrite=True)
    with pytest.raises(StoreError, match="is no store"):
        prepare({"train": TRAIN}, tmp_path / "photos" / "x.tsv", overwrite=True)
    (tmp_path / "empty").mkdir()
    assert len(prepare({"train": TRAIN}, tmp_path / "empty").train) == 3


# Triples in memory


class Frame:
    """A data frame as pandas and polars hand it over."""

    def __init__(self, **columns):
        self.table = pa.table(columns)

    def __arrow_c_stream__(self, requested_schema=None):
        return self.table.__arrow_c_stream__(requested_schema)


def test_data_frame_columns_are_read_by_name_or_order(tmp_path):
    heads, relations, tails = map(list, zip(*TRAIN, strict=True))
    named = Frame(note=heads, tail=tails, weight=[1.0, 2.0, 3.0], relation=relations, head=heads)
    store = prepare({"train": named}, tmp_path / "named", progress=False)
    assert labelled(store, "train") == TRAIN and list(store.weights()) == [1, 2, 3]
    ordered = Frame(a=heads, b=relations, c=tails)
    assert labelled(prepare({"train": ordered}, tmp_path / "ordered"), "train") == TRAIN
    turned = prepare({"train": ordered}, tmp_path / "turned", {"columns": "head=c,tail=a"})
    assert labelled(turned, "train") == [row[::-1] for row in TRAIN]


@pytest.mark.parametrize(
    "rows",
    [
        TRAIN,
        iter(TRAIN),
        np.array(TRAIN),
        np.array(TRAIN, object),
        pa.table(dict(zip("hrt", map(list, zip(*TRAIN, strict=True)), strict=True))),
    ],
    ids=["list", "iterator", "array", "object array", "table"],
)
def test_in_memory(tmp_path, rows):
    assert labelled(prepare({"train": rows}, tmp_path / "store"), "train") == TRAIN


@pytest.mark.parametrize(
    "splits, message",
    [
        ({"train": []}, "no training triples"),
        ({"test": TRAIN}, "no training triples"),
        ({"train": TRAIN, "dev": TRAIN}, "give train"),
        ({"train": [("a", "b")]}, "train: 2 columns: 0 'a', 1 'b'; expected 3"),
        ({"train": [("a", "r", None)]}, "train: triple 0: the tail is empty"),
        ({"train": [("a", "", "b")]}, "train: triple 0: the relation is empty"),
        ({"train": [("a", "r", ["b"])]}, "train: triple 0: the tail is no text"),
        ({"train": pa.table({"h": ["a"]})}, "train: 1 columns"),
    ],
)
def test_bad_triples_in_memory_are_rejected(tmp_path, splits, message):
    with pytest.raises(DataError, match=message):
        prepare(splits, tmp_path / "store")


def test_preparing_copies_no_column_more_than_it_needs(tmp_path, monkeypatch):
    """Peak bytes per triple: int64 copies of a column would be 8 more."""
    total, entities, relations = 400_000, 5000, 50
    for module in (ordering, splitting):
        monkeypatch.setattr(module, "CHUNK", 1 << 12)
    sizes = (entities, relations, entities)
    triples = np.random.default_rng(0).integers(0, sizes, (total, 3), np.int32)
    labels = pa.array([str(i) for i in range(relations)], pa.large_string())
    times = np.arange(total) % 1000

    def split(by: str) -> np.ndarray:
        one = Split(SplitOptions(by=by))
        return one.apply(triples, times, (entities, relations), total, tmp_path)

    for most, work in (
        (1, lambda: split("random")),
        (41, lambda: split("head")),
        (1, lambda: split("time")),
        (58, lambda: split("last")),
        (21, lambda: build_side("tail", triples, entities, relations)),
        (1, lambda: unseen_relations(labels, dict.fromkeys(SPLITS, triples))),
    ):
        tracemalloc.start()
        work()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < most * total


@given(st.lists(st.integers(0, 30), max_size=60), st.booleans(), st.integers(1, 9))
def test_ids_are_counted_in_chunks(ids, ascending, chunk):
    ids = np.array(sorted(ids) if ascending else ids, np.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ordering, "CHUNK", chunk)
        results = ordering.id_counts(ids, 31)
    assert results.tolist() == np.bincount(ids, minlength=31).tolist()


def test_threads_are_at_most_the_cores(tmp_path):
    """Arrow's joins take memory for each thread: 100,000 of them took 10 GB."""
    before = pa.cpu_count()
    try:
        file = write(tmp_path / "triples.tsv", TRAIN)
        words = ["prepare", str(file), "-o", str(tmp_path / "store"), "--threads", "100000"]
        assert main(words) == 0 and pa.cpu_count() <= cores()
    finally:
        pa.set_cpu_count(before)

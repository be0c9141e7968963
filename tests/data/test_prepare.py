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


def test_ambiguous_sources(tmp_path):
    for files, said in (
        ([], "no file of triples here"),
        (["a.tsv", "b.tsv"], "none of its 2 files is named train, valid or test"),
        (["valid.tsv", "test.tsv"], "no train file among"),
        (["train.tsv", "train.csv"], "more than one train file"),
        (["train.tsv", "training.tsv"], "more than one train file"),
        (["train.tsv", "train-1.tsv"], "more than one train file"),
    ):
        folder = tmp_path / f"{files}"
        folder.mkdir()
        for name in files:
            write(folder / name, TRAIN)
        with pytest.raises(DataError, match=said):
            find_sources(folder)
    train, other = write(tmp_path / "train.tsv", TRAIN), write(tmp_path / "other.tsv", TRAIN)
    for sources, said in (
        ([train, other], "other.tsv: not named train, valid or test"),
        ([train, tmp_path], "is a directory"),
        (tmp_path / "none", "no such file"),
        ([], "no input files"),
    ):
        with pytest.raises(DataError, match=said):
            find_sources(sources)


# What the report says


def test_unseen_relations_are_rejected_unless_allowed(tmp_path):
    splits = {"train": TRAIN, "valid": [("a", "new", "b"), ("b", "new", "a")]}
    with pytest.raises(DataError, match=r"'new' \(2 triples in valid\)"):
        prepare(splits, tmp_path / "store")
    assert names(tmp_path) == []
    store = prepare(splits, tmp_path / "store", {"allow_unseen_relations": True})
    assert store.report["unseen_relations"] == {"valid": {"new": 2}}
    assert labelled(store, "valid") == splits["valid"]


def test_missing_splits_are_reported(tmp_path):
    for splits, said in (
        ({"train": TRAIN}, "valid and test: no triples, so that nothing is ranked; name files so"),
        ({"train": TRAIN, "valid": TRAIN}, "test: no triples, so that nothing is ranked; name"),
        ({"train": TRAIN, "test": TRAIN}, "valid: no triples, so that the last checkpoint is the"),
    ):
        store = prepare(splits, tmp_path / "store", overwrite=True, log_notes=False)
        assert report_notes(store)[0].startswith(said)


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
    assert said[0].endswith(
        "train needs all triples, to have every entity, relation or head; give more"
    )
    assert said[1:] == ["whole: 499 duplicate triples were dropped of 500; to train with how "
                        "often each occurs, count them into a column of weights and set "
                        "data.weights loss"]  # fmt: skip
    rows = [(f"a{i}", "r", "b") for i in range(30)]
    few = prepare({"train": [*rows, rows[0]], "test": rows[:1]}, tmp_path / "few")
    assert "train: 1 duplicate triples were dropped" in report_notes(few)


# Weights


def test_the_store_keeps_weights_with_their_triples(tmp_path, capsys):
    """A repeated triple takes its largest; splits by ratio and files of splits alike."""
    rows = [(f"e{i % 5}", f"r{i % 3}", f"e{i * 7 % 4}", 0.5 + i % 61) for i in range(300)]
    text = "".join("\t".join(map(str, row)) + "\n" for row in rows)
    (path := tmp_path / "all.tsv").write_text(text)
    assert main(["prepare", str(path), "-o", str(tmp_path / "store"), "--weights", "loss"]) == 0
    assert "note: train: triples weigh from" in capsys.readouterr().out
    store, largest = TripleStore.open(tmp_path / "store"), {}
    for *triple, weight in rows:
        largest[tuple(triple)] = max(weight, largest.get(tuple(triple), 0))
    results = {}
    for split in ("train", "valid", "test"):
        assert store.weights(split).dtype == np.float32
        assert isinstance(store.weights(split), np.memmap)
        results |= dict(zip(labelled(store, split), store.weights(split).tolist(), strict=True))
    assert results == largest
    values = store.weights("train")
    assert store.report["weights"]["train"] == {
        "min": values.min(), "mean": pytest.approx(values.mean()), "max": values.max(),
    }  # fmt: skip


def test_only_training_triples_need_weights(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.tsv").write_text("a\tr\tb\t0.5\nb\tr\ta\t2\n")
    (folder / "test.tsv").write_text("a\tr\ta\n")
    store = prepare(folder, tmp_path / "store", {"weights": "loss"})
    assert store.weights("train").tolist() == [0.5, 2]
    assert store.weights("test") is None
    assert prepare(folder / "test.tsv", tmp_path / "plain").weights() is None
    with pytest.raises(DataError, match="the training triples have no weights"):
        prepare(folder / "test.tsv", tmp_path / "none", {"weights": "loss"})
    parts = [write(tmp_path / "train-1.tsv", [("h", "r", "t", "weight"), ("a", "r", "b", "1")]),
             write(tmp_path / "train-2.tsv", TRAIN)]  # fmt: skip
    with pytest.raises(DataError, match="train: some of its triples have a weight and others"):
        prepare(parts, tmp_path / "mixed")


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
    listed = {"train": [(*row, 1.5) for row in TRAIN]}
    assert list(prepare(listed, tmp_path / "listed").weights()) == [1.5] * 3
    ordered = Frame(a=heads, b=relations, c=tails)
    assert labelled(prepare({"train": ordered}, tmp_path / "ordered"), "train") == TRAIN
    turned = prepare({"train": ordered}, tmp_path / "turned", {"columns": "head=c,tail=a"})
    assert labelled(turned, "train") == [row[::-1] for row in TRAIN]


def test_in_memory(tmp_path):
    columns = dict(zip("hrt", map(list, zip(*TRAIN, strict=True)), strict=True))
    every = [iter(TRAIN), np.array(TRAIN), np.array(TRAIN, object), pa.table(columns)]
    splits = dict(zip(SPLITS, every, strict=False))
    store = prepare(splits, tmp_path / "store")
    assert all(labelled(store, split) == TRAIN for split in SPLITS)
    assert labelled(prepare({"train": every[3]}, tmp_path / "table")) == TRAIN
    for splits, said in (
        ({"train": []}, "no training triples"),
        ({"test": TRAIN}, "no training triples"),
        ({"train": TRAIN, "dev": TRAIN}, "give train"),
        ({"train": [("a", "b")]}, "train: 2 columns: 0 'a', 1 'b'; expected 3"),
        ({"train": [("a", "r", None)]}, "train: triple 0: the tail is empty"),
        ({"train": [("a", "", "b")]}, "train: triple 0: the relation is empty"),
        ({"train": [("a", "r", ["b"])]}, "train: triple 0: the tail is no text"),
        ({"train": pa.table({"h": ["a"]})}, "train: 1 columns"),
        (
            {"train": [("a", "r", "b", 1.5), ("b", "r", "c", -1)]},
            "triple 1: the weight -1.0 is neg",
        ),
        ({"train": [("a", "r", "b", 1.5), ("b", "r", "c")]}, "3 fields"),
    ):
        with pytest.raises(DataError, match=said):
            prepare(splits, tmp_path / "none")


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
        (21, lambda: build_side("tail", triples)),
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

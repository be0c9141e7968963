import json

import numpy as np
import pyarrow as pa
import pytest

from kge_torchrec import train
from kge_torchrec.data import store as store_module
from kge_torchrec.data.numbering import hashes
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.store import FEW, TripleStore, Vocabulary
from kge_torchrec.errors import StoreError, UnknownLabelError

TRAIN = [("ann", "knows", "bob"), ("bob", "knows", "eve"), ("eve", "likes", "eve")]


@pytest.fixture
def store(tmp_path) -> TripleStore:
    return prepare({"train": TRAIN, "valid": [("ann", "likes", "eve")]}, tmp_path / "store")


def test_store_reopens(store):
    again = TripleStore.open(str(store.path))
    assert (again.num_entities, again.num_relations) == (3, 2)
    assert again.entities.labels(range(3)) == ["ann", "bob", "eve"]
    assert again.train.tolist() == [[0, 0, 1], [1, 0, 2], [2, 1, 2]]
    assert again.split("valid").tolist() == [[0, 1, 2]]
    assert again.test.shape == (0, 3)
    assert again.train.dtype == np.int32 and isinstance(again.train, np.memmap)
    assert again.report == store.report
    assert "3 entities" in repr(again)


def test_degrees(store):
    assert store.degrees().tolist() == [1, 2, 3]
    for side, column in (("head", 0), ("tail", 2)):
        expected = np.bincount(store.train[:, column], minlength=3)
        assert store.degrees(side).tolist() == expected.tolist()


def test_known(store):
    known = store.filter_index(["train", "valid"])
    query, entity = known.answers("tail", [0, 0, 2], [0, 1, 0]).all()
    assert query.tolist() == [0, 1] and entity.tolist() == [1, 2]
    assert store.filter_index(["train"]).answers("tail", [0], [1]).all()[1].tolist() == []
    assert known.contains("head", [2], [1], [0, 1, 2]).tolist() == [[True, False, True]]


def test_unknown_split_is_rejected(store):
    for call in (store.split, lambda name: store.filter_index([name])):
        with pytest.raises(ValueError, match="no split 'dev'; there are train, valid, test"):
            call("dev")


def test_fingerprint_follows_the_content(store, tmp_path):
    def fingerprint(**splits):
        path = tmp_path / "other"
        return prepare(splits, path, overwrite=True).fingerprint

    valid = [("ann", "likes", "eve")]
    assert fingerprint(train=TRAIN, valid=valid) == store.fingerprint
    renamed = [("anna", r, t) if h == "ann" else (h, r, t) for h, r, t in TRAIN]
    others = {
        fingerprint(train=TRAIN),
        fingerprint(train=TRAIN, test=valid),
        fingerprint(train=TRAIN[::-1], valid=valid),
        fingerprint(train=renamed, valid=[("anna", "likes", "eve")]),
        store.fingerprint,
    }
    assert len(others) == 5


# Stores that cannot be read


def change_meta(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes), "utf-8")


def flip(file):
    """One bit of the last byte but seven: of an id, and of no size."""
    content = bytearray(file.read_bytes())
    content[-8] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(("name", "damage", "said"), [
    ("meta.json", lambda x: change_meta(x, format="something else"), "not a triple store"),
    ("meta.json", lambda x: x.write_text("[1]"), "not a triple store"),
    ("meta.json", lambda x: x.write_text("{"), "damaged store: meta.json"),
    ("known-test-head-starts.npy", flip, "checksum of known-test-head-starts.npy does not match"),
])  # fmt: skip
def test_stores_that_cannot_be_read(store, name, damage, said):
    damage(store.path / name)
    with pytest.raises(StoreError, match=said):
        TripleStore.open(store.path)


def test_large_store_is_checked_when_training_starts(store, monkeypatch, tmp_path):
    monkeypatch.setattr(store_module, "CHECKED_ON_OPEN", 0)
    flip(store.path / "train.npy")
    TripleStore.open(store.path)
    with pytest.raises(StoreError, match=r"the checksum of train.npy does not match"):
        train({"data.path": str(store.path), "run.dir": str(tmp_path / "run")})
    with pytest.raises(StoreError, match=r"the checksum of train.npy does not match"):
        TripleStore.open(store.path).check()


def test_flipped_bits_of_the_meta_file_are_detected(store):
    path = store.path / "meta.json"
    content = path.read_bytes()
    for place in range(0, len(content), 7):
        if not content[place : place + 1].isspace():
            flipped = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
            path.write_bytes(flipped)
            with pytest.raises(StoreError, match=r"meta.json|of version"):
                TripleStore.open(store.path)


# Vocabularies


def vocabulary(labels) -> Vocabulary:
    return Vocabulary(pa.array(labels, pa.large_string()), "entity")


def test_labels_and_ids():
    words = vocabulary(["b", "a", "ç", "東"])
    assert len(words) == 4
    assert words.labels(np.array([3, 0, 0])) == ["東", "b", "b"]
    ids = words.ids(["ç", "b", "ç"])
    assert ids.tolist() == [2, 0, 2] and ids.dtype == np.int64
    assert words.ids([]).tolist() == [] and words.labels([]) == []


@pytest.mark.parametrize("wrong", [4, -1])
def test_label_of_no_id(wrong):
    with pytest.raises(IndexError):
        vocabulary(["a", "b", "c", "d"]).labels([wrong])


@pytest.mark.parametrize("is_by_hash", [True, False])
def test_labels_are_found_in_any_order_of_ids(is_by_hash, monkeypatch):
    labels = pa.array([f"e{i}" for i in range(1000)] + ["", "é"], pa.large_string())
    if is_by_hash:
        labels = labels.take(pa.array(np.argsort(hashes(labels))))
    words, scans = vocabulary(labels.to_pylist()), []
    real = store_module.pc.index_in
    counted = lambda *given, **named: scans.append(1) or real(*given, **named)  # noqa: E731
    monkeypatch.setattr(store_module.pc, "index_in", counted)
    for some in (["e0", "", "é", "e7", "e7"], ["e999"], ["e3"] * (FEW + 1)):
        assert words.labels(words.find(some)) == some
    assert len(scans) == (2 if is_by_hash else 6)
    assert words.find(["nobody", words[1001]]).tolist() == [-1, 1001]


def test_unknown_label_is_reported():
    words = vocabulary(["Germany", "France", "germ"])
    with pytest.raises(UnknownLabelError) as caught:
        words.ids(["France", "germany"])
    assert str(caught.value).startswith("unknown entity 'germany'; did you mean 'Germany'")
    with pytest.raises(UnknownLabelError, match=r"'qqq' \(and 1 more labels\); .* such") as one:
        words.ids(["qqq", "France", "zzz"])
    assert str(one.value).endswith("labels here are such as 'Germany', 'France', 'germ'")
    with pytest.raises(UnknownLabelError, match=r"^unknown entity 'a'$"):
        vocabulary([]).ids(["a"])


def test_labels_are_found_by_their_ends():
    words = Vocabulary(pa.array(["http://x/treats", "http://x#a", "http://y/a", "b"]), "relation")
    assert words.ids(["treats", "b", "treats"]).tolist() == [0, 3, 0]
    assert words.search(["a", "", "x/treats", "reats"]).tolist() == [-1, -1, 0, -1]  # two end in a
    with pytest.raises(UnknownLabelError, match="unknown relation 'treats'"):
        words.ids(["treats"], exact=True)


def test_unknown_label_among_many_is_reported(monkeypatch):
    monkeypatch.setattr("kge_torchrec.data.store.MAX_COMPARED", 100)
    words = vocabulary([f"/m/{i:06d}" for i in range(1000)] + ["United_Kingdom"])
    assert words.close_to("united_kingdon") == ["United_Kingdom"]
    assert words.close_to("Untied_Kingdom") == ["United_Kingdom"]
    assert words.close_to("/n/000120")[0] == "/m/000120"

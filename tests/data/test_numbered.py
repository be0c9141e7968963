import pytest
from file_rows import rows_of

from kge_torchrec.data.prepare import prepare


def write_all(directory, files):
    for name, content in files.items():
        (directory / name).write_text(content, "utf-8")
    return directory


@pytest.fixture(params=[" ", "\t"])
def openke(tmp_path, request):
    """Columns are head, tail, relation; the labels are in no particular order."""
    gap = request.param
    return write_all(
        tmp_path,
        {
            "entity2id.txt": "3\nb\t1\na\t0\nç d\t2\n",
            "relation2id.txt": "2\nr\t0\ns\t1\n",
            "train2id.txt": "3\n" + "0 1 0\n1 2 1\n2 0 0\n".replace(" ", gap),
            "test2id.txt": "1\n" + "0 2 1\n".replace(" ", gap),
            "test2id_all.txt": "not read",
        },
    )


def test_openke(openke):
    assert rows_of(openke / "train2id.txt") == [
        ("a", "r", "b"), ("b", "s", "ç d"), ("ç d", "r", "a"),
    ]  # fmt: skip
    store = prepare(openke, openke / "store")
    assert store.report["triples"] == {"train": 3, "valid": 0, "test": 1}
    assert sorted(store.entities.labels(range(3))) == ["a", "b", "ç d"]


@pytest.fixture
def libkge(tmp_path):
    return write_all(
        tmp_path,
        {
            "entity_ids.del": "0\ta\n1\tb\n",
            "relation_ids.del": "0\tr\n",
            "train.del": "0\t0\t1\n1\t0\t0\n",
            "valid.del": "1\t0\t1\n",
        },
    )


def test_libkge(libkge):
    assert rows_of(libkge / "train.del") == [("a", "r", "b"), ("b", "r", "a")]
    store = prepare(libkge, libkge / "store")
    assert store.entities.labels(store.valid[0, 0::2]) == ["b", "b"]


def test_text_is_preferred_to_numbers(libkge):
    (libkge / "train.txt").write_text("x\ty\tz\n")
    assert prepare(libkge, libkge / "store").entities.ids(["x", "z"]).max() == 1


def test_ids_without_labels_are_labels(libkge):
    (libkge / "entity_ids.del").unlink()
    assert rows_of(libkge / "train.del") == [("0", "r", "1"), ("1", "r", "0")]

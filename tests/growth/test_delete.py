"""``extend --delete``: a run without some entities, their rows, triples and labels."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from grown_runs import TABLE, base_config, base_run, check_rows, new_triples, tensors
from training_runs import shared_folder, tiny_store

from kge_torchrec import api, extend
from kge_torchrec.cli import main
from kge_torchrec.data import SPLITS
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.store.contents import write_without
from kge_torchrec.errors import KGEError

GONE = ["e3", "e11", "e36"]


def triples_of(run: Path) -> dict[str, list[tuple[str, str, str]]]:
    store = TripleStore.open(run / "store") if (run / "store").is_dir() else None
    if store is None:
        store = TripleStore.open(api.open_run(run).config.data.path)
    entities, relations = store.entities.array.to_pylist(), store.relations.array.to_pylist()
    return {
        split: [(entities[h], relations[r], entities[t]) for h, r, t in store.split(split)]
        for split in SPLITS
    }


def check_deleted(old: Path, new: Path, gone: list[str]) -> None:
    """Compare the store of a new run with that of the old one; test_rows.py compares rows."""
    with api.open_run(old) as run:
        labels = run.model.entity_labels.array.to_pylist()
    was, now = triples_of(old), triples_of(new)
    for split in SPLITS:
        assert now[split] == [t for t in was[split] if not {t[0], t[2]} & set(gone)]
    store = TripleStore.open(new / "store")
    assert store.entities.array.to_pylist() == [x for x in labels if x not in gone]
    removed = sum(len(was[split]) - len(now[split]) for split in SPLITS)
    extended = json.loads((new / "results.json").read_text())["extended"]
    assert extended["deleted"] == {"entities": len(gone), "triples": removed}


@pytest.fixture(scope="module")
def deleted(tmp_path_factory) -> Path:
    new = tmp_path_factory.mktemp("deleted") / "run"
    return extend(base_run(), None, new, delete=GONE, checkpoint="newest").path


def test_triples_and_labels_of_others_stay(deleted):
    check_deleted(base_run(), deleted, GONE)
    assert TripleStore.open(deleted / "store").num_entities == 34


def test_nothing_of_a_deleted_entity_is_left_in_the_folder(tmp_path):
    triples = [("Jane_Doe_4711", "knows", "b"), ("b", "knows", "c"), ("c", "knows", "d"),
               ("Jane_Doe_4711", "likes", "d"), ("d", "likes", "b")]  # fmt: skip
    store = prepare({"train": triples, "test": triples[:1]}, tmp_path / "store").path
    run = api.train(base_config(store, tmp_path / "run"), rank_test=False).path
    (tmp_path / "gone.txt").write_text("Jane_Doe_4711\n\n")
    words = ["extend", run, "-o", tmp_path / "new", "--delete", tmp_path / "gone.txt"]
    assert main([*map(str, words), "--checkpoint", "newest"]) == 0
    place = TripleStore.open(store).entities.ids(["Jane_Doe_4711"])[0]
    row = tensors(run)[TABLE][place].numpy().tobytes()
    files = [path for path in (tmp_path / "new").rglob("*") if path.is_file()]
    assert len(files) > 10
    for path in files:
        content = path.read_bytes()
        assert b"Jane_Doe_4711" not in content and row not in content, path
    assert any(row in path.read_bytes() for path in run.rglob("*.safetensors"))


def test_the_new_run_supports_all_verbs(deleted, tmp_path, capsys):
    api.resume(deleted, {"train.epochs": 1})
    assert api.open_run(deleted).results["train"]["epochs"] == 1
    with api.open_run(deleted) as run:
        assert run.evaluate("test")["both"]["realistic"]["mrr"] > 0
        assert {answer.label for answer in run.predict(head="e1", relation="r1", k=99)} == {
            f"e{i}" for i in range(37)
        } - set(GONE)
        with pytest.raises(KGEError, match="unknown entity 'e3'"):
            run.predict(head="e3", relation="r1")
        run.export(tmp_path / "export")
    again = extend(deleted, new_triples(), tmp_path / "larger", epochs=1)
    labels = {label for split in new_triples().values() for h, _, t in split for label in (h, t)}
    back = labels & set(GONE)  # are new again
    assert again.results["extended"]["new"]["entities"] == 9 + len(back) > 9
    twice = extend(again.path, None, tmp_path / "twice", delete=["n0", "e1"], checkpoint="newest")
    check_deleted(again.path, twice.path, ["n0", "e1"])
    check_rows(again.path, twice.path)
    store = TripleStore.open(twice.path / "store")
    assert store.report["deleted"]["entities"] == 2 and store.base is None


def test_typed_graphs_keep_their_types(tmp_path):
    rows = [("u:a", "r", "p:x"), ("u:b", "r", "p:x"), ("u:b", "r", "p:y"), ("u:a", "f", "u:b")]
    store = prepare({"train": rows}, tmp_path / "s", {"types": "prefix"}, progress=False).path
    run = api.train(base_config(store, tmp_path / "run"), rank_test=False).path
    new = extend(run, None, tmp_path / "new", delete=["p:x"], checkpoint="newest").path
    left = TripleStore.open(new / "store")
    assert left.report["types"]["sizes"] == {"p": 1, "u": 2} and left.size.typed
    assert left.report["types"]["entities"] == 3
    names, indptr, types, _ = left.types()
    kinds = [names[kind].as_py() for kind in types.tolist()]
    assert kinds == [label[0] for label in left.entities.array.to_pylist()]
    assert indptr.tolist() == [0, 1, 2, 3]


def test_weights_follow_their_triples(tmp_path):
    rows = [("a", "r", "b", 1.0), ("c", "r", "a", 2.0), ("b", "r", "c", 3.0), ("c", "r", "b", 4.0)]
    store = prepare({"train": rows}, tmp_path / "s")
    left = write_without(store, np.isin(store.entities.array.to_pylist(), ["a"]), tmp_path / "t")
    assert left.weights().tolist() == [3, 4] and set(left.entities.array.to_pylist()) == {"b", "c"}


def test_bad_deletions_lose_nothing(tmp_path):
    run, store = base_run(), tiny_store(shared_folder() / "s")
    (tmp_path / "empty.txt").write_text("\n")
    out = tmp_path / "out"
    for options, said in (
        ({"delete": ["e3", "nobody"]}, "unknown entity 'nobody'"),
        ({"delete": tmp_path / "empty.txt"}, "no entities to delete"),
        ({"delete": store.entities.array.to_pylist()}, "nothing would be left"),
        ({"delete": GONE, "freeze": True}, "are of new rows"),
    ):
        with pytest.raises(KGEError, match=said):
            extend(run, None, out, **options)
        assert not out.exists()
    with pytest.raises(KGEError, match="delete entities first"):
        extend(run, new_triples(), out, delete=GONE)

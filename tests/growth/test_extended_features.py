"""Extended and shrunk runs whose entities have features."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from grown_runs import (
    TABLE,
    base_run,
    featured_run,
    new_triples,
    tensors,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_rows import composition

from kge_torchrec import api, extend, load_model, open_run
from kge_torchrec.cli import main
from kge_torchrec.data.features import features_from
from kge_torchrec.data.readers.lists import read_pairs
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.store.attributes import Attributes

OLD, NEW = 39, 10  # entities, two of each in no triple


def new_file() -> Path:
    return featured_run().parent / "new.tsv"


def features_of(store: TripleStore) -> dict[str, dict[str, float]]:
    """Features and weights of the entities that have some."""
    names, indptr, ids, weights = store.features()
    names, result = names.to_pylist(), {}
    for entity, label in enumerate(store.entities.array.to_pylist()):
        pairs = range(indptr[entity], indptr[entity + 1])
        if pairs:
            result[label] = {names[ids[i]]: round(float(weights[i]), 3) for i in pairs}
    return result


def vectors_of(run: Path) -> dict[str, torch.Tensor]:
    with open_run(run) as opened:
        labels = opened.model.entity_labels.array.to_pylist()
        return dict(zip(labels, torch.from_numpy(opened.model.entities), strict=True))


def test_entities_outside_the_file_keep_their_features(tmp_path):
    old = features_of(TripleStore.open(featured_run().parent / "store"))
    kept = extend(featured_run(), new_triples(), tmp_path / "kept", epochs=0)
    store = TripleStore.open(kept.path / "store")
    assert features_of(store) == old and store.num_entities == 39 + 9
    assert store.report["features"]["without_triples"] == 2
    made = extend(kept.path, {"train": [("n0", "r0", "e7")]}, tmp_path / "made", epochs=0,
                  features=new_file())  # fmt: skip
    assert made.results["extended"]["new"] == {
        "entities": 1, "relations": 0, "training triples": 1, "features": 2}  # fmt: skip
    expected = old | {"n0": {"kind 1": 1.0}, "n3": {"new kind": 1.0}, "n4": {"a kind": 1.0},
                      "x0": {"kind 3": 1.0}, "e2": {"new kind": 1.0, "kind 8": 1.0}}  # fmt: skip
    assert features_of(TripleStore.open(made.path / "store")) == expected
    before, after = vectors_of(featured_run()), vectors_of(made.path)
    assert all(torch.equal(after[label], before[label]) for label in before if label != "e2")
    assert not torch.equal(after["e2"], before["e2"])


def test_runs_without_features_get_some(tmp_path):
    made = extend(base_run(), new_triples(), tmp_path / "run", epochs=1, features=new_file())
    store = TripleStore.open(made.path / "store")
    rows = tensors(made.path)[TABLE].double()
    vectors = torch.stack(list(vectors_of(made.path).values())).double()
    assert len(rows) == 37 + 10 + 5
    assert (vectors - composition(store) @ rows).abs().max() < 1e-6


def test_deleted_entities_take_features_of_their_own_along(tmp_path):
    run, gone = featured_run(), ["e30", "c1", "e4"]
    made = extend(run, None, tmp_path / "run", delete=gone, checkpoint="newest")
    old, store = TripleStore.open(run.parent / "store"), TripleStore.open(made.path / "store")
    expected = features_of(old)
    assert features_of(store) == {k: v for k, v in expected.items() if k not in gone}
    names = old.features()[0].to_pylist()
    left = [name for name in names if name not in ("last", "c")]
    assert store.features()[0].to_pylist() == left and len(names) == len(left) + 2
    assert store.report["features"] | {"source": ""} == {
        "source": "", "features": len(left), "pairs": 17, "entities": 17, "without_triples": 1,
        "example": "c0"}  # fmt: skip
    for file in (file for file in made.path.rglob("*") if file.is_file()):
        assert b"last" not in file.read_bytes() or file.suffix not in (".arrow", ".npy"), file
    api.resume(made.path, {"train.epochs": 1})


def test_no_features_are_left_of_deleted_entities(tmp_path):
    gone = features_of(TripleStore.open(featured_run().parent / "store")).keys()
    made = extend(featured_run(), None, tmp_path / "run", delete=sorted(gone))
    store = TripleStore.open(made.path / "store")
    assert not store.has_features and len(tensors(made.path)[TABLE]) == store.num_entities


def test_verbs_use_an_extended_run(tmp_path, capsys):
    (tmp_path / "new.tsv").write_text("n0\tr0\te1\nn1\tr1\te2\n")
    words = ["extend", featured_run(), tmp_path / "new.tsv", "-o", tmp_path / "run", "--epochs", 2]
    (tmp_path / "features.tsv").write_text("x0\tkind 3\t0.5\nn1\tkind 2\t1\n")
    assert main([*map(str, words), "--features", str(tmp_path / "features.tsv")]) == 0
    assert "0 features" in capsys.readouterr().out
    with open_run(tmp_path / "run") as run:
        assert run.evaluate("test")["both"]["realistic"]["mrr"] > 0
        assert len(run.predict(head="x0", relation="r0", k=99)) == OLD + 3
        exported = load_model(run.export(tmp_path / "export")).entities
        assert np.array_equal(exported, run.model.entities)
        place = {label: i for i, label in enumerate(run.model.entity_labels.array.to_pylist())}
    rows = tensors(tmp_path / "run")[TABLE].numpy()
    kind = TripleStore.open(tmp_path / "run" / "store").features()[0].to_pylist().index("kind 3")
    assert np.allclose(exported[place["x0"]], 0.5 * rows[len(exported) + kind])


LABELS = st.sampled_from("abcdef")
PAIRS = st.dictionaries(st.tuples(LABELS, st.sampled_from("xyzuvw")), st.integers(1, 9), max_size=9)


@given(PAIRS, PAIRS.filter(bool), st.integers(3, 6))
@settings(max_examples=30)
def test_a_file_replaces_the_features_of_its_entities(tmp_path_factory, old, new, count):
    folder = tmp_path_factory.mktemp("file")
    entities = [*"abcdef"]
    old = {pair: weight for pair, weight in old.items() if entities.index(pair[0]) < count}

    def table(pairs: dict, labels: list[str], known: Attributes | None) -> Attributes:
        text = "".join(f"{e}\t{f}\t{weight}\n" for (e, f), weight in pairs.items())
        (folder / "f.tsv").write_text(text)
        rows, names = (
            read_pairs(folder / "f.tsv", "feature", {}, {}, []),
            pa.array(labels, pa.large_string()),
        )
        return features_from(rows, "f.tsv", names, np.ones(len(labels), bool), known)

    known = table(old, entities[:count], None) if old else None
    both = table(new, entities, known)
    expected = {pair: w for pair, w in old.items() if pair[0] not in {e for e, _ in new}} | new
    names, result = both.names.to_pylist(), {}
    for i, entity in enumerate(entities):
        own = slice(both.indptr[i], both.indptr[i + 1])
        assert (np.diff(both.ids[own]) > 0).all()
        for feature, weight in zip(both.ids[own], both.weights[own], strict=True):
            result[entity, names[feature]] = weight
    assert result == expected
    assert len(set(names)) == len(names)
    assert known is None or names[: len(known.names)] == known.names.to_pylist()
    inside = np.array([entity in "ace" for entity in entities])
    left = {f for e, f in expected if e in "ace"}
    assert set(both.inside(inside).without_unused().names.to_pylist()) == left

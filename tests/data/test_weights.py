"""Weights of triples: read from a fourth column, kept in the store."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from file_rows import fault_of, labelled, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from kge_torchrec.cli import main
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.readers import text_rows
from kge_torchrec.data.report import notes
from kge_torchrec.data.store import TripleStore
from kge_torchrec.errors import DataError

LABEL = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\t\n\r\ufeff\0"), min_size=1
).filter(str.strip)
WEIGHT = st.floats(2.0**-40, 2.0**40, width=32)
WEIGHTED = {"columns": "weight=3", "has_header": False}


def write(path, text: str):
    path.write_text(text, "utf-8", newline="")
    return path


@settings(max_examples=40)
@given(
    rows=st.lists(st.tuples(LABEL, LABEL, LABEL, WEIGHT), min_size=1),
    order=st.permutations(["head", "relation", "tail", "Confidence"]),
    block=st.sampled_from([64, 1 << 20]),
)
def test_any_weight_survives_every_format(tmp_path_factory, rows, order, block):
    """Bitwise, with any labels, in any order of columns."""
    folder, place = tmp_path_factory.mktemp("w"), ["head", "relation", "tail", "Confidence"]
    turned = [[row[place.index(name)] for name in order] for row in rows]
    quoted = [['"' + str(x).replace('"', '""') + '"' for x in row] for row in turned]
    files = [
        write(folder / "x.tsv", "".join("\t".join(map(str, r)) + "\n" for r in [order, *turned])),
        write(folder / "x.csv", "".join(",".join(r) + "\n" for r in [order, *quoted])),
        folder / "x.parquet",
    ]
    columns = [pa.array(column) for column in zip(*turned, strict=True)]
    pq.write_table(pa.table(columns, list(order)), files[2])
    plain = write(folder / "y.tsv", "".join("\t".join(map(str, r)) + "\n" for r in rows))
    largest = max(len(str(r).encode()) * 2 for r in turned)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_rows, "BLOCK_BYTES", max(block, largest))
        for path in files:
            assert rows_of(path, quotes=path.suffix != ".tsv") == rows
        assert rows_of(plain, **WEIGHTED, quotes=False) == rows


BAD = ["0", "-1", "nan", "inf", "1e39", "1e-60", "", "x", "1,5", "0x1", "\u0663"]


@pytest.mark.parametrize("bad", BAD)
def test_invalid_weight_is_named_by_its_line(tmp_path, monkeypatch, bad):
    line = {"0": 700, "-1": 1}.get(bad, 2)
    monkeypatch.setattr(text_rows, "BLOCK_BYTES", 512)
    rows = ["a\tr\tb\t0.5"] * 1000
    rows[line - 1] = f"a\tr\tb\t{bad}"
    said = "negative, a signed" if bad == "-1" else "no positive, finite number"
    said = (
        f":{line}: the weight {bad} is {said}" if bad == "-1" else f":{line}: the weight is {said}"
    )
    path = write(tmp_path / "x.tsv", "\n".join(rows) + "\n")
    assert said in fault_of(path, **WEIGHTED)
    path = write(tmp_path / "y.tsv", "h\tr\tt\tweight\n" + "\n".join(rows) + "\n")
    assert f":{line + 1}: the weight " in fault_of(path)


def test_the_store_keeps_weights_with_their_triples(tmp_path, capsys):
    """A repeated triple takes its largest; splits by ratio and files of splits alike."""
    rows = [(f"e{i % 5}", f"r{i % 3}", f"e{i * 7 % 4}", 0.5 + i % 61) for i in range(300)]
    text = "".join("\t".join(map(str, row)) + "\n" for row in rows)
    path = write(tmp_path / "all.tsv", text)
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
    write(folder / "train.tsv", "a\tr\tb\t0.5\nb\tr\ta\t2\n")
    write(folder / "test.tsv", "a\tr\ta\n")
    store = prepare(folder, tmp_path / "store", {"weights": "loss"})
    assert store.weights("train").tolist() == [0.5, 2]
    assert store.weights("test") is None
    assert prepare(folder / "test.tsv", tmp_path / "plain").weights() is None
    with pytest.raises(DataError, match="the training triples have no weights"):
        prepare(folder / "test.tsv", tmp_path / "none", {"weights": "loss"})
    parts = [write(tmp_path / "train-1.tsv", "h\tr\tt\tweight\na\tr\tb\t0.5\n"),
             write(tmp_path / "train-2.tsv", "a\tr\tc\n")]  # fmt: skip
    with pytest.raises(DataError, match="train: some of its triples have a weight and others"):
        prepare(parts, tmp_path / "mixed")


def test_weights_are_accepted_in_memory(tmp_path):
    triples = [("a", "r", "b", 1.5), ("b", "r", "c", 2)]
    store = prepare({"train": triples}, tmp_path / "store")
    assert store.weights().tolist() == [1.5, 2]
    assert "data.weights" in notes(store)[-1]
    for bad, said in (
        (("b", "r", "c", -1), "triple 1: the weight -1.0 is negative"),
        (("b", "r", "c"), "3 fields"),
    ):
        with pytest.raises(DataError, match=said):
            prepare({"train": [triples[0], bad]}, tmp_path / "bad")

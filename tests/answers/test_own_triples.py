"""Ranks of triples that the user brings: of labels, in memory or in a file."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from kge_torchrec.cli import main
from kge_torchrec.config import ConfigError
from kge_torchrec.errors import DataError


@pytest.fixture(scope="module")
def own(run):
    """Two triples of one query that no split holds, and one of train."""
    new = [("e1", "r0", a.label) for a in run.predict("e1", "r0", k=9, known=False)[::4]]
    (first,) = np.asarray(run.model.store.train[:1])
    store = run.model.store
    (head, tail), (relation,) = (
        store.entities.labels(first[::2]),
        store.relations.labels(first[1:2]),
    )
    return [*new[:2], (head, relation, tail)]


def ranks_by_hand(run, triples):
    """Ranks of heads and tails among what neither the splits nor the triples hold."""
    results = []
    for head, relation, tail in triples:
        for query, truth in (((None, relation, tail), head), ((head, relation, None), tail)):
            whole = {"head": None, "tail": None}
            better = 0
            answers = run.predict(*query, k=37)
            score = next(a.score for a in answers if a.label == truth)
            for a in answers:
                whole = (a.label, relation, tail) if query[0] is None else (head, relation, a.label)
                is_filtered = a.known is not None or whole in triples
                better += a.score > score and not is_filtered
            results.append(better + 1)
    return results


def test_ranks_are_filtered_by_splits_and_own_triples(run, own, tmp_path):
    expected = ranks_by_hand(run, own)
    results = run.evaluate(triples=own)
    assert results["both"]["realistic"]["mr"] == pytest.approx(np.mean(expected))
    assert results["both"]["realistic"]["mrr"] == pytest.approx(np.mean(1 / np.array(expected)))
    assert results["triples"] == {"count": 3, "train": 1, "valid": 0, "test": 0}
    (tmp_path / "own").write_text("head\trelation\ttail\n" + "".join(
        "\t".join(triple) + "\n" for triple in own
    ))  # fmt: skip
    columns = dict(zip(("head", "relation", "tail"), zip(*own, strict=True), strict=True))
    for inputs in (tmp_path / "own", str(tmp_path / "own"), iter(own), np.array(own),
                  pa.table({name: list(column) for name, column in columns.items()})):  # fmt: skip
        assert run.evaluate(triples=inputs) == results
    grouped = run.evaluate(triples=own, by=["relation"])["by"]["relation"]
    assert grouped["total"] == {side: results[side] for side in ("head", "tail", "both")}


def test_own_triples_rank_like_the_split(run):
    store = run.model.store
    heads, relations, tails = np.asarray(store.test).T
    labels = store.entities.labels(heads), store.relations.labels(relations), (
        store.entities.labels(tails)
    )  # fmt: skip
    results = run.evaluate(triples=list(zip(*labels, strict=True)))
    assert results.pop("triples") == {"count": 30, "train": 0, "valid": 0, "test": 30}
    assert results == run.evaluate("test")


def test_invalid_triples_are_rejected(run, tmp_path):
    (tmp_path / "t").write_text("e1\tr0\te2\ne1\tr0\te11x\n\ne1\tr9\te2\ne1\tr0\n")
    (tmp_path / "none").write_text("")
    for inputs, words in (
        (tmp_path / "t", r"t:2: unknown entity 'e11x'; did you mean 'e11'.*\(2 more like this\)"),
        (tmp_path / "none", "none is empty: write lines of triples"),
        (tmp_path / "nowhere", "nowhere"),
        ([("e1", "r0", "e2"), ("e1", "r9", "e2")], "triples: triple 1: unknown relation 'r9'"),
        ([("e1", "r0")], "triples: 2 columns: .*; expected 3 columns"),
        ([], "triples: the list is empty"),
        ([(1, 0, 2)], "triples: triple 0: unknown entity '1'"),
    ):
        with pytest.raises(DataError, match=words):
            run.evaluate(triples=inputs)
    with pytest.raises(ConfigError, match=r"split must be one of .* evaluate\(triples=...\)"):
        run.evaluate([("e1", "r0", "e2")])


def test_evaluate_prints_how_many_triples_are_known(run, own, tmp_path, capsys):
    file = tmp_path / "own.tsv"
    file.write_text("".join("\t".join(triple) + "\n" for triple in own))
    assert main(["evaluate", str(run.path), "--triples", str(file)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"3 triples of {file}; of them 1 in train, 0 in valid, 0 in test"

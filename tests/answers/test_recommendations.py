"""Recommendations equal those that a dense product finds, one by one, in bulk and over ranks."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest

from kge_torchrec.answers.bulk import answer_file
from kge_torchrec.answers.sources import recommended
from kge_torchrec.errors import DataError, UnknownLabelError

HEADS = ["e1", "e5", "e30"]
ALL = {"exclude_known": False, "candidates": "all"}


def recommend_file(run, heads, relation, output, exclude_known=False):
    choice = recommended(run.model, 5, exclude_known, "seen")
    return answer_file(run.model, heads, choice, output, "parquet", relation)


def oracle(run, head, relation, k, exclude_known=False, candidates="seen"):
    """The k best tails by numpy: ComplEx's product of rows, sorted by score and then by id."""
    model, store = run.model, run.model.store
    rows = model.entities.view(np.complex64)
    relations = model.scorer.relations.detach().numpy().view(np.complex64)
    head, relation = int(model.entity_ids(head)), int(model.relation_ids(relation))
    scores = ((rows[head] * relations[relation]) @ rows.conj().T).real
    scores[head] = np.nan
    train = np.asarray(store.train)
    if candidates == "seen":
        scores[~np.isin(np.arange(len(rows)), train[train[:, 1] == relation, 2])] = np.nan
    if exclude_known:
        for split in (store.train, store.valid, store.test):
            known = np.asarray(split)[(split[:, 0] == head) & (split[:, 1] == relation), 2]
            scores[known] = np.nan
    order = np.argsort(-scores, kind="stable")[:k]
    order = order[~np.isnan(scores[order])]
    return model.entity_labels.labels(order), scores[order]


@pytest.mark.parametrize(
    ("relation", "candidates", "exclude_known"),
    [("r0", "seen", False), ("r2", "seen", True), ("r1", "all", True), ("r2", "all", False)],
)
def test_recommend_matches_dense_product(run, relation, candidates, exclude_known):
    options = {"exclude_known": exclude_known, "candidates": candidates}
    for head in HEADS:
        labels, scores = oracle(run, head, relation, 9, **options)
        answers = run.recommend(head, relation, 9, **options)
        assert [answer.label for answer in answers] == labels and head not in labels
        assert [answer.score for answer in answers] == pytest.approx(scores.tolist(), abs=1e-6)
        assert [answer.rank for answer in answers] == list(range(1, len(labels) + 1))
    assert run.recommend("e1", relation) == run.recommend("e1", relation, candidates="seen")


def test_fewer_candidates_than_places(run, tmp_path):
    (tmp_path / "items").write_text("e4\ne1\ne7\n")
    answers = run.recommend("e1", "r0", 9, candidates=tmp_path / "items")
    assert sorted(answer.label for answer in answers) == ["e4", "e7"]


def test_file_of_heads_gets_the_same_answers(run, tmp_path):
    heads = tmp_path / "heads"
    labels = [f"e{i}" for i in range(37)]
    heads.write_text("\n".join([*labels, "", "nobody"]))
    report = recommend_file(run, heads, "r1", tmp_path / "out", exclude_known=True)
    assert report.answered == 37 and [problem.line for problem in report.problems] == [39]
    assert report.problems[0].reason.startswith("unknown entity 'nobody'")
    rows = pq.read_table(tmp_path / "out").to_pylist()
    expected = [
        (line, label, "r1", answer.label, answer.rank, answer.score, answer.known)
        for line, label in enumerate(labels, 1)
        for answer in run.recommend(label, "r1", 5, exclude_known=True)
    ]
    names = ("line", "head", "relation", "tail", "rank", "score", "known")
    assert [tuple(row[name] for name in names) for row in rows] == expected
    recommend_file(run, heads, "r1", tmp_path / "out")
    known = [row["known"] for row in pq.read_table(tmp_path / "out").to_pylist()]
    assert known == [x.known for label in labels for x in run.recommend(label, "r1", 5)]
    assert "train" in known and None in known


def test_invalid_queries_are_named(run, tmp_path):
    """More are in tests/bad_inputs.tsv."""
    (tmp_path / "heads").write_text("e1\n")
    with pytest.raises(UnknownLabelError, match="unknown relation 'likes'"):
        recommend_file(run, tmp_path / "heads", "likes", tmp_path / "out")
    (tmp_path / "items").write_text("e1\nshoe\n")
    with pytest.raises(DataError, match="items:2: unknown entity 'shoe'"):
        run.recommend("e1", "r0", candidates=tmp_path / "items")
    for name in ("heads", "items"):
        (tmp_path / name).write_text("\n")
    with pytest.raises(DataError, match="heads is empty: write lines of one label each"):
        recommend_file(run, tmp_path / "heads", "r0", tmp_path / "out")
    with pytest.raises(DataError, match="items is empty: write lines of one label each"):
        run.recommend("e1", "r0", candidates=tmp_path / "items")
    assert not (tmp_path / "out").exists()

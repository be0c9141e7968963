"""Vectors of queries and items: their inner products or distances are the scores, to 1e-6."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from random_models import model_of, same, triples

from kge_torchrec import load_model
from kge_torchrec.cli import main
from kge_torchrec.config import ConfigError, ModelConfig
from kge_torchrec.errors import ExportError, UnknownLabelError
from kge_torchrec.export.vectors import item_vectors, metric_of, query_vectors
from kge_torchrec.export.write import check_format

COMPARED = {
    "inner product": lambda q, t: (q * t).sum(-1),
    "euclidean": lambda q, t: -np.sqrt(np.square(q - t).sum(-1)),
    "squares": lambda q, t: -np.square(q - t).sum(-1),
    "manhattan": lambda q, t: -np.abs(q - t).sum(-1),
    "moduli": lambda q, t: -np.hypot(*np.moveaxis((q - t).reshape(len(q), -1, 2), 2, 0)).sum(-1),
}
METRICS = {
    "distmult": "inner product", "tucker": "inner product", "ckeci": "inner product",
    "transe_l2": "euclidean", "rote": "squares", "transe_l1": "manhattan", "rotate": "moduli",
}  # fmt: skip


def check(model):
    """Compares the vectors of 1,000 triples with their scores."""
    head, relation, tail = triples()
    with torch.no_grad():
        queries = query_vectors(model.scorer, model.rows(head), relation)
        items = item_vectors(model.scorer, model.rows(tail))
    assert queries.dtype == torch.float32 and queries.shape == items.shape
    pair = queries.double().numpy(), items.double().numpy()
    scores = COMPARED[metric_of(model.scorer)](*pair)
    same(torch.from_numpy(scores), model, "tail")


@pytest.mark.parametrize("reciprocal", [False, True])
@pytest.mark.parametrize("name, metric", METRICS.items())
def test_vectors_give_the_scores(name, metric, reciprocal):
    """Also of products with biases, which are elements of the vectors."""
    has_biases = metric == "inner product" and not reciprocal
    model = model_of(name, reciprocal, biases=has_biases)
    assert metric_of(model.scorer) == metric
    check(model)


@pytest.mark.parametrize("reciprocal", [False, True])
@pytest.mark.parametrize("tail, comparator, metric", [
    ("identity", "cosine", "inner product"), ("identity", "l2", "euclidean"),
    ("translation", "l2", "euclidean"), ("translation", "dot", "inner product"),
    ("translation", "cosine", None), ("diagonal", "l2", None),
])  # fmt: skip
def test_operators_on_heads_give_the_scores(tail, comparator, metric, reciprocal):
    options = {"head": "translation", "tail": tail, "comparator": comparator, "temperature": 0.5}
    model = model_of(None, reciprocal, case=("operator", 8, options))
    if metric is None:
        with pytest.raises(ExportError, match="operator has no vectors for a search index"):
            metric_of(model.scorer)
        return
    assert metric_of(model.scorer) == metric
    check(model)


@pytest.mark.parametrize("normalization", ["unit", "layer"])
def test_normalized_rows_give_the_scores(normalization):
    check(model_of("distmult", False, normalization))


@pytest.mark.parametrize("name, biases, words", [
    ("mure", False, "a distance plus a bias|changes the vector"), ("transh", False, "neither"),
    ("pairre", False, "changes the vector"), ("pyke", False, "a distance plus a bias or an offset"),
    ("house", False, "neither an inner product nor"), ("transe_l2", True, "a distance plus a bias"),
])  # fmt: skip
def test_other_scores_are_rejected(name, biases, words):
    with pytest.raises(ExportError, match=f"{name} has no vectors for a search index: .*{words}"):
        check_format("vectors", None, ModelConfig(name, 12, biases=biases))


def read(file):
    """Labels and vectors."""
    table = pq.read_table(file)
    return table["label"].to_pylist(), np.array(table["vector"].to_pylist(), np.float32)


def test_files_of_every_relation_give_recommendations(run, tmp_path):
    """The best items by the files, without known ones, are those of recommend."""
    path = run.export(tmp_path / "out", "vectors")
    about = json.loads((path / "config.json").read_text())["vectors"]
    assert about["metric"] == "inner product" and about["dim"] == 8
    assert [one["relation"] for one in about["relations"]] == ["r0", "r1", "r2"]
    train = np.asarray(run.model.store.train)
    for number, one in enumerate(about["relations"]):
        (heads, queries), (tails, items) = (
            read(path / one["folder"] / f"{name}.parquet") for name in ("queries", "items")
        )
        assert (len(heads), len(tails)) == (one["queries"], one["items"])
        own = train[train[:, 1] == number]
        assert heads == run.model.entity_labels.labels(np.unique(own[:, 0]))
        for label, scores in zip(heads, queries @ items.T, strict=True):
            best = [tails[i] for i in np.argsort(-scores, kind="stable") if tails[i] != label]
            expected = run.recommend(label, one["relation"], 5)
            assert best[:5] == [answer.label for answer in expected]
            place = [tails.index(answer.label) for answer in expected]
            assert scores[place] == pytest.approx([x.score for x in expected], abs=1e-6)
    with pytest.raises(ExportError, match="an export in the format vectors"):
        load_model(path)


def test_verb_writes_one_relation(run, tmp_path, capsys):
    words = ["export", str(run.path), "-o", str(tmp_path / "out"), "--format", "vectors"]
    assert main([*words, "--relation", "r1"]) == 0
    files = [str(x.relative_to(tmp_path / "out")) for x in (tmp_path / "out").rglob("*.*")]
    assert sorted(files) == ["1/items.parquet", "1/queries.parquet", "README.md", "config.json"]
    assert 'pq.read_table("1/queries.parquet")' in (tmp_path / "out" / "README.md").read_text()
    with pytest.raises(UnknownLabelError, match="unknown relation 'likes'"):
        run.export(tmp_path / "other", "vectors", relation="likes")
    with pytest.raises(ConfigError, match="relation: format parquet has no vectors"):
        run.export(tmp_path / "other", "parquet", relation="r0")
    assert not (tmp_path / "other").exists()

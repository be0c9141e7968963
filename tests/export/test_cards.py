"""Model cards, and what each format holds; a full disk leaves no half of an export."""

from __future__ import annotations

import json
import resource

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import load_file

from kge_torchrec import load_model
from kge_torchrec.errors import ExportError

N, R, D = 37, 3, 8


def front_matter(path):
    _, head, text = (path / "README.md").read_text("utf-8").split("---\n", 2)
    return yaml.safe_load(head), text


def test_export_is_a_hugging_face_repository(run, tmp_path):
    path = run.export(tmp_path / "out")
    head, text = front_matter(path)
    assert head["license"] == "unknown" and head["library_name"] == "kge-torchrec"
    (result,) = head["model-index"][0]["results"]
    measured = {metric["type"]: metric["value"] for metric in result["metrics"]}
    expected = run.results["test"]["both"]["realistic"]
    assert measured == pytest.approx(expected, abs=1e-6)
    assert f"| both | {expected['mrr']:.4f} |" in text
    assert "130 train, 10 valid, 10 test triples" in text
    config = json.loads((path / "config.json").read_text())
    assert (config["architectures"], config["num_entities"]) == (["complex"], N)
    assert load_file(path / "entities.safetensors")["entities"].shape == (N, D)
    model = load_model(path)
    assert np.array_equal(model.entities, run.table)
    (path / "README.md").write_text("of mine")  # people may
    assert load_model(path).score([("e1", "r0", "e2")]) == model.score([("e1", "r0", "e2")])


def test_parquet_holds_labels_and_vectors(run, tmp_path):
    path = run.export(tmp_path / "out", "parquet")
    entities = pq.read_table(path / "entities.parquet")
    assert entities.column_names == ["id", "label", "vector"]
    assert entities["id"].to_pylist() == list(range(N))
    assert entities["label"].to_pylist() == run.model.store.entities.array.to_pylist()
    assert np.array_equal(np.array(entities["vector"].to_pylist(), np.float32), run.table)
    _, text = front_matter(path)
    assert 'load_file("scorer.safetensors")["relations"]' in text
    relations = load_file(path / "scorer.safetensors")["relations"]
    assert torch.equal(relations, run.model.scorer.relations) and len(relations) == 2 * R
    with pytest.raises(ExportError, match=r"in the format parquet; export the run in the format"):
        load_model(path)


def test_full_disk_leaves_no_files(run, tmp_path):
    whole = run.export(tmp_path / "whole")
    sizes = sorted({file.stat().st_size for file in whole.rglob("*") if file.is_file()})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in [0, *(size - 1 for size in sizes)]:  # each file is cut short once
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(
                ExportError, match=r"could not be written.*incomplete export was removed"
            ):
                run.export(tmp_path / "out")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert [path.name for path in tmp_path.iterdir()] == ["whole"]
